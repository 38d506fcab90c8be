"""Workspace: the buffers that a forward's ops write into, allocated once and shared by name across layers.

No buffer is made in the step loop. Made by the decoder; layers keep the Rows they ask for.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """A buffer [max_rows, width]; `now` is its leading rows of the present forward."""

    __slots__ = ("buffer", "now")

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.now = buffer


class Workspace:
    """max_rows: the most tokens of a forward (or sampled rows of its logits)."""

    def __init__(self, max_rows: int, dtype: torch.dtype, device: torch.device):
        self.max_rows = max_rows
        self.dtype = dtype
        self.device = device
        self._rows: dict[tuple[str, int, torch.dtype], Rows] = {}
        self._count = max_rows

    def rows(self, name: str, width: int, dtype: torch.dtype | None = None) -> Rows:
        """The buffer of this name and width: the same one for all who ask, so its contents last until the next of them writes."""
        key = (name, width, dtype or self.dtype)
        if key not in self._rows:
            self._rows[key] = Rows(torch.empty(self.max_rows, width, dtype=key[2], device=self.device))
        return self._rows[key]

    def resize(self, count: int) -> None:
        """Set every `now` to `count` rows. ValueError: more than max_rows. Repeated counts, as in decode, cost nothing."""
        if count == self._count:
            return
        if count > self.max_rows:
            raise ValueError(f"{count} rows where the workspace holds {self.max_rows}")
        for rows in self._rows.values():
            rows.now = rows.buffer[:count]
        self._count = count
