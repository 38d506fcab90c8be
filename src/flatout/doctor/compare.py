"""How far logits are from the exact ones: per position, and in all. Arithmetic alone: knows no model. Called by selfcheck.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 16  # rows in float64: of a vocabulary of 150,000 they take 19 MB


@dataclass(frozen=True, slots=True)
class Position:
    """One row of logits against the exact one. Where the row isn't finite, the three errors are infinite and it counts as flipped."""

    kind: str  # of the step that made it
    token: int  # place in the prompt, from 0
    rms: float  # of the logits' errors, as a share of the standard deviation of the exact logits
    largest: float  # of the errors, likewise
    kl: float  # of the next token's distribution from the exact one, nats
    flipped: bool  # the likeliest token is another
    margin: float  # by how much the exact logits prefer theirs to it; 0 where it is the same


def positions(kind: str, tokens: Iterable[int], exact: Tensor, fast: Tensor) -> list[Position]:
    """exact, fast: float32 [N, V], one row for each of the tokens."""
    made = []
    for low in range(0, exact.shape[0], AT_ONCE):
        right, other = exact[low : low + AT_ONCE].double(), fast[low : low + AT_ONCE].double()
        spread = right.std(1, correction=0).clamp_min(torch.finfo(torch.float64).tiny)
        error = (other - right).abs()
        log_p, log_q = right.log_softmax(1), other.log_softmax(1)
        kl = (log_p.exp() * (log_p - log_q)).sum(1).clamp_min(0)  # rounding may leave -1e-17
        best, taken = right.argmax(1, keepdim=True), other.argmax(1, keepdim=True)
        margin = (right.gather(1, best) - right.gather(1, taken)).squeeze(1)
        made.append((error.pow(2).mean(1).sqrt() / spread, error.amax(1) / spread, kl, best.squeeze(1) != taken.squeeze(1), margin))
    rms, largest, kls, flips, margins = (torch.cat(column).tolist() for column in zip(*made))
    sound = fast.isfinite().all(1).tolist()
    return [
        Position(kind, token, rms[i], largest[i], kls[i], flips[i], margins[i])
        if sound[i]
        else Position(kind, token, math.inf, math.inf, math.inf, True, margins[i])
        for i, token in enumerate(tokens)
    ]


@dataclass(frozen=True, slots=True)
class Figures:
    """Several positions in numbers."""

    positions: int
    rms: float  # root of the mean square of theirs
    largest: float
    kl_mean: float
    kl_max: float
    flips: int
    closest_flip: float | None  # exact margins of the flipped choices; None: there is none
    widest_flip: float | None
    first_flip: int | None  # its token's place in the prompt

    @classmethod
    def of(cls, positions: Iterable[Position]) -> Figures:
        """ValueError: none given."""
        several = list(positions)
        if not several:
            raise ValueError("figures of no positions")
        flips = [p for p in several if p.flipped]
        return cls(
            positions=len(several),
            rms=math.sqrt(sum(p.rms**2 for p in several) / len(several)),
            largest=max(p.largest for p in several),
            kl_mean=sum(p.kl for p in several) / len(several),
            kl_max=max(p.kl for p in several),
            flips=len(flips),
            closest_flip=min((p.margin for p in flips), default=None),
            widest_flip=max((p.margin for p in flips), default=None),
            first_flip=min((p.token for p in flips), default=None),
        )

    @property
    def agreement(self) -> float:
        """Share of the positions whose likeliest token is the exact one."""
        return 1 - self.flips / self.positions

    def to_json(self) -> dict[str, Any]:
        """Null stands for what is infinite: logits that aren't finite."""
        return {
            "positions": self.positions,
            "logit_error_rms_share": finite(self.rms),
            "logit_error_max_share": finite(self.largest),
            "kl_mean_nats": finite(self.kl_mean),
            "kl_max_nats": finite(self.kl_max),
            "top1_agreement_share": self.agreement,
            "top1_flips": self.flips,
            "closest_flip_margin_logits": self.closest_flip,
            "widest_flip_margin_logits": self.widest_flip,
            "first_flip_token": self.first_flip,
        }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
