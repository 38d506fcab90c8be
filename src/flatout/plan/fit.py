"""What would make so many requests of a length fit: changed settings, each tried on paper, the fewest changes first.

The arithmetic is capacity.py's; nothing is loaded. Called by cli/doctor/plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from flatout.config import ConfigError
from flatout.doctor.predict import OnPaper, on_paper
from flatout.plan.capacity import Capacity, capacity


@dataclass(frozen=True)
class Way:
    changes: Mapping[str, Any]
    running: int  # requests of the length that run at once so


def running(plan: Capacity) -> int:
    """Of the one length that the plan was made for."""
    return 0 if plan.short else plan.fits[0].running


def ways(options: Mapping[str, Any], gpu: str | None, memory: int | None, length: int, wanted: int) -> list[Way]:
    """Those with as few changes as any that fit `wanted` requests, else the one that fits most; an empty list: they fit as it is.

    gpu, memory: as on_paper() takes them. ConfigError, ModelFileError: no start is possible with these options.
    """
    paper = on_paper(options, gpu, memory)
    plan = capacity(paper, lengths=(length,))
    if running(plan) >= wanted:
        return []
    slots = {"max_num_seqs": wanted} if (paper.config.scheduler.max_num_seqs or 0) < wanted else {}
    found: list[Way] = []
    for changes in sorted(_tries(paper, wanted), key=len):
        if found and found[0].running >= wanted and len(changes) > len(found[0].changes) - len(slots):
            break
        try:
            way = _way(options, gpu, memory, length, wanted, {**slots, **changes})
        except ConfigError:
            continue  # this model or machine can't be run so
        if way.running >= wanted and (not found or found[0].running >= wanted):
            found.append(way)
        elif not found or (found[0].running < way.running):
            found = [way]
    return found


def _way(options: Mapping[str, Any], gpu: str | None, memory: int | None, length: int, wanted: int, changes: dict[str, Any]) -> Way:
    paper = on_paper({**options, **changes}, gpu, memory)
    plan = capacity(paper, lengths=(length,))
    if running(plan) < wanted and paper.hardware.device == "cpu":  # where the pool takes a quarter of what is free, unless told more
        size = paper.config.cache.block_size
        need = wanted * -(-length // size) * paper.block_bytes
        if plan.weights + plan.buffers + plan.worst_step + need <= plan.usable:
            return Way({**changes, "kv_cache_memory_bytes": need}, wanted)
    return Way(changes, running(plan))


def _tries(paper: OnPaper, wanted: int) -> Iterator[dict[str, Any]]:
    """Changes that free memory: nothing, fewer bytes of keys and values, of weights, of a step's buffers; and of these several."""
    config = paper.config
    budget = config.scheduler.max_num_batched_tokens or 0
    kinds: tuple[list[dict[str, Any]], ...] = (
        [{}, *({"kv_cache_dtype": dtype} for dtype in ("bfloat16", "int8") if dtype != config.cache.kv_cache_dtype)],
        [{}, *({"quantization": scheme} for scheme in ("int8", "int4") if scheme != config.model.quantization)],
        [{}, {"max_num_batched_tokens": max(512, wanted)}] if budget > max(512, wanted) else [{}],
    )
    yield from ({**kv, **weights, **buffers} for kv, weights, buffers in product(*kinds))
