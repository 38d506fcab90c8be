"""Vitals: what the system counts of this process and of its cores: CPU time, page faults, disk reads, waits for a core, garbage collection.

Counters since the start, plain numbers, 0.2 ms for all of them; what the system does not tell is left out, never 0. Nothing here judges: rules.py
does. Read by server/child.py for the engine and by server/ for the front and the machine; runner/threads.py asks for the waits.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path

from flatout.hardware import allowed_cores


def waited_for_cores(root: str = "/proc/self/task") -> float:
    """Seconds that the threads of this process were ready to run and did not, since each began; 0 where the system does not tell (Linux does).
    Takes 10 us a thread."""
    total = 0
    for thread in os.listdir(root) if os.path.isdir(root) else ():
        try:
            with open(f"{root}/{thread}/schedstat", "rb") as file:
                total += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended, or this kernel counts nothing
            continue
    return total / 1e9


class Vitals:
    """Of one process, from now on. Python's collector is timed by its own callbacks: one object a process."""

    def __init__(self) -> None:
        self._gc_s, self._began = 0.0, 0.0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._gc_s += now - self._began

    def read(self) -> dict[str, float]:
        """cpu_s, gc_s, core_wait_s, major_faults and, where the system tells, disk_read (bytes)."""
        found = {
            "cpu_s": time.process_time(),
            "gc_s": self._gc_s,
            "core_wait_s": waited_for_cores(),
            "major_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
        }
        if (read := disk_read()) is not None:
            found["disk_read"] = read
        return found

    def close(self) -> None:
        gc.callbacks.remove(self._collected)


def disk_read(root: Path = Path("/proc/self")) -> float | None:
    """Bytes that this process made the system fetch from a disk."""
    for line in _text(root / "io").splitlines():
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return float(value)
    return None


def machine(root: Path = Path("/proc")) -> dict[str, float]:
    """Of the cores that this process may use: how many (cores), seconds busy for anybody (busy_s), and pages swapped in; what is told of them."""
    found = {"cores": float(allowed_cores())}
    mine = {f"cpu{i}" for i in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    ticks = 0
    for line in _text(root / "stat").splitlines():
        name, *values = line.split()
        if name in mine:
            user, nice, system, _idle, _disk, interrupt, soft, steal = map(int, values[:8])
            ticks += user + nice + system + interrupt + soft + steal  # what a hypervisor took was busy for somebody, too
    if ticks:
        found["busy_s"] = ticks / os.sysconf("SC_CLK_TCK")
    for line in _text(root / "vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "pswpin":
            found["swapped_in"] = float(value)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
