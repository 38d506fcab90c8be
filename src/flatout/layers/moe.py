"""MoE: a router, stacked experts, and the shared expert that some families run beside them.

Takes an MLP's place in a layer. Called by models/decoder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.kernels.activation import add_gated
from flatout.kernels.moe import route
from flatout.kernels.norm import add
from flatout.layers.destination import Destination
from flatout.layers.linear import Linear, bounds, under
from flatout.layers.mlp import MLP
from flatout.layers.norm import Around
from flatout.layers.workspace import Workspace
from flatout.quant.none import Plain
from flatout.quant.scheme import Schemes, stacked

if TYPE_CHECKING:
    from flatout.modelfile.spec import MoESpec


class MoE:
    def __init__(
        self,
        spec: MoESpec,
        schemes: Schemes,
        plain: Plain,
        hidden: int,
        activation: str,
        workspace: Workspace,
        *,
        around: Around,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """plain: the scheme of the router. Both products of the experts have schemes of one class."""
        self.around = around
        self.activation = activation
        self.renormalise = spec.norm_topk
        self.num_experts = spec.num_experts
        self.segments = bounds({"gate": spec.intermediate_size, "up": spec.intermediate_size})
        self.router = Linear(plain, spec.num_experts, hidden, dtype=dtype, device=device)
        self.scheme, self.hidden, self.width = schemes("gate_up"), hidden, spec.intermediate_size
        self.gate_up = stacked(self.scheme, spec.num_experts, 2 * self.width, hidden, dtype, device)
        self.down = stacked(schemes("down"), spec.num_experts, hidden, self.width, dtype, device)
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared_intermediate_size:
            width = spec.shared_intermediate_size
            self._shared = workspace.rows("shared", hidden)
            self.shared = MLP(
                lambda name: schemes(f"shared.{name}"), hidden, width, activation, False, workspace, dtype=dtype, device=device
            )
        if spec.shared_gate:
            self.shared_gate = Linear(plain, 1, hidden, dtype=dtype, device=device)
            self._gate = workspace.rows("shared_gate", 1)
        self._logits = workspace.rows("router", spec.num_experts)
        self._weights = workspace.rows("expert_weights", spec.top_k, torch.float32)
        self._chosen = workspace.rows("experts", spec.top_k, torch.int64)
        self._act = workspace.rows("expert_act", spec.top_k * spec.intermediate_size)
        self._parts = workspace.rows("expert_parts", spec.top_k * hidden)
        self._normed = workspace.rows("normed", hidden)
        self._out = workspace.rows("delta", hidden)

    def __call__(self, stream: Tensor) -> None:
        """stream [T, hidden] += the block's output."""
        around = self.around
        x = stream if around.norm is None else around.norm(self._normed.now, stream)
        out, weights, chosen = self._out.now, self._weights.now, self._chosen.now
        route(weights, chosen, self.router(self._logits.now, x), self.renormalise)
        self.scheme.experts(out, self._act.now, self._parts.now, x, self.gate_up, self.down, weights, chosen, self.activation)
        if self.shared is not None:
            shared = self.shared.into(self._shared.now, x)
            if self.shared_gate is None:
                add(out, shared, 1.0)
            else:
                add_gated(out, shared, self.shared_gate(self._gate.now, x))
        if around.post_norm is not None:
            around.post_norm(out, out)
        add(stream, out, around.scale)

    def destinations(self) -> dict[str, Destination]:
        made = under("router", self.router.destinations())
        lines = self.scheme.lines
        for name, tensor in self.gate_up.items():
            made[f"gate_up.{name}"] = Destination(tensor, self.segments, self.num_experts, lines, self.hidden)
        for name, tensor in self.down.items():
            made[f"down.{name}"] = Destination(tensor, None, self.num_experts, lines, self.width)
        if self.shared is not None:
            made |= under("shared", self.shared.destinations())
        if self.shared_gate is not None:
            made |= under("shared_gate", self.shared_gate.destinations())
        return made
