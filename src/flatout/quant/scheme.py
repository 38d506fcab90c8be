"""Scheme: how one linear layer's weights are stored and multiplied.

layers/linear.py meets it in two places only: storage for the load, and apply() in the forward. What a product costs is told by the op
that apply() calls. Names of models or checkpoints have no place here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Scheme(Protocol):
    name: str

    def tensors(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Empty storage of a [rows, columns] weight, by the last part of its name ("weight"; a quantised scheme has more).
        dtype is that of the activations."""
        ...

    def apply(self, out: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        """out [T, rows] = x [T, columns] @ weight^T + bias: one op."""
        ...
