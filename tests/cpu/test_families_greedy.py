"""Each family through the whole engine: 64 greedy tokens equal to Transformers' generate, alone and in a mixed batch of eight, chunked."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import FAMILIES, make, reference_logits

from flatout import LLM, SamplingParams

BLOCK, BUDGET, NEW = 16, 32, 64
rng = np.random.default_rng(11)
PROMPTS = [rng.integers(3, 256, n).tolist() for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BUDGET + 9)]
OTHERS = [rng.integers(3, 256, n).tolist() for n in (4, 33, 50)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def check(path, prompt: list[int], ids: list[int]) -> None:
    """Each id is Transformers' greedy choice after those before it: by induction the ids are those of its generate()."""
    logits = reference_logits(path, prompt + ids[:-1])[len(prompt) - 1 :]
    assert len(ids) == NEW and logits.argmax(1).tolist() == ids
    best = np.sort(logits, axis=1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-4, "a tie makes this test a coin toss: choose other prompts"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids(family, folder):
    path = make(family, folder)
    options = {
        "block_size": BLOCK,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "num_gpu_blocks_override": 128,
    }
    with LLM(str(path), dtype="float32", device="cpu", **options) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
        together = llm.generate([*PROMPTS[:3], *OTHERS, *PROMPTS[3:]], GREEDY, cache_salt="together")
    assert [r.outputs[0].token_ids for r in together[:3] + together[6:]] == alone
    for prompt, ids in zip(PROMPTS, alone):
        check(path, prompt, ids)
