"""Norm, an rms norm with its weight; and Join, the step from one block to the next: residual add and norm in one op.

Called by models/decoder.py, layers/head.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.norm import add, add_rms_norm, rms_norm
from flatout.layers.destination import Destination
from flatout.layers.workspace import Workspace


class Norm:
    """offset is added to the stored weight (Gemma stores weights minus 1)."""

    def __init__(self, width: int, eps: float, offset: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.eps = eps
        self.offset = offset

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out = norm(x), both [T, width], out may be x; returns out."""
        rms_norm(out, x, self.weight, self.eps, self.offset)
        return out

    def destinations(self) -> dict[str, Destination]:
        return {"weight": Destination(self.weight)}


class Join:
    """Adds a block's output, scaled, to the residual stream and gives what the next block reads: the normed stream, or the stream itself."""

    def __init__(self, norm: Norm | None, residual_scale: float, hidden: int, workspace: Workspace):
        self.norm = norm
        self.residual_scale = residual_scale
        self._normed = workspace.rows("normed", hidden)

    def __call__(self, stream: Tensor, delta: Tensor | None) -> Tensor:
        """stream [T, hidden] += residual_scale * delta (None: nothing yet to add)."""
        norm = self.norm
        if norm is None:
            if delta is not None:
                add(stream, delta, self.residual_scale)
            return stream
        if delta is None:
            return norm(self._normed.now, stream)
        out = self._normed.now
        add_rms_norm(out, stream, delta, norm.weight, norm.eps, norm.offset, self.residual_scale)
        return out

    def destinations(self) -> dict[str, Destination]:
        return {} if self.norm is None else self.norm.destinations()
