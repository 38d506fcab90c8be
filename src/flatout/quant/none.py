"""Plain weights: stored in the dtype of the activations.

The scheme of every layer whose checkpoint says nothing else. Called by layers/linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.moe import experts
from flatout.quant.scheme import RmsNorm


class Plain:
    """invariant: a row's result has the same bits whatever rows are beside it (--deterministic)."""

    name = "none"
    lines = 1

    def __init__(self, invariant: bool = False):
        self.invariant = invariant

    def tensors(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"weight": torch.empty(rows, columns, dtype=dtype, device=device)}

    def apply(self, out: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        linear(out, x, tensors["weight"], bias, self.invariant)

    def add(self, stream: Tensor, scratch: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, scale: float) -> None:
        linear_add(stream, scratch, x, tensors["weight"], bias, scale, self.invariant)

    def normed(self, out: Tensor, scratch: Tensor, x: Tensor, norm: RmsNorm, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        norm_linear(out, scratch, x, *norm, tensors["weight"], bias, self.invariant)

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
        norm_gated(out, scratch, wide, x, *norm, tensors["weight"], bias, activation, self.invariant)

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
        experts(out, act, parts, x, gate_up["weight"], down["weight"], weights, chosen, activation, self.invariant)
