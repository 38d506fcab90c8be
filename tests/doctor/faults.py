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

    model = ""  # as the server was given it

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


class SmallBuffers(Fault):
    """Sockets and transports hold a hundredth of what they would: streams of seconds fill them as those of minutes do otherwise."""

    def front(self) -> None:
        import socket

        from uvicorn.protocols.http.h11_impl import H11Protocol

        from flatout.server import launch

        before(H11Protocol, "connection_made", lambda _, transport: transport.set_write_buffer_limits(512))
        real = launch.bind

        def bind(host: str, port: int) -> socket.socket:
            listener = real(host, port)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return listener

        launch.bind = bind


class ManyThreads(Fault):
    """As where a container's quota is not seen: more threads than cores."""

    def engine(self) -> None:
        import flatout.hardware as hardware

        hardware.allowed_cores = lambda *_: 8


class ColdLoad(Fault):
    """The weights' file is not in the page cache, and the disk is a slow one. Of a copy: what other processes have mapped stays cached."""

    def front(self) -> None:
        with open(self.model, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def engine(self) -> None:
        import flatout.runner.build as build

        before(build, "load_weights", sleeping(0.8))


class ColdFirst(Fault):
    """The first step that somebody waits for makes something, for a second; so does the first of decodes alone."""

    def engine(self) -> None:
        from flatout.core.scheduler import Scheduler
        from flatout.runner.runner import Runner

        met: set[bool] = set()
        serving: set[bool] = set()  # the warm-up plans nothing

        def make(_runner: Runner, plan: Any, *_rest: Any) -> None:
            if serving and (chunks := plan.num_tokens > len(plan.slots)) not in met:
                met.add(chunks)
                time.sleep(1.0)

        before(Scheduler, "schedule", lambda *_: serving.add(True))
        before(Runner, "_execute", make)


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
            if len(kept) < 30:  # little by little: the first steps are not to be the slow ones
                kept.append([[i] for i in range(100_000)])
            elif turns[0] % 12 == 0:
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
        import tempfile

        from flatout.core.scheduler import Scheduler

        file = tempfile.TemporaryFile()  # noqa: SIM115 - in TMPDIR, on a disk, and mapped for as long as the process lives
        file.write(os.urandom(64 << 20))
        file.flush()
        os.fsync(file.fileno())
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead
        turns = iter(range(1 << 40))

        def touch(*_args: Any) -> None:
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # all of it: of a large folio no part can be dropped
            for n in range(4):
                mapped[(next(turns) * 61 + n) % (64 << 8) << 12]

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
