"""Verdict: what limits a machine or a server, in one sentence, with the numbers it rests on, the remedy, and what that would bring.

The form alone, for every rule of the doctor's: those over a ledger and those over a probe of somebody's server. Nothing here judges.
Called by doctor/probe_rules.py; shown by cli/doctor/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """One number that a verdict rests on. `shown` as a terminal has it, unit included; `unit` is the value's own."""

    what: str
    value: float
    unit: str
    shown: str

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "value": self.value, "unit": self.unit, "shown": self.shown}


@dataclass(frozen=True)
class Verdict:
    """One finding. `healthy`: nothing is to be mended, the sentence says how well it runs.

    `factor`: what the remedy is predicted to multiply the better of speed by, 1 where it brings nothing or nobody can say; findings of
    one rank are ordered by it. Texts are whole sentences, or parts of one without a full stop.
    """

    constraint: str  # a short key, stable: "serial queue"
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""  # a flag or a deed
    gain: str = ""  # predicted, with its unit
    factor: float = 1.0
    unless: str = ""  # when it does not apply
    unseen: tuple[str, ...] = ()  # what could not be looked at
    healthy: bool = False

    def without_sight_of(self, things: Iterable[str]) -> Verdict:
        """The same, and these could not be seen."""
        return replace(self, unseen=(*self.unseen, *things))

    def to_json(self) -> dict[str, Any]:
        return {
            "constraint": self.constraint,
            "healthy": self.healthy,
            "sentence": self.sentence,
            "evidence": [e.to_json() for e in self.evidence],
            "remedy": self.remedy,
            "gain": self.gain,
            "factor": self.factor,
            "unless": self.unless,
            "unseen": list(self.unseen),
        }


def verdict_from(plain: Mapping[str, Any]) -> Verdict:
    """The verdict again from to_json(). ValueError: it is none of this version's."""
    try:
        return Verdict(**{**plain, "evidence": tuple(Evidence(**e) for e in plain["evidence"]), "unseen": tuple(plain["unseen"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no verdict of this version: {error!r}") from error
