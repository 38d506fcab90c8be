"""Weights kept in 4 or 8 bits, in groups of 32 columns with scales of their own; the rows they meet are rounded to int8.

For projections of GGUF files (quant/gguf.py:repacked) and those that are rounded while loading (quant/rounding.py). Called by layers/linear.py and models/load.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flatout.kernels.packed import BITS, BYTES, GROUP, LINES, packed_add, packed_linear, packed_norm_gated, packed_norm_linear
from flatout.kernels.packed_moe import packed_experts
from flatout.quant.scheme import RmsNorm


def bits_of(weight: Tensor) -> int:
    """4 or 8: of a packed weight [lines / 16, columns / 32, bytes], or of a stack of them."""
    return BITS[weight.shape[-1]]


def misfit(parts: Iterable[int], columns: int) -> str:
    """Why a weight whose parts have so many rows cannot be packed, in words, or "": it can."""
    odd = next((rows for rows in parts if rows % LINES), 0)
    if odd:
        return f"{odd} rows are no multiple of {LINES}"
    return f"{columns} columns are no multiple of {GROUP}" if columns % GROUP else ""


class Packed:
    lines = LINES

    def __init__(self, bits: int):
        self.bits = bits
        self.name = f"int{bits} weights (groups of {GROUP})"

    def tensors(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """ValueError: a shape that does not fall into whole groups."""
        if why := misfit((rows,), columns):
            raise ValueError(f"{rows} x {columns} cannot be packed: {why}")
        return {"weight": torch.empty(rows // LINES, columns // GROUP, BYTES[self.bits], dtype=torch.uint8, device=device)}

    def apply(self, out: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        packed_linear(out, x, tensors["weight"], bias)

    def add(self, stream: Tensor, scratch: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, scale: float) -> None:
        packed_add(stream, scratch, x, tensors["weight"], bias, scale)

    def normed(self, out: Tensor, scratch: Tensor, x: Tensor, norm: RmsNorm, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        packed_norm_linear(out, scratch, x, *norm, tensors["weight"], bias)

    def gated(
        self,
        out: Tensor,
        scratch: Tensor,
        wide: Tensor,
        x: Tensor,
        norm: RmsNorm,
        tensors: dict[str, Tensor],
        bias: Tensor | None,
        activation: str,
    ) -> None:
        packed_norm_gated(out, scratch, wide, x, *norm, tensors["weight"], bias, activation)

    def experts(
        self,
        out: Tensor,
        act: Tensor,
        parts: Tensor,
        x: Tensor,
        gate_up: dict[str, Tensor],
        down: dict[str, Tensor],
        weights: Tensor,
        chosen: Tensor,
        activation: str,
    ) -> None:
        packed_experts(out, x, gate_up["weight"], down["weight"], weights, chosen, activation)
