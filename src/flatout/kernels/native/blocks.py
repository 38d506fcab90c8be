"""Functions of the native CPU library (native.h) on weights in GGUF's blocks: repack, at load, and embed, which reads single lines.

Tensors are on the CPU. No arithmetic and no choice lives here. Called by quant/gguf.py and kernels/embedding.py, which have the references.
"""

from __future__ import annotations

import struct

import numpy as np
from torch import Tensor

from flatout.kernels.blocks import PACKED
from flatout.kernels.native import _TYPES, BYTES, GROUP, LINES, _declined, _native

FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}  # ggml's numbers
_EMBED = struct.Struct("3P4q2if")  # FlatoutEmbed
_TOO_LARGE = 2  # what flatout_repack answers


def repack(out: Tensor, raw: np.ndarray, kind: str, bits: int, order: np.ndarray | None = None) -> None:
    """out uint8 [lines / 16, K / 32, bytes], contiguous = the weight of so many lines whose blocks `raw` holds (uint8, contiguous), packed in 4 or 8
    bits; line i is its line order[i], or i. On the caller's thread, which lets others run.

    ValueError: a scale or minimum that float16 does not hold, or operands that do not fit.
    """
    lines, columns = out.shape[0] * LINES, out.shape[1] * GROUP
    order = np.arange(lines) if order is None else np.ascontiguousarray(order, np.int64)
    if out.shape[2] != BYTES[bits] or not out.is_contiguous() or raw.nbytes != lines * _line_bytes(kind, columns) or len(order) != lines:
        raise ValueError(f"repack: {raw.nbytes} bytes of {kind} do not fit {tuple(out.shape)} of {bits} bits")
    answer = _native().flatout_repack(
        *(raw.ctypes.data, FORMATS[kind], order.ctypes.data),
        *(lines, columns, bits, out.data_ptr()),
    )
    if answer == _TOO_LARGE:
        raise ValueError("scales that float16 does not hold")
    if answer:
        raise ValueError(f"repack: the native library declines {lines} x {columns} of {kind} in {bits} bits")


def embed(out: Tensor, table: Tensor, ids: Tensor, kind: str | int, scale: float) -> None:
    """out [T, H] = scale * the table's lines at ids (int64 [T], contiguous), float32 or bfloat16. kind: of blocks, table uint8 [V, bytes]; or 4 or 8, a
    packed weight's, table uint8 [V / 16, H / 32, bytes]; contiguous. IndexError: an id that is none of the lines."""
    if isinstance(kind, int):
        format, lines, fits = -kind, table.shape[0] * LINES, table.shape[1:] == (out.shape[1] // GROUP, BYTES[kind])
    else:
        format, lines, fits = FORMATS[kind], table.shape[0], table.shape[1] == _line_bytes(kind, out.shape[1])
    if not fits or out.stride(1) != 1:
        raise ValueError(f"embed: {tuple(table.shape)} of kind {kind} does not fit out {tuple(out.shape)}")
    asked = _EMBED.pack(
        *(table.data_ptr(), ids.data_ptr(), out.data_ptr()),
        *(out.stride(0), out.shape[0], out.shape[1], lines),
        *(format, _TYPES[out.dtype]),
        scale,
    )
    if _declined("embed", asked):
        raise IndexError(f"embed: an id is none of the {lines} lines")


def _line_bytes(kind: str, columns: int) -> int:
    return columns // PACKED[kind].elements * PACKED[kind].layout.itemsize
