"""Public bug reports about sampling (named in each test), as far as they are the sampler's."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sampling_rows import CPU, one, random_logits, request, sample

from flatout.request import RequestError, SamplingParams
from flatout.runner.sampler import Sampler

VOCAB = 120


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32))


def run(requests: list, logits: torch.Tensor, steps: int, order=None) -> list[list[int]]:
    """Outputs of requests sampled together; a row's logits depend on the step and its last token only."""
    order = order or range(len(requests))
    sampler = Sampler(VOCAB, len(requests), CPU)
    for i in order:
        sampler.admit(i, requests[i])
    outputs: list[list[int]] = [[] for _ in requests]
    for step in range(steps):
        rows = torch.stack([logits[step].roll(7 * (outputs[i][-1] if outputs[i] else 0)) for i in order])
        for i, token in zip(order, sample(sampler, rows, list(order), [step] * len(requests)).ids.tolist()):
            outputs[i].append(token)
    return outputs


def test_a36_ignored_end_ids_may_be_sampled():
    """ignore_eos with a bias of 100 on an end id: it comes at every step; with min_tokens it waits, and so does a user's stop id."""
    ends = frozenset({3, 9})
    for end in ends:
        r = request(ignore_eos=True, logit_bias={end: 100.0}, eos_ids=ends, max_tokens=200)
        assert run([r], logits_of(20), 20) == [[end] * 20]
        waiting = request(ignore_eos=True, logit_bias={end: 100.0}, eos_ids=ends, max_tokens=200, min_tokens=5, stop_token_ids=[11])
        out = run([waiting], logits_of(20), 20)[0]
        assert not set(out[:5]) & {3, 9, 11} and out[5:] == [end] * 15
    r = request(temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=[11], logit_bias={11: 100.0})
    out = run([r], logits_of(4), 4)[0]
    assert 11 not in out[:2] and out[2:] == [11, 11]


def test_a38_a_seed_means_the_same_tokens_everywhere():
    """8 seeded alike and 8 with seeds of their own, in one batch, twice, in two orders; odd seeds work; samples of one seed differ."""
    seeded = [request(temperature=1.0, seed=42) for _ in range(8)]
    others = [request(temperature=1.0, seed=1000 + i) for i in range(8)]
    logits = logits_of(32)
    first = run(seeded + others, logits, 32)
    assert all(out == first[0] for out in first[:8])
    assert len({tuple(out) for out in first[8:]}) == 8
    assert run(seeded + others, logits, 32, order=list(range(15, -1, -1))) == first
    assert run(seeded[:1], logits, 32) == first[:1]
    odd = run([request(temperature=1.0, seed=seed) for seed in (0, -1, 2**63 - 1, 2**64 - 1, -(2**63))], logits, 32)
    assert len({tuple(out) for out in odd}) == 4  # -1 and 2^64 - 1 are one seed of 64 bits
    assert odd[1] == odd[3]
    assert len({tuple(out) for out in run([request(seed=42, index=i) for i in range(8)], logits, 32)}) == 8
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=2**64)


def test_a39_penalties_stay_with_their_row():
    """A penalised row, a seeded top_k 1 row and one with a frequency penalty and a long prompt: each as alone, in every order."""
    requests = [
        request(temperature=0, repetition_penalty=2.0, prompt_ids=[5, 6]),
        request(seed=99, top_k=1),
        request(temperature=0, frequency_penalty=1.05, prompt_ids=list(range(VOCAB)) * 5),
    ]
    logits = logits_of(40)
    alone = [run([r], logits, 40)[0] for r in requests]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        assert run(requests, logits, 40, order) == alone
    assert alone[0] != run([request(temperature=0)], logits, 40)[0]


def test_a41_penalties_count_the_prompt_however_it_was_computed():
    """The sampler reads the prompt from the request, so a cached prompt counts; the same request twice gives the same."""
    r = request(repetition_penalty=1.5, temperature=0, prompt_ids=list(range(0, VOCAB, 2)))
    logits = logits_of(20)
    first = run([r], logits, 20)
    assert run([r], logits, 20) == first
    assert run([request(temperature=0, prompt_ids=r.prompt_ids)], logits, 20) != first


def test_a42_frequency_and_presence_look_at_the_output_only():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    twenty = {"temperature": 0, "prompt_ids": [7] * 20}
    assert one(request(**twenty, frequency_penalty=2.0, presence_penalty=2.0), logits) == 7
    assert one(request(**twenty, frequency_penalty=2.0, output_ids=[7]), logits) == 0
    assert one(request(**twenty, presence_penalty=2.0, output_ids=[7]), logits) == 0
    assert one(request(**twenty, repetition_penalty=2.0), logits) == 7  # 0.5 still leads zeros
    logits[0, 8] = 0.75
    assert one(request(**twenty, repetition_penalty=2.0), logits) == 8


def test_a43_filters_and_penalties_leave_logprobs_alone():
    logits = logits_of(1)
    plain = request(logprobs=3, temperature=0)
    results = []
    for r in (
        plain,
        request(logprobs=3, top_p=0.5, top_k=2, min_p=0.9),
        request(logprobs=3, temperature=0.1, allowed_token_ids=[4], presence_penalty=1.0),
    ):
        sampler = Sampler(VOCAB, 1, CPU)
        sampler.admit(0, r)
        results.append(sample(sampler, logits, [0], [0]).logprobs)
    expected = torch.log_softmax(logits.double(), 1)
    for out in results:
        assert out.top_ids[0].tolist() == expected[0].topk(3).indices.tolist()
        assert out.top_logprobs[0].tolist() == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert results[2].chosen[0] == pytest.approx(float(expected[0, 4]), abs=1e-5)


def test_a44_each_position_has_its_own_alternatives():
    """Four rows at once: the greedy token heads its own list with the same value."""
    logits = logits_of(4, seed=4)
    sampler = Sampler(VOCAB, 4, CPU)
    for slot in range(4):
        sampler.admit(slot, request(temperature=0, logprobs=3))
    out = sample(sampler, logits, range(4), [0, 5, 2, 9])
    assert out.ids.tolist() == out.logprobs.top_ids[:, 0].tolist() == logits.argmax(1).tolist()
    assert torch.equal(out.logprobs.chosen, out.logprobs.top_logprobs[:, 0])
    assert out.logprobs.ranks.tolist() == [1] * 4
    assert len({tuple(ids) for ids in out.logprobs.top_ids.tolist()}) == 4


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_a45_a46_exactly_as_many_alternatives_as_asked(asked):
    """Also 0: the chosen token's own value alone; and that value is given when the token is not among the alternatives."""
    sampler = Sampler(VOCAB, 2, CPU)
    sampler.admit(0, request(temperature=100.0, logprobs=asked, seed=3))
    sampler.admit(1, request())
    logits = logits_of(1)
    out = sample(sampler, logits, [0], [0])
    assert out.logprobs.top_ids.shape == out.logprobs.top_logprobs.shape == (1, asked)
    assert len(set(out.logprobs.top_ids[0].tolist())) == asked
    assert out.logprobs.chosen[0] == pytest.approx(float(torch.log_softmax(logits, 1)[0, out.ids[0]]), abs=1e-5)
    assert out.logprobs.ranks[0] == (logits[0] >= logits[0, out.ids[0]]).sum()
    assert sample(sampler, logits, [1], [0]).logprobs is None
    for wrong in (-1, 21):
        with pytest.raises(RequestError, match="logprobs"):
            SamplingParams(logprobs=wrong)


def test_a47_masked_tokens_put_no_infinity_into_the_reply():
    """Strict JSON of everything the sampler returns: bias of -100, a two-choice constraint, and logits that are -inf or NaN already."""
    logits = torch.cat([logits_of(2), random_logits(np.random.default_rng(2), 6, VOCAB)])
    logits[3, 5:] = -math.inf
    logits[4, :3] = math.nan
    sampler = Sampler(VOCAB, 8, CPU)
    for slot in range(8):
        sampler.admit(slot, request(logprobs=20, logit_bias={5: -100.0}, allowed_token_ids=[5, 6] if slot % 2 else None))
    out = sample(sampler, logits, range(8), [0] * 8)
    reply = [out.logprobs.chosen.tolist(), out.logprobs.top_logprobs.tolist()]
    assert json.loads(json.dumps(reply, allow_nan=False)) == reply
    assert out.logprobs.top_logprobs.min() >= -9999.0
    assert set(out.ids[1::2].tolist()) <= {5, 6}


def test_a58_temperature_and_top_k_do_what_they_say():
    """Temperature 10 spreads out, 0.1 does not, and top_k -1 is no filter."""
    logits = logits_of(1)
    spread = {t: len({one(request(temperature=t, seed=s), logits) for s in range(100)}) for t in (0.1, 1.0, 10.0)}
    assert spread[0.1] < spread[1.0] < spread[10.0] and spread[10.0] > 40
    for seed in range(30):
        r = {"temperature": 10.0, "seed": seed}
        assert (
            one(request(**r, top_k=-1), logits)
            == one(request(**r, top_k=0), logits)
            == one(request(**r, top_k=VOCAB), logits)
            == one(request(**r), logits)
        )
        assert one(request(**r, top_k=1), logits) == int(logits.argmax())


@pytest.mark.parametrize(
    "filters", [{"top_k": 1, "top_p": 0.01, "min_p": 0.99}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3, "top_p": 1e-3}]
)
def test_a60_filters_in_a_row_leave_a_token(filters):
    """And with -100 on the best it equals greedy under the bias; also where every allowed token is biased away or banned."""
    for seed in range(20):
        logits = logits_of(1, seed)
        best = int(logits.argmax())
        bias = {best: -100.0}
        assert one(request(temperature=1.0, seed=seed, logit_bias=bias, **filters), logits) == one(
            request(temperature=0, logit_bias=bias), logits
        )
        allowed = [7, 30]
        pressed = {"allowed_token_ids": allowed, "logit_bias": {7: -100.0, 30: -100.0}}
        assert one(request(seed=seed, **pressed, **filters), logits) == one(request(temperature=0, **pressed), logits)
        assert one(request(seed=seed, allowed_token_ids=allowed, bad_words_ids=[[7], [30]], **filters), logits) == 7
        assert one(request(seed=seed, allowed_token_ids=allowed, bad_words_ids=[[7]], **filters), logits) == 30
