"""Kernels of products with few rows: `vector` (multiply-adds) and `tiles` (tensor cores). Both stream the weight once.

What a layer does before the product (an RMS norm of its rows) and after it (bias, gating, adding onto the stream) is folded in. Launched by
kernels/gpu/linear.py, which registers them and chooses the blocks; gpu/fp8.py and gpu/expert_rows.py are made of its parts too.
"""

import triton
import triton.language as tl

from flatout.kernels.gpu.gate import activated


@triton.jit
def weight_lines(program, outputs, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """The weight's rows that a program reads, [BLOCK_N]: its outputs in order; gated, those of its gates, then those of the same outputs' ups."""
    r = tl.arange(0, BLOCK_N)
    if ACTIVATION is None:
        return tl.minimum(program * BLOCK_N + r, outputs - 1)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        return tl.minimum(program * HALF + r % HALF, outputs - 1) + (r // HALF) * outputs


@triton.jit
def fetch(start, stride, lines, elements):
    """Have the L2 fetch `elements` 16-bit values of each of `lines` lines, one a thread: it takes no registers and nothing waits for it."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t; .reg .u64 a;
        mov.u32 t, %tid.x;
        setp.lt.u32 p, t, $3;
        mad.wide.u32 a, t, $2, $1;
        and.b64 a, a, -16;
        @p cp.async.bulk.prefetch.L2.global [a], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [start.to(tl.int64), stride * 2, tl.where(elements > 0, lines, 0), elements * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_lines(weight, weight_stride, program, outputs, first, elements, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """fetch for the lines of weight_lines, from column `first`."""
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    output = program * WIDTH
    start = weight + output.to(tl.int64) * weight_stride + first
    count = tl.minimum(outputs - output, WIDTH)
    fetch(start, weight_stride, count, elements)
    if ACTIVATION is not None:
        fetch(start + outputs.to(tl.int64) * weight_stride, weight_stride, count, elements)


@triton.jit
def places_of(out, program, rows, outputs, out_stride, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Pointers to what a program writes, outputs by rows, and which of them exist."""
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    output = program * WIDTH + tl.arange(0, WIDTH)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    return out + row * out_stride + output, (output < outputs) & (row < rows)


@triton.jit
def finish(y, squares, columns, eps, bias, scale, places, there, ADD: tl.constexpr, ACTIVATION: tl.constexpr):
    """Store products y [BLOCK_N, ROWS]. squares [ROWS]: sums over the row, or None where it is not normed; bias [BLOCK_N] or None."""
    if squares is not None:
        y *= tl.rsqrt(squares / columns + eps)[None, :]
    if bias is not None:
        y += bias.to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, y.shape[0] // 2, y.shape[1])), (1, 2, 0)))
        y = activated(gate, ACTIVATION) * up
    if ADD:
        y = tl.load(places, mask=there, other=0.0).to(tl.float32) + scale * y
    tl.store(places, y, mask=there)


@triton.jit
def halves(words, dtype: tl.constexpr):
    """float32 values of the lower and the upper 16 bits of words, of a 16-bit float type: two weights an element, so that a tile of them can
    be carried round a loop in registers as it came (carried as 16-bit values it costs 1.6 byte permutes a weight)."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        return low.to(tl.float32), (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "ahead"])
def vector(
    out, x, weight, bias, norm_weight, rows, outputs, columns, out_stride, x_stride, weight_stride, ahead, eps, offset, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_N rows of the weight against ROWS rows of x, over all columns, of which there are a multiple of 16.

    BLOCK_K is 256 * num_warps: a thread then holds 8 columns (16 bytes) of every row of a tile, x's included, and sums need no exchange
    before the end. The next tile is always on its way; the weight's first is so before the kernel before has ended, and `ahead` columns more.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    lines = weight_lines(program, outputs, BLOCK_N, ACTIVATION)
    word, k = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K)
    w_at = (weight + lines.to(tl.int64) * weight_stride).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
    x_at = x + (tl.minimum(tl.arange(0, ROWS), rows - 1) * x_stride)[:, None] + k[None, :]
    w_next = tl.load(w_at, mask=(word < columns // 2)[None, :], other=0, eviction_policy="evict_first")
    if norm_weight is not None:
        norm_next = tl.load(norm_weight + k, mask=k < columns, other=0.0)
    shift = tl.load(bias + lines) if bias is not None else None
    if PDL:
        fetch_lines(weight, weight_stride, program, outputs, BLOCK_K, tl.minimum(ahead, columns - BLOCK_K), BLOCK_N, ACTIVATION)
        if norm_weight is not None:
            fetch(norm_weight, 0, 1, columns)
        tl.extra.cuda.gdc_wait()
    x_next = tl.load(x_at, mask=(k < columns)[None, :], other=0.0)
    acc = tl.zeros((BLOCK_N, ROWS, BLOCK_K // 8), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K // 8), tl.float32)
    for start in range(BLOCK_K, columns + BLOCK_K, BLOCK_K):
        w_even, w_odd = halves(w_next, weight.dtype.element_ty)
        wide = x_next.to(tl.float32)
        w_next = tl.load(w_at + start // 2, mask=(start // 2 + word < columns // 2)[None, :], other=0, eviction_policy="evict_first")
        x_next = tl.load(x_at + start, mask=(start + k < columns)[None, :], other=0.0)
        if norm_weight is not None:
            squares += tl.sum(tl.reshape(wide * wide, (ROWS, BLOCK_K // 8, 8)), 2)
            wide *= (norm_next.to(tl.float32) + offset)[None, :]
            norm_next = tl.load(norm_weight + start + k, mask=start + k < columns, other=0.0)
        x_even, x_odd = tl.split(tl.reshape(wide, (1, ROWS, BLOCK_K // 2, 2)))
        even = tl.reshape(w_even, (BLOCK_N, 1, BLOCK_K // 2)) * x_even
        odd = tl.reshape(w_odd, (BLOCK_N, 1, BLOCK_K // 2)) * x_odd
        acc += tl.sum(tl.reshape(even, (BLOCK_N, ROWS, BLOCK_K // 8, 4)), 3)
        acc += tl.sum(tl.reshape(odd, (BLOCK_N, ROWS, BLOCK_K // 8, 4)), 3)
    places, there = places_of(out, program, rows, outputs, out_stride, BLOCK_N, ROWS, ACTIVATION)
    total = tl.sum(squares, 1) if norm_weight is not None else None
    finish(tl.sum(acc, 2), total, columns, eps, shift, scale, places, there, ADD, ACTIVATION)


@triton.jit(do_not_specialize=["rows", "ahead"])
def tiles(
    out, x, weight, bias, norm_weight, partials, arrivals,
    rows, outputs, columns, out_stride, x_stride, weight_stride, ahead, eps, offset, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    ADD: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_N rows of the weight against ROWS rows of x, over a share of the columns (a multiple of 16; EVEN: of BLOCK_K).

    The weight is the tensor cores' first operand, so that all of an instruction's 64 rows are of use, and x the second, as narrow as 8.
    SPLIT: there are num_programs(1) shares. They meet in partials (float32 [tiles, shares, BLOCK_N + 1, ROWS], the last line for sums of
    squares) and the last program of a tile to arrive adds them in order. arrivals: int32 [tiles], zero before and after.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(columns, BLOCK_K)
    first, last = share * steps // shares, (share + 1) * steps // shares
    lines = weight_lines(program, outputs, BLOCK_N, ACTIVATION)
    shift = tl.load(bias + lines) if bias is not None else None
    if PDL:
        some = tl.minimum(last * BLOCK_K, columns) - first * BLOCK_K
        fetch_lines(weight, weight_stride, program, outputs, first * BLOCK_K, tl.minimum(ahead, some), BLOCK_N, ACTIVATION)
        if norm_weight is not None:
            fetch(norm_weight + first * BLOCK_K, 0, 1, some)
        tl.extra.cuda.gdc_wait()
    k, row = tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    w_at = (weight + lines.to(tl.int64) * weight_stride)[:, None] + k[None, :]
    x_at = x + (row * x_stride)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K // 8), tl.float32)
    for step in range(first, last):
        start = step * BLOCK_K
        if EVEN:
            w = tl.load(w_at + start, eviction_policy="evict_first")
            xs = tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0)
        else:
            inside = (start + k < columns)[None, :]
            w = tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            xs = tl.load(x_at + start, mask=(row < rows)[:, None] & inside, other=0.0)
        if norm_weight is not None:
            wide = xs.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (ROWS, BLOCK_K // 8, 8)), 2)
            norm = tl.load(norm_weight + start + k, mask=start + k < columns, other=0.0).to(tl.float32) + offset
            xs = (wide * norm[None, :]).to(xs.dtype)
        acc = tl.dot(w, tl.trans(xs), acc)
    total = tl.sum(squares, 1) if norm_weight is not None else None
    places, there = places_of(out, program, rows, outputs, out_stride, BLOCK_N, ROWS, ACTIVATION)
    if SPLIT:
        PARTIAL: tl.constexpr = (BLOCK_N + 1) * ROWS
        tile = partials + program * shares * PARTIAL + row[None, :]
        lines_at = tile + tl.arange(0, BLOCK_N)[:, None] * ROWS
        squares_at = partials + program * shares * PARTIAL + BLOCK_N * ROWS + row
        tl.store(lines_at + share * PARTIAL, acc, cache_modifier=".cg")
        if norm_weight is not None:
            tl.store(squares_at + share * PARTIAL, total, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's stores come before one thread's release
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == shares - 1:
            acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
            if norm_weight is not None:
                total = tl.zeros((ROWS,), tl.float32)
            for begin in range(0, shares, 4):
                for other in tl.static_range(4):  # four at a time, so that loads wait for each other less
                    at = (begin + other) * PARTIAL
                    there_is = begin + other < shares
                    acc += tl.load(lines_at + at, mask=there_is, other=0.0, cache_modifier=".cg")
                    if norm_weight is not None:
                        total += tl.load(squares_at + at, mask=there_is, other=0.0, cache_modifier=".cg")
            finish(acc, total, columns, eps, shift, scale, places, there, ADD, ACTIVATION)
            tl.store(arrivals + program, 0)
    else:
        finish(acc, total, columns, eps, shift, scale, places, there, ADD, ACTIVATION)
