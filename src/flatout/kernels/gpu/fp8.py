"""quantise_rows and linear_fp8 in Triton: rows quantised in one pass, and products of few rows that stream the weight once, on tensor cores.

blocks() chooses how a product is cut; its kernel is skinny.py's `tiles` with 8-bit operands and scales at the end. Many rows are cuBLASLt's, in
kernels/fp8.py, which competes here too by measured choice. Below capability 8.9, where there are no such tensor cores, they decline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import LARGEST, SMALLEST, linear_fp8, quantise_rows
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.linear import ARRIVALS, HALVES, PARTIALS, scratch
from flatout.kernels.gpu.rows import FLOATS
from flatout.kernels.gpu.skinny import fetch, finish, places_of, weight_lines
from flatout.kernels.gpu.whole import cdiv, next_power_of_2

MOST_ROWS = 64
WIDEST = 32_768  # of a row that one program keeps in registers


def _native(x: Tensor) -> bool:
    """Tensor cores, and conversions in one instruction, of e4m3."""
    return x.is_cuda and facts(x.device).capability >= (8, 9)


# ---------------------------------------------------------------- rows


@triton.jit
def _quantise_rows(
    out, scales, x, out_stride, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a row. Divisions are exact ones, so that values and scales are the reference's to the bit."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + row * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    # as integers, magnitudes are in the order of their values, and NaN is above all of them
    most = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(most, MOST)
    scale = tl.where(most == 0.0, 1.0, tl.where(scale < LEAST, LEAST, scale))
    tl.store(scales + row, scale)
    tl.store(out + row * out_stride + column, tl.math.div_rn(wide, scale).to(tl.float8e4nv), mask=column < WIDTH)


def _quantise_accepts(out: Tensor, scales: Tensor, x: Tensor) -> bool:
    return _native(x) and x.dtype in FLOATS and x.shape[1] <= WIDEST


@quantise_rows.implementation("triton", _quantise_accepts)
def _quantise(out: Tensor, scales: Tensor, x: Tensor) -> None:
    pdl = facts(x.device).pdl
    rows, width = x.shape
    block = next_power_of_2(width)
    launch(
        _quantise_rows, (rows,),
        out, scales, x, out.stride(0), x.stride(0),
        WIDTH=width, BLOCK=block, MOST=LARGEST, LEAST=SMALLEST, PDL=pdl, launch_pdl=pdl, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


# ---------------------------------------------------------------- product


@triton.jit(do_not_specialize=["rows", "ahead"])
def _tiles(
    out, x, x_scales, weight, weight_scales, bias, partials, arrivals,
    rows, outputs, columns, out_stride, x_stride, weight_stride, ahead,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    SHARED_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_N rows of the weight against ROWS rows of x, over a share of the columns (a multiple of 16; EVEN: of BLOCK_K).

    SPLIT: there are num_programs(1) shares. They meet in partials (float32 [tiles, shares, BLOCK_N, ROWS]) and the last program of a tile to
    arrive adds them in order. arrivals: int32 [tiles], zero before and after. SHARED_SCALE: the weight has one scale.
    """
    # columns whose sum sm_90's tensor cores may keep to themselves, in some 14 bits, before it is added in float32; those of sm_89: a step's
    INEXACT: tl.constexpr = 128 if BLOCK_K > 128 else BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(columns, BLOCK_K)
    first, last = share * steps // shares, (share + 1) * steps // shares
    lines = weight_lines(program, outputs, BLOCK_N, None)
    shift = tl.load(bias + lines) if bias is not None else None
    of_lines = tl.load(weight_scales) if SHARED_SCALE else tl.load(weight_scales + lines)[:, None]
    if PDL:
        output = program * BLOCK_N
        begins = weight + output.to(tl.int64) * weight_stride + first * BLOCK_K
        some = tl.minimum(last * BLOCK_K, columns) - first * BLOCK_K
        # in its units of 16 bits
        fetch(begins, weight_stride // 2, tl.minimum(outputs - output, BLOCK_N), tl.minimum(ahead, some) // 2)
        tl.extra.cuda.gdc_wait()
    k, row = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    of_rows = tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
    w_at = (weight + lines.to(tl.int64) * weight_stride)[:, None] + k[None, :]
    x_at = x + (row * x_stride)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in range(first, last):
        start = step * BLOCK_K
        if EVEN:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            xs = tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0)
        else:
            inside = (start + k < columns)[None, :]
            w = tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            xs = tl.load(x_at + start, mask=(row < rows)[:, None] & inside, other=0.0)
        acc += tl.dot(w, tl.trans(xs), max_num_imprecise_acc=INEXACT)  # acc, an operand, would be kept in as few bits on sm_89
    places, there = places_of(out, program, rows, outputs, out_stride, BLOCK_N, ROWS, None)
    if SPLIT:
        PARTIAL: tl.constexpr = BLOCK_N * ROWS
        lines_at = partials + program * shares * PARTIAL + tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :]
        tl.store(lines_at + share * PARTIAL, acc, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's stores come before one thread's release
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == shares - 1:
            acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for begin in range(0, shares, 4):
                for other in tl.static_range(4):  # four at a time, so that loads wait for each other less
                    acc += tl.load(lines_at + (begin + other) * PARTIAL, mask=begin + other < shares, other=0.0, cache_modifier=".cg")
            finish(acc * (of_rows * of_lines), None, columns, 0.0, shift, 1.0, places, there, False, None)
            tl.store(arrivals + program, 0)
    else:
        finish(acc * (of_rows * of_lines), None, columns, 0.0, shift, 1.0, places, there, False, None)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a product is cut into programs: block_n rows of the weight by `rows` rows of x by columns in steps of block_k."""

    rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    ahead: int = 0  # columns of each row that are fetched into the L2 while the kernel before runs
    shares: int = 1  # programs that share the columns of a tile

    def shared_memory(self) -> int:
        """Bytes that a program takes at most: what the stages hold, and a kibibyte for the exchange of scales."""
        return self.stages * self.block_k * (self.block_n + self.rows) + 1024


@cache
def blocks(m: int, n: int, k: int, facts: Facts) -> Blocks:
    """For m rows of x [m, k] with a weight [n, k]. Swept on an H200 over the shapes of a 7B model (8, 32 and 64 rows)."""
    rows, tall = max(8, next_power_of_2(m)), n >= 96 * facts.sms
    if rows == 8:
        c, wanted = (Blocks(rows, 32, 512, 2, 3, 512) if tall else Blocks(rows, 32, 256, 2, 4, 512 if k <= 4096 else 0)), 3.8
    elif rows == 16:
        c, wanted = Blocks(rows, 64, 256, 4, 4, ahead=512), 0.9
    else:
        c, wanted = (Blocks(rows, 64, 128, 4, 6) if tall else Blocks(rows, 64, 256, 4, 4, 256)), 1.7 if rows == 32 else 0.9
    while c.shared_memory() > facts.shared_memory:
        c = replace(c, stages=c.stages - 1)
    count, steps = cdiv(n, c.block_n), cdiv(k, c.block_k)
    most = min(steps // 2, PARTIALS // (count * c.block_n * rows))
    return replace(c, shares=max(1, min(most, round(wanted * facts.sms / count))) if count <= ARRIVALS else 1)


def product(
    out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, chosen: Blocks | None = None
) -> None:  # fmt: skip
    """linear_fp8 for at most MOST_ROWS rows."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = weight.shape[0]
    c = chosen or blocks(rows, outputs, columns, device)
    partials, arrivals = scratch(x.device)
    launch(
        _tiles, (cdiv(outputs, c.block_n), c.shares),
        out, x, x_scales, weight, weight_scales, bias, partials, arrivals,
        rows, outputs, columns, out.stride(0), x.stride(0), weight.stride(0), c.ahead,
        ROWS=c.rows, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=columns % c.block_k == 0, SPLIT=c.shares > 1,
        SHARED_SCALE=weight_scales.numel() == 1, PDL=device.pdl, launch_pdl=device.pdl, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip


def _accepts(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> bool:
    """Rows of 16-byte units."""
    return _native(x) and 1 <= x.shape[0] <= MOST_ROWS and out.dtype in HALVES and weight.shape[0] >= 16 and weight.shape[1] % 16 == 0


@linear_fp8.implementation("skinny", _accepts)
def _skinny(out: Tensor, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> None:
    product(out, x, x_scales, weight, weight_scales, bias)
