"""A remedy put to the test: what the server's own rules name under a load, or else the setting that is predicted to help it the most; then two servers,
as they are and with it, under that load in turns.

Predictions are doctor/whatif.py's and plan/simulate.py's; what they are worth is measured here. Called by cli/doctor/apply_best.py.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flatout.bench.ceiling import HALF
from flatout.bench.ledger import lower_bound
from flatout.bench.served import NAME, clients, flatout_server, running
from flatout.bench.turns import Case
from flatout.cli.doctor.plan import flags
from flatout.cli.simulate import simulated
from flatout.client.http import Endpoint
from flatout.config import Config, ConfigError
from flatout.doctor.gauges import ledgers
from flatout.doctor.predict import on_paper
from flatout.doctor.whatif import calibrated, changed
from flatout.plan.simulate import Load
from flatout.request import RequestError

WORTH = 1.03  # a smaller predicted factor is not worth a test: predictions are 10 % off in the median
# settings that change the arithmetic, and what may be tried of each
LOSSY = {"quantization": ("int8", "int4"), "kv_cache_dtype": ("bfloat16", "int8")}
FLAG = re.compile(r"--(no-)?([a-z][a-z-]*)(?:[ =](?!and )([\w.]+))?")
FLAGS = re.compile(rf"(?:(?:{FLAG.pattern})(?: and )?)+")


@dataclass(frozen=True)
class Remedy:
    """Settings to change, and what that is predicted to multiply a load's output tok/s by; None: nobody predicted it."""

    changes: Mapping[str, Any]
    factor: float | None
    origin: str

    @property
    def flags(self) -> str:
        """As a command line has them."""
        return flags(self.changes)


@dataclass(frozen=True)
class Tried:
    """What the remedy did. Rates: output tok/s of each counted round, as it was and with the remedy."""

    remedy: Remedy
    before: Sequence[float]
    after: Sequence[float]
    ratios: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratios", [b / a for a, b in zip(self.before, self.after, strict=True)])

    @property
    def factor(self) -> float:
        return median(self.ratios)

    @property
    def least(self) -> float:
        """The factor is over this with 95 % confidence, and under `most`."""
        return lower_bound(self.ratios)

    @property
    def most(self) -> float:
        return 1 / lower_bound([1 / ratio for ratio in self.ratios])

    @property
    def outcome(self) -> str:
        """confirmed; retracted: it does nothing or harm, or what it does is less than the rounds differ by."""
        return "confirmed" if self.least > 1 else "retracted"

    @property
    def sentence(self) -> str:
        measured = f"{self.factor - 1:+.1%}, {self.least - 1:+.1%} to {self.most - 1:+.1%} at 95 % over {len(self.ratios)} rounds"
        predicted = "" if self.remedy.factor is None else f"; predicted {self.remedy.factor - 1:+.1%}"
        said = f"{self.outcome}: {self.remedy.flags} brought {measured} of output tok/s ({median(self.before):,.1f} to {median(self.after):,.1f}){predicted}"
        if self.outcome == "retracted":
            return said + ("; it does harm" if self.most < 1 else "; that is within what rounds differ by") + ": leave the setting as it is"
        return said

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "changes": dict(self.remedy.changes),
            "origin": self.remedy.origin,
            "predicted_factor": self.remedy.factor,
            "measured_factor": self.factor,
            "measured_factor_95": [self.least, self.most],
            "tokens_per_second": {"before": list(self.before), "after": list(self.after)},
        }


# -- which one ---------------------------------------------------------------------------------------------------------


def looked(options: Mapping[str, Any], case: Case, seconds: float, vocab_size: int) -> list[dict[str, Any]]:
    """What the rules of a server that runs so say after some seconds of the load: verdicts as its /ledger has them, the weightiest first.

    RuntimeError: as tried().
    """
    rng = random.Random(f"look {case.name}")
    with running(flatout_server(dict(options))) as port:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            asyncio.run(clients(port, _prompts(rng, case, vocab_size), case.new))
        verdicts: list[dict[str, Any]] = asyncio.run(_verdicts(port))
    return verdicts


async def _verdicts(port: int) -> list[dict[str, Any]]:
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    try:
        return ((await ledgers(endpoint)) or {}).get(NAME, {}).get("verdict", [])
    finally:
        endpoint.close()


def named(
    verdict: Mapping[str, Any], options: Mapping[str, Any], lossy: bool, read: Callable[[list[str]], dict[str, Any]]
) -> dict[str, Any]:
    """The settings that a verdict's remedy begins with, of those that are not so already; further on it may have alternatives.

    read: settings from NAME=VALUE texts, as cli/doctor/whatif.py:changes_of.
    """
    found = FLAGS.match(verdict["remedy"])
    texts = [
        f"{name}={value or ('false' if no else 'true')}"
        for no, flag, value in FLAG.findall(found[0] if found else "")
        if (name := flag.replace("-", "_")) in Config.owners() and (lossy or name not in LOSSY)
    ]
    return {name: value for name, value in read(texts).items() if options.get(name) != value}


class Forecast:
    """What changes are predicted to do to a load here. measure: ops that were not measured on this machine yet in a form that is asked about are
    measured, seconds for each."""

    def __init__(self, options: Mapping[str, Any], load: Load, measure: bool = True):
        self.options, self.load, self.measure = options, load, measure
        self.now, self.origin = calibrated(on_paper(options), options, measure)
        self.rate = simulated(self.now, load).tokens_s

    def of(self, changes: Mapping[str, Any], origin: str = "") -> Remedy:
        """ConfigError, RequestError: it can't be run so."""
        then, _ = calibrated(changed(self.options, changes), {**self.options, **changes}, self.measure)
        return Remedy(changes, simulated(then, self.load).tokens_s / self.rate, origin or f"what-if: {self.origin}")

    def candidates(self, lossy: bool) -> Iterator[dict[str, Any]]:
        """Settings that may help, each by itself. lossy: those that change the arithmetic, too."""
        config, hardware = self.now.config, self.now.hardware
        seqs, budget, cpu = config.scheduler.max_num_seqs or 1, config.scheduler.max_num_batched_tokens or 1, config.device.device == "cpu"
        for n in sorted({max(1, seqs // 2), 2 * seqs, min(self.load.requests, 1024)} - {seqs}):
            yield {"max_num_seqs": n}
        for n in sorted({max(64, budget // 4), 4 * budget} - {budget}):
            yield {"max_num_batched_tokens": n}
        if config.device.enforce_eager:
            yield {"enforce_eager": False}
        if not config.scheduler.async_scheduling:
            yield {"async_scheduling": True}
        if cpu and config.device.threads != hardware.cpu_count:
            yield {"threads": hardware.cpu_count}
        if lossy and cpu:
            now = {"quantization": config.model.quantization, "kv_cache_dtype": config.cache.kv_cache_dtype}
            yield from ({name: value} for name, values in LOSSY.items() for value in values if value != now[name])

    def best(self, lossy: bool, tell: Callable[[str], None]) -> list[Remedy]:
        """Every candidate, the best first; tell: is told which can't be."""
        found = []
        for changes in self.candidates(lossy):
            try:
                found.append(self.of(changes))
            except (ConfigError, RequestError) as error:
                tell(f"{flags(changes)} can't be: {error}")
        return sorted(found, key=lambda remedy: -(remedy.factor or 0.0))


# -- what it does ------------------------------------------------------------------------------------------------------


def tried(options: Mapping[str, Any], remedy: Remedy, case: Case, repeats: int, device: str, vocab_size: int) -> Tried:
    """Both servers run all the while, and take turns at new prompts, which of them first in turn; the first round warms up and does not count.

    RuntimeError: a server was not ready, with its last words, or answered otherwise.
    """
    base = {"gpu_memory_utilization": HALF, **options} if device == "cuda" else dict(options)
    rng = random.Random(case.name)
    rates: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        ports = [stack.enter_context(running(flatout_server(each))) for each in (base, {**base, **remedy.changes})]
        for turn in range(repeats + 1):
            prompts = _prompts(rng, case, vocab_size)
            for side in (0, 1) if turn % 2 else (1, 0):
                rates[side].append(asyncio.run(clients(ports[side], prompts, case.new)).rate)
    return Tried(remedy, rates[0][1:], rates[1][1:])


def _prompts(rng: random.Random, case: Case, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(10, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
