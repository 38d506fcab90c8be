"""Counts: how far each running request is, as arrays over slots, so that a step of many decodes costs a few numpy calls; and Counters.

Numbers and the newest token id only; who sits in a slot, and why, is scheduler.py's, the only caller. "Planned" and "known" count
what a plan in flight will bring; "computed" and "settled" are their committed twins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from flatout.core.prefix import tokens_of
from flatout.request import FinishReason, Request
from flatout.step import FROM_DEVICE, StepPlan

NEVER = np.iinfo(np.int32).max  # an edge out of reach


@dataclass(slots=True)
class Counters:
    """Since the start; never reset."""

    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, once a request
    prefix_hits: int = 0  # of these, found: computed before, or by another request in the same step or one in flight
    computed_tokens: int = 0  # planned for the device, recomputed and dropped ones included
    output_tokens: int = 0  # handed out
    dropped_tokens: int = 0  # sampled one step ahead for a request that had ended, or from what a failed step left
    finished: Counter[FinishReason] = field(default_factory=Counter)


class Counts:
    """All arrays int32 [max_num_seqs], in tokens unless said otherwise. A row of a free slot means nothing."""

    def __init__(self, max_num_seqs: int):
        def per_slot() -> np.ndarray:
            return np.zeros(max_num_seqs, np.int32)

        self.epoch = per_slot()  # changes when a request leaves the slot: tells a plan's row from a later owner's
        self.prompt = per_slot()
        self.limit = per_slot()  # where the sequence ends
        self.end = per_slot()  # what will ever be computed: all but the last token
        self.room = per_slot()  # what the request's blocks hold
        self.edge = per_slot()  # where the first of its blocks ends that is not published; NEVER: it shares with nobody
        self.known = per_slot()
        self.settled = per_slot()
        self.planned = per_slot()
        self.computed = per_slot()
        self.newest = per_slot()  # id of the last known token, or FROM_DEVICE

    def seat(self, slot: int, request: Request, cached: int, edge: int) -> None:
        """A request takes the slot with its first `cached` tokens computed, or planned by others."""
        tokens, prompt = request.num_tokens, len(request.prompt_ids)
        self.prompt[slot] = prompt
        self.limit[slot] = request.limit
        self.end[slot] = max(request.limit - 1, prompt)  # max_tokens 0: the whole prompt and nothing else
        self.known[slot] = self.settled[slot] = tokens
        self.planned[slot] = self.computed[slot] = cached
        self.edge[slot] = edge
        self.newest[slot] = (request.output_ids or request.prompt_ids)[-1]

    def divide(self, slots: np.ndarray, budget: int) -> np.ndarray:
        """Tokens for each of these rows in a step, int32: one to everybody who lacks any, so that no decode stalls behind a long prompt;
        what is left of the budget by order."""
        need = np.minimum(self.known[slots], self.end[slots]) - self.planned[slots]
        if need.sum() <= budget:
            return need
        one = np.minimum(need, 1)
        one[np.cumsum(one) > budget] = 0
        rest = need - one
        return one + np.clip(budget - one.sum() - (np.cumsum(rest) - rest), 0, rest).astype(np.int32)

    def token_ids(self, requests: list[Request], slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Ids of the rows' next tokens end to end, int32; a row's newest may be FROM_DEVICE."""
        only_newest = starts + 1 == self.known[slots]
        if only_newest.all():
            return self.newest[slots]
        ends = np.cumsum(counts)
        ids = np.empty(ends[-1], np.int32)
        ids[ends[only_newest] - 1] = self.newest[slots[only_newest]]
        for i in np.flatnonzero(~only_newest).tolist():
            start, count, end = int(starts[i]), int(counts[i]), int(ends[i])
            ids[end - count : end] = np.frombuffer(tokens_of(requests[i], start, start + count), np.int32)
        return ids

    def advance(self, slots: np.ndarray, reach: np.ndarray, known: np.ndarray, samples: np.ndarray) -> None:
        """A plan computes these rows up to `reach`, and one more token than `known` of those that sample."""
        self.planned[slots] = reach
        self.known[slots] = known + samples
        self.newest[slots[samples]] = FROM_DEVICE

    def settle(self, plan: StepPlan, in_place: np.ndarray, token_ids: np.ndarray) -> None:
        """The plan is committed, for rows whose request is still `in_place` (bool [R])."""
        self.computed[plan.slots[in_place]] = (plan.starts + plan.counts)[in_place]
        grown = in_place[plan.samples]
        slots = plan.slots[plan.samples][grown]
        settled = self.settled[slots] + 1
        self.settled[slots] = settled
        newest = self.known[slots] == settled  # else a later plan counts on a token still unknown
        self.newest[slots[newest]] = token_ids[grown][newest]
