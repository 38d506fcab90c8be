"""Scheme: how one linear layer's weights are stored and multiplied.

layers/linear.py meets it in two places only: storage for the load, and the products of the forward, each of them one op that tells what
it costs. Names of models or checkpoints have no place here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RmsNorm(NamedTuple):
    """A norm that a product may do on its way in (kernels/norm.py says what it computes)."""

    weight: Tensor
    eps: float
    offset: float


Schemes = Callable[[str], "Scheme"]  # by the name of a projection below what it belongs to: "qkv", "o", "gate_up", "down"


class Scheme(Protocol):
    """x [T, columns], weights [rows, columns]. Scratch operands hold nothing of use afterwards."""

    name: str
    lines: int  # rows of a weight that one row of its storage holds

    def tensors(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Empty storage of a [rows, columns] weight, by the last part of its name ("weight"; a quantised scheme has more).
        dtype is that of the activations."""
        ...

    def apply(self, out: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        """out [T, rows] = x @ weight^T + bias."""
        ...

    def add(self, stream: Tensor, scratch: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, scale: float) -> None:
        """stream [T, rows] += scale * (x @ weight^T + bias); scratch [T, rows]."""
        ...

    def normed(self, out: Tensor, scratch: Tensor, x: Tensor, norm: RmsNorm, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        """out [T, rows] = norm(x) @ weight^T + bias; scratch [T, columns]."""
        ...

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
        """out [T, rows / 2] = activation(gate) * up of norm(x) @ weight^T + bias, gate's rows first; scratch [T, columns], wide [T, rows]."""
        ...

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
        """out [T, H] = each token's chosen experts' feed-forward nets at x [T, H], weighed and summed (kernels/moe.py:experts). gate_up and down:
        stacks [experts, ...] of this scheme's weights. Scratch act [T, top_k * I], parts [T, top_k * H]."""
        ...


def stacked(scheme: Scheme, count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Empty storage of `count` weights [rows, columns], [count, ...] each."""
    return {name: t.unflatten(0, (count, -1)) for name, t in scheme.tensors(count * rows, columns, dtype, device).items()}
