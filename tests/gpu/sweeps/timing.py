"""What the sweeps beside this share: calls timed in a captured graph, work spread over processes, constants of a module changed for a while.

Importing it ends the program where there is no CUDA device, so the sweeps import it before anything that needs one. No sweep lives here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flatout.hardware import ceilings, detect

if not torch.cuda.is_available():
    sys.exit(f"{Path(sys.argv[0]).name}: no CUDA device here; a sweep times kernels on the GPU that they are tuned for")

CUDA, BF16 = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
BEGIN = time.perf_counter()


def spent() -> float:
    """Seconds since the start."""
    return time.perf_counter() - BEGIN


@cache
def roof() -> tuple[float, float]:
    """Bytes read and 16-bit operations of a product, a second: the most that this device gave."""
    best = ceilings(detect("auto"))
    return best.read[-1].median, best.matrix


def said(error: Exception, most: int = 140) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:most]


def capture(calls: Sequence[Callable[[], Any]], repeat: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of the calls in their order, `repeat` times over. One that fails leaves no capture open behind it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for _ in range(repeat):
                for call in calls:
                    call()
        except Exception:
            with suppress(RuntimeError):  # that the capture is void; the call's own error says why
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def replays(replay: Callable[[], Any], turns: int, reset: Callable[[], Any] | None = None) -> float:
    """Milliseconds of a replay: the median of `turns` after two that do not count; reset() comes before each, outside of the timing."""
    times = []
    for _ in range(turns + 2):
        if reset is not None:
            reset()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def microseconds(calls: Sequence[Callable[[], Any]], repeat: int = 1, turns: int = 5, reset: Callable[[], Any] | None = None) -> float:
    """Of one call in a graph of them all. Each runs once before, which compiles it; calls over more than the L2 cache find it cold."""
    if reset is not None:
        reset()
    for call in calls:
        call()
    graph = capture(calls, repeat)
    return replays(graph.replay, turns, reset) * 1e3 / (len(calls) * repeat)


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (owner, name, value) for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def apart(function: Callable[[Any], Any], jobs: Sequence[Any], most: int = 14) -> Iterator[Any]:
    """function of each job, in processes of their own: Triton compiles in all of them at once, and leaves in its cache on disk what this
    process then finds."""
    with ProcessPoolExecutor(max(1, min(most, os.cpu_count() or 1)), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(function, job) for job in jobs]):
            yield done.result()


def save(name: str, record: Any) -> None:
    """All timings as JSON in $OUT, or the temporary folder."""
    path = Path(os.environ.get("OUT") or os.environ.get("TMPDIR", "/tmp"), f"sweep_{name}.json")
    path.write_text(json.dumps(record, indent=0))
    print(f"{spent():.0f} s; all timings in {path}")
