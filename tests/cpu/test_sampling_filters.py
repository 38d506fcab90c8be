"""Which tokens the filters keep: both paths' kept sets equal the reference's, for any logits and any combination."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_rows import FILTER_TIE, one, request

from flatout.kernels import sampling
from flatout.runner import sampling_reference as reference


def kept_by_row(logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> list[int]:
    row = logits.numpy()
    kept = sampling._kept(row, float(row.max()), temperature, top_p, min_p, top_k or len(row))
    return list(range(len(row))) if kept is None else kept.tolist()


def kept_together(logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> list[int]:
    scaled = (logits - logits.max()).div_(temperature).unsqueeze(0)
    column = lambda x: torch.tensor([[x]], dtype=torch.float64)  # noqa: E731
    falling = scaled.sort(descending=True).values
    threshold = sampling._threshold(falling, column(float(top_k or len(logits))), column(top_p), column(min_p).log().float())
    return torch.nonzero(scaled[0] >= threshold[0]).flatten().tolist()


values = st.one_of(
    st.floats(-20, 20, width=32),
    st.integers(-40, 40).map(lambda x: x / 4),  # ties
    st.just(-np.inf),
)


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(values, min_size=1, max_size=200),
    temperature=st.sampled_from([0.1, 0.5, 1.0, 2.0, 100.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.9, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 10, 64, 199]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.9999]),
)
def test_kept_sets_equal_the_reference(logits, temperature, min_p, top_k, top_p):
    assume(max(logits) > -np.inf)
    top_k = min(top_k, len(logits))
    row = torch.tensor(logits, dtype=torch.float32)
    expected, margin = reference.keep([max(x, reference.LOWEST) for x in row.tolist()], temperature, min_p, top_k, top_p)
    assert expected and row[expected].max() == row.max()
    assume(margin > FILTER_TIE)
    assert kept_by_row(row, temperature, min_p, top_k, top_p) == expected
    clean = row.nan_to_num(neginf=reference.LOWEST)
    assert kept_together(clean, temperature, min_p, top_k, top_p) == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), top_k=st.sampled_from([0, 50, 1024, 1025, 2999]), top_p=st.sampled_from([1.0, 0.3, 0.95]))
def test_kept_sets_of_a_larger_vocabulary(seed, top_k, top_p):
    """3,000 tokens: bounds by block maxima, flat and peaked rows."""
    rng = np.random.default_rng(seed)
    row = torch.from_numpy((rng.normal(size=3000) * rng.choice([0.01, 1.0, 10.0])).astype(np.float32))
    expected, margin = reference.keep(row.tolist(), 1.0, 0.0, top_k, top_p)
    assume(margin > FILTER_TIE)
    assert kept_by_row(row, 1.0, 0.0, top_k, top_p) == expected
    assert kept_together(row, 1.0, 0.0, top_k, top_p) == expected


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([0.01, 1.0, 5.0, 30.0]), temperature=st.sampled_from([1e-5, 0.2, 1.0, 100.0]))
def test_the_winner_is_among_the_contenders(seed, scale, temperature):
    """Leaving out tokens that cannot win changes no draw: with and without the shortcut the same id."""
    rng = np.random.default_rng(seed)
    vocab = 4000
    row = (rng.normal(size=vocab) * scale).astype(np.float32)
    hashes = sampling.token_hashes(vocab, torch.device("cpu")).numpy()
    key = sampling.position_keys(np.array([sampling.sequence_key(seed, 0)]), np.array([3]))[0]
    scores = (row.astype(np.float64) - row.max()) / temperature - np.log(-np.log1p(-(sampling._noise_bits(hashes, key) + 0.5) / 2**31))
    assert scores.argmax() in sampling._contenders(row, float(row.max()), temperature, hashes, key)
    drawn = one(request(seed=seed, temperature=temperature, output_ids=[1, 2, 3]), torch.from_numpy(row))
    assert drawn == (scores.argmax() if temperature > 1e-5 else drawn)
