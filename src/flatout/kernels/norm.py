"""Ops on the residual stream: rms_norm and add.

Norms compute in float32 and round where Transformers does: before the weight, or after it where the weight has an offset (Gemma). No weights
live here. Called by layers/norm.py; kernels/rope.py uses `normalise` for its heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.native import rows
from flatout.kernels.op import Cost, nbytes, op, shape_class


def _norm_cost(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> Cost:
    return Cost(weights=nbytes(weight), activations=nbytes(out, x), flops=4 * x.numel())


def _add_cost(residual: Tensor, x: Tensor, scale: float) -> Cost:
    return Cost(activations=nbytes(residual, residual, x), flops=2 * x.numel())


def _norm_key(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, shape_class(x.shape[0]), x.shape[1], offset)


@op(cost=_norm_cost, key=_norm_key, last_resort=True)
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (offset + weight), over the rows of [T, H]. out may be x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * (weight.float() + offset) if offset else wide.to(weight.dtype) * weight)


@op(cost=_add_cost, outs=("residual",), updates=("residual",), last_resort=True)
def add(residual: Tensor, x: Tensor, scale: float) -> None:
    """residual += scale * x, both [T, H]."""
    residual.add_(x, alpha=scale)


def _by_torch(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """torch's own, which rounds once: the best in float32 (13 us a row of 576); in bfloat16 on the CPU 20 us, and 1.4 ms for 1,024 rows."""
    out.copy_(F.rms_norm(x, weight.shape, weight + offset if offset else weight, eps))


def _by_vector_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """The mean square as a vector norm, in the fewest calls: 12 us a row of 576 in bfloat16, 0.8 ms for 1,024 rows."""
    wide = x.to(torch.float32, copy=True)
    length = torch.linalg.vector_norm(wide, 2, -1, True)
    wide.mul_(torch.addcmul(_scalar(eps, x.device), length, length, value=1 / weight.shape[0]).rsqrt_())
    if offset:
        torch.mul(wide, weight.float() + offset, out=out)
    else:
        out.copy_(wide).mul_(weight)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def _torch_suits(x: Tensor, offset: float) -> bool:
    return x.dtype == torch.float32 or not offset  # 1 + weight needs more digits than 16 bits have


def normalise(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """rms_norm over the last dimension of any shape, for ops that need one inside. out may be x."""
    suits = _torch_suits(x, offset) and (x.dtype == torch.float32 or x.is_cuda)
    (_by_torch if suits else _by_vector_norm)(out, x, weight, eps, offset)


rms_norm.implementation("torch", lambda out, x, weight, eps, offset: not x.is_cuda and _torch_suits(x, offset))(_by_torch)
rms_norm.implementation("vector_norm", lambda out, x, weight, eps, offset: not x.is_cuda)(_by_vector_norm)


# few rows are sure: a program of the native library's (kernels/program.py) goes on through them, which no trial of theirs alone shows
FEW_ROWS = 64


@rms_norm.implementation(
    "native",
    lambda out, x, weight, eps, offset: (
        native.available() and rows.suit(out, x) and weight.dtype == x.dtype and weight.is_contiguous() and x.shape[1] % 16 == 0
    ),
    sure=lambda out, x, weight, eps, offset: x.shape[0] <= FEW_ROWS,
    native=True,
)
def _norm_native(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    rows.norm(out, x, weight, eps, offset)


@add.implementation("native", lambda residual, x, scale: native.available() and rows.suit(residual, x), native=True)
def _add_native(residual: Tensor, x: Tensor, scale: float) -> None:
    rows.add(residual, x, scale)
