"""Usual: what steps of about one shape take, so that one that took far longer has a name: a stall, or the first of its shape (something was made for it).

One number a shape, a fraction of a microsecond a step. Called by ledger.py.
"""

from __future__ import annotations

from flatout.step import StepRecord

TIMES, LEAST = 5.0, 0.05  # a step is out of the usual at so many times its seconds and so many seconds over it: on shared cores 20 ms come and go
ANEW = 5  # in a row are the new usual


def _class(count: int) -> int:
    """Counts that cost alike, four to each doubling."""
    return count if count < 8 else (count.bit_length() << 2) + (count >> (count.bit_length() - 3) & 3)


def shape_key(record: StepRecord) -> tuple[int, ...]:
    """Steps with one key cost about as much."""
    if record.tokens == record.rows and record.sampled == record.tokens:
        return record.rows, record.padded
    return _class(record.tokens), _class(record.sampled), _class(record.rows)


class Usual:
    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[float, int, int]] = {}  # seconds, steps (2: or more), and how many in a row were out of the usual

    def seconds(self, key: tuple[int, ...]) -> float | None:
        known = self._known.get(key)
        return known[0] if known else None

    def excess(self, key: tuple[int, ...], seconds: float) -> tuple[float, float]:
        """Seconds by which this step stalled, and by which the first of its shape took longer than this one, the second; mostly (0, 0)."""
        known = self._known.get(key)
        if known is None:
            self._known[key] = seconds, 1, 0
            return 0.0, 0.0
        usual, steps, odd = known
        if steps == 1 and usual > TIMES * seconds and usual > seconds + LEAST:
            self._known[key] = seconds, 2, 0
            return 0.0, usual - seconds
        if seconds > TIMES * usual and seconds > usual + LEAST:
            self._known[key] = (seconds, 2, 0) if odd + 1 == ANEW else (usual, 2, odd + 1)
            return seconds - usual, 0.0
        self._known[key] = usual + 0.1 * (seconds - usual), 2, 0
        return 0.0, 0.0
