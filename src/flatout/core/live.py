"""Live: what the scheduler knows of a request from add() to its end, beside the arrays of counts.py; Group: the n samples of one user request.

Records with their place in line, nothing that acts. Made, changed and read by scheduler.py alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.request import PositionLogprobs, Request, Status


@dataclass(slots=True, eq=False)
class Group:
    """The live samples of one user request. While sample 0 computes the prompt, the others are parked."""

    samples: dict[int, Live] = field(default_factory=dict)  # by index
    parked: list[Live] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Live:
    """One sequence between add() and its end."""

    request: Request
    # three of the request's own, at hand for the loop over all rows
    id: str
    index: int
    output_ids: list[int]
    group: Group
    rank: tuple[float, ...]  # by policy
    number: int  # order of arrival
    top: bytes | None  # where its chain of block hashes starts; None: it shares with nobody
    reads: bool  # may take blocks from the prefix cache
    ending: frozenset[int]  # ids that may end it
    most: int  # output tokens at which it ends
    prompt_logprobs: list[PositionLogprobs | None] | None  # those that came so far; sample 0 alone keeps them, the prompt is the same
    parked: bool
    opened: bool = False  # had its first Output
    owed: bool = False  # preempted while a token of it was in flight
    declined: int = -1  # BlockPool.releases when it last found too few blocks

    def running_key(self) -> tuple[tuple[float, ...], int]:
        return self.rank, self.number

    def waiting_key(self) -> tuple[tuple[float, ...], bool, int]:
        """Preempted ones stand before others of their rank."""
        return self.rank, self.request.status is Status.WAITING, self.number
