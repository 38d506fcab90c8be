"""What need not be computed again: chained block hashes over (extra, tokens), the longest match, publishing, and why no more was found.

A block's hash covers all tokens before it, so equal hashes mean equal KV. Which block lies where is blocks.py's; who may read the
cache, and when a block is published, is scheduler.py's, the only caller. Memory is bounded by the number of blocks.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from flatout.core.blocks import MEMORY, BlockPool
from flatout.request import Request, int32_bytes

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


def tokens_of(request: Request, start: int, stop: int) -> bytes:
    """Tokens of prompt and output in positions [start, stop), as int32."""
    data, prompt = request.prompt_bytes[4 * start : 4 * stop], len(request.prompt_ids)
    if stop > prompt:
        data += int32_bytes(request.output_ids[max(start - prompt, 0) : stop - prompt])
    return data


class PrefixCache:
    """Finds and publishes blocks of `block_size` tokens in `pool`. `top` is a request's root(): the hash before its first block."""

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size
        self._pack = struct.Struct(f"{block_size}i").pack  # of a block that was sampled
        # the prompt looked up last: its top, its tokens and the hashes of its blocks, as far as they are known
        self._model: tuple[bytes, bytes, list[bytes]] = (b"", b"", [])
        # hash of a chain -> the last few token runs (int32 bytes) that followed it, full blocks with the hash that they lead to and tails
        self._runs: OrderedDict[bytes, dict[bytes, bytes | None]] = OrderedDict()

    def match(self, request: Request, top: bytes, most: int) -> list[int]:
        """The longest published chain of the request's blocks, at most `most` of them. Takes no reference."""
        if not request.hashes:
            self._take_over(request, top)
        blocks = self.pool.chain(request.hashes[:most])
        while len(blocks) == len(request.hashes) < most:
            block = self.pool.find(self._extend(request, top))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take_over(self, request: Request, top: bytes) -> None:
        """Hashes from the request looked up before, as far as the two prompts agree: those that come together often begin alike, and to
        compare 4,096 tokens takes 5 us, to find their hashes one by one 170."""
        its_top, prompt, hashes = self._model
        if top == its_top:
            request.hashes = hashes[: _agree(prompt, request.prompt_bytes) // self.block_size]
        self._model = top, request.prompt_bytes, request.hashes

    def publish(self, request: Request, top: bytes, first: int, stop: int) -> None:
        """Let others find the request's blocks [first, stop), full of known tokens and computed or planned."""
        hashes = request.hashes
        before = hashes[first - 1] if first else top
        for index in range(first, stop):
            run = self._run(request, index)
            if index == len(hashes):
                hashes.append(_digest(before, run))
            digest = hashes[index]
            self.pool.publish(request.blocks[index], digest)
            self._remember(before, run, digest)
            before = digest

    def leave(self, request: Request, top: bytes, computed: int) -> None:
        """The request lets go of its blocks: its computed tail is kept for comparison."""
        full, rest = divmod(computed, self.block_size)
        if rest:
            self._remember(request.hashes[full - 1] if full else top, tokens_of(request, computed - rest, computed), None)

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
        mine = self._run(request, matched)
        agree = max((_agree(mine, run) for run in runs or () if run[:4] == mine[:4]), default=0)
        if agree == self.block_size:
            return MISS_EVICTED  # so long ago that the pool no longer remembers
        return MISS_DIFFERS.format(matched * self.block_size + agree)

    def _extend(self, request: Request, top: bytes) -> bytes:
        """The hash of the request's first block that has none yet, made or remembered: 1.2 or 0.4 us."""
        hashes = request.hashes
        before, run = hashes[-1] if hashes else top, self._run(request, len(hashes))
        runs = self._runs.get(before)
        digest = (runs.get(run) if runs else None) or _digest(before, run)
        hashes.append(digest)
        return digest

    def _run(self, request: Request, index: int) -> bytes:
        """Tokens of a full block as int32."""
        start = index * self.block_size
        sampled = start - len(request.prompt_ids)
        if sampled >= 0:
            return self._pack(*request.output_ids[sampled : sampled + self.block_size])
        return tokens_of(request, start, start + self.block_size)

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
