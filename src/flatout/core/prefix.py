"""What need not be computed again: chained block hashes over (extra, tokens), the longest match, publishing, and why no more was found.

A block's hash covers all tokens before it, so equal hashes mean equal KV. Which block lies where is blocks.py's; who may read the
cache, and when a block is published, is scheduler.py's, the only caller. Memory is bounded by the number of blocks.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from flatout.core.blocks import MEMORY, BlockPool
from flatout.request import Request

MISS_OFF = "off"  # prefix caching is switched off
MISS_SHORT = "too short"  # less than one full block before the last token
MISS_LOGPROBS = "prompt_logprobs"  # they are computed, never read from the cache
MISS_SALTED = "salted"  # nothing is cached under this salt. Says nothing of other salts: that would tell what others asked
MISS_EVICTED = "evicted"  # or lost with a step that failed
MISS_DIFFERS = "differs at token {}"  # counted from 0, against the recent sequence that agrees the longest

_RUNS_KEPT = 4  # continuations remembered of each chain, to tell where two prompts part


def root(*parts: str) -> bytes:
    """Where a chain of hashes starts. Each part is length-prefixed, so look-alikes ("a|b", "" and "a", "|b") never collide."""
    digest = blake2b(digest_size=32)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def tokens_of(request: Request, start: int, stop: int) -> list[int]:
    """Tokens of prompt and output in positions [start, stop)."""
    prompt = len(request.prompt_ids)
    if stop <= prompt:
        return request.prompt_ids[start:stop]
    if start >= prompt:
        return request.output_ids[start - prompt : stop - prompt]
    return request.prompt_ids[start:] + request.output_ids[: stop - prompt]


class PrefixCache:
    """Finds and publishes blocks of `block_size` tokens in `pool`. `top` is a request's root(): the hash before its first block."""

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self._pack = struct.Struct(f"{block_size}i").pack  # half the time of array("i", tokens).tobytes()
        # hash of a chain -> the last few token runs (int32 bytes) that followed it, full blocks with the hash that they lead to and tails
        self._runs: OrderedDict[bytes, dict[bytes, bytes | None]] = OrderedDict()

    def match(self, request: Request, top: bytes, most: int) -> list[int]:
        """The longest published chain of the request's blocks, at most `most` of them. Takes no reference."""
        blocks: list[int] = []
        for digest in self._chain(request, top, most):
            block = self.pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, request: Request, top: bytes, first: int, stop: int) -> None:
        """Let others find the request's blocks [first, stop), full of known tokens and computed or planned."""
        hashes = request.hashes
        for index in range(first, stop):
            before, run = hashes[index - 1] if index else top, self._run(request, index)
            if index == len(hashes):
                hashes.append(_digest(before, run))
            self.pool.publish(request.blocks[index], hashes[index])
            self._remember(before, run, hashes[index])

    def leave(self, request: Request, top: bytes, computed: int) -> None:
        """The request lets go of its blocks: its computed tail is kept for comparison."""
        full, rest = divmod(computed, self.block_size)
        if rest:
            tail = struct.pack(f"{rest}i", *tokens_of(request, computed - rest, computed))
            self._remember(request.hashes[full - 1] if full else top, tail, None)

    def why(self, request: Request, top: bytes, matched: int, most: int) -> str:
        """Why match() found `matched` blocks and not `most`; "" when it found them all. Asked once, at first admission."""
        if most == 0:
            return MISS_SHORT
        if matched == most:
            return ""
        if self.pool.was_evicted(request.hashes[matched]):
            return MISS_EVICTED
        runs = self._runs.get(request.hashes[matched - 1] if matched else top)
        if runs is None and matched == 0 and request.cache_salt:
            return MISS_SALTED
        agree = max((_agree(self._run(request, matched), run) for run in runs or ()), default=0)
        if agree == self.block_size:
            return MISS_EVICTED  # so long ago that the pool no longer remembers
        return MISS_DIFFERS.format(matched * self.block_size + agree)

    def _chain(self, request: Request, top: bytes, stop: int) -> Iterator[bytes]:
        """Hashes of the request's blocks up to `stop`, each made when asked for, or remembered: 1.2 or 0.65 us."""
        hashes = request.hashes
        yield from hashes[:stop]
        before = hashes[-1] if hashes else top
        for index in range(len(hashes), stop):
            run, runs = self._run(request, index), self._runs.get(before)
            before = (runs.get(run) if runs else None) or _digest(before, run)
            hashes.append(before)
            yield before

    def _run(self, request: Request, index: int) -> bytes:
        """Tokens of a full block as int32."""
        start = index * self.block_size
        return self._pack(*tokens_of(request, start, start + self.block_size))

    def _remember(self, chain: bytes, run: bytes, digest: bytes | None) -> None:
        runs = self._runs.get(chain)
        if runs is None:
            self._runs[chain] = {run: digest}
            if len(self._runs) > MEMORY + self.pool.num_blocks:
                self._runs.popitem(last=False)
            return
        self._runs.move_to_end(chain)
        runs.pop(run, None)
        runs[run] = digest
        if len(runs) > _RUNS_KEPT:
            del runs[next(iter(runs))]


def _digest(before: bytes, run: bytes) -> bytes:
    return blake2b(before + run, digest_size=32).digest()


def _agree(one: bytes, other: bytes) -> int:
    """How many leading int32 are equal."""
    length = min(len(one), len(other)) // 4
    parts = np.flatnonzero(np.frombuffer(one, np.int32, length) != np.frombuffer(other, np.int32, length))
    return int(parts[0]) if len(parts) else length
