"""Live: what the scheduler knows of a request from add() to its end, beside the arrays of counts.py.

A record with its place in line, nothing that acts. Made, changed and read by scheduler.py alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from flatout.request import PositionLogprobs, Request


@dataclass(slots=True, eq=False)
class Live:
    """One sequence between add() and its end."""

    request: Request
    # three of the request's own, at hand for the loop over all rows
    id: str
    index: int
    output_ids: list[int]
    rank: tuple[float, ...]  # by policy
    number: int  # order of arrival
    top: bytes | None  # where its chain of block hashes starts; None: it shares with nobody
    reads: bool  # may take blocks from the prefix cache
    ending: frozenset[int]  # ids that may end it
    most: int  # output tokens at which it ends
    prompt_logprobs: list[PositionLogprobs | None] | None  # those that came so far; sample 0 alone keeps them, the prompt is the same
    opened: bool = False  # had its first Output
    owed: bool = False  # preempted while a token of it was in flight
    declined: int = -1  # BlockPool.releases when it last found too few blocks
    # waits.py's: until when its waiting is told, and what its clocks showed by then; None: it was preempted
    since: tuple[float, dict[str, float] | None] | None = None
    kept: int = -2  # the step that last left it for the next one, to go whole; at first none, nor the one before the first

    def place(self) -> tuple[tuple[float, ...], int]:
        """In both lines. Of one rank nobody overtakes, so a preempted one is older than all who wait and stands before them."""
        return self.rank, self.number
