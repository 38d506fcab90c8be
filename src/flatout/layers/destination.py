"""Destination: where a checkpoint's tensors land in one parameter of the decoder, and which parts have landed.

A parameter may be fused (q, k, v in one; gate and up in one) or stacked over experts, while files hold the pieces. Layers
declare their parameters as Destinations; models/load.py writes through them. No file formats and no names live here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flatout.kernels.packed import unpacked
from flatout.quant.gguf import dequantize

Copy = Callable[[Tensor, Tensor], object]


class Destination:
    """One parameter, written piece by piece.

    tensor: [rows, ...], or [experts, rows, ...] when `experts` is given.
    segments: name -> (first row, end row) of the pieces that files may hold one by one; empty: the parameter comes whole.
    lines: 1, or how many rows of the weight, of `columns`, one row of a packed tensor holds; what is written is packed likewise.
    blocks: a GGUF type in whose blocks the rows of the weight, of `columns`, are kept; what is written is such blocks.
    A segment or expert left out of write() means all of them in one tensor. Each piece is written once.
    """

    def __init__(
        self,
        tensor: Tensor,
        segments: Mapping[str, tuple[int, int]] | None = None,
        experts: int | None = None,
        lines: int = 1,
        columns: int = 0,
        blocks: str = "",
    ):
        self.tensor = tensor
        self.lines, self.columns, self.blocks = lines, columns, blocks
        self.segments = {name: (first // lines, end // lines) for name, (first, end) in (segments or {}).items()}
        self.experts = experts
        self._unwritten = set(self.pieces())

    def write(self, value: Tensor, segment: str | None = None, expert: int | None = None, copy: Copy = Tensor.copy_) -> None:
        """Copy `value` into its place with copy(place, value), which casts to the parameter's dtype and device. ValueError: wrong shape, or
        the piece was written before."""

        def copied(place: Tensor) -> None:
            if value.shape != place.shape:
                raise ValueError(f"shape {list(value.shape)} where {list(place.shape)} is expected")
            copy(place, value)

        self.fill(copied, segment, expert)

    def fill(self, into: Callable[[Tensor], None], segment: str | None = None, expert: int | None = None) -> None:
        """Let into(place) write the piece where it lies. ValueError: it was written before; what into() raises leaves it unwritten."""
        place = self._view(segment, expert)
        pieces = set(self.pieces(segment, expert))
        if not pieces <= self._unwritten:
            raise ValueError("written before: two tensors of the checkpoint hold the same parameter")
        with torch.no_grad():
            into(place)
        self._unwritten -= pieces

    def values(self) -> Tensor:
        """The weight as products and rows of it are made of: where it is kept quantised float32, else the tensor itself."""
        if self.blocks:
            return dequantize(self.tensor.view(-1).numpy(), self.blocks, self.shape_of())
        return self.tensor if self.lines == 1 else unpacked(self.tensor)

    def missing(self) -> list[str]:
        """The pieces not written yet, in words ("" for a parameter that comes whole); empty when complete."""
        return [
            " ".join(w for w in ("" if e is None else f"expert {e}", s or "") if w) for e, s in self.pieces() if (e, s) in self._unwritten
        ]

    def shape_of(self, segment: str | None = None, expert: int | None = None) -> tuple[int, ...]:
        """The shape of this piece of the weight, which write() expects unless it is packed."""
        shape = tuple(self._view(segment, expert).shape)
        if self.blocks:
            return (*shape[:-1], self.columns)
        return shape if self.lines == 1 else (*shape[:-3], shape[-3] * self.lines, self.columns)

    def pieces(self, segment: str | None = None, expert: int | None = None) -> list[tuple[int | None, str | None]]:
        """The smallest parts (expert, segment) that a write() with these arguments fills."""
        experts: list[int | None] = [expert] if expert is not None or self.experts is None else list(range(self.experts))
        segments: list[str | None] = [segment] if segment is not None or not self.segments else list(self.segments)
        return [(e, s) for e in experts for s in segments]

    def _view(self, segment: str | None, expert: int | None) -> Tensor:
        if segment is not None and segment not in self.segments:
            raise ValueError(f"no part {segment!r} here; parts: {', '.join(self.segments) or 'none'}")
        if expert is not None and (self.experts is None or not 0 <= expert < self.experts):
            raise ValueError(f"no expert {expert} here; experts: {self.experts or 'none'}")
        view = self.tensor if expert is None else self.tensor[expert]
        if segment is None:
            return view
        first, end = self.segments[segment]
        return view.narrow(1 if self.experts is not None and expert is None else 0, first, end - first)
