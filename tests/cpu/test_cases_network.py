"""Public bug reports about reading a model (ids as in the tests' names), against Transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import make, reference_logits
from network import Network, Sequence, build, load
from safetensors.torch import load_file, save_file

from flatout.config import ModelConfig
from flatout.modelfile.sources import resolve_model
from flatout.modelfile.spec import ModelFileError

rng = np.random.default_rng(9)
IDS = rng.integers(3, 256, 200).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cases")


def check(path, ids=IDS[:40], **options) -> Network:
    network = load(path, **options)
    expected = reference_logits(path, ids)
    np.testing.assert_allclose(network.forced(ids, [len(ids) // 2]), expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(network.forced(ids, [len(ids) - 1]), expected, rtol=0, atol=1e-4)
    return network


def test_d11_tied_head_absent_from_the_file(folder):
    path = make("llama_tied", folder)
    assert not any("lm_head" in name for name in load_file(path / "model.safetensors"))
    check(path)


def test_d11_untied_head_absent_is_refused(folder, tmp_path):
    path = make("llama", folder, vocab_size=260)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        load(path)


@pytest.mark.parametrize(
    "overrides, windowed",
    (
        ({"sliding_window": 64, "use_sliding_window": False}, 0),
        ({"sliding_window": None, "use_sliding_window": False}, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 2),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 3),
    ),
)
def test_d13_the_window_switch(folder, overrides, windowed):
    network = check(make("qwen2", folder, **overrides), IDS)
    assert sum(layer.window is not None for layer in network.decoder.spec.layers) == windowed


@pytest.mark.parametrize("window", (1, 2, 7, 8, 9, 64, 199, 200, 4096))
def test_windows_at_every_edge(folder, window):
    check(make("mistral", folder, sliding_window=window), IDS, block_size=8)


@pytest.mark.parametrize(
    "shape",
    (
        {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32},
        {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1},
        {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None},
        {"head_dim": 80},
        {"head_dim": 96},
        {"head_dim": 256},
        {"head_dim": 20},
        {"hidden_size": 48, "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    ids=str,
)
def test_d15_head_shapes(folder, shape):
    check(make("llama", folder, num_hidden_layers=2, **shape))


@pytest.mark.parametrize(
    "family, overrides",
    (
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"attention_bias": False, "mlp_bias": True}),
        ("qwen2", {}),
        ("olmo2", {"attention_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
    ),
)
def test_d16_biases_count(folder, family, overrides):
    path = make(family, folder, **overrides)
    network = check(path)
    biases = [d.tensor for name, d in network.decoder.destinations().items() if name.endswith("bias")]
    assert biases and all(b.abs().mean() > 0.2 for b in biases)
    before = network.forced(IDS[:10])
    for bias in biases:
        bias.zero_()
    assert np.abs(network.forced(IDS[:10]) - before).max() > 0.1


def test_d16_a_tensor_nobody_uses_is_named(folder, tmp_path):
    path = make("llama", folder, vocab_size=264)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = weights["model.norm.weight"].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"q_proj\.bias"):
        load(path)


@pytest.mark.parametrize("family", ("mixtral", "qwen2_moe", "qwen3_moe"))
@pytest.mark.parametrize("renormalised", (True, False))
def test_expert_weights_with_and_without_renormalising(folder, family, renormalised):
    if family == "mixtral":
        check(make(family, folder, num_experts_per_tok=1 + renormalised))
    else:
        check(make(family, folder, norm_topk_prob=renormalised, num_experts_per_tok=3))


def test_more_tokens_or_rows_than_agreed_are_refused(folder):
    spec = resolve_model(ModelConfig(model=str(make("llama", folder)))).spec
    network = Network(build(spec, max_tokens=16))
    with pytest.raises(ValueError, match="17 rows where the workspace holds 16"):
        network.step([(Sequence(), IDS[:17])])
    network = Network(build(spec))
    batch, host = network.batch([(Sequence(), IDS[:65])])
    network.backend.plan(batch, host)
    with pytest.raises(ValueError, match="65 rows where the workspace holds 64"):
        network.decoder.logits(network.decoder.forward(batch), batch.sample_rows)
