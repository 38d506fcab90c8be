"""The ceiling test: a load of fixed lengths given to the engine in this process, and the same load to a server of ours over HTTP, turn by turn.

What the engine does without HTTP, over what is served: the loss of front and host in one number, and the ledgers of both say in which part of the time it
lies. Called by cli/doctor/ceiling.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from flatout.bench.served import NAME, clients, engine_alone, flatout_server, running
from flatout.bench.turns import Case
from flatout.cli.terminal import open_llm
from flatout.client.http import Endpoint
from flatout.client.load import Figures
from flatout.config import Config, ConfigError
from flatout.doctor.energy import joules
from flatout.doctor.facts import NotAvailable
from flatout.doctor.gauges import ledgers
from flatout.hardware import detect
from flatout.ledger.largest import FORWARD, NO_LOAD
from flatout.ledger.ledger import HOST, STAGES, Ledger

if TYPE_CHECKING:
    from flatout.llm import LLM

HALF = 0.45  # of a GPU's memory for each of the two engines, unless told otherwise
PATIENCE = 10.0  # seconds for the last steps of a load to be in a server's ledger
PARTS: dict[str, tuple[str, ...]] = {  # of the time, and the ledger's parts that they are
    "ops of the forward": FORWARD,
    "choosing tokens": ("sample",),
    "launches, Python between ops": ("launch",),
    "device waits for the host": tuple(HOST + stage for stage in STAGES),
    "communication": ("communication",),
    "no request at hand": NO_LOAD,
    "not seen": ("residual",),
}


@dataclass(frozen=True)
class Turn:
    """The load, once. Seconds by part sum to `seconds`."""

    seconds: float
    tokens: int
    steps: int
    parts: Mapping[str, float]
    joules: float | None = None
    figures: Figures | None = None  # of what was served

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Side:
    """All counted turns of the engine alone, or of the server."""

    turns: Sequence[Turn]

    @property
    def rate(self) -> float:
        """Output tok/s, median."""
        return median(turn.rate for turn in self.turns)

    @property
    def rows(self) -> float:
        """Tokens of the mean step."""
        return sum(turn.tokens for turn in self.turns) / sum(turn.steps for turn in self.turns)

    @property
    def joules(self) -> float | None:
        """For each output token."""
        used = [turn.joules for turn in self.turns]
        return None if None in used else sum(filter(None, used)) / sum(turn.tokens for turn in self.turns)

    def each(self, part: str) -> float:
        """Seconds of this part for each output token."""
        return sum(turn.parts[part] for turn in self.turns) / sum(turn.tokens for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.rate,
            "tokens_per_step": self.rows,
            "joules_per_token": self.joules,
            "seconds_per_token": {part: self.each(part) for part in PARTS},
        }


@dataclass(frozen=True)
class Ceiling:
    model: str
    machine: str
    case: Case
    alone: Side
    served: Side
    no_joules: str  # what energy would need, or ""

    @property
    def ratios(self) -> list[float]:
        """Ceiling over served, of each turn's neighbours."""
        return [a.rate / b.rate for a, b in zip(self.alone.turns, self.served.turns, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def loss(self) -> float:
        """The share of the ceiling that front and host take; under 0 where noise hides it."""
        return 1 - 1 / self.ratio

    def lost(self, part: str) -> float:
        """Seconds that an output token takes longer, served, in this part. All parts sum to the whole difference."""
        return self.served.each(part) - self.alone.each(part)

    def latency(self, name: str) -> float | None:
        """Of what was served, the median turn's p50 in seconds; name: ttft or tpot."""
        found = [getattr(turn.figures, name, None) for turn in self.served.turns]
        return median(spread.p50 for spread in found if spread is not None) if all(found) else None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "machine": self.machine,
            "requests": self.case.batch,
            "prompt_tokens": self.case.prompt,
            "output_tokens": self.case.new,
            "ceiling_over_served": self.ratio,
            "each_turn": self.ratios,
            "loss_share": self.loss,
            "ceiling": self.alone.to_json(),
            "served": {**self.served.to_json(), **{f"{name}_p50_s": self.latency(name) for name in ("ttft", "tpot")}},
            "lost_seconds_per_token": {part: self.lost(part) for part in PARTS},
            **({"joules_not_available": f"needs {self.no_joules}"} if self.no_joules else {}),
        }


def ceiling(options: Mapping[str, Any], case: Case, repeats: int, quiet: bool = True) -> Ceiling:
    """case: so many requests at once, of so many tokens in and out. The first round warms up and does not count.

    ConfigError, ModelFileError: the model can't be run as asked. RuntimeError: the server was not ready or answered otherwise.
    """
    hardware = detect(Config.make(**options).device.device)
    options = {"gpu_memory_utilization": HALF, **options} if hardware.device == "cuda" else dict(options)
    rng, sides = random.Random(case.name), (list[Turn](), list[Turn]())
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(options, quiet))
        port = stack.enter_context(running(flatout_server(options)))
        meter = _Meter(_uuid() if hardware.device == "cuda" else "")
        for _ in range(repeats + 1):
            prompts = [[rng.randrange(10, llm.spec.vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
            sides[0].append(_alone(llm, prompts, case.new, meter))
            sides[1].append(asyncio.run(_served(port, prompts, case.new, meter)))
        return Ceiling(llm.facts.model, hardware.name, case, Side(sides[0][1:]), Side(sides[1][1:]), meter.needs)


def _uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class _Meter:
    """Of energy; read() is None once it is known that nobody tells, and `needs` says why."""

    def __init__(self, uuid: str):
        self.uuid, self.needs = uuid, ""

    def read(self) -> float | None:
        if self.needs:
            return None
        try:
            return joules(self.uuid)
        except NotAvailable as lacking:
            self.needs = str(lacking)
            return None


def _used(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _alone(llm: LLM, prompts: list[list[int]], new: int, meter: _Meter) -> Turn:
    records = llm.engine.records
    records.clear()
    ledger, before, begin = Ledger(llm.engine.costs), meter.read(), time.perf_counter()
    engine_alone(llm)(prompts, new)
    seconds, after = time.perf_counter() - begin, meter.read()
    if len(records) == records.maxlen:
        raise ConfigError(f"--output: of a run only {records.maxlen} steps are kept, and these were more; use a shorter --output")
    for record in records:
        ledger.add(record)
    account = ledger.total().plain()
    return Turn(seconds, len(prompts) * new, account["steps"], _parts(account["parts"], seconds), _used(before, after))


async def _served(port: int, prompts: list[list[int]], new: int, meter: _Meter) -> Turn:
    endpoint, tokens = Endpoint(f"http://127.0.0.1:{port}"), len(prompts) * new
    try:
        before, joules_before = await _account(endpoint), meter.read()
        figures = await clients(port, prompts, new)
        joules_after, end = meter.read(), time.monotonic()
        while (after := await _account(endpoint))["sampled"] - before["sampled"] < tokens:
            if time.monotonic() > end + PATIENCE:
                raise RuntimeError(f"the server's ledger has {after['sampled'] - before['sampled']} of {tokens} tokens that it sent")
            await asyncio.sleep(0.02)
    finally:
        endpoint.close()
    parts = {part: value - before["parts"][part] for part, value in after["parts"].items()}
    steps = after["steps"] - before["steps"]
    return Turn(figures.seconds, tokens, steps, _parts(parts, figures.seconds), _used(joules_before, joules_after), figures)


async def _account(endpoint: Endpoint) -> dict[str, Any]:
    """The server's since its start."""
    found = await ledgers(endpoint)
    assert found is not None  # it is our own
    account: dict[str, Any] = found[NAME]["windows"]["start"]
    return account


def _parts(parts: Mapping[str, float], seconds: float) -> dict[str, float]:
    """PARTS of a ledger's, cut to the load's own seconds: the ledger began before and was asked after it, and had no request then."""
    found = {name: sum(parts[part] for part in of) for name, of in PARTS.items()}
    found["no request at hand"] += seconds - sum(found.values())
    return found
