"""Copies from files to the GPU through pinned memory, a piece at a time: while one piece travels the next is read.

Pageable memory, as a mapped file's, reaches the device at a third of the speed (H200: 18 against 55 GB/s), and its copies wait for each other.
Called by models/load.py, by several threads; each has buffers and a stream of its own.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE = 32 << 20  # bytes: long enough to travel at full speed, short enough to begin early
BUFFERS = 2


class Staging:
    """copy() from any thread; finish() when all are done, before the device's default stream reads what was written."""

    def __init__(self, device: torch.device):
        self.device = device
        self._local = threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()

    def copy(self, place: Tensor, value: Tensor) -> None:
        """place = value: place contiguous on the device, value contiguous on the CPU, the same shape, any dtypes."""
        if not place.is_contiguous() or not value.is_contiguous():
            place.copy_(value)
            return
        buffers, stream = self._mine()
        source, target = value.view(-1), place.view(-1)
        step = PIECE // value.element_size()
        for begin in range(0, source.numel(), step):
            piece = source[begin : begin + step]
            buffer, event = buffers[0]
            buffers.reverse()
            event.synchronize()  # its last piece has left
            staged = buffer[: piece.numel() * piece.element_size()].view(piece.dtype)
            staged.copy_(piece)
            with torch.cuda.stream(stream):
                target[begin : begin + step].copy_(staged, non_blocking=True)
                event.record()

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _mine(self) -> tuple[list[tuple[Tensor, torch.cuda.Event]], torch.cuda.Stream]:
        if not hasattr(self._local, "buffers"):
            self._local.stream = torch.cuda.Stream(self.device)
            self._local.stream.wait_stream(torch.cuda.current_stream(self.device))  # what still fills or uses the places
            self._local.buffers = [(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(BUFFERS)]
            with self._lock:
                self._streams.append(self._local.stream)
        return self._local.buffers, self._local.stream
