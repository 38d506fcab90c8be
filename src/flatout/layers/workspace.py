"""Workspace: the buffers that a forward's ops write into, allocated once and shared by name across layers.

No buffer is made in the step loop, and no view while the number of rows stays what it was. Made by the decoder and the head; layers keep
the Rows they ask for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Rows:
    """`now`: the leading rows of a buffer, or a view of other Rows, as the present forward needs them."""

    __slots__ = ("_make", "now")

    def __init__(self, make: Callable[[int], Tensor], count: int):
        self._make = make
        self.resize(count)

    def resize(self, count: int) -> None:
        self.now = self._make(count)


class Workspace:
    """max_rows: the most tokens of a forward (or sampled rows of its logits)."""

    def __init__(self, max_rows: int, dtype: torch.dtype, device: torch.device):
        self.max_rows = max_rows
        self.dtype = dtype
        self.device = device
        self.nbytes = 0  # of its buffers
        self._count = max_rows
        self._rows: dict[tuple[object, ...], Rows] = {}  # views after what they are views of

    def rows(self, name: str, width: int, dtype: torch.dtype | None = None) -> Rows:
        """[count, width] of the buffer of this name and width: the same for all who ask, so its contents last until the next of them writes."""
        dtype = dtype or self.dtype
        key = (name, width, dtype)
        if key not in self._rows:
            # integers pick things: even a step that is only rehearsed must find none out of range
            make = torch.empty if dtype.is_floating_point else torch.zeros
            buffer = make(self.max_rows, width, dtype=dtype, device=self.device)
            self.nbytes += buffer.nbytes
            self._rows[key] = Rows(lambda count: buffer[:count], self._count)
        return self._rows[key]

    def view(self, name: str, of: Rows, make: Callable[[Tensor], Tensor]) -> Rows:
        """make(of.now), made anew when the number of rows changes; the same for all who ask by this name and rows."""
        key = (name, id(of))
        if key not in self._rows:
            self._rows[key] = Rows(lambda count: make(of.now), self._count)
        return self._rows[key]

    def resize(self, count: int) -> None:
        """The next forward has `count` rows. ValueError: more than max_rows."""
        if count == self._count:
            return
        if count > self.max_rows:
            raise ValueError(f"{count} rows where the workspace holds {self.max_rows}")
        for rows in self._rows.values():
            rows.resize(count)
        self._count = count
