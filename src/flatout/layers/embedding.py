"""Embedding: the table of token rows, plain or kept quantised, and the scale that some families put on them.

Called by models/decoder.py. A tied head reads the same plain table; where it is packed, the embedding may read the head's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.blocks import PACKED
from flatout.kernels.embedding import embedding, quantised_embedding
from flatout.layers.destination import Destination

HEAD = "head"  # the kind of an embedding that reads the packed weight of a tied head


class Embedding:
    def __init__(self, vocab_size: int, width: int, scale: float, kind: str = "", *, dtype: torch.dtype, device: torch.device):
        """kind: the GGUF type of kernels/blocks.py in whose blocks the table is kept; HEAD: share() will give it; or "": it is kept in dtype."""
        self.shares = kind == HEAD
        self.kind = "" if self.shares else kind
        self.width = width
        if self.shares:
            self.weight = torch.empty(0, dtype=torch.uint8, device=device)
        elif kind:
            row = width // PACKED[kind].elements * PACKED[kind].layout.itemsize
            self.weight = torch.empty(vocab_size, row, dtype=torch.uint8, device=device)
        else:
            self.weight = torch.empty(vocab_size, width, dtype=dtype, device=device)
        # the scale is a number of the model's dtype in every family that has one (Gemma: sqrt(3072) = 55.43 is 55.5 in bfloat16)
        self.scale = float(torch.tensor(scale, dtype=dtype))

    def share(self, packed: Tensor) -> None:
        """Read these rows, uint8 [vocab_size / 16, width / 32, bytes] (kernels/packed.py), which another layer owns and loads."""
        self.weight = packed

    def __call__(self, out: Tensor, ids: Tensor) -> None:
        """out [T, width] from ids int64 [T]."""
        if self.weight.dtype == torch.uint8:
            quantised_embedding(out, ids, self.weight, self.kind, self.scale)
        else:
            embedding(out, ids, self.weight, self.scale)

    def destinations(self) -> dict[str, Destination]:
        return {} if self.shares else {"weight": Destination(self.weight, columns=self.width, blocks=self.kind)}
