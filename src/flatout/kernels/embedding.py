"""Ops that pick rows: embedding (with the family's scale) and gather_rows.

Called by layers/embedding.py, by layers/rotary.py for its table and by layers/head.py for the rows whose logits are wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.op import Cost, nbytes, op, shape_class


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
