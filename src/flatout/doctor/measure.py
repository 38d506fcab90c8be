"""What this machine gives, measured: matrix products by type, copies between host and device, launches. And whether others were busy meanwhile.

Bandwidths of memory are hardware.py's, which also keeps what is measured here. Called by cli/doctor/hardware.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.doctor.facts import Fact, Section, bytes_shown, spread
from flatout.hardware import RETRY_SECONDS, RUNS, Bandwidth, Ceilings, Hardware, Rate, Rates, ceilings, keep_rates, kept_rates, timed

BUSY = 0.05  # of the cores: what others may use before a measurement counts as disturbed
# rows and columns of the square matrices: the largest whose product takes at most LONGEST
SIDES, LONGEST = (8192, 4096, 2048, 1024), 0.15
AT_LEAST = 0.05  # seconds of a run: repeated so often, that the kernel's clock ticks can tell who used the cores
TRANSFER = 256 << 20  # bytes
LAUNCHES = 1000


def measured(hardware: Hardware, refresh: bool) -> Section:
    """From the cache or now (5 s on two cores); what this device does not do says what it needs."""
    memory, rates = ceilings(hardware, refresh), matrix_and_launch_rates(hardware, refresh)
    facts = [*_bandwidths(memory), *(_shown(rate, hardware) for rate in rates.rates)]
    found = {rate.name for rate in rates.rates}
    lacking = [(f"matrix_{name}", f"product in {name}", "FLOP/s", needs) for name, needs in _NEEDS.items()]
    lacking += [(*known, "a CUDA device") for known in _OF_CUDA]
    facts += [Fact(f"{name}_{_UNITS[unit]}", label, needs=needs) for name, label, unit, needs in lacking if name not in found]
    when = [datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M") for t in (memory.measured, rates.measured)]
    again = when[0] if when[0] == when[1] else f"{when[0]} and {when[1]}"
    return Section("measured", f"Measured {again} (--measure: anew); median, low to high of {RUNS} runs", facts)


def matrix_and_launch_rates(hardware: Hardware, refresh: bool = False) -> Rates:
    """Kept until they are measured anew; those of a disturbed measurement for RETRY_SECONDS. Of several the best of each counts."""
    before = kept_rates(hardware, torch.__version__)
    if before is not None and not refresh:
        good = not any(_disturbed(rate, hardware) for rate in before.rates)
        if good or time.time() - before.measured < RETRY_SECONDS:
            return before
    found = {rate.name: rate for rate in _measure(hardware)}
    for old in before.rates if before else ():
        if old.name in found and old.better_than(found[old.name]):
            found[old.name] = old
    now = Rates(tuple(found.values()), time.time())
    keep_rates(hardware, torch.__version__, now)
    return now


class Neighbours:
    """Cores that other processes use of those that this one may, from its making on: by the kernel's clock ticks, 10 ms."""

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._begin = time.perf_counter()
        self._busy, self._own = self._busy_seconds(), _own_seconds()

    def cores(self) -> float | None:
        """None where the system does not tell."""
        busy = self._busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / max(time.perf_counter() - self._begin, 1e-9))

    def _busy_seconds(self) -> float | None:
        """Of the CPUs that this process may use, by anyone; time that a virtual machine's host took away counts."""
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
        except OSError:
            return None
        allowed = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        fields = [line.split() for line in lines]
        # user nice system idle iowait irq softirq steal
        ticks = sum(sum(map(int, f[1:9])) - int(f[4]) - int(f[5]) for f in fields if f and f[0] in allowed)
        return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


# -- what is measured --------------------------------------------------------------------------------------------------

_UNITS = {"FLOP/s": "flop_per_s", "B/s": "bytes_per_s", "s": "seconds"}
_OF_CUDA = (
    ("host_to_device_pinned", "host to device, pinned", "B/s"),
    ("host_to_device_pageable", "host to device, pageable", "B/s"),
    ("device_to_host_pinned", "device to host, pinned", "B/s"),
    ("device_to_host_pageable", "device to host, pageable", "B/s"),
    ("launch_eager", "kernel launch, eager", "s"),
    ("launch_in_graph", "kernel in a graph", "s"),
)
_NEEDS = {  # by type of a product that not every device has
    "bfloat16": "a processor with bfloat16 arithmetic",
    "int8": "a torch that multiplies int8 here",
    "float8": "a GPU of compute capability 8.9 or later",
}
_WARNING = "measured on a busy machine"
_LABELS = {name: label for name, label, _ in _OF_CUDA}


def _measure(hardware: Hardware) -> Iterator[Rate]:
    cuda = hardware.device == "cuda"
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(hardware.cpu_count)
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        for name, product in _products(hardware):
            if name != "int8" or _int8_runs(hardware.device):
                yield _matrix(name, product, hardware)
        if cuda:
            yield from _transfers()
            yield from _launches()
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _products(hardware: Hardware) -> Iterator[tuple[str, Callable[[int], Callable[[], object]]]]:
    """By type: from the side of square matrices to their product. Random data: zeros would run faster than anything real."""
    device = hardware.device

    def plain(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
        def make(side: int) -> Callable[[], object]:
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            return lambda: torch.mm(a, b, out=out)

        return make

    def int8(side: int) -> Callable[[], object]:
        a, b = (torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())

    def fp8(side: int) -> Callable[[], object]:
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    yield "float32", plain(torch.float32)
    if hardware.has_bfloat16:
        yield "bfloat16", plain(torch.bfloat16)
    if device == "cuda":
        yield "float16", plain(torch.float16)
    yield "int8", int8
    if hardware.capability is not None and hardware.capability >= (8, 9):
        yield "float8", fp8


def _int8_runs(device: str) -> bool:
    """Whether this build of torch has the product here: it says so by raising."""
    some = torch.ones(32, 32, dtype=torch.int8, device=device)
    try:
        torch._int_mm(some, some.t())
    except RuntimeError:
        return False
    return True


def _matrix(name: str, product: Callable[[int], Callable[[], object]], hardware: Hardware) -> Rate:
    cuda = hardware.device == "cuda"
    sides = SIDES if cuda else SIDES[2:]
    small = SIDES[-1] // 2
    guess = min(timed(product(small), cuda, 3)) / small**3
    side = next((s for s in sides if guess * s**3 <= LONGEST), sides[-1])
    repeats = max(1, round(AT_LEAST / (guess * side**3)))
    times, foreign = _beside(lambda: timed(product(side), cuda, repeats=repeats))
    return _rate(f"matrix_{name}", "FLOP/s", [2 * side**3 / t for t in times], f"{side:,} x {side:,}", foreign)


def _transfers() -> Iterator[Rate]:
    device = torch.empty(TRANSFER, dtype=torch.uint8, device="cuda")
    for pinned in (True, False):
        host = torch.ones(TRANSFER, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for name, run in (
            ("host_to_device", lambda host=host: device.copy_(host, non_blocking=True)),
            ("device_to_host", lambda host=host: host.copy_(device, non_blocking=True)),
        ):
            times, foreign = _beside(lambda run=run: timed(run, True))  # type: ignore[misc]
            yield _rate(f"{name}_{kind}", "B/s", [TRANSFER / t for t in times], bytes_shown(TRANSFER), foreign)


def _launches() -> Iterator[Rate]:
    """Of a kernel that has nothing to do, each after the one before it."""
    number = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    graph = torch.cuda.CUDAGraph()
    launches()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launches()
    for name, run in (("launch_eager", launches), ("launch_in_graph", graph.replay)):
        times, foreign = _beside(lambda run=run: timed(run, True))  # type: ignore[misc]
        yield _rate(name, "s", [t / LAUNCHES for t in times], f"{LAUNCHES:,} in a row", foreign)


def _beside(run: Callable[[], list[float]]) -> tuple[list[float], float | None]:
    neighbours = Neighbours()
    return run(), neighbours.cores()


def _rate(name: str, unit: str, values: list[float], method: str, foreign: float | None) -> Rate:
    return Rate(name, unit, median(values), min(values), max(values), method, foreign)


# -- how it is told ----------------------------------------------------------------------------------------------------


def _bandwidths(memory: Ceilings) -> Iterator[Fact]:
    several = [
        (f"memory_read_{bytes_shown(b.working_set).replace(' ', '_')}".lower(), f"read of {bytes_shown(b.working_set)}", b)
        for b in memory.read
    ]
    for key, label, b in (*several, ("memory_copy", f"copy in {bytes_shown(memory.copy.working_set)}", memory.copy)):
        warning = "" if b.settled else f"{_WARNING}: the runs differ"
        yield Fact(f"{key}_bytes_per_s", label, _spread(b), _said(b, "B/s"), "", warning)


def _shown(rate: Rate, hardware: Hardware) -> Fact:
    label = _LABELS.get(rate.name) or f"product in {rate.name.removeprefix('matrix_')}"
    warning = ""
    if _beside_others(rate, hardware):
        warning = f"{_WARNING}: others used {rate.foreign_cores:.1f} cores"
    elif not rate.settled:
        warning = f"{_WARNING}: the runs differ"
    return Fact(
        f"{rate.name}_{_UNITS[rate.unit]}",
        label,
        {**_spread(rate), "foreign_cores": rate.foreign_cores},
        _said(rate, rate.unit),
        "",
        warning,
    )


def _disturbed(rate: Rate, hardware: Hardware) -> bool:
    return not rate.settled or _beside_others(rate, hardware)


def _beside_others(rate: Rate, hardware: Hardware) -> bool:
    return rate.foreign_cores is not None and rate.foreign_cores > BUSY * hardware.cpu_count


def _spread(rate: Rate | Bandwidth) -> dict[str, Any]:
    return {"median": rate.median, "low": rate.low, "high": rate.high, "method": rate.method}


def _said(rate: Rate | Bandwidth, unit: str) -> str:
    return f"{spread(rate.median, rate.low, rate.high, unit)}, {rate.method}"
