"""The sampler on CUDA: its kernels and what runs without them, against the reference, in other batches, captured, without a host sync."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_rows import CPU, agrees, random_logits, random_request, request, sample

from flatout.kernels import sampling
from flatout.runner import sampling_reference as reference
from flatout.runner.sampler import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    import sampling_kernels as kernels  # registers them
    import small_kernels  # noqa: F401  greedy's too

CUDA = torch.device("cuda")


@pytest.fixture(params=["kernels", "without"])
def path(request, monkeypatch):
    """With Triton and without."""
    if request.param == "without":
        for name in ("greedy", "draw", "token_logprobs"):
            monkeypatch.setattr(sampling, name, getattr(sampling, name).reference)
    return request.param


def test_noise_bits_are_the_cpus():
    keys = torch.from_numpy(sampling.position_keys(np.full(50, sampling.sequence_key(7, 1)), np.arange(50)))
    ours = sampling._noise_bits_of_rows(sampling.token_hashes(20_000, CUDA), keys.to(CUDA))
    assert torch.equal(ours.cpu(), sampling._noise_bits_of_rows(sampling.token_hashes(20_000, CPU), keys))


@pytest.mark.parametrize(("vocab", "rows", "steps", "seed"), [(7, 16, 4, 0), (300, 40, 6, 1), (5000, 30, 2, 3)])
def test_mixed_batches_match_the_reference(path, vocab, rows, steps, seed):
    rng = np.random.default_rng(seed)
    sampler = Sampler(vocab, rows, CUDA)
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    for slot, r in enumerate(requests):
        sampler.admit(slot, r)
    excused = 0
    for _ in range(steps):
        logits = random_logits(rng, rows, vocab)
        out = sample(sampler, logits, range(rows), [len(r.output_ids) for r in requests])
        for row, r in enumerate(requests):
            token, raw = int(out.ids[row]), logits[row].tolist()
            choice = reference.choose(raw, r, r.output_ids)
            verdict = agrees(choice, token, r.params.temperature)
            assert verdict is not False, (r.params, choice.margin, choice.filter_margin)
            excused += verdict is None
            if (asked := r.params.logprobs) is not None:
                logprob, rank, top = reference.logprobs(raw, token, min(asked, vocab))
                assert float(out.logprobs.chosen[row]) == pytest.approx(logprob, abs=1e-4) and int(out.logprobs.ranks[row]) == rank
                assert out.logprobs.top_ids[row, : len(top)].tolist() == [t for t, _ in top]
            r.output_ids.append(token)
    assert excused <= max(1, rows * steps // 50)


def test_a_row_alone_equals_the_row_in_a_crowd(path, monkeypatch):
    """Bit-equal ids and logprobs at a real vocabulary; also when the rows are worked on in parts."""
    rng = np.random.default_rng(11)
    vocab, rows = 151_936, 24
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    logits = random_logits(rng, rows, vocab)
    positions = [len(r.output_ids) for r in requests]

    def run(members):
        sampler = Sampler(vocab, rows, CUDA)
        for i in members:
            sampler.admit(int(i), requests[i])
        return sample(sampler, logits[list(members)], members, [positions[i] for i in members])

    crowd = run(range(rows))
    monkeypatch.setattr(sampling, "CHUNK", 3 * vocab)
    assert torch.equal(run(range(rows)).ids, crowd.ids)
    for i, r in enumerate(requests):
        alone = run([i])
        assert alone.ids[0] == crowd.ids[i]
        if (k := r.params.logprobs) is not None:
            assert alone.logprobs.chosen[0] == crowd.logprobs.chosen[i] and alone.logprobs.ranks[0] == crowd.logprobs.ranks[i]
            assert torch.equal(alone.logprobs.top_ids[0], crowd.logprobs.top_ids[i, :k])
            assert torch.equal(alone.logprobs.top_logprobs[0], crowd.logprobs.top_logprobs[i, :k])


def test_same_ids_as_on_the_cpu(path):
    rng = np.random.default_rng(12)
    vocab, rows = 49_152, 32
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    logits = random_logits(rng, rows, vocab)
    positions = [len(r.output_ids) for r in requests]
    ids = []
    for device in (CPU, CUDA):
        sampler = Sampler(vocab, rows, device)
        for i, r in enumerate(requests):
            sampler.admit(i, r)
        ids.append(sample(sampler, logits, range(rows), positions).ids.tolist())
    assert sum(a != b for a, b in zip(*ids)) <= 1


def test_no_host_sync(path):
    """Admission and three steps of every feature, in torch's mode that fails on a sync."""
    rng = np.random.default_rng(13)
    vocab, rows = 4000, 32
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    requests += [request(top_k=2000), request(top_p=0.5), request(temperature=0), request(logprobs=20)]
    sampler = Sampler(vocab, len(requests), CUDA)
    logits = torch.randn(len(requests), vocab, device=CUDA)
    slots = np.arange(len(requests), dtype=np.int32)
    positions = np.array([len(r.output_ids) for r in requests], np.int32)
    for slot, r in enumerate(requests):
        sampler.admit(slot, r)
    sampler.prompt_logprobs(logits.clone(), sampler.sample(logits.clone(), slots, positions).ids, 5)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slot, r in enumerate(requests):
            sampler.admit(slot, r)
        for step in range(3):
            out = sampler.sample(logits.clone(), slots, positions + step)
        sampler.prompt_logprobs(logits.clone(), out.ids, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.ids.shape == (len(requests),)


# ---------------------------------------------------------------- the kernels themselves


def test_noise():
    kernels.check_noise(CUDA, kernels.random_keys(np.random.default_rng(1), 1)[0], 400)


@pytest.mark.parametrize("vocab", [1, 129, 1025, 32_001, 49_152, 128_256, 152_064, 262_144])
def test_draw(vocab):
    """All filters in any mix, one row and many."""
    rng = np.random.default_rng(vocab)
    counts = (1, 9, 60 if vocab > 1e5 else 200)
    top_ks = (2, 5, 40, 300, 1000, 5000)
    excused = sum(kernels.check_draw(CUDA, rng, rows, vocab, kernels.random_asked(rng, rows, vocab, top_ks)) for rows in counts)
    assert excused <= 1 + sum(counts) // 50


@pytest.mark.parametrize(
    "asked",
    [
        (1.0, 1.0, 0.0, 152_064),
        (1.0, 0.9, 0.0, 152_064),
        (1.0, 0.01, 0.0, 152_064),
        (10.0, 0.3, 0.0, 152_064),
        (0.7, 0.8, 0.05, 20),
        (1.0, 1.0, 0.0, 50),
        (1.0, 0.95, 0.0, 590),
        (1.0, 0.5, 0.0, 600),
        (1.0, 0.9, 0.0, 100_000),
        (1.0, 1.0, 0.0, 152_063),
    ],
)
def test_draw_one_way(asked):
    rng = np.random.default_rng(5)
    assert kernels.check_draw(CUDA, rng, 40, 152_064, np.tile(np.array(asked, np.float64), (40, 1))) <= 1


@pytest.mark.parametrize("vocab", [1, 129, 1025, 32_001, 128_256, 152_064, 262_144])
@pytest.mark.parametrize("k", [0, 1, 8, 20, 32])
def test_token_logprobs(vocab, k):
    rng = np.random.default_rng(vocab + k)
    for rows in (1, 12):
        kernels.check_rate(CUDA, rng, rows, vocab, k)


def test_kernels_give_a_row_the_same_bits_in_any_crowd():
    """Alone, among 300, in another order, again: the split over programs and the order of atomics change nothing."""
    rng = np.random.default_rng(8)
    rows, vocab = 300, 50_000
    asked, keys = kernels.random_asked(rng, rows, vocab, (2, 40, 150, 5000)), kernels.random_keys(rng, rows)
    logits, tokens = kernels.random_rows(rng, rows, vocab), rng.integers(0, vocab, rows)
    crowd, rated = kernels.draw(logits, asked, keys, CUDA), kernels.rate(logits, tokens, 5, CUDA)
    order = rng.permutation(rows)
    assert np.array_equal(kernels.draw(logits[order], asked[order], keys[order], CUDA), crowd[order])
    for members in [[row] for row in range(0, rows, 3)] + [order[:n] for n in (2, 7, 30, 100)]:
        assert np.array_equal(kernels.draw(logits[members], asked[members], keys[members], CUDA), crowd[members])
        again = kernels.rate(logits[members], tokens[members], 5, CUDA)
        assert all(torch.equal(a, b[torch.as_tensor(members)]) for a, b in zip(again, rated))


def test_kernels_in_a_captured_graph():
    """Replayed over new logits, filters and keys in the same places."""
    rng = np.random.default_rng(9)
    rows, vocab, k = 8, 128_256, 5

    def operands():
        logits, asked = kernels.random_rows(rng, rows, vocab), kernels.random_asked(rng, rows, vocab)
        arrays = kernels.greedy(logits), logits, np.arange(rows), asked, kernels.random_keys(rng, rows)
        return [torch.from_numpy(array).to(CUDA) for array in arrays]

    def run(ids, logits, at, asked, keys):
        outs = [torch.empty(rows, device=CUDA), torch.empty(rows, dtype=torch.int32, device=CUDA)]
        outs += [torch.empty(rows, k, dtype=torch.int32, device=CUDA), torch.empty(rows, k, device=CUDA)]
        kernels.kernels.draw_triton(ids, logits, at, asked, keys, ids)
        kernels.kernels.token_logprobs_triton(*outs, logits, ids)
        return outs

    place = operands()
    run(*[x.clone() for x in place])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(*place)
    for _ in range(5):
        new = operands()
        for old, x in zip(place, new):
            old.copy_(x)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, run(*new))) and torch.equal(place[0], new[0])
