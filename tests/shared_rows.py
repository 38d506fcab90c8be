"""Rows of one query whose contexts begin with the same blocks, with plain float64 attention to compare. Shared by the CPU's and the GPU's tests."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from attention_rows import CPU, RELATIVE, plain, spec_of

from flatout.attention.triton import TritonBackend
from flatout.batch import ForwardBatch
from flatout.kernels.prefixes import Shared, shared_prefixes

Companies = list[tuple[int, int]]  # (rows, keys shared, a multiple of the block size) of each


@dataclass(slots=True)
class SharedCase:
    """Random queries; keys and values in a cache of shuffled blocks, of which companies of rows hold the same first ones."""

    backend: TritonBackend
    batch: ForwardBatch  # tables, lengths and slots on the device
    block: int
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    expected: torch.Tensor  # float64 [R, heads * D]
    company: np.ndarray  # int [R], -1: none
    tables: np.ndarray  # int32 [R, W]
    lengths: np.ndarray
    scale: float
    softcap: float

    def run(self, run, out=None) -> torch.Tensor:
        """The operation as planned, into a poisoned output."""
        out = torch.full_like(self.q, torch.nan) if out is None else out
        run(out, self.q, self.k_cache, self.v_cache, self.batch.attention[0], self.scale, self.softcap)
        return out

    def plan(self, depth: int, cascade: bool = True, find=None) -> Shared | None:
        self.backend.plan_decode(self.batch, cascade)
        found = self.batch.attention[0].arrangement.shared
        if found is not None:
            operands = [getattr(found, f.name) for f in fields(found)]
            at = torch.tensor([depth], dtype=torch.int32, device=self.q.device)
            (find or shared_prefixes)(*operands, *self.batch.block_tables, self.batch.table_rows, self.batch.kv_lens, at, self.block)
        return found

    def holds(self, out: torch.Tensor) -> None:
        """To each token's root mean square, which falls as more keys are averaged."""
        slack = RELATIVE[self.q.dtype] * self.expected.square().mean(1, keepdim=True).sqrt()
        worst = ((out.double() - self.expected).abs() / slack).nan_to_num(torch.inf).max(1).values
        assert worst.max() <= 1, f"row {int(worst.argmax())} of {len(worst)} is {float(worst.max()):.3g} times the slack away"


def shared_case(
    companies: Companies,
    own: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    block: int = 4,
    softcap: float = 0.0,
    seed: int = 0,
    device: torch.device = CPU,
    shuffle: bool = True,
) -> SharedCase:
    """own: keys of each row after the shared ones, taken in turn, at least 1; rows past the companies' share nothing: own is then as long as rows."""
    rng, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    of = [i for i, (count, _) in enumerate(companies) for _ in range(count)]
    of += [-1] * (len(own) - len(of))
    rows = len(of)
    order = rng.permutation(rows) if shuffle else np.arange(rows)
    company = np.array(of)[order]
    shared = np.array([companies[c][1] if c >= 0 else 0 for c in company], np.int64)
    lengths = (shared + np.array([own[i % len(own)] for i in range(rows)])[order]).astype(np.int32)
    widths = -(-lengths // block)
    common = [keys // block for _, keys in companies]
    total = sum(common) + int((widths - shared // block).sum())
    ids = rng.permutation(np.arange(1, total + 1)).astype(np.int32)
    cuts = np.split(ids, np.cumsum(common))
    left, begin = cuts[-1], 0
    slots = rng.permutation(rows + 2)[:rows].astype(np.int32)
    tables = np.full((rows + 2, int(widths.max()) + 3), 1 << 26, np.int32)
    for row, slot in enumerate(slots):
        mine = widths[row] - shared[row] // block
        first = cuts[company[row]] if company[row] >= 0 else left[:0]
        tables[slot, : widths[row]] = np.concatenate([first, left[begin : begin + mine]])
        begin += mine
    n_heads, kv_heads, dim = heads
    spec = spec_of(n_heads, kv_heads, dim, None, softcap)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    q = random(rows, (n_heads + 2 * kv_heads) * dim)[:, : n_heads * dim]
    caches = [random((total + 1) * block, kv_heads, dim) for _ in "kv"]
    expected = torch.empty(rows, n_heads * dim, dtype=torch.float64, device=device)
    written = torch.zeros((total + 1) * block, dtype=torch.bool, device=device)
    for row, slot in enumerate(slots):
        at = torch.from_numpy((tables[slot, : widths[row], None] * block + np.arange(block)).reshape(-1)[: lengths[row]]).to(device).long()
        written[at] = True
        query, (key, value) = q[row].view(1, n_heads, dim), (c[at] for c in caches)
        expected[row] = plain(query.double(), key.double(), value.double(), None, spec.softmax_scale, softcap).flatten()
    for cache in caches:  # what nobody wrote must not be read
        cache[~written] = torch.nan
    backend = TritonBackend(spec, block)
    to = [torch.from_numpy(a).to(device) for a in (np.arange(rows + 1, dtype=np.int32), lengths, tables, slots)]
    empty = torch.empty(0, dtype=torch.int64, device=device)
    batch = ForwardBatch(empty, empty, to[0], to[1], (to[2],), to[3], (empty,), empty)
    return SharedCase(backend, batch, block, q, *caches, expected, company, tables[slots], lengths, spec.softmax_scale, softcap)
