"""gate_mul of kernels/activation.py and finish_logits of kernels/logits.py in Triton: element by element, at the memory's speed.

Both compute in float32 and round once, where torch's gate_mul rounds after the activation too. `activated` is for other kernels' epilogues.
Registered with the ops by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.activation import ACTIVATIONS, gate_mul
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.rows import FLOATS, column_blocks
from flatout.kernels.logits import finish_logits


@triton.jit
def tanh(z):
    """By the exponential, which only shrinks; near 0, where 1 - e cancels, by the series: relative error under 1e-6."""
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    square = z * z
    near = z * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(square < 0.01, near, tl.where(z < 0, -far, far))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu_tanh of float32 x."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gate_mul(out, gate_up, out_stride, in_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = gate_up + row * in_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, activated(gate, ACTIVATION) * up, mask=mask)


@triton.jit
def _finish_logits(
    out, x, out_stride, in_stride, scale, softcap, WIDTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * in_stride + column, mask=mask, other=0.0).to(tl.float32) * scale
    if CAPPED:
        value = softcap * tanh(value / softcap)
    tl.store(out + row * out_stride + column, value, mask=mask)


def _gate_accepts(out: Tensor, gate_up: Tensor, activation: str) -> bool:
    return gate_up.is_cuda and gate_up.dtype in FLOATS and activation in ACTIVATIONS


@gate_mul.implementation("triton", _gate_accepts)
def gate_mul_triton(out: Tensor, gate_up: Tensor, activation: str) -> None:
    device = facts(out.device)
    rows, width = out.shape
    programs, block, warps = column_blocks(rows, width, device.sms)
    launch(
        _gate_mul,
        (programs,),
        out,
        gate_up,
        out.stride(0),
        gate_up.stride(0),
        WIDTH=width,
        ACTIVATION=activation,
        BLOCK=block,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )


def _finish_accepts(out: Tensor, x: Tensor, scale: float, softcap: float) -> bool:
    return x.is_cuda and x.dtype in FLOATS


@finish_logits.implementation("triton", _finish_accepts)
def finish_logits_triton(out: Tensor, x: Tensor, scale: float, softcap: float) -> None:
    device = facts(x.device)
    rows, width = x.shape
    programs, block, warps = column_blocks(rows, width, device.sms)
    launch(
        _finish_logits,
        (programs,),
        out,
        x,
        out.stride(0),
        x.stride(0),
        scale,
        softcap,
        WIDTH=width,
        CAPPED=bool(softcap),
        BLOCK=block,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )
