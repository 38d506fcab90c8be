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
    """Device time of a run's kernels and copies, longest first: of each what it adds to the end of all before it, as a kernel may begin, and
    wait, while others still run. The run is slower than without the profiler; its kernels are not."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    return added([(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6) for event in events])


def added(spans: list[tuple[str, float, float]]) -> list[KernelTime]:
    """By name what each of these (name, begin, end), in seconds, adds to the end of all that began before it."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    until = 0.0
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        calls[name] += 1
        seconds[name] += max(0.0, end - max(begin, until))
        until = max(until, end)
    return [KernelTime(name, calls[name], seconds[name]) for name in sorted(seconds, key=lambda name: -seconds[name])]


def kernel_lines(times: list[KernelTime]) -> list[str]:
    """A line each of the longest; none of none."""
    total = sum(t.seconds for t in times)
    return [f"    {t.seconds / total:4.0%}  {t.calls:6d} x {t.seconds / t.calls * 1e6:9.2f} us  {t.name[:NAME]}" for t in times[:SHOWN]]
