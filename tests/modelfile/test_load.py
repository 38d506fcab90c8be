"""Loading: what does not fit is refused by tensor, file and mend; tied heads; quantised GGUF; dummy weights; the report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modelfile_samples import change_config, config_of, model_of, save, write_gguf
from safetensors.torch import load_file, save_file
from test_load_families import assert_equal, expected, load

from flatout.config import ModelConfig
from flatout.layers.destination import Destination
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.modelfile.spec import ModelFileError


def resolve(path: Path, **options: Any) -> ModelSource:
    return resolve_model(ModelConfig(model=str(path), **options))


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama (untied, with biases)."""
    return save(model_of(config_of("llama")), tmp_path / "llama")


def edit(folder: Path, change) -> None:
    """Rewrite the folder's one safetensors file: `change` gets its dict of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(folder: Path, match: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    begin = time.perf_counter()
    with pytest.raises(ModelFileError, match=match) as e:
        load(resolve(folder, **options), dtype)
    assert time.perf_counter() - begin < 2
    assert "\n" not in str(e.value)


# -- missing, left over, wrong shape ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_d11_a_parameter_left_unset_is_named(llama, name):
    edit(llama, lambda t: t.pop(name))
    refused(llama, f"lacks {name}; incomplete download")


def test_d11_missing_experts_are_named_and_counted(tmp_path):
    save(model_of(config_of("mixtral")), tmp_path)
    edit(tmp_path, lambda t: [t.pop(k) for k in list(t) if ".experts.2." in k])
    refused(tmp_path, r"lacks model.layers.0.block_sparse_moe.experts.2.w1.weight, .*and 2 more")


def test_d16_a_tensor_that_nobody_used_is_named(llama):
    change_config(llama, attention_bias=False)
    refused(llama, r"holds tensors that LlamaForCausalLM has no place for: model.layers.0.self_attn.k_proj.bias, .* and 4 more")


def test_d16_a_tensor_of_no_known_kind_is_named(llama):
    edit(llama, lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    refused(llama, "no place for: model.layers.0.self_attn.sinks")


def test_layers_beyond_the_config_are_named(llama):
    change_config(llama, num_hidden_layers=1)
    refused(llama, "no place for: model.layers.1.")


def test_a_wrong_shape_names_tensor_file_and_both_shapes(llama):
    change_config(llama, intermediate_size=80)
    refused(llama, r"llama/model.safetensors: model.layers.0.mlp.down_proj.weight: shape \[64, 96\] where \[64, 80\] is expected")


def test_padded_vocabulary_needs_the_embeddings_own_size(llama):
    change_config(llama, vocab_size=90)
    refused(llama, r"weight: shape \[96, 64\] where \[90, 64\] is expected; set vocab_size to 96, .*vocab_size is 90")


def test_sizes_far_beyond_the_file_are_refused_before_memory_is_asked_for(llama, tmp_path):
    change_config(llama, intermediate_size=10**9)
    refused(llama, r"llama: the config describes [\d,.]+ M parameters but 0.1 M are there; they do not belong together")
    path = write_gguf(model_of(config_of("qwen3_moe")), tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"qwen3moe.expert_count\x04\0\0\0\x04", b"qwen3moe.expert_count\x04\0\0\0\xff"))
    refused(path, "m.gguf: the metadata describes")


def test_two_tensors_for_one_parameter_are_refused(tmp_path):
    save(model_of(config_of("phi3")), tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.mlp.gate_proj.weight": torch.zeros(96, 64)}))
    refused(tmp_path, "model.layers.0.mlp.gate.*_proj.weight and model.layers.0.mlp.gate.*_proj.weight hold the same parameter")


def test_frequencies_in_old_files_are_skipped_and_told(llama):
    edit(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    report = load(resolve(llama))[1]
    assert report.skipped == {"rope frequencies: made from the config": ["model.layers.0.self_attn.rotary_emb.inv_freq"]}
    assert any("1 unused" in line and "rope frequencies" in line for line in report.lines())


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_d23_quantised_checkpoints_are_refused_by_name(llama, method):
    """Until their schemes are built: never loaded as if the scales were not there."""
    change_config(llama, quantization_config={"quant_method": method, "bits": 4})
    refused(llama, f"quantization {method} is not supported yet")


def test_a_type_that_is_no_float_is_refused(llama):
    edit(llama, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    refused(llama, "model.norm.weight: type I8 is not supported; supported: F64, F32, F16, BF16")


def test_gemma3_with_a_vision_tower_loads_its_text(tmp_path):
    text = config_of("gemma3")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    model = tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    inner = tf.Gemma3ForCausalLM(text)
    inner.model.load_state_dict(model.model.language_model.state_dict())
    for number, original in enumerate((True, False)):  # the hub's names, and those that Transformers 5 holds in memory
        folder = save(model, tmp_path / str(number), save_original_format=original)
        found, report = load(resolve(folder))
        assert_equal(found, expected(inner, "gemma3"))
        ((reason, names),) = report.skipped.items()
        assert reason.startswith("vision parts") and any("vision_tower" in n for n in names)


# -- dtypes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_decoders_dtype(llama, dtype):
    found, report = load(resolve(llama), dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(found["layers.1.mlp.down.weight"], load_file(llama / "model.safetensors")[name].to(dtype))
    assert set(report.parameters) == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("value", [1e5, -7e4, float("inf"), float("nan")])
def test_d24_values_that_do_not_fit_float16_are_refused(llama, value):
    def put(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        for name in t:
            t[name] = t[name].to(torch.bfloat16)

    edit(llama, put)
    load(resolve(llama), torch.bfloat16)
    refused(
        llama,
        r"model.safetensors: model.layers.1.mlp.up_proj.weight: values up to \S+ do not fit float16.*use --dtype bfloat16 or float32",
        torch.float16,
    )


def test_d24_gguf_values_that_do_not_fit_float16_are_refused(tmp_path):
    model = model_of(config_of("qwen2", use_sliding_window=False))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 2e5
    path = write_gguf(model, tmp_path / "m.gguf")
    refused(path, r"m.gguf: blk.0.ffn_up.weight: values up to 200000 do not fit float16", torch.float16)


# -- tied heads -------------------------------------------------------------------------------------------------------------


def test_d11_tied_without_a_head_in_the_file(tmp_path):
    model = model_of(config_of("llama", tie_word_embeddings=True))
    save(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert_equal(load(resolve(tmp_path))[0], expected(model, "llama"))


def test_d11_tied_with_an_equal_head_in_the_file(tmp_path):
    model = model_of(config_of("llama", tie_word_embeddings=True))
    save(model, tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    source = resolve(tmp_path)
    assert source.spec.tie_embeddings and "lm_head.weight equals model.embed_tokens.weight" in " ".join(source.notices)
    found, report = load(source)
    assert_equal(found, expected(model, "llama"))
    assert report.skipped == {"the head is tied to the embedding": ["lm_head.weight"]}


def test_d11_tied_flag_but_another_head_in_the_file(tmp_path):
    """Transformers uses the head that is in the file then, and so do we."""
    save(model_of(config_of("llama")), tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    source = resolve(tmp_path)
    assert not source.spec.tie_embeddings and "differs" in " ".join(source.notices)
    assert torch.equal(load(source)[0]["head.weight"], theirs.lm_head.weight)


def test_d11_tied_under_the_heads_name_alone(tmp_path):
    """safetensors' save_model keeps the first name of a shared tensor, which is lm_head.weight."""
    model = model_of(config_of("llama", tie_word_embeddings=True))
    save(model, tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(tf.AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert_equal(load(resolve(tmp_path))[0], expected(model, "llama"))


# -- GGUF -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_d21_quantised_gguf_equals_its_dequantised_weights(tmp_path, kind):
    import gguf

    model = model_of(config_of("qwen3"))
    types = {"ffn": kind, "attn_q.w": kind, "attn_k.w": kind, "attn_v.w": kind, "attn_output": kind, "token_embd": kind}
    path = write_gguf(model, tmp_path / "m.gguf", types={"ffn_norm": "F32", **types})
    number = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and "lm_head" not in name:
                p.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(p.numpy(), number), number)))
    found, report = load(resolve(path))
    assert_equal(found, expected(model, "qwen3"))
    assert report.schemes["mlp"] == {(kind, "float32")}


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS"])
def test_d21_other_gguf_types_are_refused_with_a_list(tmp_path, kind):
    """The type's number in the header is changed; the smaller type leaves room, and is refused before that matters."""
    import gguf

    model = model_of(config_of("llama", hidden_size=256, head_dim=64))
    path = write_gguf(model, tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.0.ffn_gate.weight") + len(b"blk.0.ffn_gate.weight") + 4 + 16
    raw[at : at + 4] = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    path.write_bytes(raw)
    refused(path, rf"m.gguf: blk.0.ffn_gate.weight: type {kind} is not supported; supported: F32, F16, BF16, Q4_0, .*Q6_K")


def test_d21_gguf_tensors_are_called_by_their_own_names(tmp_path):
    path = write_gguf(model_of(config_of("llama")), tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.1.attn_v.weight", b"blk.1.attn_x.weight"))
    refused(path, "no place for: blk.1.attn_x.weight")
    source = resolve(write_gguf(model_of(config_of("llama")), tmp_path / "m.gguf"))
    del source.gguf.tensors["blk.1.attn_v.weight"], source.gguf.tensors["output.weight"]
    with pytest.raises(ModelFileError, match=r"lacks blk.1.attn_v.weight, output.weight; incomplete download"):
        load(source)


def test_experts_in_one_tensor_each_as_early_mixtral_files_have_them(tmp_path):
    model = model_of(config_of("mixtral"))
    path = write_gguf(model, tmp_path / "m.gguf")
    source = resolve(path)
    split: dict[str, Any] = {}
    for name, t in source.gguf.tensors.items():
        if "_exps" not in name:
            split[name] = t
            continue
        each = len(t.data) // t.shape[0]
        for e in range(t.shape[0]):
            one = name.replace("_exps", f".{e}")
            split[one] = replace(t, name=one, shape=t.shape[1:], data=t.data[e * each : (e + 1) * each])
    source.gguf.tensors = split
    assert_equal(load(source)[0], expected(model, "mixtral"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_a_damaged_model_is_refused_or_loads(tmp_path, data):
    """Bits flipped in the header of a model, or its end cut: a ModelFileError in one line or a load, never anything else."""
    path = tmp_path / "fuzz.gguf"
    if not (tmp_path / "whole.gguf").exists():
        write_gguf(
            model_of(config_of("llama")), tmp_path / "whole.gguf", tokenizer__ggml__tokens=["a", "b"], tokenizer__ggml__token_type=[1, 3]
        )
    whole = (tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"blk.1.ffn_norm.weight") + 40
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, header))] ^= 1 << data.draw(st.integers(0, 7))
    keep = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    path.write_bytes(raw[:keep])
    try:
        load(resolve(path))
    except ModelFileError as e:
        assert "\n" not in str(e)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_damaged_safetensors_are_refused_or_load(llama, data):
    whole = llama / "whole"  # not *.safetensors
    path = llama / "model.safetensors"
    if not whole.exists():
        whole.write_bytes(path.read_bytes())
    raw = bytearray(whole.read_bytes())
    end = int.from_bytes(raw[:8], "little") + 8
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])
    try:
        load(resolve(llama))
    except ModelFileError as e:
        assert "\n" not in str(e)


def test_a_header_that_only_the_library_finds_fault_with_is_refused(llama):
    path = llama / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"format":"pt"', b'"format":1   ', 1))
    refused(llama, "model.safetensors: the safetensors header is not valid")


# -- dummy and report ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_dummy_weights_come_from_a_config_alone(tmp_path, family):
    config_of(family, tie_word_embeddings=False).save_pretrained(tmp_path)
    source = resolve(tmp_path / "config.json", load_format="dummy")
    assert (source.kind, source.tokenizer, source.spec.dtype) == ("dummy", None, "bfloat16")
    first, report = load(source, torch.bfloat16, seed=1)
    again, other = load(source, torch.bfloat16, seed=1)[0], load(source, torch.bfloat16, seed=2)[0]
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("norm.weight"):
            assert torch.all(value == 1.0 - source.spec.norm_offset)
        elif not name.endswith(".bias"):
            assert not torch.equal(value, other[name])
            assert 0.014 < value.float().std() < 0.026  # of as few as 64 values
    assert report.used == 0 and any("random -> bfloat16" in line for line in report.lines())


def test_report_lines_say_what_was_understood(tmp_path):
    model = model_of(config_of("gemma3"))
    save(model, tmp_path)
    lines = load(resolve(tmp_path))[1].lines()
    text = "\n".join(lines)
    for part in (
        "Gemma3ForCausalLM",
        "in float32",
        "0 missing",
        "tied",
        "head q/k norm",
        "base 10,000",
        "base 1e+06",
        "16 tokens, 5 of 6 layers",
        "end ids  1",
    ):
        assert part in text, part
    assert len(lines) <= 12


# -- Destination ------------------------------------------------------------------------------------------------------------


def test_destination_writes_pieces_and_knows_what_is_missing():
    d = Destination(torch.zeros(6, 2), {"q": (0, 2), "k": (2, 4), "v": (4, 6)})
    assert d.missing() == ["q", "k", "v"] and d.shape_of("k") == (2, 2) and d.shape_of() == (6, 2)
    d.write(torch.ones(2, 2, dtype=torch.float64), "k")
    assert d.missing() == ["q", "v"] and d.tensor.sum() == 4
    with pytest.raises(ValueError, match=r"shape \[3, 2\] where \[2, 2\] is expected"):
        d.write(torch.ones(3, 2), "q")
    with pytest.raises(ValueError, match="written before"):
        d.write(torch.ones(2, 2), "k")
    with pytest.raises(ValueError, match="written before"):
        d.write(torch.ones(6, 2))
    with pytest.raises(ValueError, match="no part 'gate' here; parts: q, k, v"):
        d.write(torch.ones(2, 2), "gate")


def test_destination_of_experts():
    d = Destination(torch.zeros(3, 4, 2), {"gate": (0, 2), "up": (2, 4)}, experts=3)
    assert d.shape_of("up") == (3, 2, 2) and d.shape_of("up", 1) == (2, 2) and d.shape_of(None, 0) == (4, 2)
    d.write(torch.ones(3, 2, 2), "gate")
    d.write(torch.full((2, 2), 5.0), "up", 1)
    assert d.missing() == ["expert 0 up", "expert 2 up"]
    assert d.tensor[1].tolist() == [[1, 1], [1, 1], [5, 5], [5, 5]]
    with pytest.raises(ValueError, match="no expert 3 here; experts: 3"):
        d.write(torch.ones(2, 2), "up", 3)
    whole = Destination(torch.zeros(3))
    assert whole.missing() == [""]
    whole.write(torch.ones(3))
    assert whole.missing() == []


def test_config_files_that_are_damaged_are_refused(llama):
    for text, match in (
        ("{", "config.json: not valid JSON"),
        ("[]", "config.json: not a JSON object"),
        ("\xff", "config.json: not valid JSON"),
    ):
        (llama / "config.json").write_bytes(text.encode("latin-1"))
        refused(llama, match)


def test_generation_config_counts(llama):
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.3}))
    spec = resolve(llama).spec
    assert (spec.eos_ids, spec.sampling_defaults) == ((2, 5), {"temperature": 0.3})
    (llama / "generation_config.json").write_text("{")
    refused(llama, "generation_config.json: not valid JSON")


def test_dtype_is_the_weights_own_where_the_config_names_none(llama):
    def half(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            t[name] = t[name].to(torch.bfloat16)

    edit(llama, half)
    assert resolve(llama).spec.dtype == "float32"
    change_config(llama, drop=("dtype",))
    assert resolve(llama).spec.dtype == "bfloat16"
    assert np.all([t.dtype == "BF16" for t in resolve(llama).tensors.values()])
