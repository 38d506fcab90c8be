"""A remedy put to the test: the setting that is predicted to help a load the most, and two servers, as they are and with it, under that load in turns.

Predictions are doctor/whatif.py's and plan/simulate.py's, or a verdict's; what they are worth is measured here. Called by cli/doctor/apply_best.py.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flatout.bench.ceiling import HALF
from flatout.bench.ledger import lower_bound
from flatout.bench.served import clients, flatout_server, running
from flatout.bench.turns import Case
from flatout.cli.simulate import simulated
from flatout.config import Config, ConfigError, flag_of
from flatout.doctor.predict import OnPaper, on_paper
from flatout.doctor.whatif import calibrated, changed
from flatout.ledger.verdict import Verdict
from flatout.plan.simulate import Load
from flatout.request import RequestError

WORTH = 1.03  # a smaller predicted factor is not worth a test: predictions are 10 % off in the median
FLAG = re.compile(r"--(no-)?([a-z][a-z-]*)(?:[ =]([\w.]+))?")


@dataclass(frozen=True)
class Remedy:
    """Settings to change, and what that is predicted to multiply a load's output tok/s by; None: nobody predicted it."""

    changes: Mapping[str, Any]
    factor: float | None
    origin: str

    @property
    def flags(self) -> str:
        """As a command line has them."""

        def shown(name: str, value: Any) -> str:
            if isinstance(value, bool):
                return flag_of(name) if value else "--no-" + flag_of(name).removeprefix("--")
            return f"{flag_of(name)} {value}"

        return " ".join(shown(*change) for change in self.changes.items())


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


def remedy_of(verdict: Verdict, options: Mapping[str, Any], read: Callable[[list[str]], dict[str, Any]]) -> Remedy | None:
    """The settings that a verdict's remedy names; None where it names no flag of ours with its value, or the options have it so already.

    read: settings from NAME=VALUE texts, as cli/doctor/whatif.py:changes_of.
    """
    owners, texts = Config.owners(), []
    for no, flag, value in FLAG.findall(verdict.remedy):
        name = flag.replace("-", "_")
        switch = name in owners and isinstance(_default(name), bool)
        if name in owners and (switch or value):
            texts.append(f"{name}={('false' if no else 'true') if switch else value}")
    changes = {name: value for name, value in read(texts).items() if options.get(name) != value}
    factor = verdict.factor if verdict.factor > 1 else None
    return Remedy(changes, factor, f"verdict: {verdict.constraint}") if changes else None


def _default(name: str) -> Any:
    config = Config()
    return getattr(getattr(config, Config.owners()[name]), name)


def candidates(paper: OnPaper, load: Load, lossy: bool) -> Iterator[dict[str, Any]]:
    """Settings that may help a load, each by itself. lossy: those that change the arithmetic, too."""
    config, hardware = paper.config, paper.hardware
    seqs, budget = config.scheduler.max_num_seqs or 1, config.scheduler.max_num_batched_tokens or 1
    for n in sorted({max(1, seqs // 2), 2 * seqs, min(load.requests, 1024)} - {seqs}):
        yield {"max_num_seqs": n}
    for n in sorted({max(64, budget // 4), 4 * budget} - {budget}):
        yield {"max_num_batched_tokens": n}
    if config.device.enforce_eager:
        yield {"enforce_eager": False}
    if not config.scheduler.async_scheduling:
        yield {"async_scheduling": True}
    if config.device.device == "cpu" and config.device.threads != hardware.cpu_count:
        yield {"threads": hardware.cpu_count}
    if lossy:
        if config.device.device == "cpu":
            yield from ({"quantization": scheme} for scheme in ("int8", "int4") if scheme != config.model.quantization)
        yield from ({"kv_cache_dtype": dtype} for dtype in ("bfloat16", "int8") if dtype != config.cache.kv_cache_dtype)


def predicted(
    options: Mapping[str, Any], load: Load, lossy: bool = False, measure: bool = True, tell: Callable[[str], None] = lambda text: None
) -> list[Remedy]:
    """Every candidate with what it is predicted to bring, the best first. measure: ops that were not measured here yet in the forms that candidates
    take are measured now, seconds for each; tell: is told what takes time, and which candidates could not be."""
    now, origin = calibrated(on_paper(options), options, measure)
    base = simulated(now, load).tokens_s
    found = []
    for changes in candidates(now, load, lossy):
        try:
            then, _ = calibrated(changed(options, changes), {**options, **changes}, measure)
            found.append(Remedy(changes, simulated(then, load).tokens_s / base, f"what-if: {origin}"))
        except (ConfigError, RequestError) as error:
            tell(f"{Remedy(changes, None, '').flags} can't be: {error}")
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
            prompts = [[rng.randrange(10, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
            for side in (0, 1) if turn % 2 else (1, 0):
                rates[side].append(asyncio.run(clients(ports[side], prompts, case.new)).rate)
    return Tried(remedy, rates[0][1:], rates[1][1:])
