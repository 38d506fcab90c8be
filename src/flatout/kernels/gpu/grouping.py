"""Kernels that say which expert a token goes to: `choose` from a router's logits; `count` and `place`, a counting sort of pairs by expert.

A pair is a token and one of its choices, numbered token by token. Integers only after `choose`, in a fixed order: no atomics. Launched by
kernels/gpu/moe.py alone.
"""

import triton
import triton.language as tl


@triton.jit
def choose(
    weights, chosen, logits, stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, RENORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: softmax and choices of one token. Choices exist and are distinct, whatever the logits: NaN ranks under every number."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, KEPT)
    x = tl.load(logits + token * stride + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x))
    x /= tl.sum(x)
    rank = tl.where(expert < EXPERTS, tl.where(x == x, x, -1.0), -3.0)
    values, ids = tl.zeros((KEPT,), tl.float32), tl.zeros((KEPT,), tl.int64)
    for i in tl.static_range(TOP_K):
        best, which = tl.max(rank, 0, return_indices=True)  # the lowest of equals
        rank = tl.where(expert == which, -2.0, rank)
        values = tl.where(choice == i, tl.where(best < 0, float("nan"), best), values)
        ids = tl.where(choice == i, which.to(tl.int64), ids)
    if RENORMALISE:
        values /= tl.sum(values)
    tl.store(weights + token * TOP_K + choice, values, mask=choice < TOP_K)
    tl.store(chosen + token * TOP_K + choice, ids, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def count(counts, chosen, pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """A program: how many of a chunk's pairs each expert has. counts: int32 [chunks, BLOCK]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(chosen + pair, mask=pair < pairs, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.histogram(expert, BLOCK, mask=pair < pairs))


@triton.jit(do_not_specialize=["pairs", "slots"])
def place(
    slot_experts, order, counts, chosen, pairs, slots,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: one expert's pairs of one chunk, put in order into the expert's slots of ROWS. Grid: chunks, experts.

    slot_experts: int32 [slots], order: int32 [slots, ROWS], -1 where nothing is. SINGLE: there is one chunk, and counts are not needed.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, expert = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, BLOCK)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    theirs = tl.load(chosen + pair, mask=pair < pairs, other=-1).to(tl.int32)
    mine = theirs == expert
    before = tl.zeros((BLOCK,), tl.int32)
    if SINGLE:
        total = tl.histogram(theirs, BLOCK, mask=pair < pairs)
    else:
        total = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, tl.num_programs(0), 8):
            other = first + tl.arange(0, 8)[:, None]
            some = tl.load(counts + other * BLOCK + every[None, :], mask=other < tl.num_programs(0), other=0)
            total += tl.sum(some, 0)
            before += tl.sum(tl.where(other < chunk, some, 0), 0)
    filled = (total + ROWS - 1) // ROWS
    ends = tl.cumsum(filled, 0)
    end = tl.sum(tl.where(every == expert, ends, 0))
    begin = end - tl.sum(tl.where(every == expert, filled, 0))
    position = begin * ROWS + tl.sum(tl.where(every == expert, before, 0)) + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + position, pair, mask=mine)
    if chunk == 0:
        gap = begin * ROWS + tl.sum(tl.where(every == expert, total, 0)) + tl.arange(0, ROWS)
        tl.store(order + gap, tl.full((ROWS,), -1, tl.int32), mask=gap < end * ROWS)
        for first in range(begin, end, BLOCK):
            tl.store(slot_experts + first + every, tl.zeros((BLOCK,), tl.int32) + expert, mask=first + every < end)
        if expert == 0:  # at most one slot an expert is left over
            rest = tl.sum(filled) + every
            tl.store(slot_experts + rest, tl.full((BLOCK,), -1, tl.int32), mask=rest < slots)
