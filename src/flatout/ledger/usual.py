"""Usual: what steps of about one shape take, so that one that took far longer has a name: a stall, or the first of its shape (something was made for it).

One number a shape, a fraction of a microsecond a step. Called by ledger.py.
"""

from __future__ import annotations

from collections import deque

from flatout.step import StepRecord

TIMES, LEAST = 5.0, 0.1  # out of the usual: so many times its seconds and so many seconds over it; on shared cores 70 ms come and go
ANEW = 5  # in a row are the new usual
FIRSTS = 8  # first steps of their shape that may yet turn out to have been cold


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
        self._known: dict[tuple[int, ...], tuple[float, int]] = {}  # seconds, and how many in a row were out of the usual
        self._firsts: deque[tuple[tuple[int, ...], float, int, int]] = deque(maxlen=FIRSTS)  # key, seconds, tokens, rows

    def seconds(self, key: tuple[int, ...]) -> float | None:
        known = self._known.get(key)
        return known[0] if known else None

    def excess(self, key: tuple[int, ...], seconds: float, tokens: int, rows: int) -> tuple[float, float]:
        """Seconds by which this step stalled, and by which firsts of their shape took longer than this one, which did no less; mostly (0, 0)."""
        cold = self._cold(seconds, tokens, rows) if self._firsts else 0.0
        known = self._known.get(key)
        if known is None:
            self._known[key] = seconds, 0
            if seconds > LEAST:
                self._firsts.append((key, seconds, tokens, rows))
            return 0.0, cold
        usual, odd = known
        if seconds > TIMES * usual and seconds > usual + LEAST:
            self._known[key] = (seconds, 0) if odd + 1 == ANEW else (usual, odd + 1)
            return seconds - usual, cold
        self._known[key] = usual + 0.1 * (seconds - usual), 0
        return 0.0, cold

    def _cold(self, seconds: float, tokens: int, rows: int) -> float:
        cold = 0.0
        for first in list(self._firsts):
            key, taken, least_tokens, least_rows = first
            if tokens >= least_tokens and rows >= least_rows and taken > TIMES * seconds and taken > seconds + LEAST:
                self._firsts.remove(first)
                self._known[key] = seconds, 0
                cold += taken - seconds
        return cold
