"""The engine process: waits at its standard input for what to run, then turns the engine's loop between mailbox and steps.

The standard input is also its lifeline: when it ends, the parent is gone and so is this process. No HTTP and no text here, and the engine is
imported by the name that launch.py gives, so that tests can run another. Started as `python -m flatout.server.child` by launch.py.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec

from flatout.config import Config, ConfigError
from flatout.ledger.laps import IDLE
from flatout.ledger.table import CostTable
from flatout.ledger.vitals import Vitals
from flatout.modelfile.spec import ModelFileError
from flatout.request import FinishReason, ModelFacts, Output, Request, RequestError
from flatout.server.mailbox import Abort, Add, Alive, Deep, EngineMailbox, EngineState, Failed, Outputs, Ready, Refused, Shutdown, Steps
from flatout.step import StepRecord

HEARTBEAT_SECONDS = 0.5
REPORT_SECONDS = 0.25

T = TypeVar("T")


class Call(msgspec.Struct):
    """The first thing told: whom to report to, and which class (module:name) to import meanwhile."""

    endpoint: str
    key: str
    engine: str


class Start(msgspec.Struct):
    """The second, once the model's files are here: build the engine."""

    config: Config


def tell(pipe: IO[bytes], message: msgspec.Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    pipe.write(struct.pack("<I", len(payload)) + payload)
    pipe.flush()


def hear(pipe: IO[bytes], kind: type[T]) -> T | None:
    """None at the end of the pipe."""
    head = pipe.read(4)
    return msgspec.msgpack.decode(pipe.read(struct.unpack("<I", head)[0]), type=kind) if len(head) == 4 else None


class Engine(Protocol):
    """What runs here; flatout.engine.Engine is the real one."""

    facts: ModelFacts
    start_lines: list[str]
    costs: CostTable | None
    settings: dict[str, Any]  # what the doctor's rules hold steps against (flatout.engine.Engine.settings)
    records: deque[StepRecord]  # of its last steps; taken from here
    failure: Exception | None  # what keeps failing step after step

    @property
    def has_work(self) -> bool: ...
    def add(self, requests: list[Request]) -> None: ...
    def abort(self, id: str, index: int | None, reason: FinishReason, stop_reason: str | None) -> None: ...
    def step(self) -> list[Output]: ...
    def mark(self, stage: str) -> None: ...
    def deep(self, steps: int) -> None: ...
    def state(self) -> dict[str, Any]:
        """The fields of mailbox.py:EngineState."""
        ...

    def close(self) -> None: ...


def main() -> int:
    """Exit code 0 after Shutdown, 1 after Failed or when the parent left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    call = hear(sys.stdin.buffer, Call)
    if call is None:
        return 1
    mailbox = EngineMailbox(call.endpoint, call.key)
    try:
        module, name = call.engine.split(":")
        engine_class = getattr(importlib.import_module(module), name)  # seconds: torch; the parent finds the model meanwhile
        start = hear(sys.stdin.buffer, Start)
        if start is None:
            return 1
        folder = Path(call.endpoint.removeprefix("ipc://")).parent
        threading.Thread(target=_die_with_parent, args=(sys.stdin.fileno(), folder), daemon=True).start()
        engine: Engine = engine_class(start.config)
        try:
            _turn(engine, mailbox)
        finally:
            engine.close()
    except Exception as error:
        expected = isinstance(error, ConfigError | ModelFileError | RequestError)
        if not expected:
            traceback.print_exc()
        message = str(error) if expected else f"the engine failed: {type(error).__name__}: {error}"
        mailbox.send(Failed(" ".join(message.split())))
        return 1
    finally:
        mailbox.close()
    return 0


def _die_with_parent(lifeline: int, folder: Path) -> None:
    os.read(lifeline, 1)  # nothing more is ever sent: this returns when the parent is gone
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _turn(engine: Engine, mailbox: EngineMailbox) -> None:
    """The loop, until Shutdown. Idle it sleeps in the mailbox."""
    gc.collect()
    gc.freeze()  # what torch and the model hold stays for good: a full pass over it takes 100 to 180 ms, in which no step is planned
    vitals = Vitals()
    costs = engine.costs.plain() if engine.costs else None
    mailbox.send(Ready(engine.facts, engine.start_lines, costs, engine.settings, vitals.read()))
    beat = reported = time.monotonic()
    news = True  # since the last report
    while True:
        for message in mailbox.receive(0 if engine.has_work else HEARTBEAT_SECONDS):
            engine.mark("drain")
            news = True
            match message:
                case Add(requests):
                    try:
                        engine.add(requests)
                    except RequestError as error:
                        mailbox.send(Refused(requests[0].id, error.field, str(error)))
                case Abort(id, index, reason, stop_reason):
                    engine.abort(id, index, reason, stop_reason)
                case Deep(steps):
                    engine.deep(steps)
                case Shutdown():
                    return
        if engine.has_work:
            news = True
            if outputs := engine.step():
                mailbox.send(Outputs(outputs))
        if not engine.has_work:
            engine.mark(IDLE)
        if engine.failure is not None:
            raise engine.failure
        now = time.monotonic()
        if news and (not engine.has_work or now - reported >= REPORT_SECONDS):
            records = list(engine.records)
            engine.records.clear()
            mailbox.send(Steps(records, EngineState(**engine.state()), time.monotonic()))
            reported, news = now, False
        if now - beat >= HEARTBEAT_SECONDS:
            mailbox.send(Alive(vitals.read(), time.monotonic()))
            beat = now


if __name__ == "__main__":
    sys.exit(main())
