"""Kernel of a product whose rows have the same bits whatever other rows are there. Launched by kernels/gpu/linear.py alone.

Every output is one chain of the same instructions over the columns in the same order: no split of K, one width of instruction. What
differs with the number of rows is only how many such chains a program holds.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "outputs"])
def products(
    out, x, weight, bias, rows, outputs, columns, out_stride, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: BLOCK_M rows of x by BLOCK_N of the weight, the latter as the first operand. EVEN: columns is a multiple of BLOCK_K.

    Programs go through GROUP tiles of rows before the next tile of the weight, so that those that run together share both in the L2.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    across, down = tl.cdiv(outputs, BLOCK_N), tl.cdiv(rows, BLOCK_M)
    group = program // (GROUP * across)
    tall = tl.minimum(down - group * GROUP, GROUP)
    inside = program % (GROUP * across)
    row = (group * GROUP + inside % tall) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = (inside // tall) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = (weight + tl.minimum(output, outputs - 1).to(tl.int64) * weight_stride)[:, None] + k[None, :]
    x_at = (x + row.to(tl.int64) * x_stride)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, columns, BLOCK_K):
        if EVEN:
            w = tl.load(w_at + start)
            xs = tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0)
        else:
            w = tl.load(w_at + start, mask=(start + k < columns)[None, :], other=0.0)
            xs = tl.load(x_at + start, mask=(row < rows)[:, None] & (start + k < columns)[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + tl.minimum(output, outputs - 1)).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(at, acc, mask=(output < outputs)[:, None] & (row < rows)[None, :])
