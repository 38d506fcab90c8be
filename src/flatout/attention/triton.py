"""TritonBackend: attention by the paged kernels of kernels/gpu/attention.py, over the cache where it lies.

Only planning lives here: which rows are decoded together, how the others are cut into tiles, in which order. Called by runner/ through
backend.py's protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatout.attention.backend import pairs
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.attention import AttentionWork, Long, LongChunks, Paged, cudnn_runs, paged_runs
from flatout.kernels.gpu.device import facts
from flatout.kernels.prefixes import shared_of, shared_prefixes
from flatout.kernels.upload import upload

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec

# Packed queries of a tile: LARGE reads a key half as often, SMALL gives twice the programs where few would leave multiprocessors idle
SMALL, LARGE = 64, 128
# Chunks that dense attention may take, and what their lengths are rounded up to (kernels/attention.py:Long)
LONG, ROUND = 4096, 512
FARTHEST = 32_768  # keys before such a chunk: they are gathered, and what is transient must not grow with the context
# Keys that rows of a captured step share are read once where that saves this share of all keys' reads, and these bytes a layer (8 us of an
# H200): two small launches a step, one more a layer, and pieces to be put together. PROBES columns of the tables are looked at, not all
SAVED, SAVED_BYTES, FEWEST, PROBES = 0.25, 32 << 20, 17, 8
UNKNOWN = np.empty(0, np.int32)


class TritonBackend:
    name = "triton"
    captures = True

    def __init__(self, spec: ModelSpec, block_size: int, deterministic: bool = False, cascade: bool = True):
        """deterministic: a row's bits depend neither on the other rows nor on how its prompt was cut or cached: every row goes by tiles of one
        size, whose arithmetic is the same for one query as for many. cascade: captured steps may read shared keys once."""
        if block_size & (block_size - 1) or not 1 <= block_size <= 1024:
            raise ValueError(f"block_size {block_size}: the paged kernels need a power of two up to 1024")
        self.small = True  # no large tiles
        self.dense = False  # cuDNN may be asked for long chunks
        self.windows = [group.window for group in spec.cache_groups()]
        self.cascades = cascade and not deterministic and None in self.windows
        self.key_bytes = 0  # of a key and its value in a layer; 0: not allocated yet
        self.block_size = block_size
        self.deterministic = deterministic
        self.kv_heads = spec.num_kv_heads
        self.group = spec.num_heads // spec.num_kv_heads

    def kv_bytes_per_block(self, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        return 2 * spec.num_layers * spec.kv_size * block_size * dtype.itemsize

    def allocate_kv(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        if block_size != self.block_size:
            raise ValueError(f"block_size {block_size}: this backend plans for {self.block_size}")
        if device.type == "cuda" and not paged_runs(device, dtype, spec.head_dim, self.group):
            raise ValueError(
                f"the paged kernels cannot do {dtype}, head_dim {spec.head_dim}, {self.group} query heads of a KV head; see paged_runs"
            )
        # tiles of 64 packed queries were as fast on an H200 as of 128, but for narrow heads
        self.small = self.deterministic or dtype == torch.float32 or spec.head_dim > 64
        self.dense = not self.deterministic and cudnn_runs(device, dtype, spec.head_dim, spec.attn_softcap)
        self.key_bytes = 2 * spec.kv_size * dtype.itemsize
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # zeros, so that no NaN lies in a slot not written yet
        return [tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv") for _ in range(spec.num_layers)]  # type: ignore[misc]

    def plan(self, batch: ForwardBatch, host: HostBatch) -> None:
        q_lens, kv_lens = host.q_lens.astype(np.int64), host.kv_lens.astype(np.int64)
        paged = self._cut(batch, q_lens, kv_lens, np.ones(len(q_lens), bool))
        long = self._long(q_lens, kv_lens)
        rest = self._cut(batch, q_lens, kv_lens, ~long) if long.any() and not long.all() else None
        made = []
        for window, table, on_device in zip(self.windows, host.block_tables, batch.block_tables):
            work = partial(
                AttentionWork,
                q_lens=host.q_lens,
                kv_lens=host.kv_lens,
                table=table,
                block_size=self.block_size,
                window=window,
                kv_tokens=int((kv_lens if window is None else np.minimum(kv_lens, q_lens + window - 1)).sum()),
                pairs=pairs(q_lens, kv_lens, window),
            )
            arrangement: Paged | LongChunks = paged(on_device)
            if long.any() and window is None:
                chunks = tuple(self._chunk(int(row), q_lens, kv_lens, table, batch.tokens.device) for row in np.flatnonzero(long))
                arrangement = LongChunks(chunks, rest and work(arrangement=rest(on_device)), paged(on_device))
            made.append(work(arrangement=arrangement))
        batch.attention = tuple(made)

    def _cut(self, batch: ForwardBatch, q_lens: np.ndarray, kv_lens: np.ndarray, chosen: np.ndarray) -> Callable[[Tensor], Paged]:
        """An arrangement of the chosen rows (bool [R])."""
        if chosen.all() and (q_lens == 1).all():
            return self._all_single(batch)
        alone = chosen & (q_lens == 1) & (not self.deterministic)
        together, cut = np.flatnonzero(alone), np.flatnonzero(chosen & ~alone)
        large = not self.small and self._programs(q_lens[cut], LARGE) >= facts(batch.tokens.device).sms
        queries = LARGE if large else SMALL
        made = self._tiles(cut, q_lens, kv_lens, queries)
        tiles, rows = upload(batch.tokens.device, [made.astype(np.int32), together.astype(np.int32)])
        return self._paged(batch, singles=len(together), rows=rows, num_tiles=len(made), tile_queries=queries, tiles=tiles)

    def _long(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
        """bool [R]: rows for which dense attention is worth asking about. What lies before must be of a round length too, and long."""
        before = kv_lens - q_lens
        return self.dense & (q_lens >= LONG) & ((before == 0) | ((before >= LONG) & (before <= FARTHEST) & (before % ROUND == 0)))

    def _chunk(self, row: int, q_lens: np.ndarray, kv_lens: np.ndarray, table: np.ndarray, device: torch.device) -> Long:
        count, length = int(q_lens[row]), int(kv_lens[row])
        padded, before = -(-count // ROUND) * ROUND, length - count
        positions = np.minimum(np.arange(before + padded), length - 1)
        slots = table[row, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        return Long(int(q_lens[:row].sum()), count, padded, before, upload(device, [slots])[0])

    def plan_decode(self, batch: ForwardBatch, cascade: bool = False) -> None:
        paged, table = self._all_single(batch), UNKNOWN.reshape(0, 0)
        made = []
        for window, on_device in zip(self.windows, batch.block_tables):
            shared = shared_of(batch.kv_lens.shape[0], batch.kv_lens.device) if cascade and window is None else None
            arrangement = replace(paged(on_device), shared=shared)
            made.append(AttentionWork(UNKNOWN, UNKNOWN, table, self.block_size, window, kv_tokens=0, pairs=0, arrangement=arrangement))
        batch.attention = tuple(made)

    def find_shared(self, batch: ForwardBatch, depth: Tensor) -> None:
        for work in batch.attention:
            if (found := work.arrangement.shared) is not None:
                tables = work.arrangement.tables
                buffers = (found.own, found.places, found.groups, found.order)
                shared_prefixes(*buffers, tables, batch.table_rows, batch.kv_lens, depth, self.block_size)

    def shared_depth(self, tables: np.ndarray, table_rows: np.ndarray, kv_lens: np.ndarray) -> int:
        """In a few columns: rows that hold the same block there hold the same blocks before it, but for prompts computed twice. So every row but
        one of each such company is spared so many blocks."""
        rows = len(table_rows)
        if not self.cascades or rows < FEWEST:
            return -1
        blocks = (kv_lens - 1) // self.block_size
        total = int(blocks.sum())
        least = max(SAVED * total, SAVED_BYTES / (self.key_bytes * self.block_size))
        # one row may be far longer than the others
        reach = min(int(blocks.max()), 2 * total // rows)
        columns = (2 * np.arange(PROBES) + 1) * reach // (2 * PROBES)
        first = tables[table_rows, columns[0]]
        first.sort()
        if np.count_nonzero(first[1:] == first[:-1]) * reach < least:  # who shares there no block, shares none after
            return -1
        at = columns[:, None]
        ids = tables[table_rows, at]
        np.copyto(ids, -1 - np.arange(rows, dtype=np.int32), where=at >= blocks)  # past a row's last block: like no other
        ids.sort(axis=1)
        saved = np.count_nonzero(ids[:, 1:] == ids[:, :-1], axis=1) * (columns + 1)
        best = int(saved.argmax())
        return int(columns[best]) if saved[best] >= least else -1

    def _all_single(self, batch: ForwardBatch) -> Callable[[Tensor], Paged]:
        """Row i is token i: nothing else needs saying."""
        count = batch.kv_lens.shape[0]
        singles, num_tiles = (0, count) if self.deterministic else (count, 0)
        return self._paged(batch, singles=singles, rows=None, num_tiles=num_tiles, tile_queries=SMALL, tiles=None)

    def _paged(self, batch: ForwardBatch, **cut: Any) -> Callable[[Tensor], Paged]:
        """An arrangement but for a cache group's tables."""
        return partial(Paged, table_rows=batch.table_rows, q_starts=batch.q_starts, kv_lens=batch.kv_lens, **cut)

    def _programs(self, q_lens: np.ndarray, queries: int) -> int:
        return int((-(-q_lens * self.group // queries)).sum()) * self.kv_heads

    def _tiles(self, rows: np.ndarray, q_lens: np.ndarray, kv_lens: np.ndarray, queries: int) -> np.ndarray:
        """int64 [n, 2] (row, first packed query) over these rows, those with most keys before them first, so that none is left at the end."""
        counts = -(-q_lens[rows] * self.group // queries)
        row = np.repeat(rows, counts)
        first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
        keys = kv_lens[row] - q_lens[row] + first // self.group
        order = np.argsort(-keys, kind="stable")
        return np.stack([row[order], first[order]], 1)
