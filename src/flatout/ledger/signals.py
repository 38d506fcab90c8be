"""Signals: everything that the doctor's rules look at, of one window of one served model: its account, its requests, its process and its machine.

Plain data with the few sums that several rules share; nothing here judges. Made by server/diagnosis.py (and by hand in tests), read by rules*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.ledger.account import QUEUE
from flatout.ledger.ledger import HOST, STAGES, Account
from flatout.ledger.table import CostTable, StepShape
from flatout.ledger.verdict import Evidence

ENOUGH_STEPS, SLOW_STEPS, LONG = 20, 5, 2.0  # less steps say nothing of stepping, but for slow ones that took so many seconds in all


@dataclass
class Signals:
    """`grew`: by what counters grew in the window, by name: requests, ended, e2e_s, part.NAME (seconds of requests that ended), detokenise_s, client_s, log_s,
    loop_late_s, prompt_tokens, completion_tokens, logprob_tokens, lost.REASON and parted.POSITION (tokens, heads.py), preemptions,
    engine.NAME, front.NAME (vitals.py:Vitals) and machine.NAME (vitals.py:machine)."""

    account: Account
    table: CostTable | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # Engine.settings
    seconds: float = 0.0  # of `grew`
    grew: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)  # by what they grew in the window's second half
    gauges: Mapping[str, float] = field(default_factory=dict)  # running, waiting, in_flight, cores, cold_s (Account.cold since the start)
    at_start: Mapping[str, float] = field(default_factory=dict)  # the engine process's vitals once it was ready
    uptime: float = 0.0  # seconds since then

    def got(self, name: str) -> float:
        return self.grew.get(name, 0.0)

    def share(self, part: str) -> float:
        """Of the time of the requests that ended; part: as RequestAccount.parts has it."""
        whole = self.got("e2e_s")
        return self.got("part." + part) / whole if whole > 0 else 0.0

    def queued(self, reason: str) -> float:
        return self.share(QUEUE + reason)

    @property
    def steady(self) -> bool:
        steps, loaded = self.account.steps, self.account.loaded
        return loaded > 0 and (steps >= ENOUGH_STEPS or (steps >= SLOW_STEPS and loaded >= LONG))

    def of_load(self, seconds: float) -> float:
        """A share of the time with something to do."""
        loaded = self.account.loaded
        return min(1.0, seconds / loaded) if loaded > 0 else 0.0

    @property
    def device(self) -> float:
        """Share of the time with load in which the device was busy."""
        return self.of_load(self.account.decode_s + self.account.chunk_s)

    @property
    def host(self) -> dict[str, float]:
        """Share of the time with load for which the device stood still, by the stage of the engine's thread."""
        return {stage: self.of_load(self.account.parts[HOST + stage]) for stage in STAGES}

    @property
    def cores(self) -> float:
        return self.gauges.get("cores", 0.0)

    @property
    def foreign(self) -> float | None:
        """Share of this machine's cores that others used; None where the system does not tell."""
        if "machine.busy_s" not in self.grew or not self.seconds or not self.cores:
            return None
        own = self.got("engine.cpu_s") + self.got("front.cpu_s")
        return max(0.0, self.got("machine.busy_s") - own) / (self.seconds * self.cores)

    @property
    def core_wait(self) -> float:
        """Of the time for which the engine's threads wanted a core, the share for which they had none."""
        waited, ran = self.got("engine.core_wait_s"), self.got("engine.cpu_s")
        return waited / (waited + ran) if waited + ran > 0 else 0.0

    @property
    def context(self) -> int:
        """Tokens of a running request's cache, about."""
        tokens = self.account.blocks * float(self.settings.get("num_blocks", 0)) * float(self.settings.get("block_size", 16))
        return max(16, round(tokens / self.account.rows)) if self.account.rows >= 1 else 128

    def decode_gain(self, rows: float, more: float) -> float:
        """What throughput is multiplied by with `more` rows in a step of decodes instead of `rows`: by the cost table; where it tells no time (no ceiling is
        measured), half of what up to four times the rows would bring."""
        if more <= rows or rows <= 0:
            return 1.0
        few, many = (max(1, round(n)) for n in (rows, more))
        if self.table is None or not (slower := self._decode_seconds(many)):
            return 1 + 0.5 * (min(more / rows, 4.0) - 1)
        return many / few * self._decode_seconds(few) / slower

    def _decode_seconds(self, rows: int) -> float:
        assert self.table is not None
        return self.table.step_seconds(self.decode_shape(rows))

    def decode_shape(self, rows: int) -> StepShape:
        """A step that adds a token to each of so many requests as long as those that run. With a table only."""
        assert self.table is not None
        keys = tuple(rows * min(self.context, window or self.context) for window in self.table.windows)
        return StepShape(rows, rows, keys, keys, keys, rows, rows)

    def chunk_seconds(self, tokens: int) -> float:
        """Predicted of a step that computes so many tokens of one prompt. With a table only."""
        assert self.table is not None
        pairs = tuple(tokens * (tokens + 1) // 2 for _ in self.table.windows)
        ones = (tokens,) * len(pairs)
        return self.table.step_seconds(StepShape(tokens, 1, ones, pairs, ones, 1, 0))


def gained(share: float) -> float:
    """What speed is multiplied by where this share of the time is given back."""
    return 1 / (1 - min(share, 0.95))


# -- evidence, by kind of number -----------------------------------------------------------------------------------------


def percent(what: str, value: float) -> Evidence:
    return Evidence(what, value, "", f"{value:.0%}" if value >= 0.0995 or value == 0 else f"{value:.1%}")


def seconds(what: str, value: float) -> Evidence:
    return Evidence(what, value, "s", in_words(value))


def count(what: str, value: float, unit: str = "") -> Evidence:
    return Evidence(
        what,
        value,
        unit,
        f"{value:,.3g}".removesuffix(".0") + (f" {unit}" if unit else "") if value < 1000 else f"{value:,.0f} {unit}".strip(),
    )


def in_words(value: float) -> str:
    """1.24 s, 85.3 ms."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
