"""draw and token_logprobs in Triton's interpreter: edges of groups and tiles, every way through the kernels, values that are none."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_kernels as kernels
import torch
from sampling_rows import CPU

from flatout.kernels import sampling
from flatout.kernels.gpu import sampling as launches
from flatout.runner import sampling_reference as reference

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has them compiled"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy on infinities, which are meant
]


def test_the_expectation_is_the_references():
    rng = np.random.default_rng(0)
    for _ in range(60):
        vocab = int(rng.integers(1, 60))
        logits, asked = kernels.random_rows(rng, 1, vocab)[0], kernels.random_asked(rng, 1, vocab, (2, 5))[0]
        temperature, top_p, min_p, top_k = asked.tolist()
        key = sampling.position_keys(np.array([sampling.sequence_key(7, 2)]), np.array([3]))[0]
        choice = kernels.expected(logits, *asked, key)
        logit = kernels.cleaned(logits).tolist()
        kept, margin = reference.keep(logit, temperature, min_p, 0 if top_k >= vocab else int(top_k), top_p)
        scores = {token: (logit[token] - max(logit)) / temperature + reference.noise(7, 2, 3, token) for token in kept}
        assert choice.kept == kept and choice.token_id == max(kept, key=lambda token: (scores[token], -token))
        assert choice.filter_margin == pytest.approx(margin, rel=1e-6, abs=1e-9)


def test_noise():
    kernels.check_noise(CPU, kernels.random_keys(np.random.default_rng(1), 1)[0], 40)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1023, 1024, 1025, 2500])
def test_draw(vocab):
    """All filters at once, in any mix; up to 1,024 tokens all are candidates, over that few are, or the row is searched."""
    rng = np.random.default_rng(vocab)
    assert kernels.check_draw(CPU, rng, 8, vocab) <= 1


@pytest.mark.parametrize(
    "asked",
    [
        (1.0, 1.0, 0.0, 1900),  # more than are collected: the row is searched
        (1.0, 0.7, 0.01, 1200),
        (0.7, 0.02, 0.0, 2500),  # on flat rows no best scored token is kept
        (10.0, 0.4, 0.0, 2500),
        (10.0, 1.0, 0.9, 2500),
        (1.0, 0.9, 0.0, 9),
    ],
)
def test_draw_one_way(asked):
    """The same filters in every row, so that rows of all shapes go this way."""
    rng = np.random.default_rng(5)
    kernels.check_draw(CPU, rng, 6, 2500, np.tile(np.array(asked, np.float64), (6, 1)))


def test_more_equals_than_there_is_room_for(monkeypatch):
    """Candidates that overflow send the row through the search, with the same result."""
    monkeypatch.setattr(launches, "CANDIDATES", 32)
    rng = np.random.default_rng(6)
    vocab = 2000
    assert launches.few(vocab) == 7
    asked = kernels.random_asked(rng, 6, vocab)
    asked[:, 3] = 7
    kernels.check_draw(CPU, rng, 6, vocab, asked)
    logits = np.zeros((4, vocab), np.float32)
    logits[1:, 5] = 0.5
    keys = kernels.random_keys(rng, 4)
    asked = np.array([[1.0, top_p, 0.0, top_k] for top_p in (1.0, 0.5) for top_k in (1, 7)])
    ids = kernels.draw(logits, asked, keys, CPU)
    assert ids.tolist() == [kernels.expected(row, *a, key).token_id for row, a, key in zip(logits, asked, keys)]


def test_a_row_alone_equals_the_row_in_a_crowd(monkeypatch):
    """Whatever the split over programs: one program a row among six, one a tile alone."""
    rng = np.random.default_rng(8)
    rows, vocab = 6, 2500
    logits, asked, keys = kernels.random_rows(rng, rows, vocab), kernels.random_asked(rng, rows, vocab), kernels.random_keys(rng, rows)
    tokens = rng.integers(0, vocab, rows)
    monkeypatch.setattr(launches, "PROGRAMS", 2)
    assert launches.split(rows, 3, 4) == (1, 3) and launches.split(1, 3, 4) == (3, 1)
    crowd, rated = kernels.draw(logits, asked, keys, CPU), kernels.rate(logits, tokens, 5, CPU)
    for row in range(rows):
        one = slice(row, row + 1)
        assert kernels.draw(logits[one], asked[one], keys[one], CPU)[0] == crowd[row]
        alone = kernels.rate(logits[one], tokens[one], 5, CPU)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, rated))


def test_values_that_are_none():
    """NaN and +inf count as the lowest and highest; a row where all is banned or not allowed keeps its greedy choice."""
    nan, inf = np.nan, np.inf
    rows = {
        (nan, 1.0, -inf, nan): {1},
        (-inf, 1.0, inf, 0.0): {2},
        (inf, 1.0, inf, 0.0): {0, 2},
        (-inf, -inf, -inf, -inf): {0},
        (nan, nan, nan, nan): {0},
        (-inf, reference.LOWEST, reference.LOWEST, -inf): {1},
        (nan, 2.0, 2.0, -inf): {1, 2},
    }
    logits = np.repeat(np.array(list(rows), np.float32), 6, axis=0)
    for asked in ((1.0, 1.0, 0.0, 4), (1.0, 0.9, 0.5, 3)):
        keys = kernels.random_keys(np.random.default_rng(9), len(logits))
        ids = kernels.draw(logits, np.tile(np.array(asked, np.float64), (len(logits), 1)), keys, CPU)
        assert [set(part.tolist()) for part in ids.reshape(-1, 6)] == list(rows.values()), asked


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("k", [0, 1, 8, 9, 32])
def test_token_logprobs(vocab, k):
    kernels.check_rate(CPU, np.random.default_rng(100 * vocab + k), 2, vocab, k)


def test_equal_logprobs_come_in_the_order_of_ids():
    logits = np.zeros((2, 700), np.float32)
    logits[0, ::2] = -0.0
    logits[1, [699, 300, 5]] = 1.0
    _, ranks, top_ids, _ = kernels.rate(logits, np.array([4, 300]), 6, CPU)
    assert ranks.tolist() == [700, 3] and top_ids.tolist() == [[0, 1, 2, 3, 4, 5], [5, 300, 699, 0, 1, 2]]
