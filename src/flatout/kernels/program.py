"""Programs: a forward as data. Its ops run once under a recorder, and what the native library does of them is noted instead of done: blocks of calls,
each of which one call makes again. Ops that the library has nothing for stay calls of Python between the blocks.

No second model description: the same ops, with their costs and references, over the same buffers, which must stay where they are, as must what they
hold by then that tells where keys lie. Called by runner/graphs.py for decode steps on the CPU, where Python would take half of a small model's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from flatout.kernels import native
from flatout.kernels.op import Op, recording_by


@dataclass
class Part:
    """A block, or a call of Python's; and whose ops these are, in order, with the operands, which it so keeps alive."""

    run: native.Block | Callable[[], None]
    ops: list[tuple[Op, tuple[Any, ...]]]


@dataclass
class Program:
    parts: list[Part]

    def __call__(self) -> None:
        for part in self.parts:
            part.run()

    def then(self, other: Program) -> Program:
        """Both in one, where no Python is between them: the last block of this one and the first of the other are one."""
        last, first = self.parts[-1], other.parts[0]
        if not isinstance(last.run, native.Block) or not isinstance(first.run, native.Block):
            return Program(self.parts + other.parts)
        return Program([*self.parts[:-1], Part(last.run.then(first.run), last.ops + first.ops), *other.parts[1:]])

    def timed(self) -> list[tuple[Op, tuple[Any, ...], float]]:
        """Runs it; each op with its operands and how long it took, in seconds."""
        found = []
        for part in self.parts:
            if isinstance(part.run, native.Block):
                ns = np.zeros(len(part.run), np.int64)
                part.run(ns)
                found += [(op, args, each / 1e9) for (op, args), each in zip(part.ops, ns.tolist(), strict=True)]
            else:
                begin = time.perf_counter()
                part.run()
                found.append((*part.ops[0], time.perf_counter() - begin))
        return found


@dataclass
class _Recorder:
    noted: list[tuple[int, bytes]] = field(default_factory=list)  # of the block in the making
    ops: list[tuple[Op, tuple[Any, ...]]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        run = op.chosen(*args)
        if not any(i.native and i.run is run for i in op.implementations):
            self.close()
            self.parts.append(Part(partial(run, *args), [(op, args)]))
            return
        with native.noting() as noted:
            run(*args)
        if len(noted) != 1:
            raise RuntimeError(f"{op.name}: a native implementation is one call of the library, not {len(noted)}")
        self.noted += noted
        self.ops.append((op, args))

    def close(self) -> None:
        if self.noted:
            self.parts.append(Part(native.Block(self.noted), self.ops))
        self.noted, self.ops = [], []


def capture(run: Callable[[], object]) -> Program:
    """What the ops of run() do, to be done again. They are not done now; implementations that were not chosen yet are measured on the operands."""
    recorder = _Recorder()
    with recording_by(recorder):
        run()
    recorder.close()
    return Program(recorder.parts)
