"""The mailbox between the front process and its engine processes: the messages, and both ends of the line.

Messages are msgpack over zmq on a Unix socket inside a private folder. The front holds one ROUTER socket for all engines; the address frame
is the engine's key, so every message carries it. Nothing here knows what a request means.
Used by launch.py (both processes) and engines.py (the front).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from flatout.request import FinishReason, ModelFacts, Output, Request
from flatout.step import StepRecord

LONGEST_SOCKET_PATH = 100  # sockaddr_un holds 107 bytes and an end


class EngineGone(RuntimeError):
    """A message for an engine process that is not there."""


# -- down: front -> engine ------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True):
    """The sequences of one prompt: the same id, indices 0..n-1."""

    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    """End a prompt's sequences (index None: all of them). `reason` is STOP when the front met a stop string."""

    id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT
    stop_reason: str | None = None


class Deep(msgspec.Struct, tag=True):
    """So many steps from the next one on tell their ops apart."""

    steps: int


class Shutdown(msgspec.Struct, tag=True):
    """Finish the step in progress and leave."""


Down = Add | Abort | Deep | Shutdown

# -- up: engine -> front --------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    facts: ModelFacts
    start_lines: list[str]
    costs: dict[str, Any] | None = None  # CostTable.plain()
    settings: dict[str, Any] = {}  # Engine.settings
    vitals: dict[str, float] = {}  # ledger/vitals.py:Vitals of the engine's process


class Outputs(msgspec.Struct, tag=True):
    """Everything that one step yielded."""

    outputs: list[Output]


class EngineState(msgspec.Struct):
    """How the engine stands; counters since its start."""

    running: int = 0
    waiting: dict[str, int] = {}  # sequences in the queue by what they wait for
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0  # free, and still found by their hash
    evictions: int = 0  # of them, reused for something else
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0

    @property
    def num_waiting(self) -> int:
        return sum(self.waiting.values())

    @property
    def usage(self) -> float:
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


class Steps(msgspec.Struct, tag=True):
    """The records of steps since the last of these, and how the engine stands. Sent a few times a second, and when there is nothing more to do."""

    records: list[StepRecord]
    state: EngineState
    at: float = 0.0  # when it was sent, on the clock that all processes share


class Refused(msgspec.Struct, tag=True):
    """The engine did not take the prompt `id`; nothing of it runs."""

    id: str
    field: str
    message: str


class Failed(msgspec.Struct, tag=True):
    """The engine cannot start or go on; its process ends after this. One line: the cause and the mend."""

    message: str


class Alive(msgspec.Struct, tag=True):
    """The engine's loop turns. Sent every HEARTBEAT_SECONDS."""

    vitals: dict[str, float] = {}  # as Ready has them
    at: float = 0.0  # when it was sent


Up = Ready | Outputs | Steps | Refused | Failed | Alive


class FrontMailbox:
    """The front's end, on the event loop. `deliver(key, message)` is called for each arrival, in order, from the loop.

    `lines_closed` gains one for each engine whose end of the line closed, once all that it had sent can be received.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flatout-"))  # mode 0700: who can reach the socket owns the engine
        if len(str(self.folder)) > LONGEST_SOCKET_PATH - len("/mailbox"):
            self.folder.rmdir()
            self.folder = Path(tempfile.mkdtemp(prefix="flatout-", dir="/tmp"))
        self.endpoint = f"ipc://{self.folder}/mailbox"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # no high-water mark: a ROUTER drops above it. What waits here is bounded by the requests in flight.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is an error, not a loss
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)  # told when the end of what was sent has been read
        self.lines_closed = asyncio.Semaphore(0)
        self._socket.bind(self.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Up)
        self._deliver: Callable[[str, Up], None] = self._nobody
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, deliver: Callable[[str, Up], None]) -> None:
        """Start delivering on the running loop."""
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        for socket, receive in ((self._socket, self.drain), (self._monitor, self._count_closed)):
            self._loop.add_reader(socket.fileno(), receive)
            self._loop.call_soon(receive)  # zmq signals what comes after a look that found nothing

    def send(self, key: str, message: Down) -> None:
        """Raises EngineGone when no process with that key is connected."""
        try:
            self._socket.send_multipart([key.encode(), self._encoder.encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise EngineGone(f"engine {key!r} is not connected: {error}") from None
        finally:
            # zmq signals by edges, and a send, also one that failed, may have taken the edge of an arrival
            if self._loop is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.call_soon(self.drain)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._loop = None
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def drain(self) -> None:
        """Deliver what is here."""
        while self._loop is not None:
            try:
                key, payload = self._socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            self._deliver(key.decode(), self._decoder.decode(payload))

    def _count_closed(self) -> None:
        while self._loop is not None:
            try:
                self._monitor.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            self.lines_closed.release()

    @staticmethod
    def _nobody(key: str, message: Up) -> NoReturn:
        raise RuntimeError(f"a message from engine {key!r} before listen(): {message!r}")


class EngineMailbox:
    """The engine's end: plain calls, no event loop."""

    def __init__(self, endpoint: str, key: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, key.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms: the last words (Failed) get out
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Down)

    def send(self, message: Up) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout: float) -> list[Down]:
        """All messages that are here; waits up to `timeout` seconds for the first. 0 only looks."""
        if timeout > 0 and not self._socket.poll(int(timeout * 1000)):
            return []
        messages: list[Down] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(flags=zmq.DONTWAIT)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self._socket.close()
        self._context.term()
