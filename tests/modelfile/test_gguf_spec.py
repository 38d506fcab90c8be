"""GGUF metadata -> ModelSpec: rope in every form, windows, experts, end ids; what is not supported is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from modelfile_samples import config_of, model_of, write_gguf

from flatout.layers.rotary import frequencies
from flatout.modelfile.gguf import GGUFFile
from flatout.modelfile.gguf_spec import spec_from_gguf
from flatout.modelfile.spec import ModelFileError, ModelSpec, RopeSpec


def spec_of(tmp_path: Path, family: str = "llama", changes: dict[str, Any] | None = None, **extra: Any) -> ModelSpec:
    model = model_of(config_of(family, **(changes or {})))
    return spec_from_gguf(GGUFFile(write_gguf(model, tmp_path / "m.gguf", **extra)))


def refused(tmp_path: Path, match: str, family: str = "llama", **extra: Any) -> None:
    with pytest.raises(ModelFileError, match=match):
        spec_of(tmp_path, family, **extra)


def test_the_default_model(default_model):
    spec = spec_from_gguf(GGUFFile(default_model))
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (
        "llama",
        30,
        576,
        1536,
        49152,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position, spec.norm_eps) == (9, 3, 64, 8192, 1e-5)
    assert spec.ropes == (RopeSpec(100000.0, 64),) and {x.rope for x in spec.layers} == {0} and {x.window for x in spec.layers} == {None}
    assert (spec.tie_embeddings, spec.qkv_bias, spec.bos_id, spec.eos_ids, spec.pad_id) == (True, False, 1, (2,), 2)


def test_d07_llama3_scaling_stored_as_one_divisor_per_frequency(tmp_path):
    """As llama.cpp's converter works it out: the frequencies must be those of the config's own scaling."""
    scaled = RopeSpec(10000.0, 32, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    divisors = (frequencies(RopeSpec(10000.0, 32))[0] / frequencies(scaled)[0]).float().numpy()
    spec = spec_of(tmp_path, rope_freqs=divisors)
    found, factor = frequencies(spec.for_length(200).ropes[0])
    assert factor == 1.0
    torch.testing.assert_close(found.float(), frequencies(scaled)[0].float(), rtol=1e-6, atol=0)
    assert spec.max_position == 256


@pytest.mark.parametrize("bad", [np.ones(3, np.float32), np.zeros(16, np.float32), np.full(16, np.nan, np.float32)])
def test_damaged_divisors_are_refused(tmp_path, bad):
    refused(tmp_path, "tensor rope_freqs.weight", rope_freqs=bad)


def test_linear_and_yarn_scaling(tmp_path):
    linear = spec_of(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert (linear.ropes, linear.max_position) == ((RopeSpec(10000.0, 32, "linear", 4.0, 256),), 1024)
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0, "llama__rope__scaling__original_context_length": 64}
    spec = spec_of(tmp_path, **yarn)
    assert (spec.ropes, spec.max_position) == ((RopeSpec(10000.0, 32, "yarn", 4.0, 64),), 256)
    scaled = spec_of(tmp_path, **yarn, llama__rope__scaling__attn_factor=2.0).ropes[0]
    assert scaled.attention_factor == pytest.approx(2 * frequencies(spec.ropes[0])[1], rel=1e-6)
    refused(
        tmp_path,
        "rope.scaling.type: 'fourier' is not supported; supported: none, linear, yarn, longrope",
        llama__rope__scaling__type="fourier",
    )


def test_phi3_longrope_factor_tensors(tmp_path):
    factors = {"rope_factors_short": np.full(8, 1.5, np.float32), "rope_factors_long": np.full(8, 3.0, np.float32)}
    extra = {"phi3__rope__scaling__original_context_length": 64, "phi3__rope__scaling__attn_factor": 1.25}
    rope = spec_of(tmp_path, "phi3", **factors, **extra).ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position, rope.attention_factor) == ("longrope", 4.0, 64, 1.25)
    assert (rope.short_factor, rope.long_factor) == ((1.5,) * 8, (3.0,) * 8)
    with pytest.raises(ModelFileError, match=r"tensor rope_factors_long.weight must be F32 .8., is missing"):
        spec_of(tmp_path, "phi3", rope_factors_short=factors["rope_factors_short"])


def test_partial_rotation_is_refused_where_rows_lie_in_pairs(tmp_path):
    spec = spec_of(tmp_path, "phi3", {"partial_rotary_factor": 0.5})
    assert spec.ropes[0].dim == 8
    refused(tmp_path, "rope.dimension_count: 16 of a head's 32 dims", changes={"partial_rotary_factor": 0.5})


def test_windows(tmp_path):
    gemma = spec_of(tmp_path, "gemma3")
    assert [x.window for x in gemma.layers] == [16] * 5 + [None]
    assert [gemma.ropes[x.rope].base for x in gemma.layers] == [1e4] * 5 + [1e6]
    assert [x.window for x in spec_of(tmp_path, "gemma2").layers] == [16, None]
    pattern = [False, True, True, False, False, True]
    assert [x.window for x in spec_of(tmp_path, "gemma3", gemma3__attention__sliding_window_pattern=pattern).layers] == [
        16 if p else None for p in pattern
    ]
    assert {x.window for x in spec_of(tmp_path, llama__attention__sliding_window=32).layers} == {32}
    refused(tmp_path, "OLMo 3 is not supported", "olmo2", olmo2__attention__sliding_window=16)


def test_granite_can_switch_rope_off(tmp_path):
    assert {x.rope for x in spec_of(tmp_path, "granite", granite__rope__scaling__finetuned=False).layers} == {None}


def test_experts(tmp_path):
    spec = spec_of(tmp_path, "mixtral")
    assert (spec.family, spec.moe.num_experts, spec.moe.top_k, spec.moe.intermediate_size, spec.moe.norm_topk) == (
        "mixtral",
        4,
        2,
        96,
        True,
    )
    qwen = spec_of(tmp_path, "qwen2_moe")
    assert [x.moe for x in qwen.layers] == [False, True]
    assert (qwen.moe.shared_intermediate_size, qwen.moe.shared_gate, qwen.moe.norm_topk) == (48, True, False)
    assert spec_of(tmp_path, "qwen3_moe", qwen3moe__expert_weights_norm=False).moe.norm_topk is False
    refused(tmp_path, "expert_gating_func: 2 is not supported", "qwen3_moe", qwen3moe__expert_gating_func=2)


def test_end_ids_named_and_known(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", "word", "<|eot_id|>"]
    kinds = [2, 3, 3, 3, 1, 1]
    extra = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": kinds}
    assert spec_of(tmp_path).eos_ids == (2,)
    assert spec_of(tmp_path, **extra).eos_ids == (2, 3)  # <|eot_id|> is plain text in this vocabulary
    assert spec_of(tmp_path, tokenizer__ggml__eot_token_id=5, **extra).eos_ids == (2, 3, 5)


def test_sampling_defaults(tmp_path):
    extra = {"general__sampling__temp": 0.5, "general__sampling__top_k": 20, "general__sampling__penalty_repeat": 1.25}
    assert spec_of(tmp_path, **extra).sampling_defaults == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_dtype_of_the_file(tmp_path, kind, dtype):
    model = model_of(config_of("qwen2", use_sliding_window=False))
    path = write_gguf(
        model, tmp_path / "m.gguf", types={n: kind for n in ("ffn", "attn_q.weight", "attn_v.weight", "attn_output", "token_embd")}
    )
    assert spec_from_gguf(GGUFFile(path)).dtype == dtype


def test_d21_unknown_architecture_lists_what_is_supported(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba2")
    w.add_block_count(1)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(ModelFileError, match=r"x.gguf: architecture 'mamba2' is not supported; supported: llama, qwen2, .*olmo2"):
        spec_from_gguf(GGUFFile(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "feed_forward_length",
        "context_length",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(tmp_path, key):
    path = write_gguf(model_of(config_of("llama")), tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(f"llama.{key}".encode(), f"lxama.{key}".encode(), 1))
    with pytest.raises(ModelFileError, match=f"m.gguf: llama: required key '{key}' is missing"):
        spec_from_gguf(GGUFFile(path))


def test_sizes_that_differ_between_layers_are_refused(tmp_path):
    assert spec_of(tmp_path, llama__x=1).intermediate_size == 96
    path = write_gguf(model_of(config_of("llama")), tmp_path / "m.gguf", llama__feed_forward_lengtX=[96, 64])
    raw = (
        path.read_bytes()
        .replace(b"llama.feed_forward_length", b"llama.feed_forward_lengtY")
        .replace(b"llama.feed_forward_lengtX", b"llama.feed_forward_length")
    )
    path.write_bytes(raw)
    with pytest.raises(ModelFileError, match="feed_forward_length: differs between layers"):
        spec_from_gguf(GGUFFile(path))
