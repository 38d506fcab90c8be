"""Engines that take turns at the same work in one process: cases, runs, medians and ratios, as a table or JSON.

Knows no engine: each is a function from prompts to a Run, and the first of them is ours. Called by compare.py and compare_cpu.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from flatout.bench.processes import busy_neighbour
from flatout.cli.terminal import table
from flatout.request import SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM

OURS = "flatout"
REST = 0.1  # seconds


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    prompt: int  # tokens
    new: int  # tokens; 1: the prefill is what counts
    neighbour: bool = False  # beside a process that keeps a core busy


@dataclass(frozen=True)
class Run:
    """Of one engine on one case, in seconds; `tokens` are the first request's."""

    ttft: float  # until every request has its first token
    decode: float  # from the first token of any request to the end
    tokens: list[int]


Engine = Callable[[list[list[int]], int], Run]  # prompts, all of one length, and how many tokens to write after each


@dataclass(frozen=True)
class Row:
    """One work, by engine. `agree`: leading greedy tokens of the first request that an engine chose as ours did, over all turns."""

    work: str
    medians: dict[str, float]  # tok/s: decoded tokens, or prompt tokens for a prefill; or seconds
    agree: dict[str, int] = field(default_factory=dict)  # none where weights differ
    new: int = 0  # tokens that could agree
    seconds: bool = False
    at_rest: float = 0.0  # most cores that were busy before a turn

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as fast as each other engine ours is."""
        ours, others = self.medians[OURS], {name: value for name, value in self.medians.items() if name != OURS}
        return {name: value / ours if self.seconds else ours / value for name, value in others.items()}

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "ratios": self.ratios}


class Peer(Protocol):
    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
        """Greedy ids of each prompt, past any end id, and the clock (time.perf_counter) at each step's end."""


def our_engine(llm: LLM) -> Engine:
    def run(prompts: list[list[int]], new: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        timings = [o.timing for o in outputs if o.timing is not None]
        first = [t.first_token for t in timings]
        ttft = max(first) - min(t.arrival for t in timings)
        return Run(ttft, max(t.finished for t in timings) - min(first), outputs[0].outputs[0].token_ids)

    return run


def peer_engine(peer: Peer) -> Engine:
    def run(prompts: list[list[int]], new: int) -> Run:
        begin = time.perf_counter()
        tokens, times = peer.generate(prompts, new)
        return Run(times[0] - begin, times[-1] - times[0], tokens[0])

    return run


def take_turns(case: Case, engines: Mapping[str, Engine], repeats: int, vocab_size: int) -> Row:
    """New prompts in each round, so that no cache helps; the first round warms up and does not count. RuntimeError: too few tokens."""
    rng = random.Random(case.name)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    busy: list[float] = []
    for _ in range(repeats + 1):
        prompts = [[rng.randrange(10, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
        for name, engine in engines.items():
            busy.append(rest())
            with busy_neighbour() if case.neighbour else nullcontext():
                run = engine(prompts, case.new)
            if len(run.tokens) != case.new:
                raise RuntimeError(f"{case.name}: {name} wrote {len(run.tokens)} of {case.new} tokens; its figures would not be comparable")
            runs[name].append(run)
    medians = {name: median(_rate(case, run) for run in side[1:]) for name, side in runs.items()}
    agree = {name: min(map(_common, runs[OURS], side)) for name, side in runs.items() if name != OURS}
    return Row(case.name, medians, agree, case.new, at_rest=round(max(busy), 3))


def rest() -> float:
    """Cores that this process keeps busy while nobody works: threads that spin would take them from the engine whose turn is next."""
    time.sleep(REST)
    begin = time.process_time()
    time.sleep(REST)
    return (time.process_time() - begin) / REST


def _rate(case: Case, run: Run) -> float:
    """Tokens per second: of the prompts for a prefill, else of all that was decoded after the first."""
    return case.batch * case.prompt / run.ttft if case.new == 1 else case.batch * (case.new - 1) / run.decode


def _common(a: Run, b: Run) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))


def lines(rows: Sequence[Row], peers: Sequence[str], works: Iterable[str] = ()) -> list[str]:
    """A table: ours, then of each peer its own figure, our ratio to it and the tokens that agree. `works`: others that will follow."""

    def figure(row: Row, name: str) -> str:
        return "-" if name not in row.medians else f"{row.medians[name]:,.2f} s" if row.seconds else f"{row.medians[name]:,.1f}"

    def of_peer(row: Row, name: str) -> tuple[str, str, str]:
        ratio = f"{row.ratios[name]:.2f}x" if name in row.medians else "-"
        return figure(row, name), ratio, f"{row.agree[name]} of {row.new}" if name in row.agree else "-"

    cells = [(row.work, figure(row, OURS), *(cell for name in peers for cell in of_peer(row, name))) for row in rows]
    columns = ("tok/s", OURS, *(cell for name in peers for cell in (name, "ratio", "same greedy tokens")))
    widths = (max(map(len, (*works, *(row.work for row in rows)))), 10, *(w for _ in peers for w in (12, 8, 18)))
    return table(columns, cells, widths, left=1)
