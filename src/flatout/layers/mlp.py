"""MLP: the gated feed-forward block, gate and up in one projection.

Called by models/decoder.py, and by layers/moe.py for a shared expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.layers.destination import Destination
from flatout.layers.linear import Linear, under
from flatout.layers.norm import Around
from flatout.layers.workspace import Workspace
from flatout.quant.scheme import Schemes

ALONE = Around()


class MLP:
    """Adds its output to the residual stream, or, as a part of another block, writes it into rows of its own."""

    def __init__(
        self,
        schemes: Schemes,
        hidden: int,
        intermediate: int,
        activation: str,
        bias: bool,
        workspace: Workspace,
        *,
        around: Around = ALONE,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.activation = activation
        self.around = around
        segments = {"gate": intermediate, "up": intermediate}
        self.gate_up = Linear(schemes("gate_up"), 2 * intermediate, hidden, bias=bias, segments=segments, dtype=dtype, device=device)
        self.down = Linear(schemes("down"), hidden, intermediate, bias=bias, dtype=dtype, device=device)
        self._gate_up = workspace.rows("gate_up", 2 * intermediate)
        self._act = workspace.rows("act", intermediate)
        self._scratch = workspace.rows("delta", hidden)

    def __call__(self, stream: Tensor) -> None:
        """stream [T, hidden] += the block's output."""
        scratch = self._scratch.now
        act = self.gate_up.gated_after(self.around.norm, self._act.now, scratch, self._gate_up.now, stream, self.activation)
        self.down.onto(stream, self.around.post_norm, scratch, act, self.around.scale)

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, hidden] = the net's value at x [T, hidden], without norms; returns out."""
        act = self.gate_up.gated_after(None, self._act.now, out, self._gate_up.now, x, self.activation)
        return self.down(out, act)

    def destinations(self) -> dict[str, Destination]:
        return under("gate_up", self.gate_up.destinations()) | under("down", self.down.destinations())
