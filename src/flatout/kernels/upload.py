"""upload(): what the host has worked out for a step, on the device by one copy that nothing waits for.

Called by runner/ and attention/ for the inputs of steps that are not captured; captured ones keep a buffer each (runner/graphs.py), weights
come by models/staging.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BUFFERS = 8  # pinned, in turn: a step takes two or three as a rule, and two steps may be in the air
# Bytes of each at first: a chunk of 16,384 tokens takes 400 KiB. Pinning more during a step cost it 50 us and more (an H200's host).
ROOM = 512 << 10
ALIGNED = 16  # bytes at which each array begins, so that kernels are compiled for one alignment
DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "bool")}
_here = threading.local()  # rings: by device


class _Ring:
    def __init__(self) -> None:
        room = torch.empty(BUFFERS * ROOM, dtype=torch.uint8, pin_memory=True)
        self._buffers = [(piece, torch.cuda.Event()) for piece in room.split(ROOM)]
        self._turn = 0

    def next(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer of at least so many bytes, and the event to be recorded behind its copy. Where that which is next is still being copied, another
        in its place: torch keeps the old one until then."""
        self._turn = (self._turn + 1) % BUFFERS
        buffer, copied = self._buffers[self._turn]
        if buffer.shape[0] < size or not copied.query():
            buffer, copied = torch.empty(max(ROOM, 1 << (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
            self._buffers[self._turn] = buffer, copied
        return buffer, copied


def upload(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Tensors of these arrays' types (of DTYPES) and shapes. On the CPU they share the arrays' memory, if those are contiguous."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
    rings = _here.__dict__.setdefault("rings", {})
    if device not in rings:
        rings[device] = _Ring()
    buffer, copied = rings[device].next(sum(sizes))
    host, begin = buffer.numpy(), 0
    for array, size in zip(arrays, sizes):
        host[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
        begin += size
    there = torch.empty(begin, dtype=torch.uint8, device=device)
    there.copy_(buffer[:begin], non_blocking=True)
    copied.record(torch.cuda.current_stream(device))
    return [piece[: array.nbytes].view(DTYPES[array.dtype]).view(array.shape) for array, piece in zip(arrays, there.split(sizes))]
