"""MLP: the gated feed-forward block, gate and up in one projection.

Called by models/decoder.py, and by layers/moe.py for a shared expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.activation import gate_mul
from flatout.layers.destination import Destination
from flatout.layers.linear import Linear, under
from flatout.layers.workspace import Workspace
from flatout.quant.scheme import Scheme


class MLP:
    def __init__(
        self,
        scheme: Scheme,
        hidden: int,
        intermediate: int,
        activation: str,
        bias: bool,
        workspace: Workspace,
        *,
        out: str = "delta",
        dtype: torch.dtype,
        device: torch.device,
    ):
        """out: name of the workspace rows that the block writes."""
        self.activation = activation
        segments = {"gate": intermediate, "up": intermediate}
        self.gate_up = Linear(scheme, 2 * intermediate, hidden, bias=bias, segments=segments, dtype=dtype, device=device)
        self.down = Linear(scheme, hidden, intermediate, bias=bias, dtype=dtype, device=device)
        self._gate_up = workspace.rows("gate_up", 2 * intermediate)
        self._act = workspace.rows("act", intermediate)
        self._out = workspace.rows(out, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden] in the workspace."""
        gate_mul(self._act.now, self.gate_up(self._gate_up.now, x), self.activation)
        return self.down(self._out.now, self._act.now)

    def destinations(self) -> dict[str, Destination]:
        return under("gate_up", self.gate_up.destinations()) | under("down", self.down.destinations())
