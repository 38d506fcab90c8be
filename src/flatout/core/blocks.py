"""BlockPool: the blocks of the KV cache as numbers: who holds how many references, which are free, which may be found by hash.

Knows nothing of requests or tokens (prefix.py turns those into hashes) and allocates no memory. Called by scheduler.py and prefix.py.
A published block is computed, or planned: the device runs plans in order, so it is computed for whoever finds it. A free block that bears
a published hash stays findable until it is reused; the order of the free blocks is the eviction order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MEMORY = 1024  # entries that what is kept for explaining a miss may hold beyond one for each block


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Every operation is O(1) a block."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks  # published hash of each block
        self.releases = 0  # calls of release(): while it stands still, what did not fit still does not
        self.evictions = 0  # published blocks reused for something else
        self._by_hash: dict[bytes, int] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # the last MEMORY + num_blocks hashes evicted
        # free blocks: those without a hash go first, the lowest number first at the start; then the least recently used
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that take() can give, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that still bear a published hash."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, one reference each. The caller has looked at num_free."""
        blocks = self._blank[: -count - 1 : -1]  # from its end, as far as it goes
        del self._blank[len(self._blank) - len(blocks) :]
        while len(blocks) < count:
            block, _none = self._cached.popitem(last=False)
            self._evict(block)
            blocks.append(block)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these published blocks."""
        refs = self.refs
        for block in blocks:
            held = refs[block]
            if held == 0:
                del self._cached[block]
            refs[block] = held + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less, given a sequence's blocks in order. Its tail is evicted before its head, which more others share."""
        self.releases += 1
        refs = self.refs
        for block in reversed(blocks):
            left = refs[block] = refs[block] - 1
            if left == 0:
                if self.hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def find(self, digest: bytes) -> int | None:
        """The block published under this hash."""
        return self._by_hash.get(digest)

    def chain(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks published under these hashes, up to the first hash that nobody bears."""
        blocks = list(map(self._by_hash.get, digests))
        return [block for block in blocks[: blocks.index(None) if None in blocks else None] if block is not None]

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these are free: sharing them takes that many out of num_free."""
        return list(map(self.refs.__getitem__, blocks)).count(0)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find this full, held block, computed or planned. If another bears the hash already, that one stays the one to find."""
        if digest not in self._by_hash:
            self._by_hash[digest] = block
            self.hashes[block] = digest

    def unpublish(self, block: int) -> None:
        """Nobody finds this block any more, as what was planned for it did not come."""
        digest = self.hashes[block]
        if digest is not None:
            self.hashes[block] = None
            del self._by_hash[digest]
            if self.refs[block] == 0:
                del self._cached[block]
                self._blank.append(block)

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block bore this hash lately."""
        return digest in self._evicted

    def _evict(self, block: int) -> None:
        digest = self.hashes[block]
        assert digest is not None  # only published blocks are in _cached
        self.hashes[block] = None
        del self._by_hash[digest]
        self.evictions += 1
        self._evicted[digest] = None
        self._evicted.move_to_end(digest)
        if len(self._evicted) > MEMORY + self.num_blocks:
            self._evicted.popitem(last=False)
