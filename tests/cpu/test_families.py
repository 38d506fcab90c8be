"""Each family against Transformers: float32 logits at every position, whatever the prompt's length, chunking and company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make, reference_logits
from network import Network, Sequence, load

BLOCK = 8
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
rng = np.random.default_rng(5)
PROMPTS = [rng.integers(3, 256, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, folder):
    """(network, prompts with Transformers' logits)"""
    path = make(request.param, folder)
    return load(path, block_size=BLOCK, scattered=True), [(ids, reference_logits(path, ids)) for ids in PROMPTS]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_logits_tell_tokens_apart(family):
    """Else the comparisons below would prove little."""
    gaps = np.concatenate([np.diff(np.sort(expected)[:, -2:]).ravel() for _, expected in family[1]])
    assert np.median(gaps) > 0.5


def test_prompts_whole(family):
    network, cases = family
    for ids, expected in cases:
        close(network.forced(ids), expected)


def test_prompts_in_three_chunks(family):
    network, cases = family
    ids, expected = cases[-1]
    for chunks in ([BLOCK, BLOCK], [BLOCK - 1, 2], [1, BLOCK + 1]):
        close(network.forced(ids, chunks), expected)


def test_token_by_token(family):
    network, cases = family
    ids, expected = cases[-1]
    close(network.forced(ids, [1] * len(ids)), expected)


def test_in_a_mixed_batch(family: tuple[Network, list]):
    """Decode rows of several lengths beside a fresh prompt and a second chunk, in an order that mixes them."""
    network, cases = family
    ids, expected = cases[-1]
    ready = [Sequence() for _ in range(4)]
    done = [BLOCK - 1, len(ids) - 1, 5, 2 * BLOCK]
    for sequence, length in zip(ready, done):
        network.step([(sequence, ids[:length])])
    counts = [1, 1, 7, 1]
    rows = [(s, ids[n : n + c]) for s, n, c in zip(ready, done, counts)]
    rows.insert(1, (Sequence(), ids))
    found = network.step(rows)
    close(found.pop(1), expected)
    for logits, length, count in zip(found, done, counts):
        close(logits, expected[length : length + count])
    for sequence, _ in rows:
        network.free += sequence.blocks


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_as_transformers_own(folder, name):
    """The median of seven prompts. Where a router chooses, rounding turns some choices, theirs or ours."""
    path, network = make(name, folder), load(make(name, folder), dtype=torch.bfloat16)
    noise = []
    for ids in np.random.default_rng(6).integers(3, 256, (7, 20)).tolist():
        exact, theirs = reference_logits(path, ids), reference_logits(path, ids, dtype=torch.bfloat16)
        noise.append([np.sqrt(np.mean((rough - exact) ** 2)) for rough in (network.forced(ids), theirs)])
    ours, theirs = np.median(noise, 0)
    assert ours < (4 if network.decoder.spec.moe else 1.5) * theirs
