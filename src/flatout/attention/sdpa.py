"""TorchBackend: attention from what torch has: flash on the CPU piece by piece, variable-length flash on CUDA, explicit scores where neither can;
on the CPU rows of one query are the native library's where that was built.

Only planning lives here: which rows share a call, where their keys lie, what is masked. The arithmetic is kernels/attention.py.
Called by runner/ through backend.py's protocol.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flatout.attention.backend import pairs
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels import native
from flatout.kernels.attention import AttentionWork, Chunk, InPlace, Pieces, Singles, Varlen, Where, in_place_runs, varlen_runs, window_mask
from flatout.kernels.kv import stored

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec

# A row of one query whose blocks are one run is attended by itself, in place, from this many keys on: below it, a call of its own costs more than a gather
# (8 rows, us a layer, alone / padded together: 128 keys 292 / 116; 1,024 keys 749 / 1,006)
ALONE_FROM = 512
# Rows padded to one length: any up to SHORT keys, else those within a factor of 2
SHORT = 128
# Queries under a sliding window go this many at a time, so that a mask stays small and keys before the window are not touched
WINDOWED_CHUNK = 1024


class TorchBackend:
    name = "torch"
    cascades = False

    def __init__(self, spec: ModelSpec, block_size: int, rows: torch.dtype | None = None):
        """rows: the type of queries, where the cache has another."""
        self.windows = [group.window for group in spec.cache_groups()]
        self.block_size = block_size
        self.softcap = spec.attn_softcap
        self.rows = rows
        self.varlen = self.in_place = False

    @property
    def captures(self) -> bool:
        """Once there is a cache: where rows of one query are attended in place, by tables and lengths that a later step may have changed."""
        return self.in_place

    def kv_bytes_per_block(self, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        return 2 * spec.num_layers * spec.num_kv_heads * stored(spec.head_dim, dtype) * block_size * dtype.itemsize

    def allocate_kv(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        if block_size != self.block_size:
            raise ValueError(f"block_size {block_size}: this backend plans for {self.block_size}")
        self.varlen = varlen_runs(device, dtype, spec.head_dim, self.softcap)
        self.in_place = in_place_runs(device, self.rows or dtype, dtype, spec.head_dim, spec.num_heads // spec.num_kv_heads)

        def cache() -> Tensor:
            # zeros, so that no NaN lies in a slot not written yet. On the CPU numpy's, whose pages cost nothing until touched:
            # torch writes them all, 6.6 s for 3.3 GiB
            shape = (num_blocks, block_size, spec.num_kv_heads, stored(spec.head_dim, dtype))
            if device.type == "cpu":
                return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        return [(cache(), cache()) for _ in range(spec.num_layers)]

    def plan(self, batch: ForwardBatch, host: HostBatch) -> None:
        batch.attention = tuple(self._work(batch, host, group, window) for group, window in enumerate(self.windows))

    def plan_decode(self, batch: ForwardBatch, cascade: bool = False) -> None:
        rows = np.arange(batch.kv_lens.shape[0], dtype=np.int32)
        empty = np.empty(0, np.int32)

        def work(table: Tensor, window: int | None) -> AttentionWork:
            lengths, table_rows = batch.kv_lens.numpy(), batch.table_rows.numpy()
            where = native.Rows(table.numpy(), lengths, rows, rows, self.block_size, window, table_rows)
            return AttentionWork(empty, empty, empty.reshape(0, 0), self.block_size, window, 0, 0, InPlace(where, []))

        batch.attention = tuple(work(table, window) for table, window in zip(batch.block_tables, self.windows, strict=True))

    def find_shared(self, batch: ForwardBatch, depth: Tensor) -> None:
        raise NotImplementedError("no plan of this backend shares reads; see shared_depth")

    def shared_depth(self, tables: np.ndarray, table_rows: np.ndarray, kv_lens: np.ndarray) -> int:
        return -1

    def _work(self, batch: ForwardBatch, host: HostBatch, group: int, window: int | None) -> AttentionWork:
        q_lens, kv_lens = host.q_lens.astype(np.int64), host.kv_lens.astype(np.int64)
        lengths = kv_lens if window is None else np.minimum(kv_lens, q_lens + window - 1)
        if self.varlen:
            arrangement: Pieces | InPlace | Varlen = _varlen(batch, group, q_lens, lengths, self.block_size, window)
        else:
            rows = _Rows(q_lens, kv_lens, host.block_tables[group], self.block_size, batch.tokens.device)
            single = np.flatnonzero(q_lens == 1)
            if self.in_place and len(single):
                where = native.Rows(host.block_tables[group], host.kv_lens, single, rows.starts[single], self.block_size, window)
                arrangement = InPlace(where, rows.chunks(window))
            else:
                arrangement = Pieces(rows.singles(window), rows.chunks(window))
        return AttentionWork(
            q_lens=host.q_lens,
            kv_lens=host.kv_lens,
            table=host.block_tables[group],
            block_size=self.block_size,
            window=window,
            kv_tokens=int(lengths.sum()),
            pairs=pairs(q_lens, kv_lens, window),
            arrangement=arrangement,
        )


def _varlen(batch: ForwardBatch, group: int, q_lens: np.ndarray, lengths: np.ndarray, block_size: int, window: int | None) -> Varlen:
    """On the device from the batch's own tensors: the host only supplies sizes, so nothing waits."""
    table, starts = batch.block_tables[group], batch.q_starts
    kv_lens = batch.kv_lens
    needed = kv_lens if window is None else torch.minimum(kv_lens, starts[1:] - starts[:-1] + (window - 1))
    k_starts = torch.zeros_like(starts)
    torch.cumsum(needed, 0, dtype=torch.int32, out=k_starts[1:])
    total = int(lengths.sum())
    row = torch.repeat_interleave(needed, output_size=total)
    position = torch.arange(total, device=table.device) + (kv_lens - k_starts[1:])[row]
    slots = table[batch.table_rows[row], position // block_size].long() * block_size + position % block_size
    return Varlen(slots, starts, k_starts, int(q_lens.max()), int(lengths.max()), window)


class _Rows:
    """One cache group's rows on the host, while they are cut into pieces."""

    def __init__(self, q_lens: np.ndarray, kv_lens: np.ndarray, table: np.ndarray, block_size: int, device: torch.device):
        self.q_lens, self.kv_lens, self.table, self.block_size, self.device = q_lens, kv_lens, table, block_size, device
        self.starts = np.cumsum(q_lens) - q_lens

    def singles(self, window: int | None) -> list[Singles]:
        """Rows of one query: long ones alone and in place, the others padded together by length."""
        rows = np.flatnonzero(self.q_lens == 1)
        if len(rows) == 0:
            return []
        lengths = self.kv_lens[rows] if window is None else np.minimum(self.kv_lens[rows], window)
        ends = self.kv_lens[rows]
        made, together = [], []
        for row, length, end in zip(rows.tolist(), lengths.tolist(), ends.tolist()):
            run = self._run(row, end - length, end) if length >= ALONE_FROM or len(rows) == 1 else None
            if run is None:
                together.append((length, row))
            else:
                token = int(self.starts[row])
                made.append(Singles(slice(token, token + 1), 1, length, run, None))
        together.sort(reverse=True)
        while together:
            longest = together[0][0]
            share = sum(longest <= SHORT or 2 * length >= longest for length, _ in together)
            members, together = together[:share], together[share:]
            made.append(self._padded(np.array(sorted(row for _, row in members)), longest, window))
        return made

    def _padded(self, rows: np.ndarray, longest: int, window: int | None) -> Singles:
        ends = self.kv_lens[rows, None]
        lengths = ends if window is None else np.minimum(ends, window)
        place = np.arange(longest)[None, :]
        # padding repeats the row's last key: its slot is written, and the mask hides it
        slots = self._slots(rows[:, None], np.minimum(ends - lengths + place, ends - 1))
        hidden = place >= lengths
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(self._tensor(hidden), float("-inf")) if hidden.any() else None
        tokens = self.starts[rows]
        first, last = int(tokens[0]), int(tokens[-1])
        neighbours = last - first == len(rows) - 1
        return Singles(
            tokens=slice(first, last + 1) if neighbours else self._tensor(tokens),
            rows=len(rows),
            length=longest,
            where=self._tensor(slots.reshape(-1)),
            mask=None if mask is None else mask.view(len(rows), 1, 1, longest),
        )

    def chunks(self, window: int | None) -> list[Chunk]:
        """Rows of several queries, one by one; under a window that cuts them, in parts."""
        made = []
        for row in np.flatnonzero(self.q_lens > 1).tolist():
            token, count, end = int(self.starts[row]), int(self.q_lens[row]), int(self.kv_lens[row])
            if window is None or end <= window:
                made.append(Chunk(token, count, end, self._where(row, 0, end), None, None))
                continue
            bounds = [*range(0, count, WINDOWED_CHUNK), count]
            for low, high in pairwise(bounds):
                last = end - count + high  # keys up to the part's last query
                first_key = max(0, end - count + low + 1 - window)
                length = last - first_key
                mask = None if length <= window else window_mask(high - low, length, window, self.device)
                made.append(
                    Chunk(token + low, high - low, length, self._where(row, first_key, last), window if length > window else None, mask)
                )
        return made

    def _where(self, row: int, first: int, end: int) -> Where:
        return self._run(row, first, end) or self._tensor(self._slots(np.array(row), np.arange(first, end)))

    def _run(self, row: int, first: int, end: int) -> tuple[int, int] | None:
        """The slots of these positions if their blocks follow one another."""
        blocks = self.table[row, first // self.block_size : (end - 1) // self.block_size + 1]
        if (np.diff(blocks) != 1).any():
            return None
        start = int(blocks[0]) * self.block_size + first % self.block_size
        return start, start + end - first

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.table[rows, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
