"""greedy of kernels/sampling.py in Triton: the first of the largest logits of each row, a row split over programs while there are few.

Needs no cleaned logits: +inf counts as the highest finite float, NaN as -inf. That is as good as the lowest finite float where nothing was
edited; rows that were come cleaned, and in them a token that is not allowed (-inf) stays below a banned one. Registered with the op by
kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.sampling import greedy

BLOCK = 2048  # logits of one step of a program
WARPS = 4
LEAST = 2048  # logits a program: fewer and the atomics cost more than the reading
HIGHEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
NONE_BELOW: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # over every id


@triton.jit
def _greedy(ids, logits, best, arrived, row_stride, width, share, BLOCK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Program (row, part). best int64, arrived int32 [rows], both 0 before and after: the largest key so far and how many parts are in.

    A key holds a logit's order in 32 bits and, under it, 2^31 - 1 - id, so that the largest key is the lowest id among equals. It is over 0.
    A maximum of integers does not depend on the order of arrival.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * share
    lane = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32) + start
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in range(start, tl.minimum(start + share, width), BLOCK):
        x = tl.load(logits + row * row_stride + first + lane, mask=first + lane < width, other=float("-inf"))
        x = tl.minimum(x, HIGHEST, propagate_nan=tl.PropagateNan.ALL)
        better = x > value  # never of a NaN, nor of an equal with a higher id
        value = tl.where(better, x, value)
        at = tl.where(better, first, at)
    largest = tl.max(value, axis=0)
    token = tl.min(tl.where(value == largest, at + lane, NONE_BELOW), axis=0)
    if SPLIT:
        bits = (largest + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
        tl.atomic_max(best + row, (order << 31) | (NONE_BELOW - token), sem="relaxed")
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            key = tl.atomic_xchg(best + row, 0, sem="relaxed")
            tl.store(ids + row, (key & NONE_BELOW) ^ NONE_BELOW)
            tl.store(arrived + row, 0)
    else:
        tl.store(ids + row, token)


def parts_launch(rows: int, width: int, sms: int) -> tuple[int, int]:
    """(parts of a row, logits of each, a multiple of BLOCK): about eight programs a processor, each with LEAST to read or more."""
    parts = max(1, min(8 * sms // rows, cdiv(width, LEAST)))
    share = cdiv(cdiv(width, parts), BLOCK) * BLOCK
    return cdiv(width, share), share


@cache
def _scratch(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """best and arrived of the kernel, for the calls of one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("greedy's first call on a device, or the first with so many rows, must come before a capture")
    return torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, dtype=torch.int32, device=device)


@greedy.implementation("triton", lambda ids, logits: logits.is_cuda and logits.dtype == torch.float32)
def greedy_triton(ids: Tensor, logits: Tensor) -> None:
    device = facts(logits.device)
    rows, width = logits.shape
    parts, share = parts_launch(rows, width, device.sms)
    best, arrived = _scratch(logits.device, max(1024, next_power_of_2(rows)))
    launch(
        _greedy,
        (rows, parts),
        ids,
        logits,
        best,
        arrived,
        logits.stride(0),
        width,
        share,
        BLOCK=BLOCK,
        SPLIT=parts > 1,
        PDL=device.pdl,
        num_warps=WARPS,
        launch_pdl=device.pdl,
    )
