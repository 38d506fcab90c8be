"""The packaged model's network, teacher-forced: its argmax is the greedy ids that Transformers gave in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from network import load
from paths import DATA

GREEDY = json.loads((DATA / "smollm2_greedy.json").read_text())
CASES = GREEDY["cases"] + GREEDY["cases_extra"]


@pytest.fixture(scope="module")
def network(default_model):
    return load(default_model, block_size=16)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(len(c["prompt_ids"])))
def test_argmax_is_the_reference(network, case):
    ids, first = case["prompt_ids"] + case["greedy_ids"][:-1], len(case["prompt_ids"]) - 1
    logits = network.forced(ids)[first:]
    assert logits.argmax(1).tolist() == case["greedy_ids"]
    best = np.sort(logits, 1)
    np.testing.assert_allclose(best[:, -1] - best[:, -2], case["margins"], atol=2e-3)


def test_bfloat16_is_near(network, default_model):
    rough = load(default_model, block_size=16, dtype=torch.bfloat16)
    case = CASES[0]
    ids, first = case["prompt_ids"] + case["greedy_ids"][:-1], len(case["prompt_ids"]) - 1
    exact, near = network.forced(ids)[first:], rough.forced(ids)[first:]
    assert np.sqrt(np.mean((exact - near) ** 2, 1)).max() < 0.6
