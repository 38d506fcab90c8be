"""Ops on plain 16- or 32-bit weights: linear; linear_add, onto the residual stream; norm_linear and norm_gated, which norm their rows first.

The last three exist so that a kernel can do them in one pass over few rows, as the CPU library does (`native`); `composed` is the same by the
ops they consist of, through scratch rows they are given. Quantised products are ops of their own files. Called by the schemes of quant/ through
layers/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.activation import gate_mul
from flatout.kernels.norm import add, rms_norm
from flatout.kernels.op import Cost, Op, nbytes, op, shape_class

NATIVE_ROWS = 64  # up to which the native library's vectors may be the fastest
FEWEST_TILED, MOST_TILED = 5, 256  # rows for its matrix tiles, whole classes of them: with 4 the vectors are faster


def _native_suits(out: Tensor, x: Tensor, weight: Tensor, invariant: bool, most: int = NATIVE_ROWS) -> bool:
    """What the native library multiplies: few rows on the CPU. Not where a row must have the same bits in any company: more rows are torch's."""
    kinds = (torch.float32, torch.bfloat16)
    return (
        x.device.type == "cpu"
        and not invariant
        and native.available()
        and x.shape[0] <= most
        and x.shape[1] % 16 == 0
        and out.dtype in kinds
        and x.dtype in kinds
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and x.stride(1) == out.stride(1) == 1
    )


def _tiles_suit(out: Tensor, x: Tensor, weight: Tensor, invariant: bool) -> bool:
    """What it multiplies by matrix tiles: bfloat16 in whole blocks of 16 outputs and 32 columns. 1.1 to 3.8 times as fast as vectors from 16 rows on
    (576 to 4,864 columns, 2 threads, docs/performance.md)."""
    fits = weight.dtype == torch.bfloat16 and x.shape[0] >= FEWEST_TILED and x.shape[1] % 32 == 0 and out.shape[1] % 16 == 0
    return fits and _native_suits(out, x, weight, invariant, MOST_TILED) and native.has_tiles()


def _bits(weight: Tensor) -> int:
    return 8 * weight.element_size()


def _linear_cost(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> Cost:
    return Cost(weights=nbytes(weight, bias), activations=nbytes(out, x), flops=2 * x.shape[0] * weight.numel())


def _linear_key(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, out.dtype, shape_class(x.shape[0]), weight.shape, bias is None, invariant)


@op(cost=_linear_cost, key=_linear_key, last_resort=True)
def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    """out [T, N] = x [T, K] @ weight [N, K]^T + bias [N]. One dtype for all; on CUDA out may be float32 over 16-bit operands.

    invariant: only implementations may run that give a row the same bits whatever other rows are there.
    """
    if out.dtype != x.dtype:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _blas_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return not invariant


linear.implementation("blas", _blas_accepts)(linear.reference)


def _vector_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return x.shape[0] == 1 and not x.is_cuda and not invariant


@linear.implementation("vector", _vector_accepts)
def _vector(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    """One row as matrix times vector. bfloat16, 2 threads: 67 us where mm takes 105 (960x576), 1.8 ms where it takes 4.5 (49152x576)."""
    if bias is None:
        torch.mv(weight, x[0], out=out[0])
    else:
        torch.addmv(bias, weight, x[0], out=out[0])


def _weight_first_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return 2 <= x.shape[0] <= 64 and not x.is_cuda and not invariant


@linear.implementation("weight_first", _weight_first_accepts)
def _weight_first(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    """The product turned round, then transposed: oneDNN reads a row-major weight as it lies. bfloat16 49152x576: 3.0 ms where mm takes 3.8 (8 rows)."""
    turned = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    out.copy_(turned.t())


@linear.implementation("native", lambda out, x, weight, bias, invariant: _native_suits(out, x, weight, invariant), native=True)
def _native(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, many: bool = False) -> None:
    native.product(out, x, weight, _bits(weight), bias, many=many)


# ---------------------------------------------------------------- onto the stream


def _add_cost(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> Cost:
    return Cost(
        weights=nbytes(weight, bias),
        activations=nbytes(stream, stream, x),
        flops=2 * x.shape[0] * weight.numel() + 2 * stream.numel(),
    )


def _add_key(
    stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool
) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, shape_class(x.shape[0]), weight.shape, bias is None, scale == 1.0, invariant)


@op(cost=_add_cost, outs=("stream", "scratch"), updates=("stream",), key=_add_key, last_resort=True)
def linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    """stream [T, N] += scale * (x [T, K] @ weight [N, K]^T + bias [N]). scratch [T, N]: holds nothing of use afterwards."""
    product = x.float() @ weight.float().t()
    stream.copy_(stream + scale * (product if bias is None else product + bias))


def _addmm_accepts(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> bool:
    return x.is_cuda and bias is None and not invariant


@linear_add.implementation("addmm", _addmm_accepts)
def _addmm(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    """cuBLAS adds in its own epilogue."""
    torch.addmm(stream, x, weight.t(), alpha=scale, out=stream)


@linear_add.implementation("composed", lambda *operands: not _addmm_accepts(*operands))
def _add_composed(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    linear.dispatch(scratch, x, weight, bias, invariant)
    add.dispatch(stream, scratch, scale)


@linear_add.implementation("native", lambda *a: _native_suits(a[0], a[2], a[3], a[6]), native=True)
def _add_native(
    stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool, many: bool = False
) -> None:
    native.product(stream, x, weight, _bits(weight), bias, add=True, scale=scale, many=many)


# ---------------------------------------------------------------- from the stream


def _norm_linear_cost(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool,
) -> Cost:
    return Cost(
        weights=nbytes(weight, bias, norm_weight),
        activations=nbytes(out, x),
        flops=2 * x.shape[0] * weight.numel() + 4 * x.numel(),
    )


def _norm_linear_key(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool,
) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, out.dtype, shape_class(x.shape[0]), weight.shape, bias is None, offset, invariant)


@op(cost=_norm_linear_cost, outs=("out", "scratch"), key=_norm_linear_key, last_resort=True)
def norm_linear(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool,
) -> None:
    """out [T, N] = rms_norm(x [T, K]) @ weight [N, K]^T + bias. The norm is kernels/norm.py's. scratch [T, K]: of no use afterwards."""
    rms_norm.reference(scratch, x, norm_weight, eps, offset)
    linear.reference(out, scratch, weight, bias, invariant)


@norm_linear.implementation("composed", lambda *operands: True)
def _norm_linear_composed(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool,
) -> None:
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    linear.dispatch(out, scratch, weight, bias, invariant)


@norm_linear.implementation("native", lambda *a: _native_suits(a[0], a[2], a[6], a[8]), native=True)
def _norm_linear_native(
    out: Tensor,
    scratch: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool,
    many: bool = False,
) -> None:
    native.product(out, x, weight, _bits(weight), bias, norm=(norm_weight, eps, offset), many=many)


def _norm_gated_cost(
    out: Tensor,
    scratch: Tensor,
    wide: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> Cost:
    return Cost(
        weights=nbytes(weight, bias, norm_weight),
        activations=nbytes(out, x),
        flops=2 * x.shape[0] * weight.numel() + 4 * x.numel() + 5 * out.numel(),
    )


def _norm_gated_key(
    out: Tensor,
    scratch: Tensor,
    wide: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, shape_class(x.shape[0]), weight.shape, bias is None, offset, activation, invariant)


@op(cost=_norm_gated_cost, outs=("out", "scratch", "wide"), key=_norm_gated_key, last_resort=True)
def norm_gated(
    out: Tensor,
    scratch: Tensor,
    wide: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> None:
    """out [T, I] = activation(gate) * up, where [gate, up] = rms_norm(x [T, K]) @ weight [2I, K]^T + bias, gate's rows first.

    scratch [T, K], wide [T, 2I]: of no use afterwards.
    """
    norm_linear.reference(wide, scratch, x, norm_weight, eps, offset, weight, bias, invariant)
    gate_mul.reference(out, wide, activation)


@norm_gated.implementation("composed", lambda *operands: True)
def _norm_gated_composed(
    out: Tensor,
    scratch: Tensor,
    wide: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    invariant: bool,
) -> None:
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    linear.dispatch(wide, scratch, weight, bias, invariant)
    gate_mul.dispatch(out, wide, activation)


@norm_gated.implementation("native", lambda *a: _native_suits(a[0], a[3], a[7], a[10]), native=True)
def _norm_gated_native(
    out: Tensor,
    scratch: Tensor,
    wide: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    invariant: bool,
    many: bool = False,
) -> None:
    native.product(out, x, weight, _bits(weight), bias, norm=(norm_weight, eps, offset), gate=activation, many=many)


# ---------------------------------------------------------------- by tiles


def _by_tiles(of: Op, run: Callable[..., None], suits: Callable[..., bool]) -> None:
    """The library's product with its rows as tiles: run(..., many=True)."""
    of.implementation("tiles", suits, native=True)(partial(run, many=True))


_by_tiles(linear, _native, lambda out, x, weight, bias, invariant: _tiles_suit(out, x, weight, invariant))
_by_tiles(linear_add, _add_native, lambda *a: _tiles_suit(a[0], a[2], a[3], a[6]))
_by_tiles(norm_linear, _norm_linear_native, lambda *a: _tiles_suit(a[0], a[2], a[6], a[8]))
_by_tiles(norm_gated, _norm_gated_native, lambda *a: _tiles_suit(a[0], a[3], a[7], a[10]))
