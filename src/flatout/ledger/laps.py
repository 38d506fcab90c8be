"""Laps: which stage the engine's thread was in when, so that the time for which the device stood still has a name.

One mark where each stage begins; a stage lasts until the next mark, so nothing is left out and nothing counts twice. Marks and questions are the
engine's thread's. Called by engine.py.
"""

from __future__ import annotations

import time
from collections import deque

# stages: "drain" takes requests in, "schedule" plans, "launch" hands the step to the device, "wait" blocks on it, "commit" takes its tokens,
# "deliver" hands outputs on, "idle" has nothing to do
IDLE = "idle"


class Laps:
    def __init__(self) -> None:
        self.now = IDLE
        self._marks: deque[tuple[float, str]] = deque([(0.0, IDLE)])  # when each stage began; before the first mark there was no work
        self._spent: dict[str, float] = {}

    def mark(self, stage: str) -> float:
        """The stage begins now; returns the time. 0.3 us."""
        now = time.perf_counter()
        if stage != self.now:
            begun, last = self._marks[-1]
            self._spent[last] = self._spent.get(last, 0.0) + now - begun
            self._marks.append((now, stage))
            self.now = stage
        return now

    def spent(self) -> dict[str, float]:
        """Seconds in each stage that ended since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def exposed(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of each stage between these times. What lies before `begin` is forgotten: ask in order."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= begin:
            marks.popleft()
        found: dict[str, float] = {}
        for i, (begun, stage) in enumerate(marks):
            if begun >= end:
                break
            until = marks[i + 1][0] if i + 1 < len(marks) else end
            seconds = min(until, end) - max(begun, begin)
            if seconds > 0:
                found[stage] = found.get(stage, 0.0) + seconds
        return found
