"""A load on paper: the real scheduler and policy, driven by predicted step times on a virtual clock. No tensor, no sleep.

Steps take what a CostTable predicts; everything else, admission, budget, chunks, prefix cache and preemption, is core/'s own. Called by
cli/simulate.py and doctor/whatif.py's command.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from flatout.config import Config
from flatout.core.scheduler import Scheduler
from flatout.ledger.table import CostTable, StepShape, shape_of
from flatout.request import Request, SamplingParams
from flatout.step import StepPlan, StepResult

SOME_ID = 7  # what every step "samples"


@dataclass(frozen=True)
class Load:
    """Requests of one kind. rate: arrivals a second, Poisson; 0: `concurrency` of them at any time, or all at once where that is 0, too."""

    requests: int
    prompt: int  # tokens
    output: int
    rate: float = 0.0
    concurrency: int = 0
    shared: int = 0  # tokens that all prompts begin with
    seed: int = 0

    def made(self) -> list[Request]:
        """Fresh ones; prompts differ from their first own token on."""
        generator = np.random.default_rng(self.seed)
        arrivals = np.cumsum(generator.exponential(1 / self.rate, self.requests)) if self.rate else np.zeros(self.requests)
        head = [1] * min(self.shared, self.prompt)
        params = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True)
        return [
            Request(f"r{i}", [*head, *([10 + i] * (self.prompt - len(head)))], params, arrival=float(at)) for i, at in enumerate(arrivals)
        ]


@dataclass(frozen=True)
class Simulated:
    """Seconds; medians and 99th percentiles over requests."""

    seconds: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    tokens_s: float  # of output
    ttft: float
    ttft_p99: float
    tpot: float  # 0 where outputs have one token
    tpot_p99: float
    e2e: float
    preemptions: int
    steps: int
    rows: float  # of the mean step
    busy: float  # share of the time in which a step ran
    waiting: dict[str, int]  # steps in which requests waited, by reason

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def simulate(
    config: Config, table: CostTable, num_blocks: int, load: Load, captured: Callable[[StepShape], bool] | None = None
) -> Simulated:
    """The load through an engine of this resolved config. captured: which steps run as captured ones; None: those in which every row decodes.

    Raises RequestError where a request can never fit.
    """
    captured = captured or (lambda shape: shape.decodes == shape.requests and not config.device.enforce_eager)
    return _Clock(Scheduler(num_blocks=num_blocks, **config.scheduling()), table, int(config.scheduler.async_scheduling), captured).run(
        load
    )


class _Clock:
    """The engine's loop (engine.py) with a clock of its own: a step is planned while the one before it runs."""

    def __init__(self, scheduler: Scheduler, table: CostTable, ahead: int, captured: Callable[[StepShape], bool]):
        self.scheduler, self.table, self.ahead, self.captured = scheduler, table, ahead, captured
        self.now = self.free = self.busy = 0.0  # free: when the device ends what it was given
        self.flights: deque[tuple[StepPlan, float]] = deque()
        self.steps, self.rows = 0, 0
        self.waiting: dict[str, int] = {}

    def run(self, load: Load) -> Simulated:
        requests = load.made()
        closed = load.concurrency if not load.rate else 0
        coming = [(request.arrival, i) for i, request in enumerate(requests[: closed or len(requests)])]
        heapq.heapify(coming)
        following = iter(range(closed, len(requests)) if closed else ())
        left = len(requests)
        while left:
            while coming and coming[0][0] <= self.now:
                at, i = heapq.heappop(coming)
                requests[i].arrival = at
                self.scheduler.add([requests[i]])
            finished = self._step()
            left -= finished
            for _, i in zip(range(finished if closed else 0), following):
                heapq.heappush(coming, (self.now, i))
            if not finished and not self.flights and not self.scheduler.has_work and coming:
                self.now = max(self.now, coming[0][0])
        return self._told(requests)

    def _step(self) -> int:
        """Plan one, commit one; how many requests that finished."""
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            shape = shape_of(plan.starts, plan.counts, plan.samples, self.table.windows)
            seconds = self.table.step_seconds(shape, self.captured(shape))
            self.now += self.table.host_s
            self.free = max(self.now, self.free) + seconds
            self.busy += seconds
            self.steps += 1
            self.rows += len(plan.slots)
            for reason in plan.waiting:
                self.waiting[reason] = self.waiting.get(reason, 0) + 1
            self.flights.append((plan, self.free))
        if len(self.flights) <= (self.ahead if plan is not None else 0):
            return 0
        plan, end = self.flights.popleft()
        self.now = max(self.now, end)
        result = StepResult(np.full(int(plan.samples.sum()), SOME_ID, np.int64))
        return sum(output.finish_reason is not None for output in self.scheduler.commit(plan, result, self.now))

    def _told(self, requests: Sequence[Request]) -> Simulated:
        ttfts = [r.first_token - r.arrival for r in requests]
        tpots = [(r.finished - r.first_token) / (len(r.output_ids) - 1) for r in requests if len(r.output_ids) > 1]
        tokens = sum(len(r.output_ids) for r in requests)
        return Simulated(
            seconds=self.now,
            requests=len(requests),
            output_tokens=tokens,
            prompt_tokens=sum(len(r.prompt_ids) for r in requests),
            cached_tokens=sum(r.cached_tokens for r in requests),
            tokens_s=tokens / self.now,
            ttft=median(ttfts),
            ttft_p99=float(np.quantile(ttfts, 0.99)),
            tpot=median(tpots) if tpots else 0.0,
            tpot_p99=float(np.quantile(tpots, 0.99)) if tpots else 0.0,
            e2e=median(r.finished - r.arrival for r in requests),
            preemptions=sum(r.preemptions for r in requests),
            steps=self.steps,
            rows=self.rows / self.steps,
            busy=self.busy / self.now,
            waiting=self.waiting,
        )
