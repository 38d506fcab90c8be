"""Ops of the feed-forward block: gate_mul, and add_gated for a shared expert.

Called by layers/mlp.py and layers/moe.py; kernels/moe.py uses `activate`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.native import rows
from flatout.kernels.norm import FEW_ROWS
from flatout.kernels.op import Cost, nbytes, op

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def activate(x: Tensor, activation: str) -> Tensor:
    """A new tensor: silu, gelu, or gelu by its tanh approximation."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _gate_cost(out: Tensor, gate_up: Tensor, activation: str) -> Cost:
    return Cost(activations=nbytes(out, gate_up), flops=5 * out.numel())


def _add_gated_cost(out: Tensor, x: Tensor, gate: Tensor) -> Cost:
    return Cost(activations=nbytes(out, out, x, gate), flops=2 * out.numel())


@op(cost=_gate_cost, last_resort=True)
def gate_mul(out: Tensor, gate_up: Tensor, activation: str) -> None:
    """out [T, I] = activation(gate) * up, where gate_up [T, 2I] holds gate first. activation: one of ACTIVATIONS."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        torch._C._nn.silu(gate, out=out).mul_(up)  # type: ignore[call-arg]  # under F.silu, which takes no out
    else:
        torch.mul(activate(gate, activation), up, out=out)


@op(cost=_add_gated_cost, updates=("out",))
def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """out += sigmoid(gate) * x, with out and x [T, H], gate [T, 1]."""
    out.add_(torch.sigmoid(gate) * x)


@gate_mul.implementation("native", lambda out, gate_up, activation: native.available() and rows.suit(out, gate_up), native=True)
def _gate_native(out: Tensor, gate_up: Tensor, activation: str) -> None:
    rows.gate(out, gate_up, activation)


@add_gated.implementation(
    "native",
    lambda out, x, gate: native.available() and rows.suit(out, x, gate),
    sure=lambda out, x, gate: x.shape[0] <= FEW_ROWS,
    native=True,
)
def _add_gated_native(out: Tensor, x: Tensor, gate: Tensor) -> None:
    rows.add(out, x, 1.0, gate)
