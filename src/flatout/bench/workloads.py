"""The fixed offline workloads that every engine is measured on: the same token ids for each of them.

A workload is a list of (prompt ids, output tokens). Outputs are forced to their full length (the end id is ignored), so that a faster
engine can't look faster by stopping early. Data only; run by offline.py.
"""

from __future__ import annotations

import random

Work = list[tuple[list[int], int]]

VOCAB = 100_000  # ids stay under this, so that one list serves every model with a larger vocabulary
NAMES = ("batch1", "batch8", "batch64", "batch256", "mixed256", "mixed1024", "prefill8k", "prefill32k", "shared_prefix", "long_decode")


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(n)]


def workload(name: str) -> Work:
    """One of NAMES. Lengths are in tokens."""
    if name.startswith("batch"):
        n = int(name.removeprefix("batch"))
        rng = random.Random(n)
        return [(_ids(rng, 512), 256) for _ in range(n)]
    if name.startswith("mixed"):
        rng = random.Random(0)
        # the longer list begins where the shorter one ends: one generator makes both in order
        shorter = [(_ids(rng, rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]
        return shorter if name == "mixed256" else [(_ids(rng, rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(1024)]
    if name.startswith("prefill"):
        rng = random.Random(1)
        short, long = [(_ids(rng, 8000), 1)], [(_ids(rng, 32000), 1)]
        return short if name == "prefill8k" else long
    if name == "shared_prefix":
        rng = random.Random(2)
        common = _ids(rng, 4096)
        return [(common + _ids(rng, 128), 128) for _ in range(256)]
    if name == "long_decode":
        rng = random.Random(3)
        return [(_ids(rng, 16000), 128) for _ in range(32)]
    raise KeyError(name)


def fold(work: Work, vocab_size: int) -> Work:
    """The same work for a smaller vocabulary: ids wrapped into it."""
    if vocab_size >= VOCAB:
        return work
    return [([10 + (i - 10) % (vocab_size - 10) for i in prompt], n) for prompt, n in work]
