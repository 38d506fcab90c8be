"""GGUF's packed block types in numpy: how a block is laid out, and what it says as float32, exactly as ggml defines it.

One function per type unpacks a run of blocks. Files are modelfile/'s business, other layouts quant/'s; the native library has the same in
native/blocks.cpp. Called by embedding.py, whose reference it is, and quant/gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype([(f[0], f[1], (f[2],)) if len(f) == 3 else f for f in fields])


def column(values: np.ndarray) -> np.ndarray:
    """float16 [n] -> float32 [n, 1]"""
    return values.astype(np.float32)[:, None]


def nibbles(q: np.ndarray) -> np.ndarray:
    """uint8 [n, ..., b] -> [n, ..., 2b]: all low halves, then all high halves."""
    out = np.empty((*q.shape[:-1], 2 * q.shape[-1]), np.uint8)
    half = q.shape[-1]
    np.bitwise_and(q, 15, out=out[..., :half])
    np.right_shift(q, 4, out=out[..., half:])
    return out


def _bits(packed: np.ndarray, width: int) -> np.ndarray:
    """uint8 [n, b] -> [n, 8/width, b]: the `width` bits at each place of every byte, lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[:, None, :] >> shifts) & np.uint8((1 << width) - 1)


def fifth_bits(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 4] -> [n, 32] of 0 or 16: bit i is element i's fifth."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(nibbles(b["q"]).view(np.int8) - np.int8(8), column(b["d"]), out=out)


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(nibbles(b["q"]), column(b["d"]), out=out)
    out += column(b["m"])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    q = nibbles(b["q"]) | fifth_bits(b["h"])
    np.multiply(q.view(np.int8) - np.int8(16), column(b["d"]), out=out)


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(nibbles(b["q"]) | fifth_bits(b["h"]), column(b["d"]), out=out)
    out += column(b["m"])


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(b["q"], column(b["d"]), out=out)


def scales_and_minima(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and minima of a K block from its 12 bytes, times the block's own: float32 [n, 8, 1] each.

    Bytes 0-3 and 4-7 hold the first four of each and, in their top two bits, the top of the last four; bytes 8-11 the rest of those.
    """
    low, mid, high = b["s"][:, 0:4], b["s"][:, 4:8], b["s"][:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return (column(b["d"]) * scales)[:, :, None], (column(b["m"]) * minima)[:, :, None]


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = scales_and_minima(b)
    groups = out.reshape(-1, 8, 32)
    np.multiply(nibbles(b["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32), scale, out=groups)
    groups -= minimum


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = scales_and_minima(b)
    groups = out.reshape(-1, 8, 32)
    q = nibbles(b["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (_bits(b["h"], 1) << np.uint8(4))
    np.multiply(q, scale, out=groups)
    groups -= minimum


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    q = nibbles(b["q"].reshape(-1, 2, 64)).reshape(-1, 8, 32) | (_bits(b["h"].reshape(-1, 32), 2).reshape(-1, 8, 32) << np.uint8(4))
    scale = (column(b["d"]) * b["s"])[:, :, None]
    np.multiply(q.view(np.int8).reshape(-1, 16, 16) - np.int8(32), scale, out=out.reshape(-1, 16, 16))


@dataclass(frozen=True)
class Packed:
    """A packed type: its block as a record, its elements, and how a run of blocks [n] becomes float32 [n, elements]."""

    layout: np.dtype
    elements: int
    unpack: Callable[[np.ndarray, np.ndarray], None]


PACKED = {
    "Q4_0": Packed(_layout(("d", "<f2"), ("q", "u1", 16)), 32, _q4_0),
    "Q4_1": Packed(_layout(("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)), 32, _q4_1),
    "Q5_0": Packed(_layout(("d", "<f2"), ("h", "u1", 4), ("q", "u1", 16)), 32, _q5_0),
    "Q5_1": Packed(_layout(("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)), 32, _q5_1),
    "Q8_0": Packed(_layout(("d", "<f2"), ("q", "i1", 32)), 32, _q8_0),
    "Q4_K": Packed(_layout(("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", 128)), 256, _q4_k),
    "Q5_K": Packed(_layout(("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)), 256, _q5_k),
    "Q6_K": Packed(_layout(("q", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), ("d", "<f2")), 256, _q6_k),
}
