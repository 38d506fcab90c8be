"""Triton kernels of the op token_logprobs: rate_groups reads every logit once, rate_rows has a program a row and reads what matters again.

Sums of floats have one order: within a group of tokens, then over all groups of a row. So neither the split over programs nor other
rows change a bit. Launched by sampling.py beside this file; what is reported is said in kernels/sampling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.kernels.gpu.draw import (
    GROUP,
    LOG2_E,
    LOWEST,
    NOTHING,
    clean,
    groups_of,
    key_of,
    logits_of,
    ordered,
    ranked,
    token_of,
    value_of,
)
from flatout.kernels.sampling import LOGPROB_FLOOR

FLOOR = tl.constexpr(LOGPROB_FLOOR)


@triton.jit
def _level(base, ids, at):
    """The logit of the row's own token; -inf counts as the lowest finite number here."""
    return tl.maximum(clean(tl.load(base + tl.load(ids + at))), LOWEST)


@triton.jit
def _logits_of(base, group, vocab):
    """As draw.py's, with the lowest finite number for -inf but beyond the vocabulary."""
    x, token = logits_of(base, group, vocab)
    return tl.where(token < vocab, tl.maximum(x, LOWEST), float("-inf")), token


@triton.jit(do_not_specialize=["per"], do_not_specialize_on_alignment=["ids"])
def rate_groups(
    logits, ids, tops, sums, reach, vocab, stride, tiles, per, WIDE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of each group of tokens the largest logit and the sum of exp(logit - it): tops, sums float32 [N, WIDE], of no group -inf and 0.

    Grid: splits, rows. reach int32 [N, tiles], of which each split writes one: how many logits are at least the one of ids int64 [N].
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = logits + at * stride
    level = _level(base, ids, at)
    number = tl.zeros([TILE, GROUP], tl.int32)
    for tile in range(split * per, tl.minimum(split * per + per, tiles)):
        x, token = _logits_of(base, groups_of(tile, TILE), vocab)
        number += (x >= level).to(tl.int32)
        top = tl.max(x, axis=1)
        total = tl.sum(tl.where(token < vocab, tl.exp2((x - top[:, None]) * LOG2_E), 0.0), axis=1)
        group = at * WIDE + groups_of(tile, TILE)
        tl.store(tops + group, top)
        tl.store(sums + group, total)
    tl.store(reach + at * tiles + split, tl.sum(number))


@triton.jit(do_not_specialize=["splits", "k"], do_not_specialize_on_alignment=["ids", "chosen", "ranks", "top_ids", "top_logprobs"])
def rate_rows(
    chosen, ranks, top_ids, top_logprobs, logits, ids, tops, sums, reach,
    vocab, stride, tiles, splits, k, WIDE: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chosen, ranks [N] and the first k <= TOP of each row: top_ids, top_logprobs [N, k]. Grid: rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64)
    base = logits + at * stride
    group = tl.arange(0, WIDE)
    top = tl.load(tops + at * WIDE + group)
    peak = tl.max(top)
    total = tl.log(tl.sum(tl.load(sums + at * WIDE + group) * tl.exp2((top - peak) * LOG2_E)))
    tl.store(chosen + at, tl.maximum(_level(base, ids, at) - peak - total, FLOOR))
    tl.store(ranks + at, tl.sum(tl.load(reach + at * tiles + group, mask=group < splits, other=0)))
    if TOP > 0:
        # The k first lie in the k groups whose largest are first, ties by place: every other group has k tokens before its own.
        place = tl.arange(0, TOP)
        rank = ranked(ordered(top), group)
        first = tl.full([TOP], WIDE, tl.int32)  # beyond the vocabulary
        for i in range(tl.minimum(k, WIDE)):
            best = tl.max(rank)
            rank = tl.where(rank == best, NOTHING, rank)
            first = tl.where(place == i, token_of(best), first)
        x, token = _logits_of(base, first, vocab)
        rank = ranked(ordered(x), token)
        winner = tl.zeros([TOP], tl.int64)
        for i in range(k):
            best = tl.max(rank)
            rank = tl.where(rank == best, NOTHING, rank)
            winner = tl.where(place == i, best, winner)
        tl.store(top_ids + at * k + place, token_of(winner), mask=place < k)
        tl.store(top_logprobs + at * k + place, tl.maximum(value_of(key_of(winner)) - peak - total, FLOOR), mask=place < k)
