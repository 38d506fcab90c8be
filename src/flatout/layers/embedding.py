"""Embedding: the table of token rows, and the scale that some families put on them.

Called by models/decoder.py. A tied head reads the same table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.embedding import embedding
from flatout.layers.destination import Destination


class Embedding:
    def __init__(self, vocab_size: int, width: int, scale: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(vocab_size, width, dtype=dtype, device=device)
        # the scale is a number of the model's dtype in every family that has one (Gemma: sqrt(3072) = 55.43 is 55.5 in bfloat16)
        self.scale = float(torch.tensor(scale, dtype=dtype))

    def __call__(self, out: Tensor, ids: Tensor) -> None:
        """out [T, width] from ids int64 [T]."""
        embedding(out, ids, self.weight, self.scale)

    def destinations(self) -> dict[str, Destination]:
        return {"weight": Destination(self.weight)}
