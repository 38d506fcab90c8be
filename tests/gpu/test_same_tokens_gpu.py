"""On CUDA in float32 (TF32 off) the same greedy ids as on the CPU, ties under 0.01 excused and counted; tiny families and the default model."""

from __future__ import annotations

import json

import pytest
import torch
from paths import DATA

from flatout import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TIE = 0.01
GREEDY = json.loads((DATA / "smollm2_greedy.json").read_text())
CASES = GREEDY["cases"] + GREEDY["cases_extra"]
HEADS_NOT_PAGED = ("qwen3",)  # 24 dims


def excused(ids: list[int], case: dict) -> int:
    """0: equal; 1: the first difference is at a tie. Anything else fails."""
    reference = case["greedy_ids"]
    if ids == reference:
        return 0
    first = next(i for i, (a, b) in enumerate(zip(ids, reference)) if a != b)
    assert case["margins"][first] < TIE, f"differs at {first}, margin {case['margins'][first]}"
    return 1


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"async_scheduling": False, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"attention_backend": "triton"},  # captured: torch's attention, float32's default, cannot be
        {"attention_backend": "triton", "enforce_eager": True},
        {"attention_backend": "triton", "max_cudagraph_capture_size": 5, "max_num_batched_tokens": 64},
    ),
    ids=str,
)
def test_default_model_float32(default_model, options):
    with LLM("smollm2", dtype="float32", max_model_len=1024, num_gpu_blocks_override=4096, **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=len(c["greedy_ids"])) for c in CASES]
        together = llm.generate([c["prompt_ids"] for c in CASES], params)
        alone = [llm.generate([c["prompt_ids"]], p)[0] for c, p in zip(CASES, params)]
        for results in (together, alone):
            print("ties excused:", sum(excused(r.outputs[0].token_ids, c) for r, c in zip(results, CASES)))


@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_a17_any_number_of_rows_gives_the_same_ids(default_model, backend):
    """Batch sizes between those that kernels and captured steps are made for."""
    options = {"attention_backend": backend, "max_num_seqs": 32, "num_gpu_blocks_override": 4096}
    with LLM("smollm2", dtype="float32", max_model_len=1024, **options) as llm:
        for rows in (1, 2, 3, 5, 7, 9, 17, 32, 33):
            cases = [CASES[i % len(CASES)] for i in range(rows)]
            params = [SamplingParams(temperature=0, max_tokens=len(c["greedy_ids"])) for c in cases]
            results = llm.generate([c["prompt_ids"] for c in cases], params, cache_salt=str(rows))
            print(rows, "rows, ties excused:", sum(excused(r.outputs[0].token_ids, c) for r, c in zip(results, cases)))


@pytest.mark.parametrize("options", ({}, {"enforce_eager": True}, {"attention_backend": "torch"}), ids=str)
def test_default_model_bfloat16(default_model, options):
    with LLM("smollm2", dtype="bfloat16", max_model_len=1024, num_gpu_blocks_override=4096, **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=len(c["greedy_ids"])) for c in CASES]
        results = llm.generate([c["prompt_ids"] for c in CASES], params)
        for result, case in zip(results, CASES):
            assert result.outputs[0].token_ids[: case["safe_prefix"]] == case["greedy_ids"][: case["safe_prefix"]]
        print(
            "free runs equal to float32:", sum(r.outputs[0].token_ids == c["greedy_ids"] for r, c in zip(results, CASES)), "of", len(CASES)
        )


@pytest.mark.parametrize("family", ("llama", "mistral", "mixtral", "qwen2_moe", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "granite"))
def test_families_float32(family, tmp_path):
    """Tiny random models: CUDA against the CPU."""
    checkpoints = pytest.importorskip("checkpoints")
    folder = checkpoints.make(family, tmp_path)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(5, 250, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 100)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    got = {}
    for device, backend in (("cpu", "torch"), ("cuda", "torch"), ("cuda", "triton")):
        if backend == "triton" and family in HEADS_NOT_PAGED:
            continue
        options = {"num_gpu_blocks_override": 128, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 48}
        with LLM(str(folder), dtype="float32", device=device, attention_backend=backend, **options) as llm:
            got[device, backend] = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
    expected = got.pop(("cpu", "torch"))
    assert all(ids == expected for ids in got.values())
