"""Plain weights: stored in the dtype of the activations.

The scheme of every layer whose checkpoint says nothing else. Called by layers/linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.linear import linear


class Plain:
    name = "none"

    def tensors(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        return {"weight": torch.empty(rows, columns, dtype=dtype, device=device)}

    def apply(self, out: Tensor, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> None:
        linear(out, x, tensors["weight"], bias)
