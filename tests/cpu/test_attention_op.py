"""The op attention with the torch backend's plans against plain float64 attention, over random rows, windows and head shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.attention import sdpa
from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.attention import AttentionWork, Pieces, attention
from flatout.modelfile.spec import LayerSpec, ModelSpec, RopeSpec

BLOCK = 4
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None, softcap: float = 0.0) -> ModelSpec:
    layers, ropes = (LayerSpec(window=window),), (RopeSpec(base=10000.0, dim=dim),)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "intermediate_size": 8}
    return ModelSpec("x", "llama", layers=layers, ropes=ropes, max_position=4096, norm_eps=1e-5, attn_softcap=softcap, **sizes)


def plan_of(spec: ModelSpec, rows: list[tuple[int, int]], table: np.ndarray, dtype: torch.dtype) -> tuple[AttentionWork, Pieces]:
    """rows: (cached before, new)."""
    backend = TorchBackend(spec, BLOCK)
    backend.allocate_kv(spec, 1, BLOCK, dtype, torch.device("cpu"))
    q_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((new, before + new) for before, new in rows)))
    empty = torch.empty(0, dtype=torch.int64)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32))
    batch = ForwardBatch(empty, empty, starts, torch.from_numpy(kv_lens), (torch.from_numpy(table),), (empty,), empty)
    backend.plan(batch, HostBatch(q_lens, kv_lens, (table,)))
    (work,) = batch.attention
    assert isinstance(work.arrangement, Pieces)
    return work, work.arrangement


def plain(query, key, value, window, scale, softcap):
    """One row in float64: query [n, heads, D] the last n of key, value [L, kv_heads, D]."""
    n, heads, _ = query.shape
    total, kv_heads, _ = key.shape
    out = np.empty_like(query)
    for i in range(n):
        position = total - n + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(heads):
            group = h // (heads // kv_heads)
            scores = key[first : position + 1, group] @ query[i, h] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ value[first : position + 1, group]
    return out


def check(rows, heads, kv_heads, dim, window, softcap, consecutive, dtype, seed=0) -> Pieces:
    rng = np.random.default_rng(seed)
    spec = spec_of(heads, kv_heads, dim, window, softcap)
    width = max(-(-(before + new) // BLOCK) for before, new in rows)
    blocks = np.arange(1, len(rows) * width + 1)
    if not consecutive:
        rng.shuffle(blocks)
    table = blocks.reshape(len(rows), width).astype(np.int32)
    work, pieces = plan_of(spec, rows, table, dtype)
    tokens = sum(new for _, new in rows)
    # q lies in the fused projection; slots never written hold NaN, so that a read of one shows
    fused = torch.from_numpy(rng.normal(size=(tokens, (heads + 2 * kv_heads) * dim))).to(dtype)
    cache = [torch.full(((len(blocks) + 1) * BLOCK, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    scale, out = dim**-0.5, torch.full((tokens, heads * dim), torch.nan, dtype=dtype)
    q = fused[:, : heads * dim]
    expected, begin = [], 0
    for (before, new), row in zip(rows, table):
        slots = (row[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: before + new]
        for c in cache:
            c[slots] = torch.from_numpy(rng.normal(size=(before + new, kv_heads, dim))).to(dtype)
        query = q[begin : begin + new].double().numpy().reshape(new, heads, dim)
        expected.append(plain(query, *(c[slots].double().numpy() for c in cache), window, scale, softcap).reshape(new, -1))
        begin += new
    for run in (attention, attention.reference):
        out.fill_(torch.nan)
        run(out, q, *cache, work, scale, softcap)
        np.testing.assert_allclose(out.double().numpy(), np.concatenate(expected), rtol=0, atol=DTYPES[dtype])
    return pieces


ROWS = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6)
HEADS = st.sampled_from(((1, 1), (4, 4), (4, 2), (5, 1), (9, 3), (14, 2)))


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    heads=HEADS,
    dim=st.sampled_from((16, 20, 64, 80)),
    window=st.sampled_from((None, None, 1, 2, 5, 16, 100)),
    softcap=st.sampled_from((0.0, 0.0, 2.0)),
    consecutive=st.booleans(),
    dtype=st.sampled_from(tuple(DTYPES)),
    seed=st.integers(0, 9),
)
@example([(0, 1)], (1, 1), 16, 1, 0.0, True, torch.float32, 0)
@example([(40, 1)] * 5, (9, 3), 64, None, 0.0, True, torch.bfloat16, 0)
def test_against_plain_attention(rows, heads, dim, window, softcap, consecutive, dtype, seed):
    check(rows, *heads, dim, window, softcap, consecutive, dtype, seed)


@pytest.mark.parametrize("dim", (16, 32, 64, 96, 128, 256))
@pytest.mark.parametrize("softcap", (0.0, 3.0))
def test_head_sizes(dim, softcap):
    check([(9, 1), (0, 7), (5, 3), (30, 1)], 6, 2, dim, None, softcap, False, torch.float32)


def test_long_rows_of_consecutive_blocks_are_attended_in_place(monkeypatch):
    monkeypatch.setattr(sdpa, "ALONE_FROM", 20)
    monkeypatch.setattr(sdpa, "SHORT", 4)
    pieces = check([(30, 1), (2, 1), (25, 1), (9, 1), (1, 1)], 4, 2, 16, None, 0.0, True, torch.float32)
    alone = [s for s in pieces.singles if isinstance(s.where, tuple)]
    assert [s.length for s in alone] == [31, 26] and all(s.mask is None for s in alone)
    # the others in two groups, within a factor of two of the longest
    assert sorted(s.length for s in pieces.singles if not isinstance(s.where, tuple)) == [3, 10]


def test_windowed_chunks_go_in_parts(monkeypatch):
    monkeypatch.setattr(sdpa, "WINDOWED_CHUNK", 6)
    for softcap in (0.0, 2.0):
        pieces = check([(3, 20), (0, 5), (7, 13)], 4, 2, 16, 9, softcap, False, torch.float32)
        assert max(c.count for c in pieces.chunks) <= 6 and max(c.length for c in pieces.chunks) <= 6 + 8


def test_explicit_scores_go_in_steps(monkeypatch):
    monkeypatch.setattr("flatout.kernels.attention.SCORES_AT_ONCE", 200)
    check([(3, 20), (11, 1)], 4, 2, 16, None, 2.0, False, torch.float32)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, window=st.sampled_from((None, 1, 3, 10, 1000)))
def test_what_a_plan_says_it_reads(rows, window):
    """kv_tokens and pairs, which the cost is made of, by counting."""
    work, _ = plan_of(spec_of(1, 1, 16, window), rows, np.zeros((len(rows), 16), np.int32), torch.float32)
    seen, pairs = 0, 0
    for before, new in rows:
        keys = [range(0 if window is None else max(0, p - window + 1), p + 1) for p in range(before, before + new)]
        seen += len(set().union(*keys))
        pairs += sum(map(len, keys))
    assert (work.kv_tokens, work.pairs) == (seen, pairs)
