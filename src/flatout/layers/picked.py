"""Picked: copies of the few rows that a step goes on with after its last keys and values are written.

Called by models/decoder.py before the rest of the last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.embedding import gather_rows


class Picked:
    def __init__(self, max_rows: int, hidden: int, q_size: int, *, dtype: torch.dtype, device: torch.device):
        self._stream, self._queries = (torch.empty(max_rows, width, dtype=dtype, device=device) for width in (hidden, q_size))

    @property
    def nbytes(self) -> int:
        return self._stream.nbytes + self._queries.nbytes

    def __call__(self, stream: Tensor, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (int64 [S]) of the residual stream [T, hidden] and of the queries [T, q_size]: good until the next call."""
        few, theirs = self._stream[: rows.shape[0]], self._queries[: rows.shape[0]]
        if rows.shape[0]:
            gather_rows(few, stream, rows)
            gather_rows(theirs, queries, rows)
        return few, theirs
