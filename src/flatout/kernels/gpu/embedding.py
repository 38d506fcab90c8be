"""embedding and gather_rows in Triton: rows of a table, picked by ids that the device holds.

Not for speed alone: torch's index_select breaks the chain of dependent launches in a captured step. Registered with the ops by
kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.embedding import embedding, gather_rows
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.rows import FLOATS, column_blocks


@triton.jit
def _gather(
    out, table, ids, out_stride, table_stride, scale, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if PDL:
        # in this order: nothing that comes after the first of a step begins before the step's lengths and tables are there, which
        # attention_decode.py reads before it waits
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(table + tl.load(ids + row) * table_stride + column, mask=mask)
    if SCALED:
        value = value.to(tl.float32) * scale
    tl.store(out + row * out_stride + column, value, mask=mask)


def _launch(out: Tensor, table: Tensor, ids: Tensor, scale: float) -> None:
    device = facts(out.device)
    rows, width = out.shape
    programs, block, warps = column_blocks(rows, width, device.sms)
    launch(
        _gather,
        (programs,),
        out,
        table,
        ids,
        out.stride(0),
        table.stride(0),
        scale,
        WIDTH=width,
        SCALED=scale != 1.0,
        BLOCK=block,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )


def _embedding_accepts(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> bool:
    return out.is_cuda and out.dtype in FLOATS


def _gather_accepts(out: Tensor, source: Tensor, indices: Tensor) -> bool:
    return out.is_cuda and out.dtype in FLOATS


@embedding.implementation("triton", _embedding_accepts)
def embedding_triton(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    _launch(out, weight, ids, scale)


@gather_rows.implementation("triton", _gather_accepts)
def gather_rows_triton(out: Tensor, source: Tensor, indices: Tensor) -> None:
    _launch(out, source, indices, 1.0)
