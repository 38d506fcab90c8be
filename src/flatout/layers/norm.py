"""Norm: an rms norm with its weight, done by itself or by the product that follows it; and Around, what stands between a block and the stream.

Called by models/decoder.py and the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.kernels.norm import rms_norm
from flatout.layers.destination import Destination
from flatout.quant.scheme import RmsNorm


class Norm:
    """offset is added to the stored weight (Gemma stores weights minus 1)."""

    def __init__(self, width: int, eps: float, offset: float, *, dtype: torch.dtype, device: torch.device):
        self.operands = RmsNorm(torch.empty(width, dtype=dtype, device=device), eps, offset)

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out = norm(x), both [T, width], out may be x; returns out."""
        rms_norm(out, x, *self.operands)
        return out

    def destinations(self) -> dict[str, Destination]:
        return {"weight": Destination(self.operands.weight)}


@dataclass(frozen=True, slots=True)
class Around:
    """A block reads norm(stream) and adds scale * post_norm(its output) to it."""

    norm: Norm | None = None
    post_norm: Norm | None = None
    scale: float = 1.0

    def destinations(self, block: str) -> dict[str, Destination]:
        """By the names that the decoder gives norms: attn_norm.weight and attn_post_norm.weight of the block attn."""
        norms = {f"{block}_norm": self.norm, f"{block}_post_norm": self.post_norm}
        return {f"{name}.weight": norm.destinations()["weight"] for name, norm in norms.items() if norm is not None}
