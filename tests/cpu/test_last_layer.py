"""The last layer goes on with sampled tokens alone: the same logits, the same keys and values left behind, and fewer operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make
from network import Network, load

from flatout.kernels.op import recording
from flatout.runner.inputs import build_inputs
from flatout.runner.slots import Slots
from flatout.step import StepPlan

SIZE = 8
# (already computed, tokens, sampled): a decode, a whole prompt, a prompt's first chunk, another's last, one token that ends no prompt
MIXED = [(13, 1, True), (0, 11, True), (0, 9, False), (16, 5, True), (8, 1, False)]
NONE = [(0, 9, False), (8, 8, False)]


def plan_of(rows: list[tuple[int, int, bool]]) -> StepPlan:
    starts, counts, samples = (np.array(x) for x in zip(*rows))
    return StepPlan(
        step=0,
        slots=np.arange(len(rows), dtype=np.int32)[::-1].copy(),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        token_ids=(np.arange(counts.sum()) % 50 + 3).astype(np.int32),
        samples=samples.astype(bool),
        out_positions=np.zeros(len(rows), np.int32),
        requests=[None] * len(rows),
    )


def run(network: Network, rows: list[tuple[int, int, bool]], narrow: bool) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Logits of the sampled rows, the caches after it, and the operations of it. Caches begin with the same noise."""
    slots = Slots(len(rows), 4, torch.device("cpu"))
    slots.host_tables[: len(rows)] = np.arange(len(rows) * 4).reshape(-1, 4) + 1
    slots.tables.copy_(torch.from_numpy(slots.host_tables))
    caches = [t for layer in network.decoder.layers for t in (layer.attention.k_cache, layer.attention.v_cache)]
    draw = torch.Generator().manual_seed(0)
    for cache in caches:
        cache.normal_(generator=draw)
    inputs = build_inputs(plan_of(rows), slots, SIZE, network.groups, narrow)
    assert (inputs.batch.last is not None) == narrow
    network.backend.plan(inputs.batch, inputs.host)
    if inputs.host.last is not None:
        network.backend.plan(inputs.batch.last, inputs.host.last)
    with torch.inference_mode(), recording() as recorder:
        hidden = network.decoder.forward(inputs.batch)
        wanted = (inputs.batch.last or inputs.batch).sample_rows
        logits = network.decoder.logits(hidden, wanted).clone() if len(wanted) else torch.empty(0)
    return logits, [c.clone() for c in caches], recorder.total().flops


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_cache(family, tmp_path):
    network = load(make(family, tmp_path), block_size=SIZE)
    whole, kept, all_flops = run(network, MIXED, narrow=False)
    few, left, flops = run(network, MIXED, narrow=True)
    assert whole.shape == few.shape == (3, network.decoder.spec.vocab_size)
    torch.testing.assert_close(few, whole, rtol=1e-5, atol=1e-5)
    for a, b in zip(left, kept):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert flops < all_flops


def test_a_step_that_samples_nothing_leaves_keys_and_values(tmp_path):
    network = load(make("llama", tmp_path), block_size=SIZE)
    _, kept, _ = run(network, NONE, narrow=False)
    logits, left, _ = run(network, NONE, narrow=True)
    assert logits.numel() == 0
    for a, b in zip(left, kept):
        assert torch.equal(a, b)


def test_a_step_whose_tokens_are_all_sampled_is_as_before(tmp_path):
    network = load(make("llama", tmp_path), block_size=SIZE)
    slots = Slots(2, 4, torch.device("cpu"))
    assert build_inputs(plan_of([(3, 1, True), (0, 1, True)]), slots, SIZE, network.groups, narrow=True).batch.last is None
