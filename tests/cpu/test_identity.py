"""Same tokens whatever the engine does inside: chunking x prefix cache x preemption x crowd x n x step ahead, in float32 on the CPU."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from checkpoints import make

from flatout import LLM, SamplingParams

BLOCK = 8
PROMPT_TOKENS = 3 * BLOCK  # whole blocks: a full hit would leave nothing to compute
NEW_TOKENS = 2 * BLOCK + 3

rng = np.random.default_rng(7)
HEAD = rng.integers(5, 250, PROMPT_TOKENS).tolist()
CROWD = [rng.integers(5, 250, n).tolist() for n in (1, 5, BLOCK, 2 * BLOCK + 1, 40)]
PARAMS = {
    n: SamplingParams(n=n, temperature=0.8 if n > 1 else 0.0, seed=11, max_tokens=NEW_TOKENS, repetition_penalty=1.2, ignore_eos=True)
    for n in (1, 3)
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("identity"))


def build(checkpoint, **options) -> LLM:
    defaults = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_seqs": 16,
        "max_model_len": 128,
        "num_gpu_blocks_override": 256,
        "device": "cpu",
    }
    return LLM(str(checkpoint), **{**defaults, **options})


def tokens(result) -> list[list[int]]:
    return [o.token_ids for o in result.outputs]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The slow twin: no cache, no chunks, no step ahead, alone."""
    with build(checkpoint, enable_prefix_caching=False, async_scheduling=False) as llm:
        return {n: tokens(llm.generate([HEAD], PARAMS[n])[0]) for n in (1, 3)}


@contextlib.contextmanager
def preempting(llm: LLM, wanted: bool):
    """Take the blocks of each sample of the next request twice on its way, at steps where its newest token may still be in flight."""
    engine, step, steps, target = llm.engine, llm.engine.step, itertools.count(1), str(next(llm._ids) + 1)

    def preempting_step():
        if next(steps) % 9 == 0:
            for live in list(engine.scheduler._running):
                if live.request.id == target and live.request.preemptions < 2:
                    engine.scheduler._preempt(live)
        return step()

    if wanted:
        engine.step = preempting_step
    yield
    engine.step = step


@pytest.mark.parametrize("asynchronous", (True, False), ids=("async", "plain"))
@pytest.mark.parametrize("budget", (64, 13), ids=("whole", "chunked"))
@pytest.mark.parametrize("crowd", (False, True), ids=("alone", "crowd"))
@pytest.mark.parametrize("preempt", (False, True), ids=("undisturbed", "preempted"))
@pytest.mark.parametrize("n", (1, 3))
def test_identity(checkpoint, expected, asynchronous, budget, crowd, preempt, n):
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 13, "async_scheduling": asynchronous}
    with build(checkpoint, **options) as llm:
        for prefix, salt in (("miss", "a"), ("full", "a"), ("hit", "b")):
            if prefix == "hit":  # one of the three blocks is known
                llm.generate([HEAD[: BLOCK + 2]], SamplingParams(max_tokens=1, temperature=0), cache_salt=salt)
            prompts = [HEAD, *(CROWD if crowd else [])]
            params = [PARAMS[n], *[SamplingParams(temperature=1.0, seed=i, max_tokens=20, top_p=0.9) for i in range(len(prompts) - 1)]]
            with preempting(llm, preempt):
                result = llm.generate(prompts, params, cache_salt=salt)[0]
            assert tokens(result) == expected[n], prefix
            assert result.cached_tokens == {"miss": 0, "hit": BLOCK, "full": 2 * BLOCK}[prefix]
            assert (result.preemptions == 2 * n) if preempt else result.preemptions == 0
        assert llm.engine.scheduler.blocks.num_used == 0
