"""An event loop whose clock stands while work is done and jumps to the next timer when there is none: a minute of a server's life in a second,
the same each time, however busy or stopped the machine is. Sockets of this process are real."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for no timer: it tells the loop to jump, once nothing is on its way through the loopback device."""

    jump: Any = None

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        for _ in range(3):
            if (ready := super().select(0)) or timeout == 0:
                return ready
        if timeout > 1 and (ready := super().select(0.05)):  # a long jump may be a time-out's: be sure that nothing is under way
            return ready
        self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._now = 1000.0
        selector.jump = self._jump

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
