"""GGUF block types to plain tensors and to those of kernels/packed.py, a few megabytes at a time.

What a block says is kernels/blocks.py's; here is, where the packed layout can say the same, how its groups of 32 become that layout's: by the native
library, with numpy as its reference. Files and names are modelfile/'s business. Called by models/load.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.blocks import PACKED, column, fifth_bits, nibbles, scales_and_minima
from flatout.kernels.native import blocks
from flatout.kernels.packed import GROUP, LINES, pack
from flatout.quant.rounding import eight_bits

CHUNK = (
    1 << 19
)  # elements unpacked at a time: the float32 values (2 MB) stay in the L2 cache; 0.28 s for the default model, 0.5 s at 1 << 23


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
    return nibbles(b["q"]), b["d"], column(b["d"]) * -8


def _q4_1_groups(b: np.ndarray) -> Groups:
    return nibbles(b["q"]), b["d"], b["m"]


def _q4_k_groups(b: np.ndarray) -> Groups:
    # d and dmin have 11 bits, what multiplies them 6: the product is rounded to 11. One that is subnormal is exact, a multiple of the smallest step
    scale, minimum = scales_and_minima(b)
    return nibbles(b["q"].reshape(-1, 4, 32)), scale, -minimum


def _q4_0_bytes(b: np.ndarray) -> Groups:
    return nibbles(b["q"]) + np.uint8(128 - 8), b["d"]


def _q5_0_bytes(b: np.ndarray) -> Groups:
    return (nibbles(b["q"]) | fifth_bits(b["h"])) + np.uint8(128 - 16), b["d"]


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
    """The fewest bits with which repack() keeps such a tensor, or 0: it cannot."""
    if kind not in PACKED or len(shape) != 2 or shape[0] % LINES:
        return 0
    return 4 if (kind, 4) in SAME else 8


def repacks(kind: str, bits: int) -> bool:
    """Whether repack() takes such a tensor to so many bits; else its values are quant/rounding.py's to round."""
    return kind in PACKED and (bits == 8 or (kind, bits) in SAME)


def change(kind: str, bits: int) -> str:
    """What becomes of the values of such a tensor, in any way that leads to so many bits, in words, or "": nothing."""
    if kind not in PACKED:
        return "rounded"
    if (kind, bits) not in SAME:
        return "rounded again"
    return "scales rounded" if kind == "Q4_K" else ""


def repack(out: Tensor, raw: np.ndarray, kind: str, bits: int, order: np.ndarray | None = None) -> None:
    """The tensor that `raw` holds (uint8, whole blocks, row-major) into out, uint8 [rows / 16, columns / 32, bytes] on the CPU, as kernels/packed.py
    lays it out in kept_bits() or in 8; row i is the file's row order[i], or i.

    ValueError: a scale or minimum that float16 does not hold.
    """
    if native.available() and out.is_contiguous():
        blocks.repack(out, raw, kind, bits, order)
    else:
        repack_by_numpy(out, raw, kind, bits, order)


def repack_by_numpy(out: Tensor, raw: np.ndarray, kind: str, bits: int, order: np.ndarray | None = None) -> None:
    """The reference of repack()."""
    rows, columns = out.shape[0] * LINES, out.shape[1] * GROUP
    layout = PACKED[kind].layout
    groups = SAME.get((kind, bits)) or partial(_rounded_again, kind)
    lines = raw.view(np.ndarray).reshape(rows, -1)
    step = max(CHUNK // columns // LINES, 1) * LINES
    for at in range(0, rows, step):
        run = lines[at : at + step] if order is None else lines[order[at : at + step]]
        with np.errstate(all="ignore"):
            values, *factors = groups(run.reshape(-1).view(layout))
            halves = [torch.from_numpy(factor.astype(np.float16).reshape(len(run), -1)) for factor in factors]
        if not all(half.isfinite().all() for half in halves):
            raise ValueError("scales that float16 does not hold")
        out[at // LINES : (at + len(run)) // LINES] = pack(torch.from_numpy(values.reshape(len(run), -1, GROUP)), *halves)
