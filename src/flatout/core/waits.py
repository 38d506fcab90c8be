"""Waits: for how long each request waited, and for what: blocks, slots, budget, policy, or only for the next plan to be made.

Each plan names what keeps the head of the line and what keeps those behind it, and that holds until the next one. So a clock for each reason runs
for all behind the head, and a request remembers what the clocks showed when it came: waiting costs nothing per request and plan. Called by scheduler.py.
"""

from __future__ import annotations

from flatout.core.live import Live
from flatout.request import NEXT_PLAN, PREEMPTED


class Waits:
    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}  # seconds so far of all but the head, by reason
        self._now = 0.0  # of the last plan
        self._new: list[Live] = []
        self._head: Live | None = None
        self._why: tuple[str, str] = ("", "")  # of the head, and of the others

    def add(self, live: Live) -> None:
        """It came since the last plan."""
        self._new.append(live)

    def preempted(self, live: Live) -> None:
        """It is back in the line; all that it waits from now on is for that reason."""
        live.since = self._now, None

    def advance(self, now: float) -> None:
        """A plan is made now: what was said with the last one held until here."""
        seconds, (reason, others) = now - self._now, self._why
        if others:
            self._clocks[others] = self._clocks.get(others, 0.0) + seconds
        self._now = now
        if self._head is not None and self._head.since is not None and self._head.since[1] is not None:
            _told(self._head, reason, seconds)
            self._head.since = now, dict(self._clocks)
        self._head, self._why = None, ("", "")
        for live in self._new:
            _told(live, NEXT_PLAN, now - live.request.arrival)
            live.since = now, dict(self._clocks)
        self._new.clear()

    def why(self, head: Live, reason: str, others: str) -> None:
        """What keeps the head of the line and those behind it, from this plan on."""
        if head.since is not None and head.since[1] is not None:
            self.told(head)
        self._head, self._why = head, (reason, others)

    def count(self, waiting: int) -> dict[str, int]:
        """So many who stand in the line, by what keeps them."""
        new = min(len(self._new), waiting) if self._head else waiting
        left, (reason, others) = waiting - new, self._why
        found = {NEXT_PLAN: new, reason: min(left, 1)}
        found[others] = found.get(others, 0) + max(0, left - 1)
        return {why: count for why, count in found.items() if count}

    def told(self, live: Live) -> None:
        """Its request's `waited` holds all until this plan."""
        if live.since is None:
            return
        since, clocks = live.since
        if clocks is None:
            _told(live, PREEMPTED, self._now - since)
        else:
            for reason, seconds in self._clocks.items():
                _told(live, reason, seconds - clocks.get(reason, 0.0))
        live.since = self._now, dict(self._clocks)


def _told(live: Live, reason: str, seconds: float) -> None:
    if seconds > 0:
        waited = live.request.waited
        waited[reason] = waited.get(reason, 0.0) + seconds
