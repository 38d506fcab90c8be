"""The largest costs of an account in words: each op and each wait by name, its share of the time under load, its floor and how far above that it is.

A reader for people over what ledger.py sums; nothing is measured or judged here. No torch. Called by cli/doctor/trace.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatout.ledger.ledger import HOST

FORWARD = ("floor_bandwidth", "floor_compute", "kernels", "padding")  # what the ops' own times tell by name
NO_LOAD = ("idle", "underway")
WORDS = {  # part of an account -> what it is
    "sample": "choosing tokens from logits",
    "launch": "launches, and Python between ops",
    HOST + "drain": "the device waiting while requests are taken in",
    HOST + "schedule": "the device waiting for the scheduler",
    HOST + "inputs": "the device waiting for a step's inputs",
    HOST + "wait": "the device waiting until its end is noticed",
    HOST + "commit": "the device waiting while tokens are taken over",
    HOST + "deliver": "the device waiting while outputs are handed on",
    "communication": "communication between ranks",
    "residual": "what no clock saw",
}
TINY = 0.02  # of its time: a floor below that explains nothing


@dataclass(frozen=True)
class Spent:
    """One cost; seconds of the mean step, of an op with all its calls."""

    name: str
    seconds: float
    share: float  # of the time under load
    floor: float | None  # least seconds by bytes and FLOPs; None: it has none, or it is not known

    @property
    def ratio(self) -> float | None:
        """Times its floor; None where there is none that explains anything."""
        return self.seconds / self.floor if self.floor is not None and self.floor >= TINY * self.seconds else None

    @property
    def sentence(self) -> str:
        said = f"{self.name}: {self.seconds * 1e3:.3g} ms of each step, {self.share:.0%} of the time"
        if self.floor is None:
            return f"{said}; it has no floor"
        if self.ratio is None:
            return f"{said}; it moves next to no bytes from memory and computes little, so nearly all of it is overhead"
        if self.ratio < 1:
            return f"{said}; faster than the {self.floor * 1e3:.3g} ms that this machine's ceilings, as measured, allow: {self.ratio:.2f} times its floor"
        return f"{said}; its bytes and FLOPs allow {self.floor * 1e3:.3g} ms: {self.ratio:.2f} times its floor"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "sentence": self.sentence}


def largest(account: Mapping[str, Any], count: int = 5) -> list[Spent]:
    """Of Account.plain(), which a server's /ledger has too; falling by seconds. None where no step ran."""
    parts, steps = account["parts"], account["steps"]
    loaded = account["seconds"] - sum(parts[part] for part in NO_LOAD)
    if not steps or loaded <= 0:
        return []
    known = any(op["floor"] for op in account["ops"])
    found = [(op["label"], op["seconds"], op["floor"] if known else None) for op in account["ops"]]
    if not found:
        floor = parts["floor_bandwidth"] + parts["floor_compute"]
        found = [("the ops of the forward, none told apart yet", sum(parts[part] for part in FORWARD), floor or None)]
    found += [(WORDS.get(part, part), seconds, None) for part, seconds in parts.items() if part not in (*FORWARD, *NO_LOAD) and seconds > 0]
    found.sort(key=lambda each: -each[1])
    return [Spent(name, s / steps, s / loaded, None if floor is None else floor / steps) for name, s, floor in found[:count]]
