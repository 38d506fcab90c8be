"""GGUF block types to plain tensors and to those of kernels/packed.py: what each packed block says, in numpy, a few megabytes at a time.

One function per type unpacks a run of blocks into float32 exactly as ggml defines it; another, where the packed layout can say the same, gives
its groups of 32. Files and names are modelfile/'s business. Called by models/load.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatout.kernels.packed import BYTES, GROUP, LINES, pack
from flatout.quant.rounding import eight_bits

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


# ---------------------------------------------------------------- into the packed layout

# values uint8 [n, ...], then scales and, of 4 bits, minima as kernels/packed.py:pack takes them: of a run of blocks, in any shape and type
Groups = tuple[np.ndarray, ...]


def _q4_0_groups(b: np.ndarray) -> Groups:
    return _nibbles(b["q"]), b["d"], _column(b["d"]) * -8


def _q4_1_groups(b: np.ndarray) -> Groups:
    return _nibbles(b["q"]), b["d"], b["m"]


def _q4_k_groups(b: np.ndarray) -> Groups:
    # d and dmin have 11 bits, what multiplies them 6: the product is rounded to 11. One that is subnormal is exact, a multiple of the smallest step
    scale, minimum = _scales_and_minima(b)
    return _nibbles(b["q"].reshape(-1, 4, 32)), scale, -minimum


def _q4_0_bytes(b: np.ndarray) -> Groups:
    return _nibbles(b["q"]) + np.uint8(128 - 8), b["d"]


def _q5_0_bytes(b: np.ndarray) -> Groups:
    return (_nibbles(b["q"]) | _fifth_bits(b["h"])) + np.uint8(128 - 16), b["d"]


def _q8_0_bytes(b: np.ndarray) -> Groups:
    return b["q"].view(np.uint8) ^ np.uint8(128), b["d"]


def _rounded_again(kind: str, b: np.ndarray) -> Groups:
    """Of 8 bits, from the float32 values."""
    values = np.empty((len(b), PACKED[kind].elements), np.float32)
    PACKED[kind].unpack(b, values)
    rounded, scales = eight_bits(torch.from_numpy(values).view(-1, GROUP))
    return rounded.numpy(), scales.numpy()


# (type, bits) -> the same values in the packed layout; any other type has 8 bits by _rounded_again. What that adds to a type's own error, in rms of
# normal weights that ggml quantised: 0.53 % of all types, beside 7.8 % of Q4_1, 7.1 % of Q4_K, 3.8 % of Q5_1, 3.6 % of Q5_K and 1.8 % of Q6_K (which
# makes 1.86 % of 1.78); Q4_K's scales in float16 add 0.06 %
SAME: dict[tuple[str, int], Callable[[np.ndarray], Groups]] = {
    ("Q4_0", 4): _q4_0_groups,
    ("Q4_1", 4): _q4_1_groups,
    ("Q4_K", 4): _q4_k_groups,
    ("Q4_0", 8): _q4_0_bytes,
    ("Q5_0", 8): _q5_0_bytes,
    ("Q8_0", 8): _q8_0_bytes,
}


def kept_bits(kind: str, shape: tuple[int, ...]) -> int:
    """The fewest bits with which repacked() keeps such a tensor, or 0: it cannot."""
    if kind not in PACKED or len(shape) != 2 or shape[0] % LINES:
        return 0
    return 4 if (kind, 4) in SAME else 8


def repacks(kind: str, bits: int) -> bool:
    """Whether repacked() takes such a tensor to so many bits; else its values are quant/rounding.py's to round."""
    return kind in PACKED and (bits == 8 or (kind, bits) in SAME)


def change(kind: str, bits: int) -> str:
    """What becomes of the values of such a tensor, in any way that leads to so many bits, in words, or "": nothing."""
    if kind not in PACKED:
        return "rounded"
    if (kind, bits) not in SAME:
        return "rounded again"
    return "scales rounded" if kind == "Q4_K" else ""


def repacked(raw: np.ndarray, kind: str, shape: tuple[int, int], bits: int, order: np.ndarray | None = None) -> Tensor:
    """The tensor as kernels/packed.py lays it out, in kept_bits() or in 8; row i is the file's row order[i], or i.

    ValueError: a scale or minimum that float16 does not hold.
    """
    rows, columns = shape
    layout = PACKED[kind].layout
    groups = SAME.get((kind, bits)) or partial(_rounded_again, kind)
    lines = raw.view(np.ndarray).reshape(rows, -1)
    out = torch.empty(rows // LINES, columns // GROUP, BYTES[bits], dtype=torch.uint8)
    step = max(CHUNK // columns // LINES, 1) * LINES
    for at in range(0, rows, step):
        run = lines[at : at + step] if order is None else lines[order[at : at + step]]
        with np.errstate(all="ignore"):
            values, *factors = groups(run.reshape(-1).view(layout))
            halves = [torch.from_numpy(factor.astype(np.float16).reshape(len(run), -1)) for factor in factors]
        if not all(half.isfinite().all() for half in halves):
            raise ValueError("scales that float16 does not hold")
        out[at // LINES : (at + len(run)) // LINES] = pack(torch.from_numpy(values.reshape(len(run), -1, GROUP)), *halves)
    return out
