"""Every family: what Transformers writes, and the same weights as GGUF, arrive in the decoder's parameters value by value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from modelfile_samples import FAMILIES, config_of, model_of, save, write_gguf

from flatout.config import ModelConfig
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.models.decoder import Decoder
from flatout.models.load import load_weights
from flatout.models.report import LoadReport

NORMS = {
    "gemma": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "": ("input_layernorm", "", "post_attention_layernorm", ""),
}


def load(source: ModelSource, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[dict[str, torch.Tensor], LoadReport]:
    spec = source.spec.for_length(64)
    decoder = Decoder(spec, dtype=dtype, device=torch.device("cpu"), max_tokens=4, max_logits=2, max_model_len=64)
    report = load_weights(decoder, source, seed=seed)
    return {name: d.tensor for name, d in decoder.destinations().items()}, report


def expected(model, family: str) -> dict[str, torch.Tensor]:
    """The decoder's parameters, put together from the Transformers model by hand."""
    found = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    out = {"embed.weight": found["embed_tokens.weight"], "norm.weight": found["norm.weight"]}
    if not model.config.tie_word_embeddings:
        out["head.weight"] = found["lm_head.weight"]
    norms = NORMS[next(k for k in NORMS if family.startswith(k))]
    for i in range(model.config.num_hidden_layers):

        def get(name: str, i: int = i) -> torch.Tensor:
            return found[f"layers.{i}.{name}"]

        def has(name: str, i: int = i) -> bool:
            return f"layers.{i}.{name}" in found

        to = f"layers.{i}"
        for ours, theirs in zip(("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"), norms):
            if theirs:
                out[f"{to}.{ours}.weight"] = get(f"{theirs}.weight")
        for part in ("weight", "bias"):
            if has(f"self_attn.qkv_proj.{part}"):
                out[f"{to}.attn.qkv.{part}"] = get(f"self_attn.qkv_proj.{part}")
            elif has(f"self_attn.q_proj.{part}"):
                out[f"{to}.attn.qkv.{part}"] = torch.cat([get(f"self_attn.{x}_proj.{part}") for x in "qkv"])
            if has(f"self_attn.o_proj.{part}"):
                out[f"{to}.attn.o.{part}"] = get(f"self_attn.o_proj.{part}")
            for block, name in (("mlp", "mlp"), ("mlp.shared_expert", "moe.shared")):
                if has(f"{block}.gate_proj.{part}"):
                    out[f"{to}.{name}.gate_up.{part}"] = torch.cat([get(f"{block}.{x}_proj.{part}") for x in ("gate", "up")])
                if has(f"{block}.gate_up_proj.{part}"):
                    out[f"{to}.{name}.gate_up.{part}"] = get(f"{block}.gate_up_proj.{part}")
                if has(f"{block}.down_proj.{part}"):
                    out[f"{to}.{name}.down.{part}"] = get(f"{block}.down_proj.{part}")
        for x in "qk":
            if has(f"self_attn.{x}_norm.weight"):
                out[f"{to}.attn.{x}_norm.weight"] = get(f"self_attn.{x}_norm.weight")
        if has("mlp.experts.gate_up_proj"):
            out[f"{to}.moe.router.weight"] = get("mlp.gate.weight")
            out[f"{to}.moe.gate_up.weight"] = get("mlp.experts.gate_up_proj")
            out[f"{to}.moe.down.weight"] = get("mlp.experts.down_proj")
        if has("mlp.shared_expert_gate.weight"):
            out[f"{to}.moe.shared_gate.weight"] = get("mlp.shared_expert_gate.weight")
    return out


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_what_transformers_saved(family, tmp_path):
    model = model_of(config_of(family))
    save(model, tmp_path, max_shard_size="40KB")
    source = resolve_model(ModelConfig(model=str(tmp_path)))
    assert len(source.files) > 1
    found, report = load(source)
    assert_equal(found, expected(model, family))
    assert report.used == len(source.tensors) and not report.skipped
    assert report.parameters["float32"] == sum(p.numel() for p in model.parameters())
    assert source.spec.num_parameters == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert 7 <= len(report.lines()) <= 14


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_saved_in_one_tensor_load_too(family, tmp_path):
    """Transformers 5 with save_original_format=False writes the names it holds in memory."""
    model = model_of(config_of(family))
    save(model, tmp_path, save_original_format=False)
    source = resolve_model(ModelConfig(model=str(tmp_path)))
    assert any(name.endswith("experts.gate_up_proj") for name in source.tensors)
    assert_equal(load(source)[0], expected(model, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_as_gguf_give_the_same_decoder(family, tmp_path):
    # what GGUF does not store, and its readers take for granted
    assumed = {
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "gemma2": {"query_pre_attn_scalar": 16},
        "gemma3": {"query_pre_attn_scalar": 16},
    }
    model = model_of(config_of(family, **assumed.get(family, {})))
    hf = resolve_model(ModelConfig(model=str(save(model, tmp_path / "hf"))))
    ours = resolve_model(ModelConfig(model=str(write_gguf(model, tmp_path / "m.gguf"))))
    wanted = expected(model, family)
    if family.startswith("gemma"):  # the + 1 is in a GGUF file's norms
        wanted = {name: v + 1 if name.endswith("norm.weight") else v for name, v in wanted.items()}
    assert_equal(load(ours)[0], wanted)
    same = replace(
        ours.spec,
        architecture=hf.spec.architecture,
        family=hf.spec.family,
        norm_offset=hf.spec.norm_offset,
        eos_ids=hf.spec.eos_ids,
        bos_id=hf.spec.bos_id,
        pad_id=hf.spec.pad_id,
    )
    assert same == hf.spec
