"""Series: the ledger second by second, for whoever draws it. A step counts in the second in which it ended; where it took several, they share it.

Plain data, no torch, no clock. Called by server/live.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.ledger.ledger import PARTS, Account

DIGITS = 5  # of the seconds in plain()


@dataclass(slots=True)
class Point:
    """One second. `parts` (PARTS, in seconds) sum to about one: steps do not end on the stroke."""

    second: int  # on the machine's monotonic clock
    parts: dict[str, float]
    sampled: float = 0.0  # tokens that steps yielded
    prefill: float = 0.0  # prompt tokens computed
    of_floor: float = 0.0  # floor / time with load; 0: none is known
    rows: float = 0.0
    blocks: float = 0.0  # share of the pool in use
    waiting: dict[str, float] = field(default_factory=dict)  # requests that waited, by reason

    def plain(self) -> dict[str, Any]:
        """For JSON, without parts that took nothing."""
        return {
            "second": self.second,
            "parts": {name: round(s, DIGITS) for name, s in self.parts.items() if round(s, DIGITS)},
            "sampled": round(self.sampled, 2),
            "prefill": round(self.prefill, 2),
            "of_floor": round(self.of_floor, 4),
            "rows": round(self.rows, 2),
            "blocks": round(self.blocks, 4),
            "waiting": {reason: round(count, 2) for reason, count in self.waiting.items() if count},
        }


def series(closed: Sequence[tuple[int, Account]], begin: int, until: int, busy: bool) -> list[Point]:
    """A point for each second from `begin` to before `until` that is known of. closed: the accounts of seconds in which steps ended, rising; busy: a
    step is under way since the last of them."""
    points: list[Point] = []
    following = None
    for second, account in closed:
        first = second - max(0, round(account.seconds) - 1) if following is None else following
        points += _spread(account, first, second, begin)
        following = second + 1
    tail = range(max(begin, until if following is None else following), until)
    return [*points, *(Point(second, {"underway" if busy else "idle": 1.0}) for second in tail)]


def _spread(account: Account, first: int, last: int, begin: int) -> list[Point]:
    """The account over these seconds, from `begin` on: work lies at their end, as it was idle until then."""
    each = account.seconds / (last - first + 1)
    loaded = account.seconds - account.parts["idle"]
    left, points = loaded, []
    for second in range(last, max(first, begin) - 1, -1):
        here = min(each, left)
        left -= here
        share = here / loaded if loaded else 0.0
        parts = {name: account.parts[name] * share for name in PARTS}
        parts["idle"] = each - here
        load = (account.of_floor, account.rows, account.blocks, account.waiting) if here else ()
        points.append(Point(second, parts, account.sampled * share, account.prefill_tokens * share, *load))
    return points[::-1]
