"""How long calls take beside each other: what every choice among kernels rests on. Called by op.py and by kernels that choose among their own forms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

TRIALS, FEWEST = 9, 4  # timings of each run, of which the first does not count; fewer where they take long
ENOUGH = 0.2  # seconds of them
CALLS, LONG = 4, 1e-3  # in each timing on a GPU, where none of them takes LONG seconds; else one


def medians(runs: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, float]:
    """Seconds of each run, warm, in turns: a disturbance hits all alike."""
    for run in runs.values():
        run()  # compiles, and makes what it keeps
    timed = _captured(runs, device) if device.type == "cuda" else {name: partial(_seconds, run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for trial in range(TRIALS):
        if trial >= FEWEST and time.perf_counter() - begin > ENOUGH:
            break
        for name, time_one in timed.items():
            times[name].append(time_one())
    return {name: sorted(each[1:])[(len(each) - 1) // 2] for name, each in times.items()}


def _seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _captured(runs: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Callable[[], float]]:
    """How to time each run on a GPU: in a graph, as most steps run it, behind reads that leave nothing of its weights in the cache, as other
    layers do. A launch's cost on the host, which a queue of work hides, so does not count."""
    elsewhere = torch.zeros(torch.cuda.get_device_properties(device).L2_cache_size // 4, dtype=torch.int64, device=device)
    calls = CALLS if max(_on_device(run) for run in runs.values()) < LONG else 1
    graphs: dict[str, Callable[[], float]] = {}
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for name, run in runs.items():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may allocate meanwhile
            try:
                for _ in range(calls):
                    elsewhere.sum()
                    run()
            finally:
                graph.capture_end()
            graphs[name] = partial(_on_device, graph.replay, calls)
    torch.cuda.current_stream(device).wait_stream(stream)
    return graphs


def _on_device(run: Callable[[], None], calls: int = 1) -> float:
    """Seconds of one of the calls that the run makes."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls
