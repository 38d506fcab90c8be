"""GGUF block types to plain tensors: what each packed block says, in numpy, a few megabytes at a time.

One function per type unpacks a run of blocks into float32 exactly as ggml defines it. Files and names are modelfile/'s business.
Called by models/load.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.kernels.packed import LINES, pack

CHUNK = (
    1 << 19
)  # elements unpacked at a time: the float32 values (2 MB) stay in the L2 cache; 0.28 s for the default model, 0.5 s at 1 << 23


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype([(f[0], f[1], (f[2],)) if len(f) == 3 else f for f in fields])


def _column(values: np.ndarray) -> np.ndarray:
    """float16 [n] -> float32 [n, 1]"""
    return values.astype(np.float32)[:, None]


def _nibbles(q: np.ndarray) -> np.ndarray:
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


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 4] -> [n, 32] of 0 or 16: bit i is element i's fifth."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(b["q"]).view(np.int8) - np.int8(8), _column(b["d"]), out=out)


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(b["q"]), _column(b["d"]), out=out)
    out += _column(b["m"])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(b["q"]) | _fifth_bits(b["h"])
    np.multiply(q.view(np.int8) - np.int8(16), _column(b["d"]), out=out)


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(b["q"]) | _fifth_bits(b["h"]), _column(b["d"]), out=out)
    out += _column(b["m"])


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(b["q"], _column(b["d"]), out=out)


def _scales_and_minima(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and minima of a K block from its 12 bytes, times the block's own: float32 [n, 8, 1] each.

    Bytes 0-3 and 4-7 hold the first four of each and, in their top two bits, the top of the last four; bytes 8-11 the rest of those.
    """
    low, mid, high = b["s"][:, 0:4], b["s"][:, 4:8], b["s"][:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return (_column(b["d"]) * scales)[:, :, None], (_column(b["m"]) * minima)[:, :, None]


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = _scales_and_minima(b)
    groups = out.reshape(-1, 8, 32)
    np.multiply(_nibbles(b["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32), scale, out=groups)
    groups -= minimum


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = _scales_and_minima(b)
    groups = out.reshape(-1, 8, 32)
    q = _nibbles(b["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (_bits(b["h"], 1) << np.uint8(4))
    np.multiply(q, scale, out=groups)
    groups -= minimum


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(b["q"].reshape(-1, 2, 64)).reshape(-1, 8, 32) | (_bits(b["h"].reshape(-1, 32), 2).reshape(-1, 8, 32) << np.uint8(4))
    scale = (_column(b["d"]) * b["s"])[:, :, None]
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
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED = (*PLAIN, *PACKED)


# bits of the types that kernels/packed.py multiplies as they are
KEPT = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}


def kept_bits(kind: str, shape: tuple[int, ...]) -> int:
    """With how many bits repacked() keeps such a tensor, or 0: it cannot."""
    return KEPT.get(kind, 0) if len(shape) == 2 and shape[0] % LINES == 0 else 0


def repacked(raw: np.ndarray, kind: str, shape: tuple[int, int], arrange: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """The tensor's own values and scales as kernels/packed.py lays them out; arrange() puts its rows into another order."""
    blocks = raw.view(np.ndarray).view(PACKED[kind].layout).reshape(shape[0], -1)
    scales = np.ascontiguousarray(blocks["d"])
    if kind == "Q8_0":
        parts: list[np.ndarray] = [blocks["q"].view(np.uint8) ^ np.uint8(128), scales]
    elif kind == "Q4_1":
        parts = [_nibbles(blocks["q"]), scales, np.ascontiguousarray(blocks["m"])]
    else:
        with np.errstate(over="ignore"):  # eight times a float16 is one, or infinite where the weights would be
            parts = [_nibbles(blocks["q"]), scales, scales * np.float16(-8)]
    values, factors, *minima = (arrange(torch.from_numpy(part)) for part in parts)
    return pack(values, factors, minima[0] if minima else None)


def dequantize(raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor that `raw` (uint8, whole blocks, row-major) holds, in a new CPU tensor. ValueError: a type that is not supported."""
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    if kind in PLAIN:
        size = PLAIN[kind].itemsize
        for at in range(0, len(flat), CHUNK):
            # copied, since torch wants memory that it may write
            flat[at : at + CHUNK] = torch.frombuffer(bytearray(raw[at * size : (at + CHUNK) * size]), dtype=PLAIN[kind])
        return out
    if kind not in PACKED:
        raise ValueError(f"type {kind} is not supported; supported: {', '.join(SUPPORTED)}")
    packed = PACKED[kind]
    blocks = raw.view(np.ndarray).view(packed.layout)
    step = CHUNK // packed.elements
    values = np.empty((min(step, len(blocks)), packed.elements), np.float32)
    for at in range(0, len(blocks), step):
        run = blocks[at : at + step]
        part = values[: len(run)]
        with np.errstate(all="ignore"):  # a scale that is no number gives values that are none, without a warning
            packed.unpack(run, part)
        flat[at * packed.elements : (at + len(run)) * packed.elements] = torch.from_numpy(part).view(-1)
    return out
