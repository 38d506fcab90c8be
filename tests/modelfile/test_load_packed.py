"""GGUF files whose projections stay packed: which ones can, and that they hold the file's own weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from modelfile_samples import config_of, model_of, write_gguf
from test_load_families import load

from flatout.bench import twin
from flatout.config import ModelConfig
from flatout.kernels.packed import unpacked
from flatout.modelfile.sources import resolve_model
from flatout.models.decoder import Decoder
from flatout.models.load import kept_packed, load_weights

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160}


def source_of(path):
    return resolve_model(ModelConfig(model=str(path)))


def packed_load(source, packed):
    spec = source.spec.for_length(64) if hasattr(source.spec, "for_length") else source.spec
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_tokens=4, max_logits=2, max_model_len=64, packed=packed)
    report = load_weights(decoder, source)
    return {name: d.tensor for name, d in decoder.destinations().items()}, report, decoder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # of llama rows of q and k lie in pairs, of qwen2 there are biases
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_the_files_own_weights(tmp_path, family, kind):
    types = dict.fromkeys(
        ("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w", "token_embd", "output.w"), kind
    )
    path = write_gguf(model_of(config_of(family, **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types})
    source = source_of(path)
    bits = 8 if kind == "Q8_0" else 4
    packed = kept_packed(source)
    layers = source.spec.num_layers
    parts = [f"layers.{i}.{part}" for i in range(layers) for part in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")]
    assert packed == dict.fromkeys([*parts, "head"], bits)
    plain, _ = load(source)
    found, report, decoder = packed_load(source, packed)
    for name in packed:
        assert found[f"{name}.weight"].dtype == torch.uint8
        wanted = plain.get(f"{name}.weight", plain["embed.weight"])
        assert torch.equal(unpacked(found[f"{name}.weight"]), wanted), name
    for name in plain.keys() - {f"{name}.weight" for name in packed}:
        assert torch.equal(found[name], plain[name]), name
    assert {pair for pair in report.schemes["mlp"] if pair[0] == kind} == {(kind, "8.5 bits" if bits == 8 else "5.0 bits")}
    tied = source.spec.tie_embeddings
    assert ("packed for itself" in "\n".join(report.lines())) == tied
    twice = found["embed.weight"].nbytes if tied else 0
    assert decoder.weight_bytes() == sum(t.nbytes for t in found.values()) - twice


def test_the_benchmarks_twin_gets_the_same_weights(tmp_path):
    types = dict.fromkeys(("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w"), "Q4_1")
    source = source_of(write_gguf(model_of(config_of("llama", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    plain, packed = (twin._weights(packed_load(source, kept)[2].destinations()) for kept in ({}, kept_packed(source)))
    assert plain.keys() == packed.keys() and any(name.endswith("q_proj.weight") for name in plain)
    for name, value in plain.items():
        assert torch.equal(packed[name], value), name


def test_of_mixed_types_what_can(tmp_path):
    """As quantisers mix them: a q of other bits than k and v, a down that nothing keeps, a head of floats."""
    types = {
        "ffn_gate": "Q4_0",
        "ffn_up": "Q4_1",
        "ffn_down": "Q5_0",
        "attn_q.w": "Q8_0",
        "attn_k.w": "Q4_0",
        "attn_v.w": "Q4_0",
        "attn_output": "Q8_0",
    }
    source = source_of(write_gguf(model_of(config_of("qwen3", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    packed = kept_packed(source)
    assert packed == {
        f"layers.{i}.{part}": bits for i in range(source.spec.num_layers) for part, bits in (("mlp.gate_up", 4), ("attn.o", 8))
    }
    plain, _ = load(source)
    found, report, _ = packed_load(source, packed)
    for name, value in found.items():
        assert torch.equal(unpacked(value) if name.removesuffix(".weight") in packed else value, plain[name]), name
    assert report.schemes["mlp"] == {("Q4_0", "5.0 bits"), ("Q4_1", "5.0 bits"), ("Q5_0", "float32")}


def test_rows_that_fill_no_block_are_unpacked(tmp_path):
    odd = WIDE | {"vocab_size": 168, "num_key_value_heads": 1, "head_dim": 8, "num_attention_heads": 4}
    types = dict.fromkeys(("attn_q.w", "attn_k.w", "attn_v.w", "token_embd", "ffn_down"), "Q8_0")
    source = source_of(write_gguf(model_of(config_of("qwen3", **odd)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    assert set(kept_packed(source)) == {f"layers.{i}.mlp.down" for i in range(source.spec.num_layers)}


def test_experts_stay_unpacked(tmp_path):
    types = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_output"), "Q8_0")
    source = source_of(write_gguf(model_of(config_of("mixtral", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    packed = kept_packed(source)
    assert set(packed) == {f"layers.{i}.attn.o" for i in range(source.spec.num_layers)}
    found, _, _ = packed_load(source, packed)
    assert all(np.isfinite(t.float().numpy()).all() for t in found.values())
