"""Kernels of experts' products: `vector`, a token by itself; `tiles`, tokens grouped by expert; `combine`, the sum over a token's choices.

The first product gates in its epilogue. Weights are stacked, [E, lines, columns]. A pair is a token and one of its choices, numbered token
by token; `act` and `parts`, between the kernels, have a row for each. Launched by kernels/gpu/moe.py alone, which chooses the blocks.
"""

import triton
import triton.language as tl

from flatout.kernels.gpu.gate import activated
from flatout.kernels.gpu.skinny import halves, weight_lines


@triton.jit
def _finish(y, out, block, outputs, there, ACTIVATION: tl.constexpr):
    """Store products y [lines of weight_lines, rows], gated if so; out: pointers to the rows' results [1, rows], there: which of the rows exist."""
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2, y.shape[1])), (1, 2, 0)))
        y = activated(gate, ACTIVATION) * up
    output = (block * y.shape[0] + tl.arange(0, y.shape[0]))[:, None]
    tl.store(out + output, y, mask=(output < outputs) & there)


@triton.jit
def _units(unit, w_at, x_at, chosen, weights, height, WIDTH: tl.constexpr, CHOICES: tl.constexpr):
    """Of units [UNITS], each 8 columns of one choice: words of the weight [UNITS, LINES, 4] and of x [UNITS, 1, 4], and the choices' weights
    [UNITS, 1, 1], or ones. w_at: pointers to the lines of expert 0, [1, LINES, 4]; x_at: to the row of x, [1, 1, 4]."""
    inside = (unit < CHOICES * (WIDTH // 8))[:, None, None]
    choice = tl.minimum(unit // (WIDTH // 8), CHOICES - 1)
    expert = tl.load(chosen) if CHOICES == 1 else tl.load(chosen + choice)
    column = expert * height * (WIDTH // 2) + (unit - choice * (WIDTH // 8)) * 4
    w = tl.load(w_at + column[:, None, None], mask=inside, other=0, eviction_policy="evict_first")
    x = tl.load(x_at + (unit * 4)[:, None, None], mask=inside, other=0)
    weight = tl.full(unit.shape, 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + choice)
    return w, x, weight[:, None, None]


@triton.jit
def vector(
    out, x, stacked, chosen, weights, outputs, out_stride, x_stride,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, SHARE: tl.constexpr, LINES: tl.constexpr, UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: LINES lines of the weights of a row's CHOICES experts, one after the other, against the row. Grid: rows, blocks of lines.

    A row of x has WIDTH columns for each choice and serves SHARE rows. UNITS is 32 * num_warps: a thread has 8 columns (16 bytes) of every
    line of a step, so that sums need no exchange before the end; the next step is always on its way.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0), tl.program_id(1)
    height = outputs if ACTIVATION is None else 2 * outputs
    unit, word = tl.arange(0, UNITS), tl.arange(0, 4)[None, None, :]
    lines = weight_lines(block, outputs, LINES, ACTIVATION).to(tl.int64)[None, :, None] * (WIDTH // 2)
    w_at = stacked.to(tl.pointer_type(tl.int32)) + lines + word
    x_at = (x + (row // SHARE) * x_stride).to(tl.pointer_type(tl.int32)) + word
    chosen += row * CHOICES
    if weights is not None:
        weights += row * CHOICES
    w_next, x_next, weight_next = _units(unit, w_at, x_at, chosen, weights, height, WIDTH, CHOICES)
    acc = tl.zeros((UNITS, LINES), tl.float32)
    for first in range(UNITS, CHOICES * (WIDTH // 8) + UNITS, UNITS):
        w_even, w_odd = halves(w_next, stacked.dtype.element_ty)
        x_even, x_odd = halves(x_next, stacked.dtype.element_ty)
        x_even, x_odd = x_even * weight_next, x_odd * weight_next
        w_next, x_next, weight_next = _units(first + unit, w_at, x_at, chosen, weights, height, WIDTH, CHOICES)
        acc += tl.sum(w_even * x_even + w_odd * x_odd, 2)
    _finish(tl.sum(acc, 0)[:, None], out + row * out_stride, block, outputs, True, ACTIVATION)


@triton.jit(do_not_specialize=["slots", "share"])
def tiles(
    out, x, stacked, slot_experts, order, slots, share, outputs, columns, x_stride,
    ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, STREAM: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: LINES lines of an expert's weight, the first operand, against the ROWS rows of x of the pairs in a slot.

    A row of x serves `share` pairs. EVEN: columns are a multiple of BLOCK_K. STREAM: few slots read a weight, which then need not stay in the
    L2. Programs go through GROUP slots before the next lines, so that those that run together share both operands in the L2.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    height = outputs if ACTIVATION is None else 2 * outputs
    across = tl.cdiv(height, LINES)
    group = tl.program_id(0) // (GROUP * across)
    inside = tl.program_id(0) % (GROUP * across)
    tall = tl.minimum(slots - group * GROUP, GROUP)
    slot, block = group * GROUP + inside % tall, inside // tall
    expert = tl.load(slot_experts + slot)
    pair = tl.load(order + slot * ROWS + tl.arange(0, ROWS))
    there = (pair >= 0) & (expert >= 0)
    k = tl.arange(0, BLOCK_K)
    lines = expert.to(tl.int64) * height + weight_lines(block, outputs, LINES, ACTIVATION)
    w_at = stacked + (lines * columns)[:, None] + k[None, :]
    x_at = x + ((pair // share).to(tl.int64) * x_stride)[:, None] + k[None, :]
    acc = tl.zeros((LINES, ROWS), tl.float32)
    stop = tl.where(expert < 0, 0, columns)  # a slot that is left over; a branch would have `pair` wait for `expert`
    for start in range(0, stop, BLOCK_K):
        keep: tl.constexpr = "evict_first" if STREAM else ""
        if EVEN:
            w = tl.load(w_at + start, eviction_policy=keep)
            xs = tl.load(x_at + start, mask=there[:, None], other=0.0)
        else:
            within = (start + k < columns)[None, :]
            w = tl.load(w_at + start, mask=within, other=0.0, eviction_policy=keep)
            xs = tl.load(x_at + start, mask=there[:, None] & within, other=0.0)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
    _finish(acc, out + (pair.to(tl.int64) * outputs)[None, :], block, outputs, there[None, :], ACTIVATION)


@triton.jit
def combine(out, parts, weights, out_stride, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = sum over a token's choices, in their order, of weights [T, TOP_K] * parts [T, TOP_K, WIDTH]. A program: BLOCK columns of a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        acc += tl.load(weights + pair) * tl.load(parts + pair * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, acc, mask=column < WIDTH)
