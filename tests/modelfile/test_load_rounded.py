"""--quantization int8 and int4: which projections are rounded, from safetensors, GGUF files or nothing; that the decoder holds those roundings and
answers as their values do; what is told and what refused."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
from modelfile_samples import FAMILIES, change_config, config_of, model_of, save, write_gguf
from network import Network, Sequence
from test_load_families import load

from flatout.config import ModelConfig
from flatout.kernels.packed import unpacked
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.modelfile.spec import ModelFileError
from flatout.models.decoder import Decoder
from flatout.models.load import load_weights, rounded_packed
from flatout.models.report import LoadReport
from flatout.quant.rounding import rounded_weight

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "num_hidden_layers": 3,
}
PROJECTIONS = ("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w", "token_embd", "output.w")


def source_of(path, **options) -> ModelSource:
    return resolve_model(ModelConfig(model=str(path), **options))


def decoder_of(source: ModelSource, packed: dict[str, int], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    spec = source.spec.for_length(64)
    return Decoder(spec, dtype=dtype, device=torch.device(device), max_tokens=32, max_logits=4, max_model_len=64, packed=packed)


def chosen(source: ModelSource, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    return rounded_packed(decoder_of(source, {}, "meta").destinations(), source.spec, bits)


def rounded_load(source: ModelSource, bits: int, seed: int = 0, **options) -> tuple[dict[str, torch.Tensor], LoadReport, Decoder]:
    decoder = decoder_of(source, chosen(source, bits)[0], **options)
    report = load_weights(decoder, source, seed=seed)
    return {name: d.tensor for name, d in decoder.destinations().items()}, report, decoder


def rounding(value: torch.Tensor, bits: int) -> torch.Tensor:
    return rounded_weight(lambda first, end: value[first:end], *value.shape, bits)


def assert_rounded(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], packed: dict[str, int]) -> None:
    """Bit by bit: the roundings of a plain load's projections, and all else as it is there."""
    for name, value in found.items():
        bits = packed.get(name.removesuffix(".weight"))
        wanted = plain[name] if name in plain else plain["embed.weight"]
        assert torch.equal(value, rounding(wanted, bits) if bits else wanted), name


# -- which, and what they hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_familys_projections_are_rounded(tmp_path, family, bits):
    save(model_of(config_of(family, **WIDE)), tmp_path)
    source = source_of(tmp_path)
    packed, left = chosen(source, bits)
    names = set()
    for i, layer in enumerate(source.spec.layers):
        feed_forward = ["moe.shared"] * bool(source.spec.moe and source.spec.moe.shared_intermediate_size) if layer.moe else ["mlp"]
        names |= {f"layers.{i}.attn.{x}" for x in ("qkv", "o")} | {f"layers.{i}.{f}.{x}" for f in feed_forward for x in ("gate_up", "down")}
    odd = {name for name in names if name.endswith("shared.down")}  # 48 columns
    assert packed == dict.fromkeys(names - odd, bits) | {"head": 8}
    assert left == ({"moe.shared.down (48 columns are no multiple of 32)": len(odd)} if odd else {})
    plain, _ = load(source)
    found, report, _ = rounded_load(source, bits)
    assert_rounded(found, plain, packed)
    assert report.used == len(source.tensors) and report.missing == 0
    held = {4: "5.0 bits", 8: "8.5 bits"}[bits]
    assert ("F32", f"{held} (rounded)") in report.schemes["attention"] and ("F32", "8.5 bits (rounded)") in report.schemes["head"]
    if source.spec.moe:
        assert report.schemes["experts"] == {("F32", "float32")}


def test_the_report_says_which_arithmetic_runs(tmp_path):
    save(model_of(config_of("qwen2", **WIDE, tie_word_embeddings=True)), tmp_path)
    for bits, wanted in (
        (8, "products int8 weights (groups of 32) in attention, mlp, head; int8 activations, of many rows bfloat16"),
        (4, "products int4 weights (groups of 32) in attention, mlp; int8 weights (groups of 32) in head; int8 activations, of many rows bfloat16"),
    ):  # fmt: skip
        lines = rounded_load(source_of(tmp_path), bits)[1].lines()
        assert wanted in lines
        assert "head     tied to the embedding, packed for itself, 160 rows" in lines
    assert not any(line.startswith("products") for line in load(source_of(tmp_path))[1].lines())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_is_rounded_is_the_files_own_values(tmp_path, dtype):
    """Not those that the activations' type would leave of them."""
    save(model_of(config_of("llama", **WIDE)).to(dtype), tmp_path)
    if dtype == torch.float64:
        change_config(tmp_path, dtype="float32")  # no dtype of ours
    source = source_of(tmp_path)
    plain, _ = load(source, torch.float32)
    found, report, _ = rounded_load(source, 8, dtype=torch.bfloat16)
    name = "layers.1.mlp.down.weight"
    assert torch.equal(found[name], rounding(plain[name], 8)) and found["embed.weight"].dtype == torch.bfloat16
    assert {stored for stored, _ in report.schemes["mlp"]} == {{torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}[dtype]}


def test_what_does_not_fit_stays_and_is_told(tmp_path):
    odd = WIDE | {"head_dim": 8, "num_key_value_heads": 1, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 168}
    save(model_of(config_of("qwen3", **odd)), tmp_path)
    source = source_of(tmp_path)
    packed, left = chosen(source, 4)
    assert packed == {f"layers.{i}.attn.o": 4 for i in range(3)}
    assert left == {
        "attn.qkv (8 rows are no multiple of 16)": 3,
        "mlp.gate_up (40 rows are no multiple of 16)": 3,
        "mlp.down (40 columns are no multiple of 32)": 3,
        "head (168 rows are no multiple of 16)": 1,
    }
    found, report, _ = rounded_load(source, 4)
    assert_rounded(found, load(source)[0], packed)
    assert ("F32", "float32") in report.schemes["mlp"] and report.packed == {4: ["attention"]}


# -- GGUF files -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])  # of llama rows of q and k lie in pairs
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_plain_gguf_tensors(tmp_path, family, kind, bits):
    types = {"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}
    source = source_of(write_gguf(model_of(config_of(family, **WIDE)), tmp_path / "m.gguf", types=types))
    found, report, _ = rounded_load(source, bits)
    assert_rounded(found, load(source)[0], chosen(source, bits)[0])
    assert {stored for stored, held in report.schemes["mlp"] if "rounded" in held} == {kind}


@pytest.mark.parametrize(
    ("kind", "bits", "change"),
    [
        ("Q4_0", 4, ""),
        ("Q4_1", 4, ""),
        ("Q8_0", 8, ""),
        ("Q4_0", 8, ""),
        ("Q4_1", 8, "rounded again"),
        ("Q8_0", 4, "rounded again"),
        ("Q5_1", 4, "rounded again"),
    ],
)
def test_rounded_gguf_tensors_keep_what_the_bits_hold_and_the_rest_is_told(tmp_path, kind, bits, change):
    types = {"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}
    source = source_of(write_gguf(model_of(config_of("llama", **WIDE)), tmp_path / "m.gguf", types=types))
    plain, _ = load(source)
    found, report, _ = rounded_load(source, bits)
    for name, held in chosen(source, bits)[0].items():
        wanted = plain[f"{name}.weight"]
        if held == bits and not change:
            assert torch.equal(unpacked(found[f"{name}.weight"]), wanted), name
        elif held == bits:
            assert torch.equal(found[f"{name}.weight"], rounding(wanted, held)), name
    told = {4: "5.0 bits", 8: "8.5 bits"}[bits] + (f" ({change})" if change else "")
    assert (kind, told) in report.schemes["mlp"] and (kind, told) in report.schemes["attention"]


# -- no file ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_dummy_weights(tmp_path, tied, bits):
    config_of("qwen2", **WIDE, tie_word_embeddings=tied).save_pretrained(tmp_path)
    source = source_of(tmp_path / "config.json", load_format="dummy")
    found, report, _ = rounded_load(source, bits, seed=1)
    again, other = rounded_load(source, bits, seed=1)[0], rounded_load(source, bits, seed=2)[0]
    packed = chosen(source, bits)[0]
    for name in packed:
        value = found[f"{name}.weight"]
        assert torch.equal(value, again[f"{name}.weight"]) and not torch.equal(value, other[f"{name}.weight"])
        assert 0.018 < unpacked(value).std() < 0.022
    values = {name: unpacked(found[f"{name}.weight"]) for name in packed}
    assert not torch.equal(values["layers.0.attn.o"], values["layers.1.attn.o"])
    assert torch.equal(found["head.weight"], rounding(found["embed.weight"], 8)) == tied
    assert ("random", {4: "5.0 bits", 8: "8.5 bits"}[bits]) in report.schemes["mlp"]


# -- what it costs ----------------------------------------------------------------------------------------------------------------


def logits_of(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """Of a prompt of 20 ids and then of one at a time."""
    network, sequence = Network(decoder), Sequence()
    [prompt] = network.step([(sequence, ids[:20])])
    return np.concatenate([prompt, *(network.step([(sequence, [token])])[0] for token in ids[20:])])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "olmo2", "qwen2_moe"])
def test_logits_are_those_of_the_rounded_values(tmp_path, family):
    """But for what rounding rows to 8 bits costs, 2 to 5 % of these wild nets' rms; of the file's own values int8 loses little more, int4 a good deal."""
    source = source_of(checkpoints.make(family, tmp_path, **WIDE))
    ids = np.random.default_rng(0).integers(0, 160, 28).tolist()

    def off(found: np.ndarray, wanted: np.ndarray) -> float:
        return float(np.sqrt(np.square(found - wanted).mean() / wanted.var()))

    exact_decoder = decoder_of(source, {})
    load_weights(exact_decoder, source)
    exact = logits_of(exact_decoder, ids)
    lost = {}
    for bits in (4, 8):
        found, _, decoder = rounded_load(source, bits)
        reference = decoder_of(source, {})  # with a head of its own where the rounded one is
        load_weights(reference, source)
        for name, destination in reference.destinations().items():
            if found[name].dtype == torch.uint8:
                destination.tensor.copy_(unpacked(found[name]))
        if source.spec.tie_embeddings:
            reference.head.projection.tensors = {"weight": unpacked(found["head.weight"])}
        logits = logits_of(decoder, ids)
        assert 1e-3 < off(logits, logits_of(reference, ids)) < 0.06, bits
        lost[bits] = off(logits, exact)
    assert lost[8] < 0.07 and 0.15 < lost[4] < 0.5, lost


# -- refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_values_that_no_scale_holds_are_refused_by_name(tmp_path, bits):
    model = model_of(config_of("qwen3", **WIDE))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 7] = 3e7
    save(model, tmp_path)
    load(source_of(tmp_path))
    wanted = rf"layers.1.mlp.down_proj.weight: values that float16 scales for {bits} bits do not hold; use --quantization none"
    with pytest.raises(ModelFileError, match=wanted):
        rounded_load(source_of(tmp_path), bits)
