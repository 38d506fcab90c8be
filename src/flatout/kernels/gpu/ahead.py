"""Kernels compiled ahead, by as many processes as there are cores: the first start of a model on a machine meets dozens, a second each.

collect() runs code with every Triton launch left out and notes what would be compiled; compile_all() compiles it in forked children, which
leave it in Triton's cache on disk. Threads are no help: a compilation holds Python's lock. Called by runner/build.py.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.driver import driver

Wanted = dict[tuple[int, str], tuple[Any, str]]  # by kernel and key: the kernel and its specialisation, as Triton writes it


@contextmanager
def collect() -> Iterator[Wanted]:
    """Inside, Triton kernels are noted instead of launched; what they would write is not written."""
    wanted: Wanted = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        wanted[id(fn.jit_function), str(key)] = fn.jit_function, compile["specialization_data"]
        return True  # do not compile; a launch without a kernel does nothing

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        yield wanted


def compile_all(wanted: Wanted, processes: int) -> int:
    """Compile what was noted; returns how many processes failed: what they leave is compiled at its first launch, in its turn."""
    work = list(wanted.values())
    device = driver.active.get_current_device()
    children = []
    for first in range(min(processes, len(work))):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forking beside threads: the child touches nothing of theirs, nor the GPU
            child = os.fork()
        if child == 0:
            _compile(work[first :: min(processes, len(work))], device)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _compile(work: list[tuple[Any, str]], device: int) -> None:
    """In a child; never returns."""
    code = 1
    try:
        driver.active.get_current_device = lambda: device  # torch's asks CUDA, which a child must not
        for kernel, specialisation in work:
            made = kernel.preload(specialisation)
            driver.active.launcher_cls(made.src, made.metadata)  # C, compiled and kept on disk too
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)
