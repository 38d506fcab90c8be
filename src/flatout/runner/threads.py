"""Threads: how many threads of the native library a step takes: all that were asked for, or fewer while others use the cores.

The lag is what the system says: how long threads of this process were ready to run while others had the cores. Where it is large a few steps are
tried with fewer threads, and fewer stay only where steps of the same rows were faster so. Then all are tried again, now and then. Rows have the same
bits with any number of threads, so no token changes. Called by runner.py after each step, on the compute thread; made by build.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flatout.ledger.vitals import waited_for_cores

WINDOW = 0.1  # seconds of decode steps that are compared; and for each thread, as each takes 10 us to ask:
WINDOW_EACH = 0.02
# Threads that waited for a core, in the mean. A decode at batch 1 with 2 threads on 2 cores: 0.1 to 0.2 alone, 0.65 to 1.5 beside a busy process
LAG = 0.5
GAIN = 1.05  # how much faster other threads must be to be kept
PAUSE, LONGEST_PAUSE = 0.5, 4.0  # seconds between trials: twice as many after each that gained nothing


class Threads:
    """`asked` threads at most; `use(n)` takes n from now on. `now` of them are in use."""

    def __init__(
        self,
        asked: int,
        use: Callable[[int], object],
        waited: Callable[[], float] = waited_for_cores,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.asked = self.now = asked
        self._use, self._waited, self._clock = use, waited, clock
        self._window = max(WINDOW, asked * WINDOW_EACH)
        self._steps: dict[int, list[float]] = {}  # seconds, by rows
        self._spent = 0.0
        self._began = clock(), waited()
        self._before: tuple[int, dict[int, list[float]]] | None = None  # while others are tried: what was in use, and its steps
        self._next = self._began[0]  # when a trial may begin
        self._pause = PAUSE

    def after(self, rows: int, seconds: float) -> None:
        """A step took so long, in which each of these rows decoded one token; rows 0: a step of another kind, which compares with nothing."""
        if rows:
            self._steps.setdefault(rows, []).append(seconds)
            self._spent += seconds
            if self._spent >= self._window:
                self._judge(self._clock())

    def _judge(self, now: float) -> None:
        waited = self._waited()
        lag = (waited - self._began[1]) / max(now - self._began[0], self._window)
        if self._before is not None:
            used, steps = self._before
            self._before = None
            if _gain(steps, self._steps) >= GAIN:
                self._pause = PAUSE
            else:
                self._take(used)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next = now + self._pause
        elif now >= self._next and (self.now < self.asked or lag >= LAG):
            self._before = self.now, self._steps
            self._take(self.asked if self.now < self.asked else max(1, self.asked - max(1, round(lag))))
        elif lag < LAG and self.now == self.asked:
            self._pause = PAUSE
        self._steps, self._spent, self._began = {}, 0.0, (now, waited)

    def _take(self, n: int) -> None:
        self._use(n)
        self.now = n


def _gain(before: dict[int, list[float]], after: dict[int, list[float]]) -> float:
    """How many times as fast the later steps were, of the sizes that both have; 0 where there are none."""
    common = before.keys() & after.keys()
    expected = sum(len(after[rows]) * sum(before[rows]) / len(before[rows]) for rows in common)
    return expected / sum(sum(after[rows]) for rows in common) if common else 0.0
