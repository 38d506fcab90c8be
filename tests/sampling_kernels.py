"""Checks of the Triton kernels of draw and token_logprobs against float64, for tests/kernels (interpreted, on the CPU) and tests/gpu alike.

They call the implementations themselves, so that neither accepts() nor a measured choice stands between. The rules are the reference's
(runner/sampling_reference.py), in numpy since vocabularies are real; `test_the_expectation_is_the_references` holds the two together.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_rows import agrees
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from flatout.kernels import sampling
from flatout.kernels.gpu import draw as drawing
from flatout.kernels.gpu import sampling as kernels
from flatout.runner.sampling_reference import LOGPROB_FLOOR, LOWEST, Choice

POISON = 77


def cleaned(logits: np.ndarray, lowest: float = -np.inf) -> np.ndarray:
    """float64, with NaN, +inf and -inf as the ops read them."""
    return np.nan_to_num(logits.astype(np.float64), nan=LOWEST, posinf=-LOWEST, neginf=lowest)


def expected(logits: np.ndarray, temperature: float, top_p: float, min_p: float, top_k: float, key: np.ndarray) -> Choice:
    """What draw should choose from a row [V] under a key [2] of position_keys; its kept ids and margins as the reference's."""
    logit = cleaned(logits)
    vocab, peak, calls = len(logit), logit.max(), [np.inf]
    scaled = (logit - peak) / temperature
    falling = np.sort(scaled)[::-1]
    weights, last = np.exp(falling), vocab
    if min_p > 0:
        floor = np.log(min_p)
        last = int((falling >= floor).sum())
        calls += [abs(x - floor) for x in falling[last - 1 : last + 1] if x != floor]
    last = min(last, int(top_k))
    if top_p < 1:
        held = np.cumsum(weights[:last])
        mass = held[-1]
        last = min(last, 1 + int((held < top_p * mass).sum()))
        calls += [abs(held[last - 1] / mass - top_p), abs((held[last - 1] - weights[last - 1]) / mass - top_p)]
    if last < vocab:
        calls += [falling[last - 1] - x for x in falling[last:] if x < falling[last - 1]][:1]
    kept = np.flatnonzero(scaled >= falling[last - 1])
    hashes = sampling.token_hashes(vocab, torch.device("cpu")).numpy()[kept]
    scores = scaled[kept] - np.log(-np.log1p(-(sampling._noise_bits(hashes, key) + 0.5) / 2.0**31))
    best = int(scores.argmax())
    margin = scores[best] - np.delete(scores, best).max(initial=-np.inf)
    return Choice(int(kept[best]), kept.tolist(), {}, margin, min(calls))


def random_rows(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Logits float32 [rows, vocab]: flat to peaked, some on a grid so that values tie, some with holes."""
    logits = rng.normal(0, 1, (rows, vocab)) * rng.choice([0.01, 1.0, 3.0, 8.0], (rows, 1)) + rng.choice([-50.0, 0.0, 10.0], (rows, 1))
    coarse = rng.random(rows) < 0.3
    logits[coarse] = np.round(logits[coarse] * 8) / 8
    for row in np.flatnonzero(rng.random(rows) < 0.2):
        logits[row, rng.random(vocab) < 0.3] = rng.choice([-np.inf, np.nan, LOWEST])
        logits[row, rng.integers(vocab)] = 0.0
    return logits.astype(np.float32)


def random_asked(rng: np.random.Generator, rows: int, vocab: int, top_ks: tuple[int, ...] = (2, 5, 40, 300)) -> np.ndarray:
    """Params of draw [rows, 4]: every filter on in half of the rows, at all strengths."""

    def maybe(values, off):
        return np.where(rng.random(rows) < 0.5, rng.choice(values, rows), off)

    top_ks = np.minimum([*top_ks, vocab - 1, vocab], vocab).clip(1)
    return np.stack(
        [
            rng.choice([1e-5, 0.3, 0.7, 1.0, 1.5, 10.0], rows),
            maybe([1e-6, 0.05, 0.5, 0.8, 0.95, 0.999], 1.0),
            maybe([1e-9, 0.01, 0.2, 1.0], 0.0),
            maybe(top_ks, vocab),
        ],
        axis=1,
    ).astype(np.float64)


def random_keys(rng: np.random.Generator, rows: int) -> np.ndarray:
    return sampling.position_keys(rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 1000, rows))


def greedy(logits: np.ndarray) -> np.ndarray:
    return cleaned(logits).argmax(axis=1)


def draw(logits: np.ndarray, asked: np.ndarray, keys: np.ndarray, device: torch.device, rows: np.ndarray | None = None) -> np.ndarray:
    """Ids [S] after draw at rows (all unless given), whose params and keys these are; the others' greedy ids must stay."""
    rows = np.arange(len(logits)) if rows is None else rows
    on = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    matrix, ids = on(logits), on(greedy(logits))
    before = ids.clone()
    kernels.draw_triton(ids, matrix, on(rows), on(asked), on(keys), torch.empty(0, dtype=torch.int32, device=device))
    others = np.setdiff1d(np.arange(len(logits)), rows)
    assert torch.equal(ids[others], before[others]) and np.array_equal(matrix.cpu().numpy(), logits, equal_nan=True)
    return ids.cpu().numpy()


def check_draw(device: torch.device, rng: np.random.Generator, rows: int, vocab: int, asked: np.ndarray | None = None) -> int:
    """Random rows, drawn in random order among others that are not. Returns how many differ by a call too close to make."""
    logits, asked, keys = (
        random_rows(rng, rows + 1, vocab),
        random_asked(rng, rows, vocab) if asked is None else asked,
        random_keys(rng, rows),
    )
    order = rng.permutation(rows + 1)[:rows]
    ids = draw(logits, asked, keys, device, order)
    excused = 0
    for at, row in enumerate(order):
        choice = expected(logits[row], *asked[at], keys[at])
        verdict = agrees(choice, int(ids[row]), asked[at, 0])
        assert verdict is not False, (vocab, asked[at].tolist(), choice.token_id, int(ids[row]), choice.margin, choice.filter_margin)
        excused += verdict is None
    return excused


def rate(logits: np.ndarray, ids: np.ndarray, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_logprobs over poisoned outputs: chosen, ranks, top_ids, top_logprobs."""
    rows = len(logits)
    chosen, top_logprobs = (torch.full(shape, float(POISON), device=device) for shape in ((rows,), (rows, k)))
    ranks, top_ids = (torch.full(shape, POISON, dtype=torch.int32, device=device) for shape in ((rows,), (rows, k)))
    operands = torch.from_numpy(logits).to(device), torch.from_numpy(ids).to(device)
    kernels.token_logprobs_triton(chosen, ranks, top_ids, top_logprobs, *operands)
    return chosen.cpu(), ranks.cpu(), top_ids.cpu(), top_logprobs.cpu()


def check_rate(device: torch.device, rng: np.random.Generator, rows: int, vocab: int, k: int) -> None:
    k = min(k, vocab)
    logits = random_rows(rng, rows, vocab)
    ids = rng.integers(0, vocab, rows)
    chosen, ranks, top_ids, top_logprobs = rate(logits, ids, k, device)
    logit = cleaned(logits, LOWEST)
    peak = logit.max(axis=1, keepdims=True)
    logprobs = np.maximum(logit - peak - np.log(np.exp(logit - peak).sum(axis=1, keepdims=True)), LOGPROB_FLOOR)
    own = np.take_along_axis(logit, ids[:, None], 1)
    assert np.array_equal(ranks.numpy(), (logit >= own).sum(axis=1))
    assert np.allclose(chosen.numpy(), np.take_along_axis(logprobs, ids[:, None], 1)[:, 0], rtol=1e-6, atol=2e-5)
    best = np.argsort(-logit, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top_ids.numpy(), best)
    assert np.allclose(top_logprobs.numpy(), np.take_along_axis(logprobs, best, 1), rtol=1e-6, atol=2e-5)
    same = top_ids.long() == torch.from_numpy(ids)[:, None]
    assert torch.equal(top_logprobs[same], chosen[:, None].expand_as(same)[same])


@triton.jit
def _noises(out, add, multiply, CUDA: tl.constexpr):
    token = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out + token, drawing.noise(token, tl.load(add).to(tl.uint32), tl.load(multiply).to(tl.uint32), CUDA))


def check_noise(device: torch.device, key: np.ndarray, blocks: int) -> None:
    """The noise of 1,024 * blocks tokens is that of kernels/sampling.py, to what float32 resolves."""
    vocab = 1024 * blocks
    out, on = torch.empty(vocab, device=device), torch.from_numpy(key).to(device)
    _noises[(blocks,)](out, on[:1], on[1:], CUDA=device.type == "cuda")
    uniform = (sampling._noise_bits(sampling.token_hashes(vocab, torch.device("cpu")).numpy(), key) + 0.5) / 2.0**31
    expected = -np.log2(-np.log1p(-uniform) / np.log(2))
    error = np.abs(out.cpu().numpy() - expected)
    assert error[uniform < 0.99].max() < 2e-5  # over that uniform's own rounding shows, on tokens without luck
