"""The energy that a GPU has used, as NVML counts it. What is not counted says what that would need: it is never 0.

Called by bench/ceiling.py; tests hand it a library of their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flatout.doctor.facts import NotAvailable
from flatout.doctor.nvml import Nvml


def joules(uuid: str, library: Any = None) -> float:
    """Since the driver was loaded, of the GPU with this UUID ("" where the model runs on the CPU), to a millijoule. NotAvailable."""
    if not uuid:
        raise NotAvailable("a GPU: the energy of a CPU is not told to ordinary processes")
    with Nvml(library) as nvml:
        for device in nvml.devices():
            if nvml.text("nvmlDeviceGetUUID", device).removeprefix("GPU-") == uuid:
                return nvml.number("nvmlDeviceGetTotalEnergyConsumption", device, kind=ctypes.c_ulonglong) / 1e3
    raise NotAvailable(f"NVML to know the GPU {uuid}")
