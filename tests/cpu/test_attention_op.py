"""The op attention with the torch backend's plans against plain float64 attention, over random rows, windows and head shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_rows import check, plan_of, spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.attention import sdpa

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
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
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
    monkeypatch.setattr(sdpa, "in_place_runs", lambda *_: False)  # as without the native library
    monkeypatch.setattr(sdpa, "ALONE_FROM", 20)
    monkeypatch.setattr(sdpa, "SHORT", 4)
    work = check([(30, 1), (2, 1), (25, 1), (9, 1), (1, 1)], 4, 2, 16, None, 0.0, True, torch.float32)
    alone = [s for s in work.arrangement.singles if isinstance(s.where, tuple)]
    assert [s.length for s in alone] == [31, 26] and all(s.mask is None for s in alone)
    # the others in two groups, within a factor of two of the longest
    assert sorted(s.length for s in work.arrangement.singles if not isinstance(s.where, tuple)) == [3, 10]


def test_windowed_chunks_go_in_parts(monkeypatch):
    monkeypatch.setattr(sdpa, "WINDOWED_CHUNK", 6)
    for softcap in (0.0, 2.0):
        work = check([(3, 20), (0, 5), (7, 13)], 4, 2, 16, 9, softcap, False, torch.float32)
        assert max(c.count for c in work.arrangement.chunks) <= 6 and max(c.length for c in work.arrangement.chunks) <= 6 + 8


def test_explicit_scores_go_in_steps(monkeypatch):
    monkeypatch.setattr("flatout.kernels.attention.SCORES_AT_ONCE", 200)
    check([(3, 20), (11, 1)], 4, 2, 16, None, 2.0, False, torch.float32)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, window=st.sampled_from((None, 1, 3, 10, 1000)))
def test_what_a_plan_says_it_reads(rows, window):
    """kv_tokens and pairs, which the cost is made of, by counting."""
    work = plan_of(spec_of(1, 1, 16, window), rows, np.zeros((len(rows), 16), np.int32), torch.float32)
    seen, pairs = 0, 0
    for before, new in rows:
        keys = [range(0 if window is None else max(0, p - window + 1), p + 1) for p in range(before, before + new)]
        seen += len(set().union(*keys))
        pairs += sum(map(len, keys))
    assert (work.kv_tokens, work.pairs) == (seen, pairs)
