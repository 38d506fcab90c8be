"""The sampler on CUDA: against the reference, against itself in other batches, and without a host sync."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_rows import CPU, agrees, random_logits, random_request, request, sample

from flatout.kernels import sampling
from flatout.runner import sampling_reference as reference
from flatout.runner.sampler import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def test_noise_bits_are_the_cpus():
    keys = torch.from_numpy(sampling.position_keys(np.full(50, sampling.sequence_key(7, 1)), np.arange(50)))
    ours = sampling._noise_bits_of_rows(sampling.token_hashes(20_000, CUDA), keys.to(CUDA))
    assert torch.equal(ours.cpu(), sampling._noise_bits_of_rows(sampling.token_hashes(20_000, CPU), keys))


@pytest.mark.parametrize(("vocab", "rows", "steps", "seed"), [(7, 16, 4, 0), (300, 40, 6, 1), (5000, 30, 2, 3)])
def test_mixed_batches_match_the_reference(vocab, rows, steps, seed):
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


def test_a_row_alone_equals_the_row_in_a_crowd(monkeypatch):
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


def test_same_ids_as_on_the_cpu():
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


def test_no_host_sync():
    """Admission and three steps of every feature, in torch's mode that fails on a sync."""
    rng = np.random.default_rng(13)
    vocab, rows = 4000, 32
    requests = [random_request(rng, vocab, str(i)) for i in range(rows)]
    requests += [request(top_k=2000), request(top_p=0.5), request(temperature=0), request(logprobs=20)]
    sampler = Sampler(vocab, len(requests), CUDA)
    logits = torch.randn(len(requests), vocab, device=CUDA)
    slots = np.arange(len(requests), dtype=np.int32)
    positions = np.array([len(r.output_ids) for r in requests], np.int32)
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
