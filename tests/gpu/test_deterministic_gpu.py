"""--deterministic on CUDA: ids and logprobs bit for bit over graphs x chunks x prefix cache x preemption x company; bf16, fp16 and float32."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from checkpoints import make

from flatout import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEW = 48
TIGHT = 30  # blocks: the longest sequence takes 22 of them, all together over 60


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Lengths around a block and a chunk; the last three share 130 tokens."""
    draw = torch.Generator().manual_seed(1)
    made = [torch.randint(5, vocabulary, (n,), generator=draw).tolist() for n in (1, 15, 16, 17, 47, 64, 130, 300)]
    return [*made, made[6] + made[3], made[6] + made[4]]


def params_of(count: int, **wanted) -> list[SamplingParams]:
    """Every third row draws from a seed."""
    return [SamplingParams(temperature=float(i % 3 == 2), seed=i, max_tokens=NEW, ignore_eos=True, **wanted) for i in range(count)]


def answer(result) -> tuple:
    """Ids, and of each position ids and logprobs: floats that must be equal, not near."""
    (output,) = result.outputs
    told = [[(i, entry.logprob, entry.rank) for i, entry in position.items()] for position in output.logprobs]
    return output.token_ids, told


def open_llm(model: str, dtype: str, **options) -> LLM:
    given = {"max_model_len": 512, "max_num_seqs": 16, "num_gpu_blocks_override": 4096, "deterministic": True, **options}
    return LLM(model, dtype=dtype, **given)


def slow_twin(model: str, dtype: str, prompts: list[list[int]]) -> list[tuple]:
    """One at a time, in one chunk, nothing cached, nothing captured."""
    with open_llm(model, dtype, enforce_eager=True, enable_prefix_caching=False, async_scheduling=False) as llm:
        return [answer(llm.generate([p], q)[0]) for p, q in zip(prompts, params_of(len(prompts), logprobs=5))]


def holds(model: str, dtype: str, prompts: list[list[int]], expected: list[tuple], **options) -> None:
    asked, plain = params_of(len(prompts), logprobs=5), params_of(len(prompts))
    with open_llm(model, dtype, **options) as llm:
        together = llm.generate(prompts, asked)
        if "num_gpu_blocks_override" in options:
            assert sum(r.preemptions for r in together) > 0
        alone = [llm.generate([p], q)[0] for p, q in zip(prompts, asked)]
        backwards = llm.generate(prompts[::-1], asked[::-1])[::-1]
        for results in (together, alone, backwards):
            for i, (result, wanted) in enumerate(zip(results, expected)):
                assert answer(result) == wanted, f"prompt {i} of {len(prompts[i])} tokens"
        # greedy rows that ask for no logprobs: captured steps choose for themselves
        for results in (llm.generate(prompts, plain), [llm.generate([p], q)[0] for p, q in zip(prompts, plain)]):
            assert [r.outputs[0].token_ids for r in results] == [ids for ids, _ in expected]


@pytest.fixture(scope="module")
def default_prompts():
    return prompts_of(49_000)


@pytest.fixture(scope="module")
def default_twin(default_model, default_prompts):
    return slow_twin("smollm2", "bfloat16", default_prompts)


@pytest.mark.parametrize("budget", (48, 64, 8192))
@pytest.mark.parametrize(("eager", "caching", "tight"), list(product((False, True), repeat=3)))
def test_default_model(default_twin, default_prompts, eager, caching, tight, budget):
    options = {"enforce_eager": eager, "enable_prefix_caching": caching, "max_num_batched_tokens": budget}
    if tight:
        options["num_gpu_blocks_override"] = TIGHT
    holds("smollm2", "bfloat16", default_prompts, default_twin, **options)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("family", ("llama", "qwen2_moe"))
def test_families(family, dtype, tmp_path):
    model, prompts = str(make(family, tmp_path)), prompts_of(250)
    expected = slow_twin(model, dtype, prompts)
    for options in (
        {},
        {"enforce_eager": True, "max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 48, "num_gpu_blocks_override": TIGHT},
        {"max_num_batched_tokens": 48, "enable_prefix_caching": False, "max_cudagraph_capture_size": 3},
    ):
        holds(model, dtype, prompts, expected, **options)


def test_rank_and_logprob_are_those_of_other_modes(default_model, default_prompts):
    """Deterministic is another order of additions, not another model."""
    expected = slow_twin("smollm2", "float32", default_prompts)
    with open_llm("smollm2", "float32", deterministic=False) as llm:
        results = [answer(r) for r in llm.generate(default_prompts, params_of(len(default_prompts), logprobs=5))]
    for (ids, told), (wanted, told_wanted) in zip(results, expected):
        agreed = next((i for i, (a, b) in enumerate(zip(ids, wanted)) if a != b), NEW)
        for position, position_wanted in zip(told[:agreed], told_wanted[:agreed]):
            assert position[0][1] == pytest.approx(position_wanted[0][1], abs=1e-3)
        assert agreed > 0
