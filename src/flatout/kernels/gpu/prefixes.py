"""shared_prefixes of kernels/prefixes.py in Triton: every row is compared with the lowest that may lead it, then one program forms the groups.

Two launches a step, whatever the layers. Registered with the op by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.whole import next_power_of_2
from flatout.kernels.prefixes import shared_prefixes

SPAN = 1024  # rows, or blocks of a row, looked at together
NONE: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["count", "table_stride"], do_not_specialize_on_alignment=["tables", "table_rows", "kv_lens", "depth"])
def _compare(places, tables, table_rows, kv_lens, depth, count, table_stride, BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows,): places[row] = leader, or -1 where no other row has the block; blocks in common with the leader."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, lane = tl.program_id(0), tl.arange(0, SPAN)
    column = tl.load(depth)
    full = (tl.load(kv_lens + row) - 1) // BLOCK
    mine = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    leader, alike = -1, 0
    if full > column:
        block = tl.load(mine + column)
        lowest, holders = NONE, 0
        for first in range(0, count, SPAN):
            other = first + lane
            there = other < count
            there &= (tl.load(kv_lens + other, mask=there, other=0) - 1) // BLOCK > column
            at = tl.load(table_rows + other, mask=there, other=0).to(tl.int64) * table_stride + column
            there &= tl.load(tables + at, mask=there, other=0) == block
            lowest = tl.minimum(lowest, tl.min(tl.where(there, other, NONE)))
            holders += tl.sum(there.to(tl.int32))
        if holders > 1:
            theirs = tables + tl.load(table_rows + lowest).to(tl.int64) * table_stride
            limit = tl.minimum(full, (tl.load(kv_lens + lowest) - 1) // BLOCK)
            alike = limit
            first = 0
            while first < alike:
                at = first + lane
                there = at < limit
                unlike = there & (tl.load(mine + at, mask=there, other=0) != tl.load(theirs + at, mask=there, other=0))
                alike = tl.minimum(alike, tl.min(tl.where(unlike, at, NONE)))
                first += SPAN
            leader = tl.where(alike > column, lowest, -1)
    tl.store(places + row * 3, leader)
    tl.store(places + row * 3 + 1, alike)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["kv_lens"])
def _arrange(
    own,
    places,
    groups,
    order,
    kv_lens,
    count,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,); SPAN at least the rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, SPAN)
    there = row < count
    leader = tl.load(places + row * 3, mask=there, other=-1)
    alike = tl.load(places + row * 3 + 1, mask=there, other=0)
    length = tl.load(kv_lens + row, mask=there, other=0)
    group, place, shared = tl.full((SPAN,), -1, tl.int32), tl.zeros((SPAN,), tl.int32), tl.zeros((SPAN,), tl.int32)
    found, begin = 0, 0
    lowest = tl.min(tl.where(leader >= 0, leader, NONE))
    while (found < GROUPS) & (lowest < NONE):
        mine = leader == lowest
        members = tl.sum(mine.to(tl.int32))
        if members > 1:  # others may have had its leader's block, and other blocks before it
            keys = tl.min(tl.where(mine, alike, NONE)) * BLOCK
            rank = tl.cumsum(mine.to(tl.int32)) - 1
            group, place, shared = tl.where(mine, found, group), tl.where(mine, rank, place), tl.where(mine, keys, shared)
            tl.store(order + begin + rank, row, mask=mine)
            record = groups + found * 4
            tl.store(record, keys)
            tl.store(record + 1, members)
            tl.store(record + 2, begin)
            tl.store(record + 3, lowest)
            begin += members
            found += 1
        lowest = tl.min(tl.where(leader > lowest, leader, NONE))
    empty = tl.arange(0, GROUPS * 4)
    tl.store(groups + empty, tl.zeros((GROUPS * 4,), tl.int32), mask=empty >= found * 4)
    tl.store(own + row, length - shared, mask=there)
    tl.debug_barrier()  # all have read what is written over
    tl.store(places + row * 3, group, mask=there)
    tl.store(places + row * 3 + 1, place, mask=there)
    tl.store(places + row * 3 + 2, shared, mask=there)


@shared_prefixes.implementation("triton", lambda own, *_: own.is_cuda)
def shared_prefixes_triton(
    own: Tensor,
    places: Tensor,
    groups: Tensor,
    order: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    kv_lens: Tensor,
    depth: Tensor,
    block_size: int,
) -> None:
    device, count = facts(own.device), own.shape[0]
    common = {"BLOCK": block_size, "PDL": device.pdl, "launch_pdl": device.pdl}
    launch(_compare, (count,), places, tables, table_rows, kv_lens, depth, count, tables.stride(0), SPAN=SPAN, num_warps=4, **common)
    span = max(SPAN, next_power_of_2(count))
    launch(_arrange, (1,), own, places, groups, order, kv_lens, count, GROUPS=groups.shape[0], SPAN=span, num_warps=8, **common)
