"""A fake device for core/: it keeps a KV "content" at each (block, offset) and checks at every step that a row reads its own prefix.

Its model is a function: the next token follows from (seed, all tokens before), so a sequence's output cannot depend on the schedule;
solo() says what it must be. A step may fail: then what it was to write is LOST, and so is all that is computed from it, down to tokens
that no model would give. check() audits a scheduler's books from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from flatout.core.blocks import MEMORY
from flatout.core.scheduler import Scheduler
from flatout.request import FinishReason, Output, Request, SamplingParams, Status
from flatout.step import FROM_DEVICE, LogprobRows, StepPlan, StepResult

VOCABULARY = 32
EOS = 0
TOP = 3  # alternatives that the fake sampler returns
UNWRITTEN, LOST = -1, -2  # contents
GARBAGE = VOCABULARY  # the token that is sampled from what is lost
_MASK = (1 << 61) - 1


def chained(before: int, token: int) -> int:
    """What the KV of a position stands for: its token and all before it."""
    value = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x1234567) & _MASK
    return value ^ (value >> 29)


def contents(tokens: list[int]) -> list[int]:
    chain, value = [], 7
    for token in tokens:
        value = chained(value, token)
        chain.append(value)
    return chain


def next_token(request: Request, content: int) -> int:
    """The model and the sampler in one: a function of the seed, the sample's index and all tokens before."""
    return chained(content, request.seed * 64 + request.index + 1000) % VOCABULARY


def logprob(content: int, token: int) -> float:
    return -float(np.float32(chained(content, token) % 4096 / 256))


def solo(request: Request, limit: int) -> tuple[list[int], FinishReason, int | None]:
    """Outputs, finish reason and stop reason when nobody else is there."""
    params, tokens, outputs = request.params, list(request.prompt_ids), []
    value = contents(tokens)[-1]
    stops = params.stop_token_ids or []
    while len(tokens) < limit:
        token = masked(request, next_token(request, value), len(outputs))
        outputs.append(token)
        tokens.append(token)
        value = chained(value, token)
        if token in request.eos_ids and not params.ignore_eos:
            return outputs, FinishReason.STOP, None
        if token in stops:
            return outputs, FinishReason.STOP, token
    return outputs, FinishReason.LENGTH, None


def masked(request: Request, token: int, position: int) -> int:
    """What a sampler does about min_tokens: an ending id gives way to another."""
    ending = {*(request.params.stop_token_ids or []), *request.eos_ids}
    while position < request.params.min_tokens and token in ending:
        token = (token + 1) % VOCABULARY
    return token


class Device:
    """Executes plans in order, as a runner would, on fake contents. Raises AssertionError on anything a real one would get wrong."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, width: int):
        self.block_size = block_size
        self.kv = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.table = [[-1] * width for _ in range(num_slots)]
        self.last = [-1] * num_slots
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]  # as the device knows them
        self.chain: list[list[int]] = [[] for _ in range(num_slots)]
        self.owner: list[Request | None] = [None] * num_slots
        self.loads: list[tuple[int, Request, list[int]]] = []
        self.shared_at_once = 0  # rows that read what another row of the same step wrote

    def launch(self, plan: StepPlan) -> None:
        """What a runner reads on the host at launch: a resumed request's outputs are all known then."""
        slots = plan.slots[len(plan.slots) - len(plan.admitted) :].tolist()
        assert plan.admitted == plan.requests[len(plan.requests) - len(plan.admitted) :]
        assert slots == [request.slot for request in plan.admitted]
        self.loads += [(slot, request, request.prompt_ids + request.output_ids) for slot, request in zip(slots, plan.admitted)]

    def run(self, plan: StepPlan, fails: bool = False) -> StepResult:
        """Writes of all rows, then reads, then samples. When the step fails nobody sees the result, yet later plans run on from it."""
        for slot, request, tokens in self.loads[: len(plan.admitted)]:
            self.owner[slot], self.tokens[slot], self.chain[slot] = request, tokens, contents(tokens)
        del self.loads[: len(plan.admitted)]
        for slot, column, block in zip(plan.block_slots.tolist(), plan.block_columns.tolist(), plan.block_ids.tolist()):
            self.table[slot][column] = block
        extents = list(zip(plan.slots.tolist(), plan.starts.tolist(), (plan.starts + plan.counts).tolist()))
        lost = self.exchange(extents, fails)
        ids, sampled, rows, prompts, begin = plan.token_ids.tolist(), [], [], {}, 0
        for row, (slot, start, end) in enumerate(extents):
            request, tokens, chain = plan.requests[row], self.tokens[slot], self.chain[slot]
            assert self.owner[slot] is request and end > start
            given = ids[begin : begin + end - start]
            begin += end - start
            if FROM_DEVICE in given:
                assert given == [FROM_DEVICE] and start == len(tokens) - 1
                given = [self.last[slot]]
            assert given == tokens[start:end], "a row computes other tokens than its own"
            prompt = len(request.prompt_ids)
            if request.params.prompt_logprobs is not None and start < prompt - 1:
                positions = range(start, min(end, prompt - 1))
                prompts[row] = self.rows([LOST if row in lost else chain[p] for p in positions], [tokens[p + 1] for p in positions])
            assert plan.samples[row] == (end == len(tokens) and request.params.max_tokens != 0)
            if plan.samples[row]:
                assert plan.out_positions[row] == len(tokens) - prompt
                token = GARBAGE if row in lost else masked(request, next_token(request, chain[-1]), len(tokens) - prompt)
                rows.append(chain[-1])
                sampled.append(token)
                self.last[slot] = token
                tokens.append(token)
                chain.append(LOST if row in lost else chained(chain[-1], token))
        return StepResult(np.array(sampled, np.int64), self.rows(rows, sampled), prompts)

    def exchange(self, extents: list[tuple[int, int, int]], fails: bool) -> set[int]:
        """Write each row's positions [start, end) and check what it reads. Returns the rows that read what is lost; theirs is lost too."""
        size = self.block_size
        places = [[(self.table[slot][p // size], p % size) for p in range(end)] for slot, _, end in extents]
        writers = {place: row for row, (_, start, _) in enumerate(extents) for place in places[row][start:]}
        assert len(writers) == sum(end - start for _, start, end in extents), "two rows write the same place"
        for row, (slot, start, _) in enumerate(extents):
            self.shared_at_once += any(place in writers for place in places[row][:start])
            for position, (block, offset) in enumerate(places[row][start:], start):
                self.kv[block][offset] = self.chain[slot][position]
        lost: set[int] = set()
        more = set(range(len(extents))) if fails else self.losing(places)
        while more > lost:
            lost = more
            for row in lost:
                for block, offset in places[row][extents[row][1] :]:
                    self.kv[block][offset] = LOST
            more = lost | self.losing(places)
        for row, (slot, _, end) in enumerate(extents):
            read = [self.kv[block][offset] for block, offset in places[row]]
            assert row in lost or read == self.chain[slot][:end], "a row reads what is not its prefix"
        return lost

    def losing(self, places: list[list[tuple[int, int]]]) -> set[int]:
        return {row for row, mine in enumerate(places) if any(self.kv[block][offset] == LOST for block, offset in mine)}

    @staticmethod
    def rows(values: list[int], tokens: list[int]) -> LogprobRows:
        top = [[(token + k) % VOCABULARY for k in range(TOP)] for token in tokens]
        return LogprobRows(
            np.array([logprob(v, t) for v, t in zip(values, tokens)], np.float32),
            np.array([1 + t % 5 for t in tokens], np.int32),
            np.array(top, np.int32).reshape(-1, TOP),
            np.array([[logprob(v, t) for t in ts] for v, ts in zip(values, top)], np.float32).reshape(-1, TOP),
        )


@dataclass
class _Flight:
    plan: StepPlan
    fails: bool
    result: StepResult | None = None  # when it has run


@dataclass
class Loop:
    """engine.py's loop in small: plain, or one step ahead. `late`: the device runs a plan as late as it may. `fails`: whether the next
    plan launched is to fail."""

    scheduler: Scheduler
    ahead: bool = True
    late: bool = True
    audit: bool = True
    fails: Callable[[], bool] = lambda: False
    outputs: dict[tuple[str, int], list[Output]] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    plans: list[StepPlan] = field(default_factory=list)
    steps: int = 0
    failed: list[Request] = field(default_factory=list)  # ended by a step that failed
    restarted: int = 0  # requests that such a step made start over

    def __post_init__(self) -> None:
        s = self.scheduler
        width = -(-min(s.max_model_len, s.blocks.num_blocks * s.block_size) // s.block_size)
        self.device = Device(s.blocks.num_blocks, s.block_size, s.max_num_seqs, width)
        self.flight: _Flight | None = None

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self.flight is not None

    def step(self) -> list[Output]:
        scheduler, self.steps = self.scheduler, self.steps + 1
        before = scheduler.counters.preemptions
        # asked again after a None, as an engine may when a request comes in meanwhile
        plan = scheduler.schedule(float(self.steps)) or scheduler.schedule(float(self.steps))
        launched = None
        if plan is not None:
            check_plan(scheduler, plan, preempted=scheduler.counters.preemptions > before)
            self.plans.append(plan)
            self.waits.update(plan.waiting)
            if self.flight is not None and not self.late:
                self.land(self.flight)
            self.device.launch(plan)
            launched = _Flight(plan, self.fails())
        elif scheduler.has_work:
            assert self.flight is not None, "work is there, nothing is in flight and nothing is planned"
        if self.audit:
            check(scheduler)
        if self.ahead:
            launched, self.flight = self.flight, launched
        if launched is None:
            return []
        result = self.land(launched)
        outputs = []
        if launched.fails:
            self.failed += scheduler.fail(launched.plan)
            self.restarted += sum(len(each.void) for each in scheduler._flights)
        else:
            outputs = scheduler.commit(launched.plan, result, self.steps + 0.5)
        for output in outputs:
            self.outputs.setdefault((output.id, output.index), []).append(output)
        if self.audit:
            check(scheduler)
            if self.flight is None:
                self.check_findable()
        return outputs

    def land(self, flight: _Flight) -> StepResult:
        if flight.result is None:
            flight.result = self.device.run(flight.plan, flight.fails)
        return flight.result

    def check_findable(self) -> None:
        """With nothing in the air, each block that can be found is computed."""
        for block in self.scheduler.blocks._by_hash.values():
            assert min(self.device.kv[block]) >= 0, "a block is found whose content never came"

    def run(self, most: int = 10_000) -> Loop:
        while self.busy:
            self.step()
            assert self.steps <= most, "somebody starves"
        check_empty(self.scheduler)
        self.check_findable()
        return self

    def tokens(self, id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[id, index] for token in output.token_ids]


def request(id: str, prompt: list[int], index: int = 0, *, seed: int = 1, salt: str = "", priority: int = 0, **params) -> Request:
    params = {"max_tokens": 8, "ignore_eos": True, **params}
    return Request(
        id, prompt, SamplingParams(**params), index, seed=seed, eos_ids=frozenset([EOS]), cache_salt=salt, priority=priority, arrival=0.25
    )


def samples(id: str, prompt: list[int], n: int, **options) -> list[Request]:
    return [request(id, prompt, i, n=n, **options) for i in range(n)]


def scheduler(**options) -> Scheduler:
    return Scheduler(
        **{"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **options}
    )


def check_plan(scheduler: Scheduler, plan: StepPlan, preempted: bool) -> None:
    assert plan.num_tokens == plan.counts.sum() <= scheduler.budget and (plan.counts > 0).all()
    slots = plan.slots.tolist()
    assert len(set(slots)) == len(slots) <= scheduler.max_num_seqs and all(0 <= s < scheduler.max_num_seqs for s in slots)
    assert not (preempted and plan.admitted)
    assert all(r.slot == s and r.status is Status.RUNNING for r, s in zip(plan.requests, slots))
    assert sum(plan.waiting.values()) == scheduler.num_waiting and all(n > 0 for n in plan.waiting.values())
    for array in (plan.slots, plan.starts, plan.counts, plan.token_ids, plan.out_positions, plan.block_slots, plan.block_ids):
        assert array.dtype == np.int32
    if not scheduler.chunked:
        for row in range(len(slots)):
            assert plan.counts[row] == 1 or plan.starts[row] + plan.counts[row] == plan.requests[row].num_tokens


def check(scheduler: Scheduler) -> None:
    """The books add up: references, free blocks, hashes, slots, and nothing is shared but equal prefixes."""
    pool, size = scheduler.blocks, scheduler.block_size
    live = [member.request for group in scheduler._groups.values() for member in group.values()]
    held: Counter[int] = Counter()
    tenant: dict[int, tuple[int, list[int]]] = {}
    for r in live:
        assert (r.slot >= 0) == (r.status is Status.RUNNING) and (bool(r.blocks) == (r.slot >= 0))
        assert len(set(r.blocks)) == len(r.blocks), "a block twice in one sequence"
        held.update(r.blocks)
        tokens = r.prompt_ids + r.output_ids
        for column, block in enumerate(r.blocks):
            mine = (column, tokens[: (column + 1) * size])
            if block in tenant:
                assert tenant[block] == mine and len(mine[1]) == (column + 1) * size, "a block owned twice"
            tenant[block] = mine
    assert pool.refs == [held[b] for b in range(pool.num_blocks)]
    blank, cached = pool._blank, list(pool._cached)
    assert sorted(blank + cached) == [b for b in range(pool.num_blocks) if not held[b]]
    assert pool.num_free + pool.num_used == pool.num_blocks
    assert all(pool.hashes[b] is None for b in blank) and all(pool.hashes[b] is not None for b in cached)
    assert pool._by_hash == {h: b for b, h in enumerate(pool.hashes) if h is not None}
    taken = sorted(r.slot for r in live if r.slot >= 0)
    assert len(set(taken)) == len(taken) == scheduler.num_running
    assert sorted(taken + scheduler._free_slots) == list(range(scheduler.max_num_seqs))
    assert scheduler.num_running + scheduler.num_waiting == len(live)
    assert max(len(pool._evicted), len(scheduler.prefix._runs)) <= MEMORY + pool.num_blocks


def check_empty(scheduler: Scheduler) -> None:
    check(scheduler)
    assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
