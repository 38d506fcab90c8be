"""Op linear: rows times a weight matrix, plain 16- or 32-bit weights.

Quantised products are ops of their own files. Called by the schemes of quant/ through layers/linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels.op import Cost, nbytes, op, shape_class


def _cost(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Cost:
    return Cost(weights=nbytes(weight, bias), activations=nbytes(out, x), flops=2 * x.shape[0] * weight.numel())


def _key(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, shape_class(x.shape[0]), weight.shape, bias is None)


@op(cost=_cost, key=_key)
def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [T, N] = x [T, K] @ weight [N, K]^T + bias [N]. One dtype for all."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@linear.implementation("vector", lambda out, x, weight, bias: x.shape[0] == 1 and not x.is_cuda)
def _vector(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """One row as matrix times vector. bfloat16, 2 threads: 67 us where mm takes 105 (960x576), 1.8 ms where it takes 4.5 (49152x576)."""
    if bias is None:
        torch.mv(weight, x[0], out=out[0])
    else:
        torch.addmv(bias, weight, x[0], out=out[0])


@linear.implementation("weight_first", lambda out, x, weight, bias: 2 <= x.shape[0] <= 64 and not x.is_cuda)
def _weight_first(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The product turned round, then transposed: oneDNN reads a row-major weight as it lies. bfloat16 49152x576: 3.0 ms where mm takes 3.8 (8 rows)."""
    turned = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    out.copy_(turned.t())
