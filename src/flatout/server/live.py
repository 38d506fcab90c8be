"""What a viewer of a served model sees beside its windows: the ledger by seconds, the roofline, TTFT and TPOT by percentile, the last requests.

Events are kept in rings as they happen, for a fraction of a microsecond each; the rest is told when somebody asks, and once a second however many
do. One Live a model, on the event loop; fed and asked by engines.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.ledger.account import RequestAccount
from flatout.ledger.ledger import SECONDS_KEPT, Account, Ledger, account
from flatout.ledger.roofline import roofline
from flatout.ledger.series import series
from flatout.ledger.verdict import Verdict

REQUESTS = 24  # shown: those that run, the newest first, then the last that ended
RECENT_SECONDS = 60  # whose latencies count
LATENCIES = 2048  # of them, the last
POINTS = 240  # of them, those that are told one by one
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class Seen:
    """One request of the waterfall."""

    id: str
    began: float  # monotonic
    end: str  # how it ended; "": it runs
    account: RequestAccount

    def plain(self, now: float) -> dict[str, Any]:
        return {"id": self.id, "age_ms": round((now - self.began) * 1e3, 1), "end": self.end, **self.account.plain()}


class Live:
    def __init__(self) -> None:
        self._ttft: deque[tuple[float, float]] = deque(maxlen=LATENCIES)  # when, and seconds
        self._tpot: deque[tuple[float, float]] = deque(maxlen=LATENCIES)
        self._ended: deque[Seen] = deque(maxlen=REQUESTS)
        self._seconds: dict[int, tuple[int, Account]] = {}  # of each closed second: its steps when it was told, and the account
        self._told: tuple[int, dict[str, Any]] = (0, {})  # what is told once a second, and in which it was

    def first_token(self, at: float, ttft: float) -> None:
        self._ttft.append((at, ttft))

    def ended(self, seen: Seen) -> None:
        self._ended.append(seen)
        if seen.account.tpot is not None:
            self._tpot.append((seen.began + seen.account.total, seen.account.tpot))

    def plain(self, ledger: Ledger, busy: bool, since: int | None, running: Sequence[Seen]) -> dict[str, Any]:
        """For JSON: series (of all seconds that are kept, or from `since` on), latency, requests. running: the newest first."""
        now = time.monotonic()
        shown = [*running, *reversed(self._ended)][:REQUESTS]
        tpot = [*self._tpot, *((now, seen.account.tpot) for seen in running if seen.account.tpot is not None)]
        return {
            "now": now,
            "series": self._series(ledger, int(now), busy, since),
            "latency": {"seconds": RECENT_SECONDS, "ttft": _latency(self._ttft, now), "tpot": _latency(tpot, now)},
            "requests": [seen.plain(now) for seen in shown],
        }

    def each_second(self, ledger: Ledger, busy: bool, verdicts: Callable[[], list[Verdict]]) -> dict[str, Any]:
        """For JSON, as of this second: windows of the last 10 and 60 seconds, the roofline of the first, and the verdicts."""
        second, table = int(time.monotonic()), ledger.table
        if self._told[0] != second:
            windows = {f"{n}s": ledger.window(n, busy).plain() for n in (10, 60)}
            roof = None if table is None else roofline(ledger.sums(10), table)
            self._told = second, {"windows": windows, "roofline": roof, "verdict": [verdict.to_json() for verdict in verdicts()]}
        return self._told[1]

    def _series(self, ledger: Ledger, now: int, busy: bool, since: int | None) -> dict[str, Any]:
        """`settled`: the last second in which a step ended. What comes later changes until the next step ends."""
        closed = ledger.closed()
        told = {}
        for second, sums in closed:
            known = self._seconds.get(second)
            told[second] = known if known is not None and known[0] == sums.steps else (sums.steps, account(sums, ledger.table))
        self._seconds = told
        points = series([(second, each) for second, (_, each) in told.items()], max(now - SECONDS_KEPT, since or 0), now, busy)
        return {"settled": closed[-1][0] if closed else 0, "points": [point.plain() for point in points]}


def _latency(events: Iterable[tuple[float, float]], now: float) -> dict[str, Any]:
    """count, percentiles in ms, and points: [seconds ago, ms] of the newest. Percentiles are None of nothing."""
    recent = [(now - at, 1e3 * seconds) for at, seconds in events if now - at <= RECENT_SECONDS]
    ranked = sorted(value for _, value in recent)
    return {
        "count": len(ranked),
        **{name: round(ranked[min(int(share * len(ranked)), len(ranked) - 1)], 3) if ranked else None for name, share in SHARES.items()},
        "points": [[round(age, 2), round(value, 3)] for age, value in recent[-POINTS:]],
    }
