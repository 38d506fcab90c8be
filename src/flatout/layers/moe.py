"""MoE: a router, stacked experts, and the shared expert that some families run beside them.

Takes an MLP's place in a layer. Called by models/decoder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.kernels.activation import add_gated
from flatout.kernels.moe import experts, route
from flatout.kernels.norm import add
from flatout.layers.destination import Destination
from flatout.layers.linear import Linear, bounds, under
from flatout.layers.mlp import MLP
from flatout.layers.workspace import Workspace
from flatout.quant.none import Plain
from flatout.quant.scheme import Scheme

if TYPE_CHECKING:
    from flatout.modelfile.spec import MoESpec


class MoE:
    def __init__(
        self, spec: MoESpec, scheme: Scheme, hidden: int, activation: str, workspace: Workspace, *, dtype: torch.dtype, device: torch.device
    ):
        self.activation = activation
        self.renormalise = spec.norm_topk
        self.num_experts = spec.num_experts
        self.segments = bounds({"gate": spec.intermediate_size, "up": spec.intermediate_size})
        self.router = Linear(Plain(), spec.num_experts, hidden, dtype=dtype, device=device)
        self.gate_up = torch.empty(spec.num_experts, 2 * spec.intermediate_size, hidden, dtype=dtype, device=device)
        self.down = torch.empty(spec.num_experts, hidden, spec.intermediate_size, dtype=dtype, device=device)
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared_intermediate_size:
            width = spec.shared_intermediate_size
            self.shared = MLP(scheme, hidden, width, activation, False, workspace, out="shared", dtype=dtype, device=device)
        if spec.shared_gate:
            self.shared_gate = Linear(Plain(), 1, hidden, dtype=dtype, device=device)
            self._gate = workspace.rows("shared_gate", 1)
        self._logits = workspace.rows("router", spec.num_experts)
        self._weights = workspace.rows("expert_weights", spec.top_k, torch.float32)
        self._chosen = workspace.rows("experts", spec.top_k, torch.int64)
        self._out = workspace.rows("delta", hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden] in the workspace."""
        out, weights, chosen = self._out.now, self._weights.now, self._chosen.now
        route(weights, chosen, self.router(self._logits.now, x), self.renormalise)
        experts(out, x, self.gate_up, self.down, weights, chosen, self.activation)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is None:
                add(out, shared, 1.0)
            else:
                add_gated(out, shared, self.shared_gate(self._gate.now, x))
        return out

    def destinations(self) -> dict[str, Destination]:
        made = under("router", self.router.destinations())
        made["gate_up.weight"] = Destination(self.gate_up, self.segments, self.num_experts)
        made["down.weight"] = Destination(self.down, None, self.num_experts)
        if self.shared is not None:
            made |= under("shared", self.shared.destinations())
        if self.shared_gate is not None:
            made |= under("shared_gate", self.shared_gate.destinations())
        return made
