"""Faults to inject into a served model: patches of the front's process or the engine's, by the names that test_faults.py uses.

They are what somebody's machine, library or load would do: sleeps where it would be slow, and real reads, threads and garbage where they can be had.
Made in the forked processes of fault_server.py; nothing is undone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any


class Fault:
    """None; and what the others do not say."""

    def front(self) -> None: ...

    def engine(self) -> None: ...


def before(owner: Any, name: str, do: Callable[..., object]) -> None:
    """owner.name() first does that, with the same operands."""
    real = getattr(owner, name)

    def patched(*args: Any, **named: Any) -> Any:
        do(*args, **named)
        return real(*args, **named)

    setattr(owner, name, patched)


def sleeping(seconds: float) -> Callable[..., None]:
    return lambda *_args, **_named: time.sleep(seconds)


class SlowTokeniser(Fault):
    def front(self) -> None:
        from flatout.text.tokenizer import Tokenizer

        before(Tokenizer, "encode", sleeping(0.6))


class SlowDetokeniser(Fault):
    def front(self) -> None:
        from flatout.text.sequence import SequenceText

        before(SequenceText, "push", sleeping(0.006))


class SlowScheduler(Fault):
    def engine(self) -> None:
        from flatout.core.scheduler import Scheduler

        before(Scheduler, "schedule", sleeping(0.05))


class SlowCommit(Fault):
    def engine(self) -> None:
        from flatout.core.scheduler import Scheduler

        before(Scheduler, "commit", sleeping(0.05))


class BlockingLog(Fault):
    def front(self) -> None:
        from flatout.server.launch import RequestLog

        before(RequestLog, "write", sleeping(0.1))


class ManyThreads(Fault):
    """As where a container's quota is not seen: more threads than cores."""

    def engine(self) -> None:
        import flatout.hardware as hardware

        hardware.allowed_cores = lambda *_: 8


class ColdLoad(Fault):
    """The weights' file is dropped from the page cache, and read as a slow disk would."""

    def engine(self) -> None:
        from flatout.modelfile.sources import resolve_model

        file = os.open(resolve_model("smollm2").weights[0], os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        import flatout.engine

        before(flatout.engine, "build", sleeping(0.0))


class ColdFirst(Fault):
    """The first step makes something, for a second."""

    def engine(self) -> None:
        from flatout.runner.runner import Runner

        real, met = Runner._execute, set()

        def execute(self: Runner, plan: Any, *rest: Any) -> Any:
            if len(met) < 2 and (key := plan.num_tokens > len(plan.slots)) not in met:
                met.add(key)
                time.sleep(1.0)
            return real(self, plan, *rest)

        Runner._execute = execute  # type: ignore[method-assign]


class GrammarCompile(Fault):
    """Every request's grammar takes its time, seen as the reason for which it waits."""

    def engine(self) -> None:
        from flatout.core.scheduler import Scheduler

        real, since = Scheduler._obstacle, {}

        def obstacle(self: Scheduler, live: Any, left: int, draft: Any) -> Any:
            begun = since.setdefault(live.id, time.monotonic())
            return ("grammar", []) if time.monotonic() - begun < 0.4 else real(self, live, left, draft)

        Scheduler._obstacle = obstacle  # type: ignore[method-assign]
        # a plan is asked for as long as somebody waits: without rows the loop would spin
        before(Scheduler, "schedule", lambda scheduler, now: None if scheduler.num_running else time.sleep(0.01))


class Garbage(Fault):
    """A large graph of objects, and the full collections that it brings now and then."""

    def engine(self) -> None:
        import gc

        from flatout.core.scheduler import Scheduler

        turns, kept = [0], []

        def collect(*_args: Any) -> None:
            turns[0] += 1
            if not kept:
                kept.append([[i] for i in range(1_500_000)])
            if turns[0] % 12 == 0:
                gc.collect()

        before(Scheduler, "schedule", collect)


class Hiccups(Fault):
    """A step in twenty takes 0.3 s more on the device."""

    def engine(self) -> None:
        from flatout.runner.runner import Runner

        turns = [0]

        def stall(*_args: Any) -> None:
            turns[0] += 1
            if turns[0] % 20 == 0:
                time.sleep(0.3)

        before(Runner, "_execute", stall)


class Faulting(Fault):
    """Each step reads pages of a mapped file that the page cache has lost."""

    def engine(self) -> None:
        import mmap

        from flatout.core.scheduler import Scheduler
        from flatout.modelfile.sources import resolve_model

        opened: list[Any] = []
        turns = [0]

        def touch(*_args: Any) -> None:
            if not opened:
                handle = os.open(resolve_model("smollm2").weights[0], os.O_RDONLY)
                opened.extend((handle, mmap.mmap(handle, 0, prot=mmap.PROT_READ)))
                opened[1].madvise(mmap.MADV_RANDOM)
            turns[0] += 1
            handle, mapped = opened
            base = turns[0] * 61 % 200 * (64 << 12)
            for page in range(4):
                at = (base + page * (16 << 12)) % (len(mapped) - 4096) & ~4095
                mapped.madvise(mmap.MADV_DONTNEED, at, 4096)
                os.posix_fadvise(handle, at, 4096, os.POSIX_FADV_DONTNEED)
                mapped[at]

        before(Scheduler, "schedule", touch)


class Rejected(Fault):
    """Half of the rows are drafts that nobody takes, as speculation's records would say."""

    def engine(self) -> None:
        from flatout.engine import Engine

        before(Engine, "_keep", lambda engine, record, *rest: setattr(record, "rejected", record.tokens // 2))


class Neighbour(Fault):
    """Two busy processes on the two cores."""

    def front(self) -> None:
        for _ in range(2):
            if os.fork() == 0:
                parent = os.getppid()
                while os.getppid() == parent:
                    sum(range(10_000))
                os._exit(0)


class BlockedLoop(Fault):
    """Something on the front's loop holds it up, four times a second."""

    def front(self) -> None:
        from flatout.server.engines import ServedModel

        before(ServedModel, "deliver", sleeping(0.02))


class BusyFront(Fault):
    """A thread of the front holds the interpreter."""

    def front(self) -> None:
        def spin() -> None:
            while True:
                sum(range(1000))

        threading.Thread(target=spin, daemon=True).start()


FAULTS: dict[str, type[Fault]] = {kind.__name__: kind for kind in (Fault, *Fault.__subclasses__())}
