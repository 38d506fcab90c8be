"""Counters: how busy this machine's cores and GPUs are just now, a line each. What it is and could do is cpu.py's and gpu.py's.

No torch; NVML is asked where a driver is. Called by cli/top.py.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from flatout.doctor.facts import NotAvailable, bytes_shown
from flatout.doctor.gpu import SM, THROTTLES
from flatout.doctor.nvml import Nvml
from flatout.ledger.vitals import machine


class Counters:
    """read() tells the time since the call before. library: NVML's, for tests; None: the driver's."""

    def __init__(self, library: Any = None, cores: Callable[[], dict[str, float]] = machine, clock: Callable[[], float] = time.monotonic):
        self._library, self._cores, self._clock = library, cores, clock
        self._before = clock(), cores()

    def read(self) -> list[str]:
        """What is known: "2 cores: 96 % busy", "GPU 0: 98 % busy, ..."."""
        return [*self._cpu(), *self._gpus()]

    def _cpu(self) -> list[str]:
        (begin, before), (now, after) = self._before, (self._clock(), self._cores())
        self._before = now, after
        if "busy_s" not in after or "busy_s" not in before or now <= begin:
            return []
        cores = after["cores"]
        busy = min(1.0, (after["busy_s"] - before["busy_s"]) / (now - begin) / cores)
        return [f"{cores:.0f} core{'s' * (cores > 1)}: {busy:.0%} busy"]

    def _gpus(self) -> list[str]:
        try:
            with Nvml(self._library) as nvml:
                return [f"GPU {i}: {', '.join(_known(nvml, device))}" for i, device in enumerate(nvml.devices())]
        except NotAvailable:  # no driver, no GPUs: nothing to count
            return []


def _known(nvml: Nvml, device: Any) -> list[str]:
    """Of a GPU, without what it does not tell."""

    def busy() -> str:
        rates = nvml.number("nvmlDeviceGetUtilizationRates", device, kind=ctypes.c_ulonglong)  # nvmlUtilization_t: of kernels, of memory
        return f"{rates & 0xFFFFFFFF} % busy"

    def memory() -> str:
        held = nvml.memory(device)
        return f"{bytes_shown(held.used)} of {bytes_shown(held.total)}"

    def power() -> str:
        return f"{nvml.number('nvmlDeviceGetPowerUsage', device) / 1e3:.0f} W"

    def clock() -> str:
        return f"{nvml.number('nvmlDeviceGetClockInfo', device, ctypes.c_int(SM)):,} MHz"

    def heat() -> str:
        return f"{nvml.number('nvmlDeviceGetTemperature', device, ctypes.c_int(0))} °C"

    def slowed() -> str:
        bits = nvml.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong)
        reasons = [name for bit, (name, costs) in THROTTLES.items() if bits & bit and costs]
        return f"slowed by {', '.join(reasons)}" if reasons else ""

    found = []
    for read in (busy, memory, power, clock, heat, slowed):
        try:
            found.append(read())
        except NotAvailable:
            continue
    return [text for text in found if text] or ["tells nothing"]
