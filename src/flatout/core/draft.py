"""Draft: a plan in the making. Flight: one that is made and not yet committed. What the scheduler keeps beside the plan itself.

Records that a plan's rows pass through, nothing that decides. Made, changed and read by scheduler.py alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flatout.core.live import Live
from flatout.request import Status
from flatout.step import StepPlan


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    rows: list[Live]
    slots: np.ndarray  # int32 [R]
    counts: np.ndarray  # int32 [R]
    reach: np.ndarray  # int32 [R] tokens planned, with these
    admitted: list[Live] = field(default_factory=list)
    gifts: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))  # slots, columns, blocks: those newly given
    published: list[int] = field(default_factory=list)  # blocks that others find from now on
    waiting: dict[str, int] = field(default_factory=dict)

    def keep(self, mask: np.ndarray) -> None:
        self.rows = [self.rows[i] for i in np.flatnonzero(mask).tolist()]
        self.slots, self.counts, self.reach = self.slots[mask], self.counts[mask], self.reach[mask]


@dataclass(slots=True)
class Flight:
    """A plan not yet committed."""

    plan: StepPlan
    rows: list[Live]
    epochs: np.ndarray  # int32 [R]; a slot's epoch changes when its request leaves it
    published: list[int]  # blocks that others find though this plan, or one before it, has yet to compute them
    void: list[Live] = field(default_factory=list)  # started over since, as what their rows read may never have come

    def drops(self, live: Live) -> bool:
        """Whether nobody wants the result of this row any more."""
        return live.request.status is Status.FINISHED or live in self.void
