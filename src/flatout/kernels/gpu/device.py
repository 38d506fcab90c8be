"""What a Triton kernel's launch may depend on: facts of a device by capability, never by name.

Called by the kernels of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Facts:
    capability: tuple[int, int]
    sms: int  # multiprocessors
    shared_memory: int  # bytes that one block may take
    pdl: bool  # dependent launches: a kernel may start, and load weights, while the one before it ends


INTERPRETED = Facts((8, 0), 4, 101_376, False)  # the least that kernels are written for: sm_89's shared memory, no sm_90 instructions


@cache
def facts(device: torch.device) -> Facts:
    """Of a CUDA device; of the interpreter's stand-in on the CPU."""
    if device.type != "cuda":
        return INTERPRETED
    p = torch.cuda.get_device_properties(device)
    capability = (p.major, p.minor)
    shared = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Facts(capability, p.multi_processor_count, shared, capability >= (9, 0))
