"""Roofline: where steps stand between what memory and arithmetic allow, by the kind of step.

A point is what steps of a kind did in a second of the device's time: FLOPs over bytes (its intensity), and FLOP/s. The roof over it is the least of
compute and of bandwidth times intensity. Plain data, no torch. Called by server/live.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from flatout.ledger.ledger import Sums
from flatout.ledger.table import CostTable

DECODE, PREFILL = "decode", "prefill"  # steps of decodes alone, and steps with chunks of prompts


@dataclass(frozen=True, slots=True)
class Operating:
    """Steps of one kind, in sum."""

    steps: int
    seconds: float  # of the device
    flops: float
    bytes: float

    def plain(self, bandwidth: float, rate: float) -> dict[str, float]:
        """For JSON, under the roof of bytes/s and FLOP/s; rate 0: no ceiling of compute is known."""
        intensity, reached = self.flops / self.bytes, self.flops / self.seconds
        roof = min(bandwidth * intensity, rate or bandwidth * intensity)
        return {**asdict(self), "intensity": intensity, "flops_per_s": reached, "of_roof": reached / roof}


def roofline(sums: Sums, table: CostTable) -> dict[str, Any] | None:
    """Of these steps, for JSON: ceilings in bytes/s and FLOP/s (by the types that the model computes in), and a point for each kind of step that
    there was. None: no bandwidth was measured."""
    cache = table.roof.cache
    found: dict[str, list[float]] = {}
    work = 0
    for alike in sums.alike.values():
        shape = alike.mean()
        moved = flops = held = 0.0
        for op in table.ops:
            cost = op.cost(shape) * op.count
            held += cost.weights + cost.kv
            moved += cost.weights + cost.kv + max(0, cost.activations - cache * op.count)
            flops += cost.flops
        work = max(work, round(held))
        kind = found.setdefault(DECODE if shape.decodes == shape.requests else PREFILL, [0, 0.0, 0.0])
        for i, value in enumerate((alike.steps, alike.steps * flops, alike.steps * moved)):
            kind[i] += value
    bandwidth = table.roof.bandwidth(work or table.weight_bytes)
    if not isfinite(bandwidth):
        return None
    rates = {op.dtype: rate for op in table.ops if (rate := table.roof.flops.get(op.dtype))}
    points = {
        kind: Operating(int(steps), seconds, flops, moved).plain(bandwidth, max(rates.values(), default=0.0))
        for kind, (steps, flops, moved) in found.items()
        if (seconds := sums.device.get(kind == DECODE, 0.0)) > 0 and moved
    }
    return {"machine": table.roof.name, "measured": table.roof.measured, "bandwidth": bandwidth, "flops": rates, "points": points}
