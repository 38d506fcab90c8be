"""GGUF files whose projections stay packed: which ones can, that they hold the file's own weights or are as near as 8 bits are, and logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from modelfile_samples import config_of, model_of, write_gguf
from network import Network, Sequence
from test_load_families import load

from flatout.bench import twin
from flatout.config import ModelConfig
from flatout.kernels.blocks import PACKED
from flatout.kernels.packed import unpacked
from flatout.layers.embedding import HEAD
from flatout.modelfile.sources import resolve_model
from flatout.modelfile.spec import ModelFileError
from flatout.models.decoder import Decoder
from flatout.models.load import kept_embedding, kept_packed, load_weights

PROJECTIONS = ("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w", "token_embd", "output.w")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160}

# whole blocks of the K types
K_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}


def source_of(path):
    return resolve_model(ModelConfig(model=str(path)))


def packed_load(source, packed, embedding=""):
    spec, sizes = source.spec.for_length(64), {"max_tokens": 32, "max_logits": 4, "max_model_len": 64}
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), packed=packed, embedding=embedding, **sizes)
    report = load_weights(decoder, source)
    return {name: d.tensor for name, d in decoder.destinations().items()}, report, decoder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # of llama rows of q and k lie in pairs, of qwen2 there are biases
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_the_files_own_weights(tmp_path, family, kind):
    types = {"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}
    source = source_of(write_gguf(model_of(config_of(family, **WIDE)), tmp_path / "m.gguf", types=types))
    bits = 4 if kind.startswith("Q4") else 8
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
    assert decoder.weight_bytes() == sum(t.nbytes for t in found.values()) - found["embed.weight"].nbytes


@pytest.mark.parametrize(
    ("tied", "kind", "kept"),
    [
        *((True, kind, HEAD) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0")),
        *((True, kind, kind) for kind in ("Q5_1", "Q4_K", "Q5_K", "Q6_K")),  # whose values a packed head has not
        *((False, kind, kind) for kind in ("Q4_1", "Q8_0", "Q6_K")),
        *((tied, kind, "") for tied in (True, False) for kind in ("F32", "F16")),
    ],
)
def test_the_embeddings_own_values_without_a_table_of_floats(tmp_path, tied, kind, kept):
    config = config_of("llama", **K_WIDE, tie_word_embeddings=tied)
    source = source_of(write_gguf(model_of(config), tmp_path / "m.gguf", types={"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}))
    packed = kept_packed(source)
    assert kept_embedding(source, packed) == kept
    plain, _ = load(source)
    found, report, decoder = packed_load(source, packed, kept)
    assert ("embed.weight" in found) == (kept != HEAD)
    ids, out = torch.tensor([159, 0, 3]), torch.empty(3, K_WIDE["hidden_size"])
    decoder.embed(out, ids)
    assert torch.equal(out, plain["embed.weight"][ids] * decoder.embed.scale)
    said = "\n".join(report.lines())
    assert ("and so read by it" in said) == (kept == HEAD) and ("packed for itself" in said) == (tied and kept not in ("", HEAD))
    assert f"{sum(p.numel() for p in model_of(config).parameters()) / 1e6:,.1f} M parameters" in said
    if kept in PACKED:
        assert found["embed.weight"].nbytes == source.gguf.tensors["token_embd.weight"].data.nbytes


def test_an_embedding_that_a_plain_head_reads_is_plain(tmp_path):
    """A vocabulary of no whole 16 rows keeps the tied head from being packed."""
    types = {"norm": "F32", **dict.fromkeys(PROJECTIONS, "Q8_0")}
    source = source_of(
        write_gguf(model_of(config_of("llama", **{**WIDE, "vocab_size": 150}, tie_word_embeddings=True)), tmp_path / "m.gguf", types=types)
    )
    packed = kept_packed(source)
    assert "head" not in packed and kept_embedding(source, packed) == ""


def test_the_benchmarks_twin_gets_the_same_weights(tmp_path):
    types = dict.fromkeys(("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w"), "Q4_1")
    types["token_embd"] = "Q8_0"
    source = source_of(write_gguf(model_of(config_of("llama", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    kept = kept_packed(source)
    plain = twin._weights(packed_load(source, {})[2].destinations())
    assert any(name.endswith("q_proj.weight") for name in plain) and kept_embedding(source, kept) in ("Q8_0", HEAD)
    for embedding in ("", "Q8_0", kept_embedding(source, kept)):
        packed = twin._weights(packed_load(source, kept, embedding)[2].destinations())
        assert plain.keys() == packed.keys() - ({"lm_head.weight"} - plain.keys())
        for name, value in plain.items():
            assert torch.equal(packed[name], value), name


def near(found: torch.Tensor, wanted: torch.Tensor, bits: int) -> bool:
    """As near as rounding leaves it, by the largest of each group: of 8 bits half a step, a 254th; of 4 bits 2^-11 of 15 scales and a minimum, which
    are together up to three times the largest."""
    groups = wanted.unflatten(1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True) * {8: 1.001 / 254, 4: 4 / 2048}[bits]
    return bool(torch.all((found.unflatten(1, (-1, 32)) - groups).abs() <= most))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_1"])
def test_what_is_rounded_is_near_and_told(tmp_path, family, kind):
    types = {"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}
    source = source_of(write_gguf(model_of(config_of(family, **K_WIDE)), tmp_path / "m.gguf", types=types))
    packed = kept_packed(source)
    bits = 4 if kind == "Q4_K" else 8
    assert len(packed) == 4 * source.spec.num_layers + 1 and set(packed.values()) == {bits}
    plain, _ = load(source)
    found, report, _ = packed_load(source, packed)
    for name, value in found.items():
        if name.removesuffix(".weight") in packed:
            wanted = plain.get(name, plain["embed.weight"])
            assert near(unpacked(value), wanted, bits) and not torch.equal(unpacked(value), wanted), name
        else:
            assert torch.equal(value, plain[name]), name
    told = "Q4_K -> 5.0 bits (scales rounded)" if bits == 4 else f"{kind} -> 8.5 bits (rounded again)"
    scheme = next(line for line in report.lines() if line.startswith("scheme"))
    assert f"mlp {told}" in scheme or f"{told}; " in scheme


def test_a_projection_of_mixed_types_has_the_bits_of_its_widest(tmp_path):
    """As quantisers mix them: a v of more bits than q and k, a down of another type in every layer, a head of floats."""
    types = {
        "ffn_gate": "Q4_0",
        "ffn_up": "Q4_1",
        "blk.0.ffn_down": "Q4_K",
        "blk.1.ffn_down": "Q6_K",
        "attn_q.w": "Q4_K",
        "attn_k.w": "Q4_0",
        "attn_v.w": "Q6_K",
        "attn_output": "Q5_K",
    }
    model = model_of(config_of("llama", **K_WIDE, attention_bias=False))
    source = source_of(write_gguf(model, tmp_path / "m.gguf", types={"norm": "F32", **types}))
    packed = kept_packed(source)
    wanted = {"mlp.gate_up": (4, 4), "mlp.down": (4, 8), "attn.qkv": (8, 8), "attn.o": (8, 8)}
    assert packed == {f"layers.{i}.{part}": bits[i] for part, bits in wanted.items() for i in range(2)}
    plain, _ = load(source)
    found, report, _ = packed_load(source, packed)
    for name, value in found.items():
        bits = packed.get(name.removesuffix(".weight"))
        assert near(unpacked(value), plain[name], bits) if bits else torch.equal(value, plain[name]), name
    gate_up, qkv = (unpacked(found[f"layers.0.{name}.weight"]) for name in ("mlp.gate_up", "attn.qkv"))
    assert torch.equal(gate_up, plain["layers.0.mlp.gate_up.weight"])
    assert torch.equal(qkv[256:384], plain["layers.0.attn.qkv.weight"][256:384])  # k: what Q4_0 says 8 bits say too
    assert report.schemes["attention"] >= {
        ("Q4_K", "8.5 bits (rounded again)"),
        ("Q4_0", "8.5 bits"),
        ("Q6_K", "8.5 bits (rounded again)"),
        ("Q5_K", "8.5 bits (rounded again)"),
    }
    assert report.schemes["mlp"] >= {("Q4_K", "5.0 bits (scales rounded)"), ("Q6_K", "8.5 bits (rounded again)"), ("Q4_1", "5.0 bits")}


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_one_part_of_floats_keeps_its_projection_plain(tmp_path, kind):
    types = {
        "ffn_gate": "Q4_0",
        "ffn_up": kind,
        "ffn_down": "Q5_0",
        "attn_q.w": "Q8_0",
        "attn_k.w": kind,
        "attn_v.w": "Q4_0",
        "attn_output": kind,
    }
    source = source_of(write_gguf(model_of(config_of("qwen3", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    assert kept_packed(source) == {f"layers.{i}.mlp.down": 8 for i in range(source.spec.num_layers)}
    plain, _ = load(source)
    found, _, _ = packed_load(source, kept_packed(source))
    for name, value in found.items():
        assert torch.equal(unpacked(value) if name.endswith("down.weight") else value, plain[name]), name


def test_rows_that_fill_no_block_are_unpacked(tmp_path):
    odd = WIDE | {"vocab_size": 168, "num_key_value_heads": 1, "head_dim": 8, "num_attention_heads": 4}
    types = dict.fromkeys(("attn_q.w", "attn_k.w", "attn_v.w", "token_embd", "ffn_down"), "Q8_0")
    source = source_of(write_gguf(model_of(config_of("qwen3", **odd)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    assert set(kept_packed(source)) == {f"layers.{i}.mlp.down" for i in range(source.spec.num_layers)}


@pytest.mark.parametrize(("width", "kept"), [(96, True), (40, False)])
def test_gates_and_ups_in_one_tensor_are_whole_blocks_each(tmp_path, width, kept):
    config = config_of("phi3", **WIDE | {"intermediate_size": width})
    source = source_of(write_gguf(model_of(config), tmp_path / "m.gguf", types={"norm": "F32", "ffn_up": "Q8_0"}))
    assert set(kept_packed(source)) == {f"layers.{i}.mlp.gate_up" for i in range(source.spec.num_layers) if kept}


def test_scales_that_do_not_fit_are_refused_by_name(tmp_path):
    model = model_of(config_of("qwen3", **K_WIDE))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 7] = 2e6
    source = source_of(write_gguf(model, tmp_path / "m.gguf", types={"norm": "F32", "ffn_down": "Q4_K"}))
    load(source)
    with pytest.raises(ModelFileError, match=r"m.gguf: blk.1.ffn_down.weight: scales that float16 does not hold; use --quantization none"):
        packed_load(source, kept_packed(source))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "mixed"])
def test_logits_are_those_of_the_unpacked_weights(tmp_path, family, kind):
    """But for what rounding rows and values to 8 bits costs."""
    types = dict.fromkeys(PROJECTIONS, "Q4_K" if kind == "mixed" else kind)
    if kind == "mixed":
        types |= {"attn_v.w": "Q6_K", "token_embd": "Q6_K", "output.w": "Q6_K"}
        types = {"blk.1.ffn_down": "Q6_K", **types}
    source = source_of(write_gguf(model_of(config_of(family, **K_WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **types}))
    ids = np.random.default_rng(0).integers(0, 160, 24).tolist()
    logits = []
    for packed in ({}, kept_packed(source)):
        network = Network(packed_load(source, packed)[2])
        sequence = Sequence()
        [prompt] = network.step([(sequence, ids[:20])])
        logits.append(np.concatenate([prompt, *(network.step([(sequence, [token])])[0] for token in ids[20:])]))
    plain, found = logits
    off = np.sqrt(np.square(found - plain).mean() / plain.var())
    assert 1e-4 < off < 0.03


EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
MIXTURE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 160}


def stack(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([unpacked(one) for one in weight])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("gates", "down"), [("Q4_0", "Q4_0"), ("Q4_1", "Q8_0"), ("Q8_0", "Q4_0"), ("Q4_K", "Q6_K")])
def test_experts_stay_packed(tmp_path, family, gates, down):
    """Gates with their ups, and down, each in the bits of its type; logits are those of the unpacked weights but for what rounding costs."""
    types = {"norm": "F32", "ffn_gate_exps": gates, "ffn_up_exps": gates, "ffn_down_exps": down}
    source = source_of(write_gguf(model_of(config_of(family, **MIXTURE)), tmp_path / "m.gguf", types=types))
    packed, plain = kept_packed(source), load(source)[0]
    sparse = [i for i, layer in enumerate(source.spec.layers) if layer.moe]
    wanted = {part: 4 if kind.startswith("Q4") else 8 for part, kind in (("gate_up", gates), ("down", down))}
    assert packed == {f"layers.{i}.moe.{part}": bits for i in sparse for part, bits in wanted.items()}
    found, report, decoder = packed_load(source, packed)
    for name, value in found.items():
        bits = packed.get(name.removesuffix(".weight"))
        if bits is None:
            assert torch.equal(value, plain[name]), name
        elif "K" in gates:
            assert near(stack(value).flatten(0, 1), plain[name].flatten(0, 1), bits), name
        else:
            assert torch.equal(stack(value), plain[name]), name
    assert report.parameters.total() == sum(t.numel() for t in plain.values())
    assert decoder.weight_bytes() == sum(t.nbytes for t in found.values()) - found["embed.weight"].nbytes
    ids = np.random.default_rng(0).integers(0, 160, 12).tolist()
    logits = [Network(packed_load(source, kept)[2]).step([(Sequence(), ids)])[0] for kept in ({}, packed)]
    off = np.sqrt(np.square(logits[1] - logits[0]).mean() / logits[0].var())
    assert 1e-5 < off < 0.03


def test_experts_in_one_tensor_each_stay_packed_too(tmp_path):
    """As early Mixtral files have them."""
    path = write_gguf(model_of(config_of("mixtral", **WIDE)), tmp_path / "m.gguf", types={"norm": "F32", **dict.fromkeys(EXPERTS, "Q8_0")})
    whole, source = source_of(path), source_of(path)
    split = {}
    for name, t in source.gguf.tensors.items():
        if "_exps" not in name:
            split[name] = t
            continue
        each = len(t.data) // t.shape[0]
        for e in range(t.shape[0]):
            one = name.replace("_exps", f".{e}")
            split[one] = replace(t, name=one, shape=t.shape[1:], data=t.data[e * each : (e + 1) * each])
    source.gguf.tensors = split
    packed = kept_packed(source)
    assert packed == kept_packed(whole) and len(packed) == 2 * source.spec.num_layers
    ours, theirs = (packed_load(s, packed)[0] for s in (source, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("types", "width"),
    [
        ({**dict.fromkeys(EXPERTS, "Q8_0"), "ffn_down_exps": "F16"}, 96),
        ({**dict.fromkeys(EXPERTS, "Q8_0"), "ffn_up_exps": "BF16"}, 96),
        ({"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q8_0", "ffn_down_exps": "F32"}, 40),
    ],
)
def test_experts_are_packed_whole_or_not_at_all(tmp_path, types, width):
    types = {"norm": "F32", "attn_output": "Q8_0", **types}
    source = source_of(write_gguf(model_of(config_of("mixtral", **WIDE | {"intermediate_size": width})), tmp_path / "m.gguf", types=types))
    packed = kept_packed(source)
    assert set(packed) == {f"layers.{i}.attn.o" for i in range(source.spec.num_layers)}
    plain, found = load(source)[0], packed_load(source, packed)[0]
    assert all(torch.equal(found[name], plain[name]) for name in plain if ".moe." in name)
