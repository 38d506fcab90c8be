"""Op shared_prefixes: which rows of a decode step have their first blocks in common, found on the device from the tables attention reads.

Shared holds what it finds and goes with an arrangement (kernels/attention.py:Paged) whose attention reads shared keys once. Whether that is
worth while is the backend's to say (attention/triton.py), which makes the buffers. Called once a step by runner/graphs.py, through the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.op import Cost, nbytes, op

GROUPS = 16  # rows past so many groups are attended by themselves


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Groups of rows that share blocks. int32 all."""

    own: Tensor  # [R] keys of each row that it shares with none of its group, at least 1
    places: Tensor  # [R, 3] group, place in it, keys shared: a multiple of the block size; -1, 0, 0 of a row in no group
    groups: Tensor  # [GROUPS, 4] keys shared, rows, where they begin in `order`, the first row; zeros past the last group
    order: Tensor  # [R] rows of one group after another; what lies past the last is not used


def shared_of(rows: int, device: torch.device) -> Shared:
    """Buffers for so many rows, without a group yet."""
    own, places, groups, order = (
        torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((rows,), (rows, 3), (GROUPS, 4), (rows,))
    )
    return Shared(own, places, groups, order)


def _cost(own: Tensor, places: Tensor, groups: Tensor, order: Tensor, tables: Tensor, table_rows: Tensor, kv_lens: Tensor, *_: Any) -> Cost:
    return Cost(activations=nbytes(own, places, groups, order, table_rows, kv_lens))


def _key(own: Tensor, *_: Any) -> tuple[str]:
    return (own.device.type,)


@op(cost=_cost, outs=("own", "places", "groups", "order"), key=_key, last_resort=True)
def shared_prefixes(
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
    """Fill a Shared. tables int32 [any, W]: blocks in order; table_rows, kv_lens int32 [R]: each row's place there and its keys; depth int32 [1].

    A row's blocks count but for the one with its last key. Rows with the same block in column `depth` of their tables, and the same blocks
    before it, form a group with the lowest of them, and share what all of them have in common with that one. The first GROUPS groups of two
    rows or more stay, in the order of their lowest rows; their rows stay in theirs.
    """
    lengths, column = kv_lens.tolist(), int(depth)
    blocks = [tables[row, : (length - 1) // block_size].tolist() for row, length in zip(table_rows.tolist(), lengths)]
    leaders: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    common: dict[int, int] = {}
    for row, mine in enumerate(blocks):
        if len(mine) <= column:
            continue
        leader = leaders.setdefault(mine[column], row)
        first = blocks[leader]
        alike = next((i for i, (a, b) in enumerate(zip(mine, first)) if a != b), min(len(mine), len(first)))
        if alike > column:
            members.setdefault(leader, []).append(row)
            common[leader] = min(alike, common.get(leader, alike))
    own.copy_(kv_lens)
    places.copy_(places.new_tensor([-1, 0, 0]).expand_as(places))
    groups.zero_()
    begin, found = 0, [leader for leader in sorted(members) if len(members[leader]) > 1][: len(groups)]
    for group, leader in enumerate(found):
        rows, keys = members[leader], common[leader] * block_size
        groups[group] = groups.new_tensor([keys, len(rows), begin, leader])
        order[begin : begin + len(rows)] = order.new_tensor(rows)
        begin += len(rows)
        for place, row in enumerate(rows):
            places[row] = places.new_tensor([group, place, keys])
            own[row] = lengths[row] - keys
