"""LLM(quantization="int8" | "int4"): whole answers by programs of the native library; the start lines; what it needs."""

from __future__ import annotations

import pytest
from checkpoints import make

from flatout import LLM, SamplingParams
from flatout.config import ConfigError
from flatout.kernels import native

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 2, 7], [8] * 30, list(range(3, 60))]


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_step_is_one_call_and_its_tokens_are_those_of_steps_op_by_op(tmp_path, method, dtype):
    found = []
    for options in ({"enforce_eager": True}, {}):
        with LLM(make("llama_tied", tmp_path, head_dim=32), quantization=method, dtype=dtype, max_model_len=96, **options) as llm:
            found.append([tokens(llm, PROMPTS), *(tokens(llm, [prompt]) for prompt in PROMPTS)])
            lines = llm.engine.start_lines
    assert found[0] == found[1]
    (part,) = llm.engine.runner.executor.decodes.steps[1].forward.parts
    assert part.run.names().count("product") == 4 * llm.spec.num_layers + 1
    assert llm.config.model.dtype == ("float32" if dtype == "auto" else dtype)
    where = "attention, mlp; int8 weights (groups of 32) in head" if method == "int4" else "attention, mlp, head"
    assert f"products {method} weights (groups of 32) in {where}; int8 activations, of many rows bfloat16" in lines
    assert not any("leaves in" in line for line in lines)


def test_the_start_says_what_stays_and_experts_keep_the_files_type(tmp_path):
    with LLM(make("qwen2_moe", tmp_path), quantization="int4", max_model_len=96) as llm:
        assert all(len(ids) == 12 for ids in tokens(llm, PROMPTS))
        text = "\n".join(llm.engine.start_lines)
        plain = llm.config.model.dtype
    odd = "2 x moe.shared.gate_up (40 rows are no multiple of 16); 2 x moe.shared.down (40 columns are no multiple of 32)"
    assert f"--quantization int4 leaves in {plain}: {odd}" in text
    assert f"experts F32 -> {plain}" in text and f"shared expert F32 -> {plain}" in text
    assert f"dtype = {plain}: " in text


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_gguf_file_is_rounded_again_where_it_must_be(default_model, method):
    with LLM(str(default_model), quantization=method, max_model_len=128) as llm:
        scheme = next(line for line in llm.engine.start_lines if line.startswith("scheme"))
        assert all(len(ids) == 12 for ids in tokens(llm, PROMPTS))
    assert ("Q4_1 -> 8.5 bits (rounded again)" if method == "int8" else "Q4_1 -> 5.0 bits") in scheme


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_dummy_weights(tmp_path, method):
    with LLM(make("qwen3", tmp_path), load_format="dummy", quantization=method, max_model_len=96) as llm:
        assert all(len(ids) == 12 for ids in tokens(llm, PROMPTS))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_without_the_native_library_it_is_refused(tmp_path, monkeypatch, method):
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(
        ConfigError, match=f"--quantization: {method} needs the native library, which is not there; leave it out, or install"
    ):
        LLM(make("llama", tmp_path), quantization=method)
