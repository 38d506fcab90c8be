"""The token-budget loop: schedule() -> StepPlan, commit(plan, result) -> Outputs. One step may be planned before the last one is committed.

No phases: a request has tokens computed and tokens known, and each step closes the gap within one budget. Counts live in arrays over
slots; Python touches a request when it is admitted, given a block, preempted, finished, or handed a token. Who goes first is
policy.py's, where is blocks.py's, what is cached is prefix.py's, when it ends is stop.py's. Called by engine.py; no clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flatout.core import logprobs, stop
from flatout.core.blocks import BlockPool
from flatout.core.counts import Counts
from flatout.core.live import Group, Live
from flatout.core.policy import POLICIES, Line
from flatout.core.prefix import MISS_LOGPROBS, MISS_OFF, PrefixCache, root
from flatout.request import FinishReason, Output, Request, RequestError, Status, Timing
from flatout.step import StepPlan, StepResult


@dataclass(slots=True)
class Counters:
    """Since the start; never reset."""

    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, once a request
    prefix_hits: int = 0  # of these, found
    computed_tokens: int = 0  # planned for the device, recomputed and dropped ones included
    output_tokens: int = 0  # handed out
    dropped_tokens: int = 0  # sampled one step ahead for a request that had ended
    finished: Counter[FinishReason] = field(default_factory=Counter)


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    rows: list[Live]
    slots: np.ndarray  # int32 [R]
    counts: np.ndarray  # int32 [R]
    admitted: list[Live] = field(default_factory=list)
    gifts: list[int] = field(default_factory=list)  # slot, column and block of each newly given block, end to end
    waiting: dict[str, int] = field(default_factory=dict)

    def keep(self, mask: np.ndarray) -> None:
        self.rows = [self.rows[i] for i in np.flatnonzero(mask).tolist()]
        self.slots, self.counts = self.slots[mask], self.counts[mask]


@dataclass(slots=True)
class _Flight:
    """A plan not yet committed."""

    plan: StepPlan
    rows: list[Live]
    epochs: np.ndarray  # int32 [R]; a slot's epoch changes when its request leaves it


class Scheduler:
    """Admits, plans, preempts and ends requests over `max_num_seqs` slots and `num_blocks` blocks of `block_size` tokens.

    Call schedule() and commit() in turn, or one step ahead: schedule() once more before the first commit(). Plans are committed in order.
    Raises ValueError for settings that cannot work together.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
    ):
        if policy not in POLICIES:
            raise ValueError(f"--scheduling-policy: {policy!r} is not one of {', '.join(POLICIES)}")
        if min(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len) < 1:
            raise ValueError("blocks, block size, slots, token budget and context must each be at least 1")
        if not enable_chunked_prefill and max_num_batched_tokens < min(max_model_len, num_blocks * block_size):
            raise ValueError(
                f"--max-num-batched-tokens: {max_num_batched_tokens} cannot hold every prompt whole; raise it, lower --max-model-len or "
                "enable chunked prefill"
            )
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.chunked = enable_chunked_prefill
        self.caching = enable_prefix_caching
        self.blocks = BlockPool(num_blocks)
        self.counts = Counts(max_num_seqs)
        self.prefix = PrefixCache(self.blocks, block_size)
        self.counters = Counters()
        self._rank = POLICIES[policy]
        self._groups: dict[str, Group] = {}
        self._running = Line(Live.running_key)
        self._waiting = Line(Live.waiting_key)
        self._num_parked = 0
        self._arrivals = 0
        self._steps = 0
        self._flights: deque[_Flight] = deque()
        self._free_slots = list(range(max_num_seqs))  # a heap
        # running requests in order and their slots, int32; None when somebody came or left
        self._order: tuple[list[Live], np.ndarray] | None = None

    # -- requests come and go ------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_parked

    def add(self, requests: list[Request]) -> None:
        """Queue the n samples of one user request: same id and prompt, index 0 to n-1. Raises RequestError and changes nothing if they
        can never run: the prompt with one token exceeds the context or the pool, or the id is in use."""
        first = requests[0]
        if [r.key for r in requests] != [(first.id, i) for i in range(len(requests))]:
            raise ValueError(f"add() takes the samples of one request, index 0 to n-1, got {[r.key for r in requests]}")
        if first.id in self._groups:
            raise RequestError("request_id", f"{first.id!r} is still being served; use another id")
        if first.kind != "generate":
            raise RequestError("kind", f"{first.kind!r} requests are not supported; only 'generate'")
        limits = [
            stop.longest(r, max_model_len=self.max_model_len, num_blocks=self.blocks.num_blocks, block_size=self.block_size)
            for r in requests
        ]
        # samples share their prompt even when caching is off, under a root of their own
        top = None
        if self.caching:
            top = root("salt", first.cache_salt)
        elif len(requests) > 1:
            top = root("samples", str(self._arrivals))
        group = self._groups[first.id] = Group()
        for request, limit in zip(requests, limits):
            request.limit = limit
            request.status = Status.WAITING
            collects = request.index == 0 and request.params.prompt_logprobs is not None
            live = Live(
                request,
                request.id,
                request.index,
                request.output_ids,
                group,
                rank=self._rank(request),
                number=self._arrivals,
                top=top,
                reads=top is not None and not collects,
                ending=stop.ending_ids(request),
                most=limit - len(request.prompt_ids),
                prompt_logprobs=[None] if collects else None,
                parked=request.index > 0 and len(request.prompt_ids) > self.block_size,  # else no block to share
            )
            self._arrivals += 1
            group.samples[request.index] = live
            if live.parked:
                group.parked.append(live)
                self._num_parked += 1
            else:
                self._waiting.add(live)

    def abort(
        self,
        id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        stop_reason: str | None = None,
    ) -> list[Request]:
        """End a request, or one sample of it, at any moment; returns those that were live. What is in flight for them is dropped.
        A stop string found by the text side comes here with FinishReason.STOP."""
        group = self._groups.get(id)
        if group is None:
            return []
        ended = [live for i, live in group.samples.items() if index is None or i == index]
        for live in ended:
            self._finish(live, reason, stop_reason)
        return [live.request for live in ended]

    def _finish(self, live: Live, reason: FinishReason, stop_reason: int | str | None) -> None:
        request = live.request
        if request.slot >= 0:
            self._vacate(live)
        elif live.parked:
            live.group.parked.remove(live)
            self._num_parked -= 1
        else:
            self._waiting.remove(live)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.hashes.clear()
        self.counters.finished[reason] += 1
        del live.group.samples[request.index]
        if not live.group.samples:
            del self._groups[request.id]
        if request.index == 0:
            self._unpark(live.group)

    def _preempt(self, live: Live) -> None:
        """Take the request's blocks; its known tokens will be computed again. Nothing else of it is lost."""
        request = live.request
        live.owed = bool(self.counts.known[request.slot] > self.counts.settled[request.slot])
        self._vacate(live)
        request.status = Status.PREEMPTED
        request.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(live)

    def _vacate(self, live: Live) -> None:
        """Give back slot and blocks. The device runs plans in order, so both may be reused by the next plan."""
        request = live.request
        self._running.remove(live)
        self._order = None
        if live.top is not None:
            self.prefix.leave(request, live.top, int(self.counts.computed[request.slot]))
        self.blocks.release(request.blocks)
        request.blocks = []
        self.counts.epoch[request.slot] += 1
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1

    def _unpark(self, group: Group) -> None:
        """The prompt is computed, or sample 0 is gone: the other samples go on by themselves."""
        for live in group.parked:
            live.parked = False
            self._waiting.add(live)
        self._num_parked -= len(group.parked)
        group.parked.clear()

    # -- a step is planned ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when nothing can run before the plan in flight is committed. Rows of `plan.admitted` come last,
        in that order. In a step that preempted nobody is admitted."""
        if len(self._flights) > 1:
            raise RuntimeError("two plans are uncommitted: commit the older one first")
        if self._order is None:
            rows = list(self._running)
            self._order = rows, np.array([live.request.slot for live in rows], np.int32)
        rows, slots = self._order
        draft = _Draft(rows, slots, self.counts.divide(slots, self.budget))
        if not draft.counts.all():
            draft.keep(draft.counts > 0)
        if self._grow(draft):
            draft.keep(np.array([live.request.slot >= 0 for live in draft.rows], bool))
            draft.waiting = {"blocks": len(self._waiting)}
        else:
            self._admit(draft, now)
        if self._num_parked:
            draft.waiting["siblings"] = self._num_parked
        return self._plan(draft) if draft.rows else None

    def _grow(self, draft: _Draft) -> bool:
        """Give blocks to rows that outgrow theirs, in order, preempting from the end of the line (in the end themselves) while too few
        are free. True if somebody was preempted."""
        reach = self.counts.planned[draft.slots] + draft.counts
        preempted = False
        for i in np.flatnonzero(reach > self.counts.room[draft.slots]).tolist():
            live = draft.rows[i]
            lack = self._blocks_for(int(reach[i])) - len(live.request.blocks)
            while live.request.slot >= 0 and self.blocks.num_free < lack:
                self._preempt(self._running.last)
                preempted = True
            if live.request.slot < 0:
                break  # and everybody behind it
            self._give(live.request, self.blocks.take(lack), draft)
        return preempted

    def _admit(self, draft: _Draft, now: float) -> None:
        """Admit from the head of the line while slots, budget and blocks last. Nobody overtakes a head that has to wait."""
        left = self.budget - int(draft.counts.sum())
        chunks: list[int] = []
        while self._waiting:
            live = self._waiting.first
            reason, shared = self._obstacle(live, left)
            if reason:
                # what the head lacks of slots or budget, all behind it lack too
                alike = len(self._waiting) if not self._free_slots or left == 0 else 1
                draft.waiting[reason] = alike
                if alike < len(self._waiting):
                    draft.waiting["policy"] = len(self._waiting) - alike
                break
            self._seat(live, shared, draft, now)
            chunks.append(min(live.request.num_tokens - len(shared) * self.block_size, left))
            left -= chunks[-1]
        if draft.admitted:
            draft.rows = draft.rows + draft.admitted
            draft.slots = np.append(draft.slots, np.array([live.request.slot for live in draft.admitted], np.int32))
            draft.counts = np.append(draft.counts, np.array(chunks, np.int32))

    def _obstacle(self, live: Live, left: int) -> tuple[str, list[int]]:
        """What keeps the head of the line from being admitted with `left` tokens of budget ("" for nothing), and the cached blocks that
        it would share."""
        request, running = live.request, len(self._running)
        if not self._free_slots:
            return "slots", []
        if left == 0:
            return "budget", []
        if live.owed or (running and live.declined == self.blocks.releases):
            return "blocks", []
        shared = []
        if live.reads and live.top is not None:
            shared = self.prefix.match(request, live.top, (request.num_tokens - 1) // self.block_size)
        if not self.chunked and request.num_tokens - len(shared) * self.block_size > left:
            return "budget", []
        # Blocks for all known tokens at once: half a prompt is of no use. And one to spare for each running request: else their next
        # blocks would cost this one its place, and its prompt would be computed twice.
        lack = self._blocks_for(request.num_tokens) - len(shared) + running
        if self.blocks.num_free - self.blocks.num_idle(shared) < lack:
            live.declined = self.blocks.releases
            return "blocks", []
        return "", shared

    def _seat(self, live: Live, shared: list[int], draft: _Draft, now: float) -> None:
        """Give the head of the line a slot, the cached blocks and fresh ones."""
        request = live.request
        self._waiting.remove(live)
        if request.status is Status.WAITING:
            self._first_look(live, len(shared))
            request.first_scheduled = now
        request.status = Status.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        self._running.add(live)
        self._order = None
        self.counts.seat(request.slot, request, len(shared) * self.block_size)
        self.blocks.share(shared)
        self._give(request, shared + self.blocks.take(self._blocks_for(request.num_tokens) - len(shared)), draft)
        draft.admitted.append(live)

    def _first_look(self, live: Live, matched: int) -> None:
        """Count what the prefix cache gave at first admission, and say why not more."""
        request = live.request
        most = (request.num_tokens - 1) // self.block_size
        request.cached_tokens = matched * self.block_size
        if live.top is None or (not self.caching and matched < most):
            request.miss_reason = MISS_OFF
        elif not live.reads:
            request.miss_reason = MISS_LOGPROBS
        else:
            request.miss_reason = self.prefix.why(request, live.top, matched, most)
        if self.caching and live.reads:
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += request.cached_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _give(self, request: Request, blocks: list[int], draft: _Draft) -> None:
        for column, block in enumerate(blocks, len(request.blocks)):
            draft.gifts += request.slot, column, block
        request.blocks += blocks
        self.counts.room[request.slot] = len(request.blocks) * self.block_size

    def _plan(self, draft: _Draft) -> StepPlan:
        slots, counts = draft.slots, draft.counts
        starts, known = self.counts.planned[slots], self.counts.known[slots]
        reach = starts + counts
        samples = (reach == known) & (known < self.counts.limit[slots])
        requests = [live.request for live in draft.rows]
        gifts = np.array(draft.gifts, np.int32).reshape(-1, 3).T.copy()
        plan = StepPlan(
            step=self._steps,
            slots=slots,
            starts=starts,
            counts=counts,
            token_ids=self.counts.token_ids(requests, slots, starts, counts),
            samples=samples,
            out_positions=known - self.counts.prompt[slots],
            requests=requests,
            admitted=[live.request for live in draft.admitted],
            block_slots=gifts[0],
            block_columns=gifts[1],
            block_ids=gifts[2],
            waiting=draft.waiting,
        )
        self.counts.advance(slots, reach, known, samples)
        self.counters.computed_tokens += plan.num_tokens
        self._flights.append(_Flight(plan, draft.rows, self.counts.epoch[slots]))
        self._steps += 1
        return plan

    # -- a step is committed -------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Take the result of the oldest uncommitted plan: full blocks are published, tokens appended, ended requests let go. One Output
        for each sequence that got a token or ended; rows of requests that ended meanwhile are dropped."""
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError(f"plan {plan.step} is not the oldest uncommitted one")
        if len(result.token_ids) != (sampled := np.count_nonzero(plan.samples)):
            raise ValueError(f"{len(result.token_ids)} tokens came for the {sampled} sampled rows of plan {plan.step}")
        flight = self._flights.popleft()
        in_place = self.counts.epoch[plan.slots] == flight.epochs  # rows whose request did not leave its slot meanwhile
        self._publish(flight, in_place)
        self.counts.settle(plan, in_place, result.token_ids)
        for row, chunk in result.prompt_logprobs.items():
            live = flight.rows[row]
            if live.prompt_logprobs is not None:
                logprobs.extend_prompt(live.prompt_logprobs, chunk, int(plan.starts[row]), live.request)
        outputs = self._hand_out(flight, in_place, result, now)
        # max_tokens 0: only the prompt was to be computed
        complete = in_place & ~plan.samples & (plan.starts + plan.counts == self.counts.limit[plan.slots])
        for row in np.flatnonzero(complete).tolist():
            live = flight.rows[row]
            output = Output(live.request.id, live.request.index, [])
            self._open(live, output, now)
            self._close(live, output, FinishReason.LENGTH, None, now)
            outputs.append(output)
        return outputs

    def _publish(self, flight: _Flight, in_place: np.ndarray) -> None:
        """Let others find the blocks that this plan filled."""
        plan = flight.plan
        before = self.counts.computed[plan.slots] // self.block_size
        after = (plan.starts + plan.counts) // self.block_size
        for row in np.flatnonzero(in_place & (after > before)).tolist():
            live = flight.rows[row]
            if live.top is not None:
                self.prefix.publish(live.request, live.top, int(before[row]), int(after[row]))

    def _hand_out(self, flight: _Flight, in_place: np.ndarray, result: StepResult, now: float) -> list[Output]:
        """Append each sampled token to its request, also to one preempted meanwhile, and end those that reach an end."""
        sampled = np.flatnonzero(flight.plan.samples)
        lives, tokens = [flight.rows[row] for row in sampled.tolist()], result.token_ids.tolist()
        kept: Sequence[int] = range(len(tokens))
        if not in_place[sampled].all():
            kept = [i for i, live in enumerate(lives) if live.request.status is not Status.FINISHED]
            self.counters.dropped_tokens += len(tokens) - len(kept)
            lives, tokens = [lives[i] for i in kept], [tokens[i] for i in kept]
            for live in lives:
                live.owed = False
        outputs = [Output(live.id, live.index, [token]) for live, token in zip(lives, tokens)]
        for live, token, output in zip(lives, tokens, outputs):
            output_ids = live.output_ids
            output_ids.append(token)
            if not live.opened:
                self._open(live, output, now)
            if token in live.ending or len(output_ids) >= live.most:
                reason, stop_reason = stop.verdict(live.request)
                if reason is not None:
                    self._close(live, output, reason, stop_reason, now)
        if result.logprobs is not None:
            for live, token, output, i in zip(lives, tokens, outputs, kept):
                if live.request.params.logprobs is not None:
                    output.logprobs = [logprobs.position(result.logprobs, i, token, live.request.params.logprobs)]
        self.counters.output_tokens += len(outputs)
        return outputs

    def _open(self, live: Live, output: Output, now: float) -> None:
        """A request's first Output: its prompt is computed."""
        live.opened = True
        live.request.first_token = now
        self._tell(live.request, output)
        if live.prompt_logprobs is not None:
            if len(live.prompt_logprobs) != len(live.request.prompt_ids):
                raise ValueError(f"{len(live.prompt_logprobs)} prompt logprobs came for {len(live.request.prompt_ids)} prompt tokens")
            output.prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
        if live.request.index == 0:
            self._unpark(live.group)

    def _close(self, live: Live, output: Output, reason: FinishReason, stop_reason: int | None, now: float) -> None:
        """A request's last Output."""
        request = live.request
        request.finished = now
        self._finish(live, reason, stop_reason)
        output.finish_reason, output.stop_reason = reason, stop_reason
        output.timing = Timing(request.arrival, request.first_scheduled, request.first_token, now)
        self._tell(request, output)

    @staticmethod
    def _tell(request: Request, output: Output) -> None:
        output.prompt_tokens = len(request.prompt_ids)
        output.cached_tokens = request.cached_tokens
        output.miss_reason = request.miss_reason
        output.preemptions = request.preemptions
