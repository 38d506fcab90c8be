"""Kernels compiled ahead, by as many processes as there are cores: the first start of a model on a machine meets dozens, a second each.

collect() runs code with every launch left out and notes what would be compiled; compile_all() compiles it in forked children, which leave it
in the caches on disk, Triton's and cuda.py's, while this process measures cuBLASLt's algorithms, which needs none of them. Threads are no help:
Triton compiles under Python's lock. Called by runner/build.py.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import triton
from triton.runtime.driver import driver

from flatout.kernels.gpu import blaslt, cuda
from flatout.kernels.gpu.launch import without_launches

LONGEST = 120.0  # seconds that a child may take: 8 were enough for 55 kernels and 16 children


@dataclass(slots=True)
class Wanted:
    kernels: dict[Any, Callable[[], object]] = field(default_factory=dict)  # by kernel and variant: what compiles it
    measurements: list[Callable[[], object]] = field(default_factory=list)


@contextmanager
def collect() -> Iterator[Wanted]:
    """Inside, kernels are noted instead of launched; what they would write is not written. Complete when it is left."""
    wanted = Wanted()

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        wanted.kernels[id(fn.jit_function), str(key)] = partial(_triton, fn.jit_function, compile["specialization_data"])
        return True  # do not compile

    with triton.knobs.runtime.scope(), without_launches(), cuda.noting() as variants, blaslt.postponing() as measurements:
        triton.knobs.runtime.jit_cache_hook = note
        yield wanted
    for program, architecture, variant in variants:
        wanted.kernels[program, variant] = partial(program.compile, architecture, variant)
    wanted.measurements = measurements


def compile_all(wanted: Wanted, processes: int) -> int:
    """Compile and measure what was noted; returns how many processes failed: what they leave is compiled at its first launch, in its turn."""
    work = list(wanted.kernels.values())
    device = driver.active.get_current_device()
    children = []
    wished = min(processes, len(work))
    jobs, end = os.pipe()  # each child takes the next that nobody has taken
    os.write(end, struct.pack(f"{len(work)}H", *range(len(work))))
    os.close(end)
    for _ in range(wished):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forking beside threads: the child touches nothing of theirs, nor the GPU
            try:
                child = os.fork()
            except OSError:  # no room for more: these are compiled as they are met
                break
        if child == 0:
            _compile(work, jobs, device)
        children.append(child)
    os.close(jobs)
    try:
        for measure in wanted.measurements:
            measure()
    finally:
        failed = wished - len(children) + sum(not _ended_well(child) for child in children)
    return failed


def _ended_well(child: int) -> bool:
    """Waits for a child, not for ever: one that inherited a lock which some thread held never ends."""
    last = time.monotonic() + LONGEST
    while time.monotonic() < last:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _triton(kernel: Any, specialisation: str) -> None:
    """specialisation: as Triton writes it."""
    made = kernel.preload(specialisation)
    driver.active.launcher_cls(made.src, made.metadata)  # C, compiled and kept on disk too


def _compile(work: list[Callable[[], object]], jobs: int, device: int) -> None:
    """In a child; never returns."""
    code = 1
    try:
        driver.active.get_current_device = lambda: device  # torch's asks CUDA, which a child must not
        while job := os.read(jobs, 2):
            work[struct.unpack("H", job)[0]]()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)
