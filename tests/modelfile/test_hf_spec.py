"""config.json -> ModelSpec, against Transformers' own reading of the same file; what cannot be honoured is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers as tf
from modelfile_samples import FAMILIES, SIZES, config_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flatout.modelfile.hf_spec import ARCHITECTURES, spec_from_hf
from flatout.modelfile.spec import ModelFileError, ModelSpec, RopeSpec

LLAMA: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


def as_file(config: Any, **changes: Any) -> dict[str, Any]:
    """What Transformers writes for this config."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {**values, **changes}


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_hf({**LLAMA, **changes})


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(ModelFileError, match=match):
        spec_of(**changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_and_its_defaults_are_read_as_transformers_reads_them(family):
    """Also when the file leaves out every key that has a default."""
    config = config_of(family)
    model = tf.AutoModelForCausalLM.from_config(config)
    names = dict(model.named_parameters())
    full = as_file(config, architectures=[type(model).__name__])
    kept = {*SIZES, "architectures", "model_type", "num_local_experts", *FAMILIES[family][1]}
    for values in (full, {k: v for k, v in full.items() if k in kept}):
        spec = spec_from_hf(values)
        assert spec.family == family
        layer = model.model.layers[-1]
        assert spec.head_dim == layer.self_attn.head_dim
        assert spec.softmax_scale == pytest.approx(layer.self_attn.scaling)
        assert spec.norm_eps == config.rms_norm_eps
        assert spec.tie_embeddings == config.tie_word_embeddings
        assert spec.qkv_bias == any(n.endswith("q_proj.bias") for n in names)
        assert spec.o_bias == any(n.endswith("o_proj.bias") for n in names)
        assert spec.mlp_bias == any(n.endswith("down_proj.bias") for n in names)
        assert (spec.qk_norm != "") == any("q_norm" in n for n in names)
        assert [x.moe for x in spec.layers] == [hasattr(x.mlp, "experts") for x in model.model.layers]
        windows = [getattr(x.self_attn, "sliding_window", getattr(config, "sliding_window", None)) for x in model.model.layers]
        assert [x.window for x in spec.layers] == [w or None for w in windows]
        theta = config.rope_parameters
        wanted = {v["rope_theta"] for v in theta.values()} if family == "gemma3" else {theta["rope_theta"]}
        assert {r.base for r in spec.ropes} == wanted
        assert (spec.bos_id, spec.eos_ids) == (config.bos_token_id, () if config.eos_token_id is None else (config.eos_token_id,))


def test_every_architecture_is_known_to_transformers():
    for name in ARCHITECTURES:
        assert hasattr(tf, name) or name == "LLaMAForCausalLM"


# -- sizes, heads, biases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "heads", "kv", "head_dim", "expected"),
    [(64, 4, 4, 32, 32), (60, 5, 1, None, 12), (14 * 20, 14, 2, 20, 20), (9 * 64, 9, 3, None, 64)]
    + [(64, 4, 2, d, d) for d in (80, 96, 256, 20)],
)
def test_d15_head_dim_is_read_not_computed(hidden, heads, kv, head_dim, expected):
    spec = spec_of(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=head_dim)
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (expected, heads * expected, kv * expected)
    assert spec.ropes[0].dim == expected


def test_d15_heads_that_do_not_divide_are_refused():
    refused("num_key_value_heads: 3 does not divide", num_key_value_heads=3)
    refused("head_dim: must be given", hidden_size=66)


def test_key_value_heads_default_to_heads_when_null():
    assert spec_of(num_key_value_heads=None).num_kv_heads == 4


def test_d16_bias_flags():
    assert spec_of(attention_bias=True, mlp_bias=True).o_bias
    spec = spec_from_hf(as_file(config_of("qwen2"), architectures=["Qwen2ForCausalLM"]))
    assert (spec.qkv_bias, spec.o_bias) == (True, False)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
)
def test_a_missing_key_is_named_with_its_file(key):
    values = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelFileError, match=f"^/m/config.json: required key '{key}' is missing; restore"):
        spec_from_hf(values, where="/m/config.json")


@pytest.mark.parametrize("value", [0, -1, "64", 1.5, None, True, [64], 2**60])
def test_a_size_of_the_wrong_kind_is_named(value):
    refused("hidden_size", hidden_size=value)


def test_unknown_architecture_lists_what_is_supported():
    refused("architecture 'FooForCausalLM' is not supported; supported: LlamaForCausalLM, .*Olmo2", architectures=["FooForCausalLM"])
    with pytest.raises(ModelFileError, match="architecture 'foo' is not supported"):
        spec_from_hf({"model_type": "foo"})
    with pytest.raises(ModelFileError, match="neither 'architectures' nor 'model_type'"):
        spec_from_hf({})


def test_model_type_serves_configs_without_architectures():
    assert spec_of(architectures=None, model_type="qwen3", head_dim=None).architecture == "Qwen3ForCausalLM"


def test_unknown_activation_is_refused():
    refused("hidden_act: 'xielu' is not supported", hidden_act="xielu")


# -- rope -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
    ],
)
def test_d07_llama3_scaling_in_every_spelling(changes):
    spec = spec_of(**changes)
    assert spec.ropes == (RopeSpec(10000.0, 16, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),)
    assert spec.max_position == SIZES["max_position_embeddings"]


def test_d07_unknown_rope_type_is_refused():
    refused(
        "rope_scaling: rope_type: 'fourier' is not supported; supported: default, linear, dynamic, yarn, llama3, longrope",
        rope_scaling={"type": "fourier"},
    )


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor"])
def test_d07_a_missing_rope_parameter_is_named(missing):
    refused(
        f"rope_scaling: required key '{missing}'", rope_scaling={"rope_type": "llama3", **{k: v for k, v in LLAMA3.items() if k != missing}}
    )


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({"rope_theta": 500000.0}, 5e5),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": None}, 1e4),
        ({"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}}, 7e4),
    ],
)
def test_d10_rope_theta(changes, base):
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
    assert spec_from_hf(values).ropes[0].base == base


def test_d10_partial_rotary_factor_counts_where_transformers_counts_it():
    phi = as_file(config_of("phi3"), architectures=["Phi3ForCausalLM"])
    phi["rope_parameters"]["partial_rotary_factor"] = 0.5
    assert spec_from_hf(phi).ropes[0].dim == 8
    notices: list[str] = []
    assert spec_from_hf({**LLAMA, "partial_rotary_factor": 0.5}, notices=notices).ropes[0].dim == 16
    assert "partial_rotary_factor 0.5 is ignored" in notices[0]
    refused("partial_rotary_factor", partial_rotary_factor=0.5, rope_scaling={"rope_type": "linear", "factor": 2.0})


def test_d10_yarn_with_and_without_attention_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = spec_of(rope_scaling=yarn)
    assert spec.ropes == (RopeSpec(10000.0, 16, "yarn", 4.0, 64),)
    assert spec.max_position == 256
    assert spec_of(rope_scaling={**yarn, "attention_factor": 0.8}).ropes[0].attention_factor == 0.8
    ratio = spec_of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 64})  # as DeepSeek writes it
    assert (ratio.ropes[0].factor, ratio.max_position) == (4.0, 256)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scalings_that_stretch_the_context(kind):
    spec = spec_of(rope_scaling={"type": kind, "factor": 2.0})
    assert spec.ropes[0] == RopeSpec(10000.0, 16, kind, 2.0, 256)
    assert spec.max_position == 512
    assert spec.for_length(400).ropes[0].length == 400


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_longrope_under_all_its_names(kind):
    values = as_file(config_of("phi3"), architectures=["Phi3ForCausalLM"], original_max_position_embeddings=64, rope_parameters=None)
    spec = spec_from_hf({**values, "rope_scaling": {"type": kind, **LONG}, "rope_theta": 10000.0})
    rope = spec.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position, rope.long_factor) == ("longrope", 4.0, 64, tuple(LONG["long_factor"]))
    assert spec.max_position == 256
    with pytest.raises(ModelFileError, match="short_factor: must be a list of 8 numbers, got 7"):
        spec_from_hf({**values, "rope_scaling": {"type": kind, **LONG, "short_factor": [1.0] * 7}})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "longrope", **LONG, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rope_spec_gives_transformers_frequencies(rope):
    """The tables made from our spec against Transformers' own functions, past the trained length."""
    from flatout.layers.rotary import frequencies

    config = tf.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **rope})
    length = 300
    wanted, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    spec = spec_from_hf(as_file(config, architectures=["LlamaForCausalLM"])).for_length(length)
    found, factor = frequencies(spec.ropes[0])
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-6, atol=0)
    assert factor == pytest.approx(scale)


# -- windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
def test_d13_no_window_unless_switched_on(family):
    values = as_file(config_of(family), architectures=None)
    values |= {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    assert all(x.window is None for x in spec_from_hf(values).layers)
    values["layer_types"] = ["sliding_attention"] * values["num_hidden_layers"]
    assert all(x.window is None for x in spec_from_hf(values).layers)


def test_d13_max_window_layers_null_window_and_layer_types():
    values = as_file(config_of("qwen2"), architectures=["Qwen2ForCausalLM"], layer_types=None)
    assert [x.window for x in spec_from_hf(values).layers] == [None, 16]
    assert [x.window for x in spec_from_hf({**values, "sliding_window": None}).layers] == [None, None]
    assert [x.window for x in spec_from_hf({**values, "max_window_layers": 0}).layers] == [16, 16]
    assert [x.window for x in spec_from_hf({**values, "layer_types": ["sliding_attention", "full_attention"]}).layers] == [16, None]
    for wrong in (["full_attention"], ["full_attention", "chunked_attention"]):
        with pytest.raises(ModelFileError, match="layer_types"):
            spec_from_hf({**values, "layer_types": wrong})


def test_a_window_as_long_as_the_context_is_no_window():
    assert spec_from_hf({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 256}).layers[0].window is None
    assert spec_from_hf({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 255}).layers[0].window == 255


def test_smollm3_layers_without_rope():
    values = as_file(config_of("smollm3"), no_rope_layers=None)
    assert [x.rope for x in spec_from_hf(values).layers] == [0, 0, 0, None]
    assert [x.rope for x in spec_from_hf({**values, "no_rope_layers": [0, 1, 0, 1]}).layers] == [None, 0, None, 0]
    with pytest.raises(ModelFileError, match="no_rope_layers"):
        spec_from_hf({**values, "no_rope_layers": [0]})


# -- Gemma 3, text inside -------------------------------------------------------------------------------------------------

GEMMA_HUB = {  # the shape of the hub's gemma-3-4b-it config.json, written by Transformers 4
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}


def test_gemma3_hub_config_that_leaves_out_its_sizes():
    spec = spec_from_hf(GEMMA_HUB)
    config = tf.Gemma3Config(**{k: v for k, v in GEMMA_HUB.items() if k not in ("architectures", "torch_dtype")}).text_config
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert [x.window is not None for x in spec.layers] == [t == "sliding_attention" for t in config.layer_types]
    local, world = spec.ropes[spec.layers[0].rope], spec.ropes[spec.layers[5].rope]
    assert (local.base, local.kind, world.base, world.kind, world.factor) == (1e4, "default", 1e6, "linear", 8.0)
    assert spec.max_position == 131072  # scaled already
    assert (spec.eos_ids, spec.dtype, spec.tie_embeddings) == ((1, 106), "bfloat16", True)
    assert spec.cache_groups()[1].window == 1024


def test_gemma3_rope_parameters_per_layer_type_of_transformers_5():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    text = {k: v for k, v in GEMMA_HUB["text_config"].items() if k != "rope_scaling"}
    spec = spec_from_hf({**GEMMA_HUB, "text_config": {**text, "rope_parameters": rope}})
    assert [(r.base, r.kind) for r in spec.ropes] == [(2e4, "default"), (3e6, "linear")]


def test_gemma_that_looks_both_ways_is_refused():
    with pytest.raises(ModelFileError, match="text_config: use_bidirectional_attention"):
        spec_from_hf({**GEMMA_HUB, "text_config": {**GEMMA_HUB["text_config"], "use_bidirectional_attention": True}})


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(None, None, True), (False, None, False), (None, False, False), (False, True, False), (True, None, True)]
)
def test_d11_tied_flag_in_the_outer_or_the_inner_config(outer, inner, tied):
    values: dict[str, Any] = {**GEMMA_HUB, "text_config": dict(GEMMA_HUB["text_config"])}
    if outer is not None:
        values["tie_word_embeddings"] = outer
    if inner is not None:
        values["text_config"]["tie_word_embeddings"] = inner
    assert spec_from_hf(values).tie_embeddings is tied


# -- ids, sampling, dtype, quantisation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": [5, 6]}, None, (5, 6)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,)),
        ({}, {"eos_token_id": 50}, (50,)),  # Llama's own 2 may be a word in this vocabulary
        ({}, {}, (2,)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": -1}, None, ()),
    ],
)
def test_a34_every_end_id_counts(config, generation, ends):
    assert spec_from_hf({**LLAMA, **config}, generation).eos_ids == ends


def test_end_ids_of_the_wrong_kind_are_refused():
    refused("eos_token_id: must be a token id", eos_token_id="</s>")
    with pytest.raises(ModelFileError, match=r"/m/generation_config.json: eos_token_id"):
        spec_from_hf(LLAMA, {"eos_token_id": [1, "x"]}, where="/m/config.json")


def test_sampling_defaults_are_taken_as_they_are():
    generation = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 99,
    }
    assert spec_from_hf(LLAMA, generation).sampling_defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    with pytest.raises(ModelFileError, match=r"generation_config.json: temperature: must be a finite number"):
        spec_from_hf(LLAMA, {"temperature": "hot"})


@pytest.mark.parametrize(
    ("changes", "dtype"), [({"dtype": "float16"}, "float16"), ({"torch_dtype": "torch.bfloat16"}, "bfloat16"), ({}, "float32")]
)
def test_dtype_under_both_names(changes, dtype):
    assert spec_of(**changes).dtype == dtype


def test_an_unknown_dtype_is_refused():
    refused("torch_dtype: 'float8_e4m3fn' is not supported", torch_dtype="float8_e4m3fn")


def test_quantization_config_is_kept_untouched():
    quantization = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}
    assert spec_of(quantization_config=quantization).quantization == quantization


def test_granite_multipliers():
    spec = spec_from_hf(as_file(config_of("granite"), architectures=["GraniteForCausalLM"]))
    assert (spec.attn_scale, spec.embed_scale, spec.residual_scale, spec.logit_scale) == (0.2, 3.0, 0.5, 0.25)


def test_olmo2_norms_come_after():
    spec = spec_from_hf(as_file(config_of("olmo2")))
    assert (spec.pre_norm, spec.post_norm, spec.qk_norm) == (False, True, "full")
