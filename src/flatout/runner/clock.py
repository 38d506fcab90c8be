"""Clocks of one step: what the forward, the sampler and single ops took, on the CPU's own clock or by events on a CUDA device.

On the CPU every step is timed, as reading the clock takes 40 ns: a program as a whole, loose ops one by one. A deep step tells its ops apart; on CUDA
it runs op by op with an event behind each, so there it is for whoever asks. Called by runner.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatout.kernels.op import Op, recording_by
from flatout.kernels.program import Program

HOST_CYCLES = 30_000_000  # of a GPU's clock: some 15 ms, in which Python calls a thousand ops


class StepClock:
    """Of a step on the CPU."""

    def __init__(self, deep: bool = False):
        self.deep = deep
        self.native_s = 0.0  # in programs, and in ops that are called one by one
        self.sample_s = 0.0
        self.ops: list[tuple[str, float]] = []

    def program(self, run: Callable[[], object]) -> None:
        """Run a captured forward."""
        if self.deep and isinstance(run, Program):
            timed = [(op.name, seconds) for op, _, seconds in run.timed()]
            self.ops += timed
            self.native_s += sum(seconds for _, seconds in timed)
            return
        begin = time.perf_counter()
        run()
        self.native_s += time.perf_counter() - begin

    def ahead(self) -> None:
        """Before a forward begins op by op."""

    def held_s(self) -> float:
        """For how long ahead() kept the device waiting, which no step is to be told by. Once the step is done."""
        return 0.0

    @contextmanager
    def loose(self) -> Iterator[None]:
        """Ops called meanwhile are timed each."""
        with recording_by(self):
            yield
        self.native_s += sum(seconds for _, seconds in self.ops)

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        run = op.chosen(*args)
        begin = time.perf_counter()
        run(*args)
        self.ops.append((op.name, time.perf_counter() - begin))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.sample_s += time.perf_counter() - begin

    def per_op(self) -> list[tuple[str, float]] | None:
        """Of a deep step, once it is done: each op's name and seconds, in order."""
        return self.ops if self.deep else None


class CudaClock(StepClock):
    """Of a step on a CUDA device: nothing, but in a deep one the ops, each from the event before it to its own."""

    def __init__(self, deep: bool = False):
        super().__init__(deep)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._held: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def program(self, run: Callable[[], object]) -> None:
        run()

    def ahead(self) -> None:
        """Keep the device waiting until the host has issued what follows: ops that it waits for one by one would all seem to take a launch."""
        if self.deep:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.cuda._sleep(HOST_CYCLES)
            end.record()
            self._held = begin, end

    def held_s(self) -> float:
        return self._held[0].elapsed_time(self._held[1]) / 1e3 if self._held else 0.0

    @contextmanager
    def loose(self) -> Iterator[None]:
        if not self.deep:
            yield
            return
        self._mark("")
        with recording_by(self):
            yield

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        op.dispatch(*args)
        self._mark(op.name)

    def _mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((name, event))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        yield

    def per_op(self) -> list[tuple[str, float]] | None:
        pairs = zip(self._events, self._events[1:])
        return [(name, before.elapsed_time(event) / 1e3) for (_, before), (name, event) in pairs] or None
