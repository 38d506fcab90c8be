"""Ops that pick rows: embedding (with the family's scale), of a plain table or of one kept quantised, and gather_rows.

Called by layers/embedding.py, by layers/rotary.py for its table and by layers/head.py for the rows whose logits are wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.blocks import PACKED
from flatout.kernels.native import LINES, blocks
from flatout.kernels.op import Cost, nbytes, op, shape_class
from flatout.kernels.packed import BITS, unpacked


def _embedding_cost(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> Cost:
    return Cost(weights=nbytes(out), activations=nbytes(out, ids), flops=0 if scale == 1.0 else out.numel())


def _gather_cost(out: Tensor, source: Tensor, indices: Tensor) -> Cost:
    return Cost(activations=nbytes(out, out, indices))


def _embedding_key(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> tuple[Any, ...]:
    return (out.device.type, out.dtype, shape_class(out.shape[0]), out.shape[1], scale == 1.0)


def _gather_key(out: Tensor, source: Tensor, indices: Tensor) -> tuple[Any, ...]:
    """Not how many rows there are to pick from: of a step's hidden states any number."""
    return (out.device.type, out.dtype, shape_class(out.shape[0]), out.shape[1])


@op(cost=_embedding_cost, key=_embedding_key, last_resort=True)
def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """out [T, H] = weight [V, H] at ids (int64 [T]), times scale."""
    torch.index_select(weight, 0, ids, out=out)
    if scale != 1.0:
        out.mul_(scale)


@op(cost=_gather_cost, key=_gather_key, last_resort=True)
def gather_rows(out: Tensor, source: Tensor, indices: Tensor) -> None:
    """out [S, H] = source [N, H] at indices (int64 [S])."""
    torch.index_select(source, 0, indices, out=out)


def _native_accepts(out: Tensor, source: Tensor) -> bool:
    return out.device.type == "cpu" and native.available() and out.dtype == source.dtype and out.dtype in (torch.float32, torch.bfloat16)


@embedding.implementation("native", lambda out, ids, weight, scale: _native_accepts(out, weight), native=True)
def _embedding_native(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    native.gather(out, weight, ids, scale)


gather_rows.implementation("native", lambda out, source, indices: _native_accepts(out, source), native=True)(native.gather)


# ---------------------------------------------------------------- of a quantised table


def _quantised_cost(out: Tensor, ids: Tensor, table: Tensor, kind: str, scale: float) -> Cost:
    line = table.shape[1] if kind else table.shape[1] * table.shape[2] // LINES
    return Cost(weights=ids.shape[0] * line, activations=nbytes(out, ids), flops=2 * out.numel())


def _quantised_key(out: Tensor, ids: Tensor, table: Tensor, kind: str, scale: float) -> tuple[Any, ...]:
    return (*_embedding_key(out, ids, table, scale), kind or BITS[table.shape[2]])


@op(cost=_quantised_cost, key=_quantised_key, last_resort=True)
def quantised_embedding(out: Tensor, ids: Tensor, table: Tensor, kind: str, scale: float) -> None:
    """out [T, H] = the table's float32 values at ids (int64 [T]), as out's type, times scale.

    kind: a GGUF type of kernels/blocks.py, table uint8 [V, bytes] its blocks as the file has them; or "": a packed weight,
    uint8 [V / 16, H / 32, bytes] (kernels/packed.py).
    """
    if kind:
        layout, unpack = PACKED[kind].layout, PACKED[kind].unpack
        found = table.index_select(0, ids).numpy().reshape(-1).view(layout)
        values = np.empty((len(found), PACKED[kind].elements), np.float32)
        unpack(found, values)
        out.copy_(torch.from_numpy(values).view(out.shape))
    else:
        lines = unpacked(table.index_select(0, ids // LINES)).view(-1, LINES, out.shape[1])
        out.copy_(lines[torch.arange(len(ids)), ids % LINES])
    if scale != 1.0:
        out.mul_(scale)


@quantised_embedding.implementation(
    "native",
    lambda out, ids, table, kind, scale: out.device.type == "cpu" and native.available() and out.dtype in (torch.float32, torch.bfloat16),
    native=True,
)
def _quantised_native(out: Tensor, ids: Tensor, table: Tensor, kind: str, scale: float) -> None:
    blocks.embed(out, table, ids, kind or BITS[table.shape[2]], scale)
