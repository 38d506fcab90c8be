"""The counter-based random numbers: the same bits everywhere, and statistically what Gumbel-max needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_rows import CPU

from flatout.kernels import sampling
from flatout.runner import sampling_reference as reference

SEEDS = [0, 1, 42, -1, 2**63 - 1, 2**63, 2**64 - 1]


def keys_of(count: int, seed: int = 0, index: int = 0, first: int = 0) -> torch.Tensor:
    """Keys of `count` positions of one sequence."""
    sequence = np.full(count, sampling.sequence_key(seed, index))
    return torch.from_numpy(sampling.position_keys(sequence, np.arange(first, first + count)))


def uniforms(keys: torch.Tensor, vocab: int) -> np.ndarray:
    return (sampling._noise_bits_of_rows(sampling.token_hashes(vocab, CPU), keys).numpy() + 0.5) / 2**31


def chi_square_limit(freedom: int) -> float:
    """Wilson-Hilferty: exceeded by chance once in about 10^5 (z = 4.3). The tests are deterministic: a pass stays a pass."""
    return freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / (9 * freedom))) ** 3


def draws(logits: torch.Tensor, keys: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    """One draw a key from the same logits, by the rows-together path."""
    rows, vocab = len(keys), len(logits)
    ids = torch.full((rows,), int(logits.argmax()))
    params = torch.tensor([[temperature, 1.0, 0.0, float(vocab)]], dtype=torch.float64).expand(rows, 4)
    sampling._draw_together(ids, logits.expand(rows, vocab), torch.arange(rows), params, keys, sampling.token_hashes(vocab, CPU))
    return ids.numpy()


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_the_same_in_numpy_torch_and_python_integers(seed):
    vocab = 300
    table = sampling.token_hashes(vocab, CPU)
    for index, position in ((0, 0), (0, 1), (3, 0), (127, 1_000_000)):
        key = sampling.position_keys(np.array([sampling.sequence_key(seed, index)]), np.array([position], np.int32))
        expected = [reference.noise_bits(seed, index, position, token) for token in range(vocab)]
        assert sampling._noise_bits(table.numpy(), key[0]).tolist() == expected
        assert sampling._noise_bits_of_rows(table, torch.from_numpy(key))[0].tolist() == expected


def test_known_bits():
    """The definition is for good: a change here would change every seeded answer ever given."""
    assert [reference.noise_bits(*args) for args in ((0, 0, 0, 0), (42, 0, 0, 1), (42, 1, 7, 49151), (2**64 - 1, 127, 10**6, 151935))] == [
        706720488,
        1093663744,
        486262381,
        1313077894,
    ]


def test_uniform_over_tokens_and_over_positions():
    """Chi-square of 256 cells, over all tokens of some keys and over many keys of some tokens; and of the tail under 2^-10."""
    over_tokens = uniforms(keys_of(8), 150_000)
    over_keys = uniforms(keys_of(150_000), 8).T
    for sample in (*over_tokens, *over_keys):
        cells = np.bincount((sample * 256).astype(int), minlength=256)
        assert ((cells - len(sample) / 256) ** 2 / (len(sample) / 256)).sum() < chi_square_limit(255)
        tail = (sample < 2**-10).sum()
        assert abs(tail - len(sample) * 2**-10) < 5 * math.sqrt(len(sample) * 2**-10)


def test_neighbouring_tokens_positions_indices_and_seeds_are_independent():
    """Correlation of neighbours, and chi-square of the pairs over 16 x 16 cells."""
    count = 200_000
    base = uniforms(keys_of(count), 2)
    others = {
        "token": base[:, 1],
        "position": uniforms(keys_of(count, first=1), 1)[:, 0],
        "index": uniforms(keys_of(count, index=1), 1)[:, 0],
        "seed": uniforms(keys_of(count, seed=1), 1)[:, 0],
        "seed high": uniforms(keys_of(count, seed=1 << 63), 1)[:, 0],
    }
    many_seeds = np.array([sampling.sequence_key(seed, 0) for seed in range(20_000)])
    by_seed = uniforms(torch.from_numpy(sampling.position_keys(many_seeds, np.zeros(20_000, np.int32))), 16)
    for name, other in {**others, "seeds": by_seed[1:, 0]}.items():
        first = by_seed[:-1, 0] if name == "seeds" else base[:, 0]
        assert abs(np.corrcoef(first, other)[0, 1]) < 4.5 / math.sqrt(len(first)), name
        cells = np.bincount((first * 16).astype(int) * 16 + (other * 16).astype(int), minlength=256)
        assert ((cells - len(first) / 256) ** 2 / (len(first) / 256)).sum() < chi_square_limit(255), name


def test_draws_follow_softmax():
    """Chi-square of 200,000 draws over 40 tokens, at three temperatures, over positions and over seeds."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, 40).astype(np.float32))
    seeds = np.array([sampling.sequence_key(seed, 0) for seed in range(50_000)])
    by_seed = torch.from_numpy(sampling.position_keys(seeds, np.zeros(len(seeds), np.int32)))
    for temperature, keys in ((1.0, keys_of(200_000)), (0.5, keys_of(200_000, seed=9)), (3.0, keys_of(200_000, index=2)), (1.0, by_seed)):
        probability = torch.softmax(logits.double() / temperature, 0).numpy()
        expected = probability * len(keys)
        counts = np.bincount(draws(logits, keys, temperature), minlength=40)
        usual = expected > 5
        rest = expected[~usual].sum()
        chi = ((counts - expected) ** 2 / expected)[usual].sum() + (counts[~usual].sum() - rest) ** 2 / max(rest, 5)
        assert chi < chi_square_limit(int(usual.sum())), temperature


def test_no_token_id_is_favoured():
    """Equal logits over 256 tokens: chi-square over ids, low half against high, even against odd."""
    count, vocab = 120_000, 256
    counts = np.bincount(draws(torch.zeros(vocab), keys_of(count)), minlength=vocab)
    assert ((counts - count / vocab) ** 2 / (count / vocab)).sum() < chi_square_limit(vocab - 1)
    for half in (counts[: vocab // 2], counts[::2]):
        assert abs(half.sum() - count / 2) < 4.5 * math.sqrt(count / 4)


def test_rare_tokens_come_as_often_as_they_should():
    """20 tokens of probability p beside a sure one, p from 1e-3 to 1e-6, in float32 as on the GPU: their count is Poisson."""
    rare, groups, rows, parts = 20, 10, 40_000, 10
    hits = dict.fromkeys((1e-3, 1e-4, 1e-5, 1e-6), 0)
    for part in range(parts):
        uniform = uniforms(keys_of(rows, seed=part), 1 + groups * rare).astype(np.float32)
        exponential = -np.log1p(-np.minimum(uniform, np.float32(1 - 2**-24)))
        # ten disjoint groups of rare tokens meet the same sure one: ten draws for the price of one
        sure, luckiest = exponential[:, :1], exponential[:, 1:].reshape(rows, groups, rare).min(axis=2)
        for chance in hits:
            hits[chance] += int((luckiest / chance < sure / (1 - rare * chance)).sum())
    for chance, count in hits.items():
        expected = rows * parts * groups * rare * chance
        assert abs(count - expected) < 5 * math.sqrt(expected), chance
