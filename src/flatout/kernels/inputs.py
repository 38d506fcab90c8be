"""Ops around a captured decode step: decode_inputs makes its inputs from one staged array; remember keeps the ids it chose for the next.

So a step needs one copy from the host and no id or table from it. What is staged is runner/graphs.py's business, which calls these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.native import FROM_DEVICE
from flatout.kernels.op import Cost, nbytes, op


def _inputs_cost(
    tokens: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    kv_slots: Tensor,
    rows: Tensor,
    tables: Tensor,
    staged: Tensor,
    last_ids: Tensor,
    block_size: int,
) -> Cost:
    gathered = tokens.shape[0] * (tables.element_size() + last_ids.element_size())
    return Cost(activations=nbytes(tokens, positions, kv_lens, kv_slots, rows, staged) + gathered)


def _inputs_key(
    tokens: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    kv_slots: Tensor,
    rows: Tensor,
    tables: Tensor,
    staged: Tensor,
    last_ids: Tensor,
    block_size: int,
) -> tuple[Any, ...]:
    return (tokens.device.type,)


def _remember_cost(last_ids: Tensor, slots: Tensor, ids: Tensor) -> Cost:
    return Cost(activations=nbytes(slots, ids, ids))


def _remember_key(last_ids: Tensor, slots: Tensor, ids: Tensor) -> tuple[Any, ...]:
    return (ids.device.type, slots.dtype)


@op(
    cost=_inputs_cost,
    outs=("tokens", "positions", "kv_lens", "kv_slots", "rows", "tables"),
    updates=("tables",),
    key=_inputs_key,
    last_resort=True,
)
def decode_inputs(
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
    """Write new blocks into the tables; then a forward's inputs for R rows of one token each.

    staged int32 [1 + 3R + 3D]: d | ids R | positions R | slots R | diff slots D | diff columns D | diff blocks D. The first d <= D diffs, of
    distinct cells, count: tables[slot, column] = block; the others may hold anything. tables int32 [S, W]: blocks of each slot in order.

    Of each row, with the tables as the diffs leave them: tokens int64 = its id, or last_ids (int64 [S]) of its slot where that is
    FROM_DEVICE; positions int64; kv_lens int32 = position + 1; kv_slots int64 = where the cache holds that position; rows int32 = slot.
    """
    count = tokens.shape[0]
    ids, places, slots = staged[1 : 1 + 3 * count].view(3, count)
    diffs = staged[1 + 3 * count :].view(3, -1).long()
    if diffs.shape[1]:
        # unused diffs repeat the first; where that one is unused too, its cell becomes 0, 0 and keeps what it holds
        index = torch.arange(diffs.shape[1], device=staged.device)
        slot, column, block = diffs[:, torch.where(index < staged[0], index, 0)] * (staged[0] > 0)
        tables[slot, column] = torch.where(staged[0] > 0, block.to(tables.dtype), tables[slot, column])
    row = slots.long()
    tokens.copy_(torch.where(ids == FROM_DEVICE, last_ids[row], ids))
    positions.copy_(places)
    kv_lens.copy_(places + 1)
    rows.copy_(slots)
    kv_slots.copy_(tables[row, positions // block_size].long() * block_size + positions % block_size)


@op(cost=_remember_cost, outs=("last_ids",), updates=("last_ids",), key=_remember_key, last_resort=True)
def remember(last_ids: Tensor, slots: Tensor, ids: Tensor) -> None:
    """last_ids (int64 [S]) at slots (int32 or int64 [R]) = ids (int64 [R]). Of rows with one slot, as padding has, any may win."""
    last_ids.index_copy_(0, slots.long(), ids)


def _native_accepts(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and native.available()


decode_inputs.implementation("native", lambda *args: _native_accepts(args[0]), native=True)(native.inputs)
remember.implementation("native", lambda last_ids, slots, ids: _native_accepts(ids) and slots.dtype == torch.int32, native=True)(
    native.remember
)
