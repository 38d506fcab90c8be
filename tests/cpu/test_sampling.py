"""The sampler against the float64 reference, row by row in random mixed batches; and each row alone against the crowd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_rows import CPU, agrees, one, random_logits, random_request, request, sample

from flatout.kernels import logit_edits, sampling
from flatout.request import RequestError, SamplingParams
from flatout.runner import sampling_reference as reference
from flatout.runner.sampler import Sampler


@pytest.fixture(params=["by row", "together"])
def path(request, monkeypatch):
    """The CPU's way, and on the CPU that of a GPU without kernels."""
    if request.param == "together":
        monkeypatch.setattr(logit_edits, "clean_logits", logit_edits._clean_rows)
        monkeypatch.setattr(sampling, "greedy", sampling._greedy_together)
        monkeypatch.setattr(sampling, "draw", sampling._draw_together)
        monkeypatch.setattr(sampling, "token_logprobs", sampling._logprobs_together)
    return request.param


@pytest.mark.parametrize(("vocab", "rows", "steps", "seed"), [(7, 16, 4, 0), (300, 40, 6, 1), (300, 40, 6, 2), (3000, 24, 2, 3)])
def test_mixed_batches_match_the_reference(path, vocab, rows, steps, seed):
    """Ids, and the logprobs of rows that asked, over several steps of continuing requests; half of them replaced midway."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(vocab, 2 * rows, CPU)
    slots = rng.permutation(2 * rows)[:rows]
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    for slot, r in zip(slots, requests):
        sampler.admit(int(slot), r)
    excused = 0
    for step in range(steps):
        if step == steps // 2:
            for i in rng.permutation(rows)[: rows // 2]:
                requests[i] = random_request(rng, vocab, f"new {i}")
                sampler.admit(int(slots[i]), requests[i])
        order = rng.permutation(rows)[: rng.integers(1, rows + 1)]
        logits = random_logits(rng, len(order), vocab)
        out = sample(sampler, logits, slots[order], [len(requests[i].output_ids) for i in order])
        asked = max((requests[i].params.logprobs if requests[i].params.logprobs is not None else -1) for i in order)
        assert (out.logprobs is None) == (asked < 0)
        for row, i in enumerate(order):
            r, token, raw = requests[i], int(out.ids[row]), logits[row].tolist()
            choice = reference.choose(raw, r, r.output_ids)
            verdict = agrees(choice, token, r.params.temperature)
            assert verdict is not False, (r.params, choice.margin, choice.filter_margin)
            excused += verdict is None
            if r.params.logprobs is not None:
                assert out.logprobs.top_ids.shape == (len(order), min(asked, vocab))
                logprob, rank, top = reference.logprobs(raw, token, min(r.params.logprobs, vocab))
                assert out.logprobs.chosen[row] == pytest.approx(logprob, abs=1e-4)
                assert out.logprobs.ranks[row] == rank
                assert [int(t) for t in out.logprobs.top_ids[row, : len(top)]] == [t for t, _ in top]
                assert out.logprobs.top_logprobs[row, : len(top)].tolist() == pytest.approx([x for _, x in top], abs=1e-4)
            r.output_ids.append(token)
    assert excused <= max(1, rows * steps // 100)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_alone_equals_the_row_in_a_crowd(seed):
    """Bit-equal ids and logprobs, in any order, whatever the others ask for."""
    rng = np.random.default_rng(100 + seed)
    vocab, rows = 2000 + seed, 30
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    logits = random_logits(rng, rows, vocab)
    positions = [len(r.output_ids) for r in requests]
    crowd = Sampler(vocab, rows, CPU)
    for slot, r in enumerate(requests):
        crowd.admit(slot, r)
    together = sample(crowd, logits, range(rows), positions)
    for order in (rng.permutation(rows), rng.permutation(rows)[:7]):
        again = Sampler(vocab, rows, CPU)
        for i in rng.permutation(rows):
            again.admit(int(rows - 1 - i), requests[i])
        out = sample(again, logits[order], rows - 1 - order, [positions[i] for i in order])
        assert torch.equal(out.ids, together.ids[order])
    for i, r in enumerate(requests):
        sampler = Sampler(vocab, 1, CPU)
        sampler.admit(0, r)
        alone = sample(sampler, logits[i : i + 1], [0], [positions[i]])
        assert alone.ids[0] == together.ids[i]
        if (k := r.params.logprobs) is not None:
            assert alone.logprobs.chosen[0] == together.logprobs.chosen[i]
            assert alone.logprobs.ranks[0] == together.logprobs.ranks[i]
            assert torch.equal(alone.logprobs.top_ids[0], together.logprobs.top_ids[i, :k])
            assert torch.equal(alone.logprobs.top_logprobs[0], together.logprobs.top_logprobs[i, :k])


def test_preempted_anywhere_loses_nothing():
    """A request that goes on in another slot of another sampler, its outputs given back at admission, yields the same tokens."""
    rng = np.random.default_rng(5)
    vocab, steps = 200, 12
    logits = random_logits(rng, steps, vocab)
    for i in range(20):
        r = random_request(rng, vocab, str(i))
        start = list(r.output_ids)
        runs = []
        for restarts in ((), (1, 2, 7)):
            r.output_ids[:] = start
            sampler, slot = Sampler(vocab, 4, CPU), 2
            sampler.admit(slot, r)
            for step in range(steps):
                if step in restarts:
                    sampler, slot = Sampler(vocab, 4, CPU), step % 4
                    sampler.admit(slot, random_request(rng, vocab, "someone else"))
                    sampler.admit(slot, r)
                r.output_ids.append(int(sample(sampler, logits[step : step + 1], [slot], [len(r.output_ids)]).ids[0]))
            runs.append(list(r.output_ids))
        assert runs[0] == runs[1]


def test_steps_ahead_of_the_host_see_the_sampled_tokens():
    """The host's output_ids stay empty while three steps run: penalties and bad words follow the device's tokens."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    sampler = Sampler(5, 1, CPU)
    sampler.admit(0, request(temperature=0, presence_penalty=1.5, bad_words_ids=[[0, 2], [1, 0]]))
    # 0 first; then 1 (4 against 3.5); then 0 is banned after 1, and 2 leads with 3 against 2.5; then nothing is banned: 0 with 3.5
    assert [int(sample(sampler, logits, [0], [position]).ids[0]) for position in range(4)] == [0, 1, 2, 0]


def test_slots_grow_only_for_who_needs_them():
    sampler = Sampler(100, 64, CPU)
    plain = request(temperature=1.0, top_p=0.9, logprobs=2)
    for slot in range(64):
        sampler.admit(slot, plain)
    sample(sampler, torch.zeros(64, 100), range(64), [0] * 64)
    assert sampler._history.tokens.numel() == 0 and not sampler._edits
    for slot in range(10):
        sampler.admit(slot, request(frequency_penalty=1.0, prompt_ids=[1] * 3000))
    assert sampler._history.tokens.shape[0] < 64
    rows = sampler._history.tokens.shape[0]
    for _ in range(5):  # readmission takes the rows back
        for slot in range(10):
            sampler.admit(slot, request(frequency_penalty=1.0))
    assert sampler._history.tokens.shape[0] == rows
    sampler.admit(0, request(repetition_penalty=1.1, prompt_ids=list(range(100)) * 20, output_ids=[1] * 5000))
    assert sample(sampler, torch.zeros(1, 100), [0], [5000]).ids[0] < 100


def test_a_readmitted_slot_starts_clean():
    rng = np.random.default_rng(7)
    vocab = 50
    logits = random_logits(rng, 1, vocab).nan_to_num_(0.0, neginf=0.0)
    sampler = Sampler(vocab, 2, CPU)
    for _ in range(30):
        sampler.admit(1, random_request(rng, vocab, "before"))
        sample(sampler, logits, [1], [40])
        after = random_request(rng, vocab, "after")
        sampler.admit(1, after)
        assert int(sample(sampler, logits, [1], [len(after.output_ids)]).ids[0]) == one(after, logits)


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-3, 0.1, 1.0, 100.0])
def test_temperatures_from_tiny_to_huge(path, temperature):
    logits = random_logits(np.random.default_rng(1), 1, 500).nan_to_num_(0.0, neginf=-20.0)
    for seed in range(20):
        r = request(temperature=temperature, seed=seed)
        assert agrees(reference.choose(logits[0].tolist(), r, []), one(r, logits), temperature) is not False


def test_greedy_takes_the_lowest_of_equals(path):
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=9e-6), SamplingParams(temperature=5.0, top_k=1)):
        assert {one(request(params, seed=seed), logits) for seed in range(9)} == {1}


def test_equal_tokens_stand_or_fall_together(path):
    """top_k 2 and top_p keep every token that equals the last one kept, as vLLM's top_k does."""
    logits = torch.tensor([[4.0, 3.0, 3.0, 3.0, 1.0]])
    for filters in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        drawn = {one(request(temperature=1.0, seed=seed, **filters), logits) for seed in range(60)}
        assert drawn == {0, 1, 2, 3}, filters


def test_broken_logits_have_a_meaning(path):
    nan, inf = float("nan"), float("inf")
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.0), SamplingParams(top_p=0.9), SamplingParams(top_k=3)):
        r = request(params)
        assert one(r, torch.tensor([[nan, 1.0, -inf, nan]])) == 1
        assert one(r, torch.tensor([[-inf, 1.0, inf, 0.0]])) == 2
        assert one(r, torch.full((1, 4), -inf)) == 0
        assert one(r, torch.full((1, 4), nan)) == 0
        assert one(request(params, allowed_token_ids=[2, 3]), torch.tensor([[5.0, nan, -inf, -inf]])) == 2
        assert one(request(params, bad_words_ids=[[0], [1]], allowed_token_ids=[0, 1]), torch.tensor([[1.0, 2.0, 9.0]])) == 0
        assert one(request(params, bad_words_ids=[[2]]), torch.tensor([[-inf, -inf, 1.0]])) == 0
        twice_lowest = request(params, allowed_token_ids=[2, 3], repetition_penalty=2.0)
        assert one(twice_lowest, torch.tensor([[5.0, 5.0, nan, nan]])) == 2


def test_penalties_at_both_signs(path):
    """repetition divides a positive logit and multiplies a negative one; the other two subtract; vLLM's arithmetic by hand."""
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.5, 1.0]])
    r = request(
        temperature=0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, prompt_ids=[0, 1], output_ids=[3, 3, 1]
    )
    edited = reference.edit(logits[0].tolist(), r, r.output_ids)
    assert edited == [1.0, -4.75, 0.0, 1.5 / 2 - 1.0 - 0.25, 1.0]
    assert one(r, logits) == 0 and one(r, logits + torch.tensor([0, 0, 0, 0, 0.5])) == 4


def test_short_histories_beside_long_ones():
    """A row's penalties end where its own history ends: token 0 is the padding of fresh rows and keeps its lead."""
    logits = torch.tensor([[3.0, 1.0, 2.0]]).repeat(4, 1)
    sampler = Sampler(3, 4, CPU)
    sampler.admit(0, request(temperature=0, repetition_penalty=2.0, prompt_ids=[1], output_ids=[2] * 50))
    sampler.admit(1, request(temperature=0, repetition_penalty=2.0, prompt_ids=[1]))
    sampler.admit(2, request(temperature=0, repetition_penalty=2.0, prompt_ids=[777]))  # a placeholder: nothing to penalise
    sampler.admit(3, request(temperature=0, presence_penalty=2.0))
    assert sample(sampler, logits, range(4), [50, 0, 0, 0]).ids.tolist() == [0, 0, 0, 0]


def test_bad_words_match_the_output_only():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])
    words = {"temperature": 0, "repetition_penalty": 1.001, "prompt_ids": [3], "bad_words_ids": [[3, 4], [2, 3, 4]]}
    assert one(request(**words), logits) == 4
    assert one(request(**words, output_ids=[3]), logits) == 3
    assert one(request(**words, output_ids=[3, 1]), logits) == 4


def test_long_outputs_grow_the_history():
    """700 steps with no word from the host: the counts of the device are those of all the outputs."""
    penalty = 1 / 128
    sampler = Sampler(5, 2, CPU)
    sampler.admit(1, request(temperature=0, frequency_penalty=penalty))
    logits, counts = [1.0, 1.0, 0.5, 0.0, -9.0], [0] * 5
    for position in range(700):
        expected = max(range(5), key=lambda token: logits[token] - penalty * counts[token])
        assert sample(sampler, torch.tensor([logits]), [1], [position]).ids.tolist() == [expected]
        counts[expected] += 1


def test_frequency_counts_exactly_however_often():
    """3,000 repeats: the sum is one product, not 3,000 roundings."""
    r = request(temperature=0, frequency_penalty=0.1, output_ids=[2] * 3000)
    assert one(r, torch.tensor([[0.0, 1.0, 301.0]])) == 1  # 301 - 300 = 1: a tie, lowest id
    assert one(r, torch.tensor([[0.0, 1.0, 301.01]])) == 2


def test_ids_outside_the_vocabulary_are_refused():
    sampler = Sampler(10, 1, CPU)
    for name, wrong in (
        ("logit_bias", {"logit_bias": {10: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [3, 99]}),
        ("stop_token_ids", {"stop_token_ids": [10], "min_tokens": 1}),
        ("bad_words", {"bad_words_ids": [[1, 10]]}),
        ("bad_words", {"bad_words_ids": [[-1]]}),
    ):
        with pytest.raises(RequestError, match=name):
            sampler.admit(0, request(**wrong))
    sampler.admit(
        0, request(prompt_ids=[4, 5000], repetition_penalty=2.0, eos_ids=frozenset({10}), min_tokens=2)
    )  # a placeholder; no such end
    assert sample(sampler, torch.eye(10)[4:5], [0], [0]).ids.shape == (1,)


def test_wrong_logits_are_refused():
    sampler = Sampler(10, 2, CPU)
    for logits in (torch.zeros(1, 9), torch.zeros(2, 10), torch.zeros(1, 10, dtype=torch.bfloat16), torch.zeros(1, 20)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous float32"):
            sampler.sample(logits, np.array([0], np.int32), np.array([0], np.int32))


def test_prompt_logprobs(path):
    logits = random_logits(np.random.default_rng(3), 9, 80)
    targets = torch.arange(0, 72, 8)
    out = Sampler(80, 1, CPU).prompt_logprobs(logits.clone(), targets, 4)
    for row in range(9):
        logprob, rank, top = reference.logprobs(logits[row].tolist(), int(targets[row]), 4)
        assert out.chosen[row] == pytest.approx(logprob, abs=1e-4) and out.ranks[row] == rank
        assert out.top_ids[row].tolist() == [t for t, _ in top]
    assert out.ranks.dtype == out.top_ids.dtype == torch.int32


def test_equal_logprobs_come_in_the_order_of_ids(path):
    """Whatever the number asked in the batch; 0.0 and -0.0 are equal. A rank counts all that are at least as likely, as in vLLM."""
    logits = torch.tensor([[-0.0, 1.0, 0.0, -0.0, 1.0, 0.0]])
    for k in range(1, 7):
        out = Sampler(6, 1, CPU).prompt_logprobs(logits.clone(), torch.tensor([4]), k)
        assert out.top_ids[0].tolist() == [1, 4, 0, 2, 3, 5][:k] and out.ranks[0] == 2


def test_costs_are_counted():
    from flatout.kernels.op import recording

    sampler = Sampler(100, 4, CPU)
    sampler.admit(
        0, request(temperature=1.0, logprobs=1, logit_bias={1: 2.0}, presence_penalty=1.0, output_ids=[1], allowed_token_ids=[1, 2])
    )
    with recording() as recorder:
        sample(sampler, torch.zeros(1, 100), [0], [1])
    assert [e.op for e in recorder.entries] == [
        "clean_logits",
        "add_bias",
        "penalise",
        "allow_only",
        "greedy",
        "draw",
        "append_tokens",
        "token_logprobs",
    ]
    assert all(e.cost.bytes > 0 for e in recorder.entries)
