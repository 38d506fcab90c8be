"""An event loop for servers and clients of one process whose clock stands while work is done and jumps to the next timer when there is none, and
whose connections are queues in memory: a minute of a server's life in a second, the same each time, however busy or stopped the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for no timer, but tells the loop to jump: nothing that this loop waits for comes from outside."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and no timer runs: this would be for ever"
        self.jump(max(0.0, timeout))
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        selector.jump = self._jump
        self._now, self._served = 1000.0, dict[int, Callable[[], asyncio.BaseProtocol]]()
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        self._served[port] = factory
        return _Server(self._served, port)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if port not in self._served:
            raise ConnectionRefusedError(111, "Connection refused")
        here, there = _Pipe(self, factory()), _Pipe(self, self._served[port]())
        here.peer, there.peer = there, here
        for end in (there, here):
            end.protocol.connection_made(end)
        return here, here.protocol


class _Server:
    def __init__(self, served: dict[int, Any], port: int):
        self._served, self._port = served, port

    def close(self) -> None:
        self._served.pop(self._port, None)


class _Pipe(asyncio.Transport):
    """One end of a connection. What is written arrives at the loop's next turn, or once the reader goes on."""

    peer: _Pipe

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any):
        super().__init__()
        self._loop, self.protocol = loop, protocol
        self._arrived, self._paused, self._closing, self._over = b"", False, False, False

    def write(self, data: Any) -> None:
        if not self._closing:
            self.peer._arrived += bytes(data)
            self._loop.call_soon(self.peer._deliver)

    def _deliver(self) -> None:
        if self._paused:
            return
        data, self._arrived = self._arrived, b""
        if data and not self._closing:
            self.protocol.data_received(data)
        if self.peer._closing and not self._arrived and not self._paused:
            self.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lost)
            self._loop.call_soon(self.peer._deliver)

    abort = close

    def _lost(self) -> None:
        if not self._over:
            self._over = True
            self.protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._deliver()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def beside(fake: Any) -> Any:
    """Stands for asyncio in a module whose verb asks one server: run() serves the fake (tests/fake_endpoint.py) meanwhile, on this clock."""

    async def served(work: Coroutine[Any, Any, Any]) -> Any:
        async with fake.served():
            return await work

    class Clock:
        run = staticmethod(lambda work: run(served(work)))

    return Clock
