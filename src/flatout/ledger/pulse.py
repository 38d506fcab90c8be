"""Pulse: counters of anything, kept as they stood second by second, so that what they grew by in the last few seconds can be told.

Called by server/engines.py twice a second; rules.py reads the differences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

EVERY = 0.5  # seconds between two looks
KEPT = 250  # of them: two minutes and a little, as long as the ledger keeps its seconds


class Pulse:
    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=KEPT)

    def due(self, now: float) -> bool:
        return not self._looks or now - self._looks[-1][0] >= EVERY

    def add(self, now: float, counters: Mapping[str, float]) -> None:
        self._looks.append((now, counters))

    def over(self, seconds: float) -> tuple[float, dict[str, float]]:
        """(seconds between the first look that is not older and the last one, what each counter of the last grew by meanwhile); (0, {}) where there
        are no two. A counter that came meanwhile began at 0."""
        if len(self._looks) < 2:
            return 0.0, {}
        until, last = self._looks[-1]
        since, first = next((look for look in self._looks if until - look[0] <= seconds), self._looks[-1])
        return until - since, {name: value - first.get(name, 0.0) for name, value in last.items()}
