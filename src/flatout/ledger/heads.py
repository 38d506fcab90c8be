"""Heads: which part of each prompt recent prompts had too, whatever the prefix cache made of it, and what of that was computed again, by reason.

The cache knows why it missed (core/prefix.py); whether there was anything to find, under another salt or behind a first word that differs, it can't
know. Counts only: no text, and nothing of it reaches a client. numpy alone. One for each served model, kept by server/engines.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

RECENT = 8  # prompts compared with: 8 us each at 4,096 tokens
LEAST = 16  # tokens: less in common is no head; chat templates share as much
POSITIONS = 64  # kept of where prompts part


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of one prompt to those that came lately, in tokens."""

    head: int = 0  # the longest beginning that one of them has too
    behind: int = 0  # the longest run, at the same place, of what follows the first difference
    parts_at: int = 0  # where that difference is


class Heads:
    def __init__(self) -> None:
        self._recent: deque[np.ndarray] = deque(maxlen=RECENT)
        self.lost: dict[str, int] = {}  # tokens that were there before and were computed again, by reason
        self.parted: dict[int, int] = {}  # of those lost behind a difference: by its position

    def see(self, prompt: bytes) -> Likeness:
        """prompt: int32 token ids (Request.prompt_bytes)."""
        mine, best = np.frombuffer(prompt, np.int32), Likeness()
        for other in self._recent:
            like = _likeness(mine, other)
            best = Likeness(max(best.head, like.head), *max((best.behind, best.parts_at), (like.behind, like.parts_at)))
        self._recent.append(mine)
        return best

    def ended(self, like: Likeness, cached: int, reason: str, prompt: int) -> None:
        """A prompt of so many tokens had `cached` of them from the cache; reason: why no more (Request.miss_reason)."""
        lost, kind = like.head - cached, reason
        if reason.startswith("differs"):
            kind, lost = "differs", like.behind
            if like.behind < max(LEAST, prompt // 4):
                return
            if like.parts_at in self.parted or len(self.parted) < POSITIONS:
                self.parted[like.parts_at] = self.parted.get(like.parts_at, 0) + lost
        if reason and lost >= LEAST:
            self.lost[kind] = self.lost.get(kind, 0) + lost


def _likeness(mine: np.ndarray, other: np.ndarray) -> Likeness:
    length = min(len(mine), len(other))
    apart = np.flatnonzero(mine[:length] != other[:length])
    if not len(apart):
        return Likeness(length)
    runs = np.diff(apart, append=length) - 1
    return Likeness(int(apart[0]), int(runs.max()), int(apart[0]))
