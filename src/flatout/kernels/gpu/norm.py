"""rms_norm and add in Triton: one pass over the rows, float32 inside.

A program walks over rows, so that a long prompt's norm reads its weight once a program. Numbers are those of kernels/norm.py's references.
Nothing here knows a layer. Registered with the ops by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.rows import FLOATS, column_blocks
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.norm import add, rms_norm

WIDEST = 16_384  # of a row that one program keeps in registers


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    out,
    x,
    weight,
    out_stride,
    x_stride,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask = inside & (row < rows)
    wide = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    if OFFSET == 0.0:
        wide = wide.to(weight.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, wide * gain, mask=mask)


def norm_launch(rows: int, width: int) -> tuple[int, int, int, int]:
    """(programs, columns, rows, warps) of the launch. Only the first depends on how many rows there are.

    A program a row, or for each few of them: H200, 8,000 x 3,584: 29.8 us, and 32.6 where programs go on to further rows.
    """
    block = next_power_of_2(width)
    together = max(1, 1024 // block)  # short rows share a program
    warps = min(16, max(1, block * together // 512))  # 16 values a thread
    return cdiv(rows, together), block, together, warps


def _norm_accepts(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> bool:
    return x.is_cuda and x.dtype in FLOATS and x.shape[1] <= WIDEST


@rms_norm.implementation("triton", _norm_accepts)
def rms_norm_triton(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    device = facts(x.device)
    rows, width = x.shape
    programs, block, together, warps = norm_launch(rows, width)
    launch(
        _rms_norm,
        (programs,),
        out,
        x,
        weight,
        out.stride(0),
        x.stride(0),
        rows,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=together,
        OFFSET=offset,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )


@triton.jit
def _add(residual, x, residual_stride, x_stride, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = residual + row * residual_stride + column
    delta = tl.load(x + row * x_stride + column, mask=mask).to(tl.float32)
    tl.store(at, tl.load(at, mask=mask).to(tl.float32) + scale * delta, mask=mask)


def _add_accepts(residual: Tensor, x: Tensor, scale: float) -> bool:
    return x.is_cuda and x.dtype in FLOATS and residual.dtype in FLOATS


@add.implementation("triton", _add_accepts)
def add_triton(residual: Tensor, x: Tensor, scale: float) -> None:
    device = facts(x.device)
    rows, width = x.shape
    programs, block, warps = column_blocks(rows, width, device.sms)
    launch(
        _add,
        (programs,),
        residual,
        x,
        residual.stride(0),
        x.stride(0),
        scale,
        WIDTH=width,
        BLOCK=block,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )
