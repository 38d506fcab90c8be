"""The token-budget loop: schedule() -> StepPlan, commit(plan, result) -> Outputs. One step may be planned before the last one is committed.

No phases: a request has tokens computed and tokens known, and each step closes the gap within one budget. Counts live in arrays over
slots; Python touches a request when it is admitted, given a block, preempted, finished, or handed a token. A block is published when it
is planned, so requests share what is being computed, even in the same step. Who goes first is policy.py's, where is blocks.py's, what
is cached is prefix.py's, when it ends is stop.py's. Called by engine.py; no clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from flatout.core import logprobs, stop
from flatout.core.blocks import BlockPool
from flatout.core.counts import NEVER, Counters, Counts
from flatout.core.draft import Draft, Flight
from flatout.core.live import Live
from flatout.core.policy import POLICIES, Line, kept_whole
from flatout.core.prefix import MISS_LOGPROBS, MISS_OFF, PrefixCache, root
from flatout.core.waits import Waits
from flatout.request import FinishReason, Output, Request, RequestError, Status, Timing, int32_bytes
from flatout.step import StepPlan, StepResult


class Scheduler:
    """Admits, plans, preempts and ends requests over `max_num_seqs` slots and `num_blocks` blocks of `block_size` tokens.

    Call schedule() and commit() in turn, or one step ahead: schedule() once more before the first commit(). A plan that raised is given to
    fail() instead. Plans run and are committed in order, and in each layer all keys and values of a plan are written before any are read:
    so a block is there for whoever shares it in the same plan or a later one. Raises ValueError for settings that cannot work together.
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
        self._waits = Waits()
        self._rank = POLICIES[policy]
        self._groups: dict[str, dict[int, Live]] = {}  # the live samples of each user request by index
        self._running = Line(Live.place)
        self._waiting = Line(Live.place)
        self._arrivals = 0
        self._steps = 0
        self._flights: deque[Flight] = deque()
        self._latest: tuple[Live, int] | None = None  # who was admitted last, with its reach, while its blocks are not yet published
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
        return len(self._waiting)

    @property
    def waiting(self) -> dict[str, int]:
        """Who waits, by reason."""
        return self._waits.count(len(self._waiting))

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
        group = self._groups[first.id] = {}
        for request, limit in zip(requests, limits):
            request.limit = limit
            request.status = Status.WAITING
            collects = request.index == 0 and request.params.prompt_logprobs is not None
            live = Live(
                request,
                request.id,
                request.index,
                request.output_ids,
                rank=self._rank(request),
                number=self._arrivals,
                top=top,
                reads=top is not None and not collects,
                ending=stop.ending_ids(request),
                most=limit - len(request.prompt_ids),
                prompt_logprobs=[None] if collects else None,
            )
            self._arrivals += 1
            group[request.index] = live
            self._waiting.add(live)
            self._waits.add(live)

    def abort(
        self, id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT, stop_reason: str | None = None
    ) -> list[Request]:
        """End a request, or one sample of it, at any moment; returns those that were live. What is in flight for them is dropped.
        A stop string found by the text side comes here with FinishReason.STOP."""
        ended = [live for i, live in self._groups.get(id, {}).items() if index is None or i == index]
        for live in ended:
            self._finish(live, reason, stop_reason)
        return [live.request for live in ended]

    def _finish(self, live: Live, reason: FinishReason, stop_reason: int | str | None) -> None:
        request = live.request
        if request.slot >= 0:
            self._vacate(live)
        else:
            self._waiting.remove(live)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.hashes = []
        self.counters.finished[reason] += 1
        group = self._groups[request.id]
        del group[request.index]
        if not group:
            del self._groups[request.id]

    def _preempt(self, live: Live) -> None:
        """Take the request's blocks; its known tokens will be computed again. Nothing else of it is lost."""
        request = live.request
        live.owed = bool(self.counts.known[request.slot] > self.counts.settled[request.slot])
        self._vacate(live)
        request.status = Status.PREEMPTED
        request.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(live)
        self._waits.preempted(live)

    def _vacate(self, live: Live) -> None:
        """Give back slot and blocks. The device runs plans in order, so both may be reused by the next plan; and what is planned will be
        computed all the same, so it is published as far as its tokens have become known."""
        request = live.request
        self._running.remove(live)
        self._order = None
        if self._latest is not None and self._latest[0] is live:
            self._latest = None
        if live.top is not None:
            blocks = self._publish_one(live, int(min(self.counts.planned[request.slot], self.counts.settled[request.slot])))
            if self._flights:
                self._flights[-1].published += blocks
            self.prefix.leave(request, live.top, int(self.counts.computed[request.slot]))
        self.blocks.release(request.blocks)
        request.blocks = []
        self.counts.epoch[request.slot] += 1
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1

    # -- a step is planned ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when nothing can run before the plan in flight is committed. Rows of `plan.admitted` come last,
        in that order. In a step that preempted nobody is admitted."""
        if len(self._flights) > 1:
            raise RuntimeError("two plans are uncommitted: commit the older one first")
        self._waits.advance(now)
        self._publish_latest(self._flights[-1].published if self._flights else [])  # while the device works on the plan that computes them
        if self._order is None:
            rows = list(self._running)
            self._order = rows, np.array([live.request.slot for live in rows], np.int32)
        rows, slots = self._order
        counts = self.counts.divide(slots, self.budget)
        draft = Draft(rows, slots, counts, self.counts.planned[slots] + counts)
        if not draft.counts.all():
            draft.keep(draft.counts > 0)
        preempted = self._grow(draft)
        if preempted:
            draft.keep(np.array([live.request.slot >= 0 for live in draft.rows], bool))
        self._publish(draft)
        if preempted:
            draft.waiting = {"blocks": len(self._waiting)}
            self._waits.why(self._waiting.first, "blocks", "blocks")
        else:
            self._admit(draft, now)
        return self._plan(draft) if draft.rows else None

    def _grow(self, draft: Draft) -> bool:
        """Give blocks to rows that outgrow theirs, in order, preempting from the end of the line (in the end themselves) while too few
        are free. True if somebody was preempted."""
        preempted = False
        over = draft.reach - self.counts.room[draft.slots]
        outgrown = np.flatnonzero(over > 0)
        for i, lack in zip(outgrown.tolist(), (-(-over[outgrown] // self.block_size)).tolist()):
            live = draft.rows[i]
            while live.request.slot >= 0 and self.blocks.num_free < lack:
                self._preempt(self._running.last)
                preempted = True
            if live.request.slot < 0:
                break  # and everybody behind it
            self._give(live.request, self.blocks.take(lack), draft)
        return preempted

    def _publish(self, draft: Draft) -> None:
        """Let those who are admitted next find the blocks that these rows fill; not yet one with a token that is on the device only."""
        reach = np.minimum(draft.reach, self.counts.settled[draft.slots])
        for row in np.flatnonzero(reach >= self.counts.edge[draft.slots]).tolist():
            draft.published += self._publish_one(draft.rows[row], int(reach[row]))

    def _publish_latest(self, published: list[int]) -> None:
        """Whoever was admitted last is published when the next in line is looked up, or with the next plan: 8,000 tokens take 0.9 ms, for
        which the first plan of an idle device does not wait. The blocks are added to `published`."""
        if self._latest is not None:
            live, reach = self._latest
            self._latest = None
            published += self._publish_one(live, reach)

    def _publish_one(self, live: Live, reach: int) -> list[int]:
        """Let others find the blocks that the request's first `reach` tokens fill, all known. Returns those not published before."""
        if live.top is None:
            return []
        request = live.request
        first, stop = int(self.counts.edge[request.slot]) // self.block_size - 1, reach // self.block_size
        self.prefix.publish(request, live.top, first, stop)
        self.counts.edge[request.slot] = (stop + 1) * self.block_size
        return request.blocks[first:stop]

    def _admit(self, draft: Draft, now: float) -> None:
        """Admit from the head of the line while slots, budget and blocks last. Nobody overtakes a head that has to wait."""
        left = self.budget - int(draft.counts.sum())
        reach: list[int] = []
        while self._waiting:
            live = self._waiting.first
            reason, shared = self._obstacle(live, left, draft)
            if reason:
                # what the head lacks of slots or budget, all behind it lack too
                alike = len(self._waiting) if not self._free_slots or left == 0 else 1
                draft.waiting[reason] = alike
                if alike < len(self._waiting):
                    draft.waiting["policy"] = len(self._waiting) - alike
                self._waits.why(live, reason, reason if alike > 1 else "policy")
                break
            self._publish_latest(draft.published)  # also where the next in line does not look
            self._seat(live, shared, draft, now)
            start = len(shared) * self.block_size
            reach.append(min(live.request.num_tokens, start + left))
            left -= reach[-1] - start
            self._latest = live, reach[-1]
        if draft.admitted:
            slots = np.array([live.request.slot for live in draft.admitted], np.int32)
            draft.rows = draft.rows + draft.admitted
            draft.slots = np.append(draft.slots, slots)
            draft.reach = np.append(draft.reach, np.array(reach, np.int32))
            draft.counts = np.append(draft.counts, draft.reach[-len(slots) :] - self.counts.planned[slots])

    def _obstacle(self, live: Live, left: int, draft: Draft) -> tuple[str, list[int]]:
        """What keeps the head of the line from being admitted with `left` tokens of budget ("" for nothing), and the published blocks
        that it would share. With budget left, all who run have their known tokens planned, so it finds every full block of theirs; those
        of who was admitted before it in this step are published here."""
        request, running = live.request, len(self._running)
        if not self._free_slots:
            return "slots", []
        if left == 0:
            return "budget", []
        if live.owed or (running and live.declined == self.blocks.releases):
            return "blocks", []
        shared = []
        if live.reads and live.top is not None:
            self._publish_latest(draft.published)
            shared = self.prefix.match(request, live.top, (request.num_tokens - 1) // self.block_size)
        rest, decodes = request.num_tokens - len(shared) * self.block_size, len(draft.rows) + len(draft.admitted)
        if rest > left:
            if not self.chunked:
                return "budget", []
            if live.kept != self._steps - 1 and kept_whole(rest, left, self.budget, decodes):
                live.kept = self._steps
                return "budget", []
        # Blocks for all known tokens at once: half a prompt is of no use. And one to spare for each running request: else their next
        # blocks would cost this one its place, and its prompt would be computed twice.
        lack = self._blocks_for(request.num_tokens) - len(shared) + running
        if self.blocks.num_free - self.blocks.num_idle(shared) < lack:
            live.declined = self.blocks.releases
            return "blocks", []
        return "", shared

    def _seat(self, live: Live, shared: list[int], draft: Draft, now: float) -> None:
        """Give the head of the line a slot, the shared blocks and fresh ones."""
        request = live.request
        self._waiting.remove(live)
        self._waits.told(live)
        if request.status is Status.WAITING:
            self._first_look(live, len(shared))
            request.first_scheduled = now
        request.status = Status.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        self._running.add(live)
        self._order = None
        cached = len(shared) * self.block_size
        self.counts.seat(request.slot, request, cached, NEVER if live.top is None else cached + self.block_size)
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

    def _give(self, request: Request, blocks: list[int], draft: Draft) -> None:
        slots, columns, ids = draft.gifts
        slots += [request.slot] * len(blocks)
        columns += range(len(request.blocks), len(request.blocks) + len(blocks))
        ids += blocks
        request.blocks += blocks
        self.counts.room[request.slot] = len(request.blocks) * self.block_size

    def _plan(self, draft: Draft) -> StepPlan:
        slots, counts, reach = draft.slots, draft.counts, draft.reach
        starts, known = reach - counts, self.counts.known[slots]
        samples = (reach == known) & (known < self.counts.limit[slots])
        requests = [live.request for live in draft.rows]
        gifts = [np.frombuffer(int32_bytes(column), np.int32) for column in draft.gifts]
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
        if plan.num_tokens > len(slots):
            for row in np.flatnonzero(counts > 1).tolist():
                requests[row].chunks += 1
        self._flights.append(Flight(plan, draft.rows, self.counts.epoch[slots], draft.published))
        self._steps += 1
        return plan

    # -- a step is committed -------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Take the result of the oldest uncommitted plan: tokens are appended, ended requests let go. One Output for each sequence that got
        a token or ended; rows of requests that ended meanwhile are dropped."""
        self._check_oldest(plan)
        if len(result.token_ids) != (sampled := np.count_nonzero(plan.samples)):
            raise ValueError(f"{len(result.token_ids)} tokens came for the {sampled} sampled rows of plan {plan.step}")
        flight = self._flights.popleft()
        in_place = self.counts.epoch[plan.slots] == flight.epochs  # rows whose request did not leave its slot meanwhile
        self.counts.settle(plan, in_place, result.token_ids)
        for row, chunk in result.prompt_logprobs.items():
            live = flight.rows[row]
            if live.prompt_logprobs is not None and not flight.drops(live):
                logprobs.extend_prompt(live.prompt_logprobs, chunk, int(plan.starts[row]), live.request)
        outputs = self._hand_out(flight, in_place, result, now)
        if sampled < len(plan.slots):  # max_tokens 0: only the prompt was to be computed
            complete = in_place & ~plan.samples & (plan.starts + plan.counts == self.counts.limit[plan.slots])
            for row in np.flatnonzero(complete).tolist():
                live = flight.rows[row]
                output = Output(live.request.id, live.request.index, [])
                self._open(live, output, now)
                self._close(live, output, FinishReason.LENGTH, None, now)
                outputs.append(output)
        return outputs

    def fail(self, plan: StepPlan) -> list[Request]:
        """The oldest uncommitted plan raised, and nothing it was to write can be trusted. The requests it held end with FinishReason.ERROR;
        those still live are returned. What it and the plan after it published is found no more. Whoever was admitted by the latter, perhaps
        onto such blocks, starts over and gets nothing of that plan. All others read only their own and what committed plans computed."""
        self._check_oldest(plan)
        ended = [live for live in self._flights[0].rows if live.request.status is not Status.FINISHED]
        for live in ended:
            self._finish(live, FinishReason.ERROR, None)
        for later in list(self._flights)[1:]:  # one at most
            later.void = later.rows[len(later.rows) - len(later.plan.admitted) :]
            for live in later.void:
                if live.request.slot >= 0:
                    self._preempt(live)
                live.owed = False
        for flight in self._flights:
            for block in flight.published:
                self.blocks.unpublish(block)
        self._flights.popleft()
        return [live.request for live in ended]

    def _check_oldest(self, plan: StepPlan) -> None:
        if not self._flights or self._flights[0].plan is not plan:
            raise RuntimeError(f"plan {plan.step} is not the oldest uncommitted one")

    def _hand_out(self, flight: Flight, in_place: np.ndarray, result: StepResult, now: float) -> list[Output]:
        """Append each sampled token to its request, also to one preempted meanwhile, and end those that reach an end."""
        sampled = np.flatnonzero(flight.plan.samples)
        lives, tokens = [flight.rows[row] for row in sampled.tolist()], result.token_ids.tolist()
        kept: Sequence[int] = range(len(tokens))
        if not in_place[sampled].all():
            kept = [i for i, live in enumerate(lives) if not flight.drops(live)]
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

    def _close(self, live: Live, output: Output, reason: FinishReason, stop_reason: int | None, now: float) -> None:
        """A request's last Output."""
        request = live.request
        request.finished = now
        self._finish(live, reason, stop_reason)
        output.finish_reason, output.stop_reason = reason, stop_reason
        self._tell(request, output)

    @staticmethod
    def _tell(request: Request, output: Output) -> None:
        output.prompt_tokens = len(request.prompt_ids)
        output.cached_tokens = request.cached_tokens
        output.miss_reason = request.miss_reason
        output.preemptions = request.preemptions
        output.timing = Timing.of(request)
