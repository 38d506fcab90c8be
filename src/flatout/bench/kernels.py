"""Which kernels a work's device time goes to, by torch's profiler: the finer half of the first ledger.

Names are the kernels' own; a captured step shows its kernels one by one like any other. Called by offline.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

SHOWN = 12
NAME = 60  # characters of a kernel's name that a table has room for


@dataclass(frozen=True)
class KernelTime:
    name: str
    calls: int
    seconds: float


def kernel_times(run: Callable[[], object]) -> list[KernelTime]:
    """Device time of a run's kernels and copies, longest first. The run is slower than without the profiler; its kernels are not."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            calls[event.name] += 1
            seconds[event.name] += event.device_time * 1e-6
    return [KernelTime(name, calls[name], seconds[name]) for name in sorted(seconds, key=lambda name: -seconds[name])]


def kernel_lines(times: list[KernelTime]) -> list[str]:
    """A line each of the longest; none of none."""
    total = sum(t.seconds for t in times)
    return [f"    {t.seconds / total:4.0%}  {t.calls:6d} x {t.seconds / t.calls * 1e6:9.2f} us  {t.name[:NAME]}" for t in times[:SHOWN]]
