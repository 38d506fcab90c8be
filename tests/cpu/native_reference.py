"""What flatout's native library should answer, in float64 numpy: packing as native.h has it, and products by the exact arithmetic of rounded rows.

Beside each value stands how far float32 may be from it: roundings of the sums, and whole steps of the rows' type where a normed element lies
too near the middle between two. Used by test_native.py and test_native_plain.py; nothing of flatout is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
GROUP, LINES = 32, 16
EPSILON = 2.0**-23


@dataclass
class Weight:
    kind: int
    packed: NDArray[np.uint8]  # [lines / 16, columns / 32, bytes]
    values: Floats  # [lines, columns], float64


def make_weight(rng: np.random.Generator, kind: int, lines: int, columns: int, scale: float = 0.02) -> Weight:
    """Random codes, with all of the extreme ones, under random scales of both signs."""
    most = 15 if kind == 4 else 255
    codes = rng.integers(0, most + 1, (lines, columns))
    codes[rng.random(codes.shape) < 0.1] = most
    codes[rng.random(codes.shape) < 0.1] = 0
    d = (rng.normal(size=(lines, columns // GROUP)) * scale / most).astype(np.float16)
    m = (rng.normal(size=d.shape) * scale).astype(np.float16) if kind == 4 else None
    return pack(kind, codes, d, m)


def pack(kind: int, codes: NDArray[np.integer], d: NDArray[np.float16], m: NDArray[np.float16] | None) -> Weight:
    lines, columns = codes.shape
    blocks, groups = lines // LINES, columns // GROUP
    by_block = codes.reshape(blocks, LINES, groups, GROUP).transpose(0, 2, 1, 3)
    if kind == 4:
        by_block = by_block[..., :16] | by_block[..., 16:] << 4
    fours = by_block.reshape(blocks, groups, LINES, -1, 4).transpose(0, 1, 3, 2, 4)
    parts = [fours.astype(np.uint8).reshape(blocks, groups, -1)]
    for factors in (d, m):
        if factors is not None:
            by_line = np.ascontiguousarray(factors.reshape(blocks, LINES, groups).transpose(0, 2, 1))
            parts.append(by_line.view(np.uint8).reshape(blocks, groups, -1))
    wide = codes.reshape(lines, groups, GROUP).astype(np.float64)
    values = d.astype(np.float64)[..., None] * (wide if kind == 4 else wide - 128)
    if m is not None:
        values += m.astype(np.float64)[..., None]
    return Weight(kind, np.ascontiguousarray(np.concatenate(parts, -1)), values.reshape(lines, columns))


def rounded_rows(x: NDArray[np.float32], near: float) -> tuple[Floats, Floats]:
    """x as its int8 groups hold it, and how far each element may be off: a step where x / d is within `near` of the middle between two."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    d = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    ratio = groups / np.where(d > 0, d, np.float32(1))
    q = np.where(d > 0, np.clip(np.rint(ratio), -127, 127), 0)
    wide = d.astype(np.float64)
    middle = np.abs(np.abs(ratio - np.trunc(ratio)) - 0.5) < near
    return (wide * q).reshape(x.shape), (wide * middle).reshape(x.shape)


def normed(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, offset: float) -> NDArray[np.float32]:
    wide = x.astype(np.float64)
    factor = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return (wide * factor * (weight.astype(np.float64) + offset)).astype(np.float32)


_erf = np.vectorize(math.erf, otypes=[np.float64])
ACTIVATIONS = {
    "silu": lambda g: g / (1 + np.exp(-g)),
    "gelu_tanh": lambda g: 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "gelu": lambda g: 0.5 * g * (1 + _erf(g / math.sqrt(2))),
}


def product(
    x: NDArray[np.float32],
    weight: Weight,
    bias: NDArray[np.float32] | None = None,
    norm: tuple[NDArray[np.float32], float, float] | None = None,
    gate: str | None = None,
    before: Floats | None = None,
    scale: float = 1.0,
) -> tuple[Floats, Floats]:
    """Of a packed weight (values, how far float32 may be off), both [rows, outputs]. before: what out held, with add."""
    rows, slack = rounded_rows(normed(x, *norm) if norm else x, 1e-3 if norm else 0.0)
    values = rows @ weight.values.T
    # each group's sum is rounded a few times on its way; a kind 4 group's codes and minima may cancel, so sizes count without sign
    spread = np.abs(weight.values).reshape(len(weight.values), -1, GROUP).max(-1).repeat(GROUP, -1)
    error = (np.abs(rows) @ spread.T) * EPSILON * (8 + rows.shape[1] // GROUP) + slack @ np.abs(weight.values).T
    return _finished(values, error, bias, gate, before, scale)


def to_bfloat16(x: NDArray[np.float32], near: int) -> tuple[Floats, Floats]:
    """x to the nearest bfloat16, ties to even, and how far each may be off: a step where x is within `near` units of the middle between two."""
    bits = x.view(np.uint32).astype(np.int64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    step = np.abs(np.ldexp(1.0, np.frexp(x)[1] - 8))
    return kept.astype(np.uint32).view(np.float32).astype(np.float64), step * (np.abs((bits & 0xFFFF) - 0x8000) < near)


def plain_product(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    kind: int,
    bias: NDArray[np.float32] | None = None,
    norm: tuple[NDArray[np.float32], float, float] | None = None,
    gate: str | None = None,
    before: Floats | None = None,
    scale: float = 1.0,
) -> tuple[Floats, Floats]:
    """product() of a plain weight [lines, columns], its values those of the kind."""
    wide = normed(x, *norm) if norm else x
    rows, slack = (
        to_bfloat16(wide, 8 if norm else 0) if kind == 16 else (wide.astype(np.float64), np.abs(wide) * (norm is not None) * 4 * EPSILON)
    )
    exact = weight.astype(np.float64)
    # the longest chains of sums are those of the shortest vectors, of 4
    error = np.abs(rows) @ np.abs(exact).T * EPSILON / 2 * (8 + x.shape[1] // 4) + slack @ np.abs(exact).T
    return _finished(rows @ exact.T, error, bias, gate, before, scale)


def _finished(
    values: Floats, error: Floats, bias: NDArray[np.float32] | None, gate: str | None, before: Floats | None, scale: float
) -> tuple[Floats, Floats]:
    """What comes after the sums, and how it passes errors on."""
    if bias is not None:
        values = values + bias
        error = error + EPSILON * np.abs(values)
    if gate:
        n = values.shape[1] // 2
        act, up = ACTIVATIONS[gate](values[:, :n]), values[:, n:]
        # no activation is steeper than 1.13
        error = (
            1.2 * error[:, :n] * np.abs(up)
            + error[:, n:] * np.abs(act)
            + np.abs(values[:, :n] * up) * 4e-7
            + 8 * EPSILON * np.abs(act * up)
        )
        values = act * up
    values, error = values * scale, error * abs(scale)
    if before is not None:
        values = values + before
    return values, error + EPSILON * np.abs(values)
