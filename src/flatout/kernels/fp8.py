"""Ops on 8-bit floats (e4m3: up to 448, no infinities): quantise_rows, a scale for each row of activations; linear_fp8, the product of such rows
with a weight of a scale for each output or for all.

The product by cuBLASLt is here; kernels/gpu/fp8.py has both ops in Triton. Nothing here quantises a weight or knows a checkpoint's names. Meant
for the schemes of quant/, through layers/linear.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.op import Cost, nbytes, op, shape_class

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# the least scale: with the subnormal one of a row of subnormal float32, quotients would lose their digits or be NaN
SMALLEST = torch.finfo(torch.float32).tiny


def _quantise_cost(out: Tensor, scales: Tensor, x: Tensor) -> Cost:
    return Cost(activations=nbytes(out, scales, x), flops=3 * x.numel())


def _quantise_key(out: Tensor, scales: Tensor, x: Tensor) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, shape_class(x.shape[0]), x.shape[1])


@op(cost=_quantise_cost, outs=("out", "scales"), key=_quantise_key, last_resort=True)
def quantise_rows(out: Tensor, scales: Tensor, x: Tensor) -> None:
    """out [T, K] e4m3 = x / scales, to the nearest; scales [T] float32 = max |x| of the row / 448, or 1 for a row of zeros. x [T, K]: any float.

    A finite row gives finite values and a scale above 0; a NaN makes its whole row and scale NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1)
    largest = most.new_full((), LARGEST)  # a tensor: by a plain number CUDA's division is a product with its rounded inverse
    scales.copy_(torch.where(most == 0, 1.0, (most / largest).clamp(min=SMALLEST)))
    out.copy_((wide / scales[:, None]).clamp(-LARGEST, LARGEST))  # a quotient may be 448 and a rounding


# ---------------------------------------------------------------- product


def _linear_cost(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Cost:
    return Cost(
        weights=nbytes(weight, weight_scales, bias),
        activations=nbytes(out, x, x_scales),
        flops=2 * x.shape[0] * weight.numel() + 2 * out.numel(),
    )


def _linear_key(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return (x.device.type, out.dtype, shape_class(x.shape[0]), weight.shape, weight_scales.numel() == 1, bias is None)


@op(cost=_linear_cost, key=_linear_key, last_resort=True)
def linear_fp8(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> None:
    """out [T, N] = x_scales [T] * weight_scales [N] * (x [T, K] @ weight [N, K]^T) + bias [N]; sums in float32.

    x, weight: e4m3; scales: float32, of the weight [1] where all outputs share one; out and bias: bfloat16 or float16, the same.
    """
    product = x.float() @ weight.float().t() * (x_scales[:, None] * weight_scales)
    out.copy_(product if bias is None else product + bias)


# Tensor cores keep some 14 bits of a sum of e4m3 products and truncate: over thousands of columns that is as much as a bfloat16 result's own
# rounding, and all of it towards zero. Not so where every 128 columns' sum is added in float32, which is what False asks for.
FAST_SUMS = False


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


@cache
def _ones(device: torch.device, outputs: int) -> Tensor:
    _lasting()
    return torch.ones(1, outputs, device=device)


@cache
def _scratch(device: torch.device, rows: int) -> Tensor:
    _lasting()
    return torch.empty(rows, 1, device=device)


def _lasting() -> None:
    """What is made in a capture is the graph's own memory, and filled by its replays alone."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("fp8 products of this size must run once before they are captured")


def _suits(weight: Tensor) -> bool:
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def _row_wise_accepts(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> bool:
    return _capability(x)[0] == 9 and _suits(weight)


@linear_fp8.implementation("scaled_mm", _row_wise_accepts)
def _scaled_mm(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> None:
    """cuBLASLt with both scales in its epilogue. It takes one for each output; one for all goes into the rows' instead."""
    rows, outputs = x.shape[0], weight.shape[0]
    of_rows, of_outputs = x_scales[:, None], weight_scales[None, :]
    if weight_scales.numel() == 1:
        kept = _scratch(x.device, 1 << (rows - 1).bit_length())
        of_rows, of_outputs = torch.mul(of_rows, weight_scales, out=kept[:rows]), _ones(x.device, outputs)
    torch._scaled_mm(x, weight.t(), of_rows, of_outputs, bias=bias, out_dtype=out.dtype, use_fast_accum=FAST_SUMS, out=out)


def _scaled_after_accepts(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> bool:
    capability = _capability(x)
    return capability >= (8, 9) and capability[0] != 9 and _suits(weight) and out.dtype == torch.bfloat16


@linear_fp8.implementation("scaled_after", _scaled_after_accepts)
def _scaled_after(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> None:
    """For capability 8.9, where cuBLASLt has no scales of rows, and torch's own kernel for them runs past the current stream before torch 2.12
    (a graph does not hold it). Results are rounded once for each factor, and products of e4m3 pass float16's range."""
    one, whole = _ones(x.device, 1), weight_scales.numel() == 1
    torch._scaled_mm(x, weight.t(), one, weight_scales if whole else one, out_dtype=out.dtype, use_fast_accum=FAST_SUMS, out=out)
    out.mul_(x_scales[:, None])
    if not whole:
        out.mul_(weight_scales)
    if bias is not None:
        out.add_(bias)
