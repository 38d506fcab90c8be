"""decode_inputs and remember of kernels/inputs.py in Triton, one launch each: the ends of a captured decode step.

Registered with the ops by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.whole import cdiv
from flatout.kernels.inputs import FROM_DEVICE, decode_inputs, remember

BLOCK, WARPS = 1024, 8
LATE: tl.constexpr = tl.constexpr(FROM_DEVICE)


@triton.jit(do_not_specialize=["count", "diffs"])
def _decode_inputs(
    tokens,
    positions,
    kv_lens,
    kv_slots,
    rows,
    tables,
    staged,
    last_ids,
    table_stride,
    count,
    diffs,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all rows, since they read the tables that it has just changed."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, BLOCK)
    used = tl.load(staged)
    new = staged + 1 + 3 * count
    for first in range(0, diffs, BLOCK):
        at = first + lane
        mask = at < diffs
        slot = tl.load(new + at, mask=mask, other=0)  # loaded whether in use or not: `used` is still under way
        column = tl.load(new + diffs + at, mask=mask, other=0)
        block = tl.load(new + 2 * diffs + at, mask=mask, other=0)
        tl.store(tables + slot.to(tl.int64) * table_stride + column, block, mask=at < used)
    tl.debug_barrier()
    for first in range(0, count, BLOCK):
        row = first + lane
        mask = row < count
        token = tl.load(staged + 1 + row, mask=mask, other=0)
        position = tl.load(staged + 1 + count + row, mask=mask, other=0)
        slot = tl.load(staged + 1 + 2 * count + row, mask=mask, other=0)
        block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=mask, other=0)
        late = tl.load(last_ids + slot, mask=mask & (token == LATE), other=0)
        tl.store(tokens + row, tl.where(token == LATE, late, token.to(tl.int64)), mask=mask)
        tl.store(positions + row, position.to(tl.int64), mask=mask)
        tl.store(kv_lens + row, position + 1, mask=mask)
        tl.store(rows + row, slot, mask=mask)
        tl.store(kv_slots + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)


def _inputs_accepts(
    tokens: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    kv_slots: Tensor,
    rows: Tensor,
    tables: Tensor,
    staged: Tensor,
    last_ids: Tensor,
    block_size: int,
) -> bool:
    return tokens.is_cuda


@decode_inputs.implementation("triton", _inputs_accepts)
def decode_inputs_triton(
    tokens: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    kv_slots: Tensor,
    rows: Tensor,
    tables: Tensor,
    staged: Tensor,
    last_ids: Tensor,
    block_size: int,
) -> None:
    device = facts(tokens.device)
    count = tokens.shape[0]
    launch(
        _decode_inputs,
        (1,),
        tokens,
        positions,
        kv_lens,
        kv_slots,
        rows,
        tables,
        staged,
        last_ids,
        tables.stride(0),
        count,
        (staged.shape[0] - 1 - 3 * count) // 3,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        PDL=device.pdl,
        num_warps=WARPS,
        launch_pdl=device.pdl,
    )


@triton.jit(do_not_specialize=["count"])
def _remember(last_ids, slots, ids, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    tl.store(last_ids + tl.load(slots + row, mask=mask, other=0), tl.load(ids + row, mask=mask, other=0), mask=mask)


@remember.implementation("triton", lambda last_ids, slots, ids: ids.is_cuda)
def remember_triton(last_ids: Tensor, slots: Tensor, ids: Tensor) -> None:
    device = facts(ids.device)
    count = ids.shape[0]
    launch(
        _remember, (cdiv(count, BLOCK),), last_ids, slots, ids, count, BLOCK=BLOCK, PDL=device.pdl, num_warps=WARPS, launch_pdl=device.pdl
    )
