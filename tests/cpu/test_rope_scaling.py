"""Every rotary scaling against Transformers, far beyond the trained length, at every position (reports D07, D10)."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import make, reference_logits
from network import load

from flatout.layers.rotary import frequencies, table
from flatout.modelfile.spec import ModelFileError, RopeSpec

TRAINED, LENGTH = 64, 512
IDS = np.random.default_rng(1).integers(3, 256, 300).tolist()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 1.5 * i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": TRAINED, **FACTORS}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope_attention_factor": {**LONGROPE, "attention_factor": 1.3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rope")


def check(path, *, reference=None, rope_length=None, max_model_len=LENGTH):
    found = load(path, max_model_len=max_model_len).forced(IDS, [100])
    np.testing.assert_allclose(found, reference_logits(reference or path, IDS, rope_length), rtol=0, atol=1e-4)
    return found


def scaled(folder, parameters, **overrides):
    context = TRAINED if parameters["rope_type"] in ("default", "linear", "dynamic") else LENGTH
    return make("llama", folder, rope_parameters={"rope_theta": 500.0, **parameters}, max_position_embeddings=context, **overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_beyond_the_trained_length(folder, kind):
    fixed = LENGTH if kind == "dynamic" or kind.startswith("longrope") else None
    found = check(scaled(folder, KINDS[kind]), rope_length=fixed)
    if kind != "default":  # the scaling shows: short tests would not see one that is ignored
        plain = load(scaled(folder, KINDS["default"])).forced(IDS)
        assert np.abs(found - plain)[-1].max() > 0.1


@pytest.mark.parametrize("max_model_len, chosen", ((TRAINED, "short_factor"), (TRAINED + 1, "long_factor")))
def test_longrope_takes_its_factors_by_max_model_len(max_model_len, chosen):
    rope = RopeSpec(
        base=10000.0,
        dim=16,
        kind="longrope",
        factor=8.0,
        original_max_position=TRAINED,
        length=max_model_len,
        **{k: tuple(v) for k, v in FACTORS.items()},
    )
    expected = 1.0 / (torch.tensor(FACTORS[chosen]) * 10000.0 ** (torch.arange(0, 16, 2) / 16))
    torch.testing.assert_close(frequencies(rope)[0], expected)


def test_dynamic_within_the_trained_length_is_plain():
    plain, dynamic = (
        RopeSpec(base=10000.0, dim=16, kind=k, factor=4.0, original_max_position=TRAINED, length=TRAINED // 2)
        for k in ("default", "dynamic")
    )
    torch.testing.assert_close(frequencies(plain)[0], frequencies(dynamic)[0])


def test_table_rows_turn_by_their_position():
    rope = RopeSpec(base=100.0, dim=8)
    cos, sin = table(rope, 50)[:, :4], table(rope, 50)[:, 12:]
    angles = np.outer(np.arange(50), 100.0 ** -(np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


@pytest.mark.parametrize("spelling", ("rope_parameters", "rope_type", "type"))
def test_d07_scaling_in_every_spelling(folder, spelling, tmp_path):
    written = scaled(folder, LLAMA3)
    path = shutil.copytree(written, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    if spelling == "rope_parameters":
        config["rope_parameters"] = parameters
    else:
        config["rope_theta"] = parameters.pop("rope_theta")
        kind = parameters.pop("rope_type")
        config["rope_scaling"] = {spelling: kind, **parameters}
    (path / "config.json").write_text(json.dumps(config))
    check(path, reference=written)


def test_d07_an_unknown_kind_is_refused(folder, tmp_path):
    path = shutil.copytree(scaled(folder, LLAMA3), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["rope_type"] = "spiral"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="spiral"):
        load(path)


@pytest.mark.parametrize("theta", (500000.0, 1e6, None))
def test_d10_base(folder, tmp_path, theta):
    written = make("llama", folder, rope_parameters={"rope_type": "default", "rope_theta": theta or 10000.0})
    check(written)
    path = shutil.copytree(written, tmp_path / "model")  # the same as an old file says it
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    if theta is not None:
        config["rope_theta"] = theta
    (path / "config.json").write_text(json.dumps(config))
    check(path, reference=written)


def test_d10_part_of_a_head_rotates(folder):
    check(make("phi3", folder, sliding_window=None))


def test_gemma3_full_and_sliding_layers_have_their_own_ropes(folder):
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    check(make("gemma3", folder, rope_parameters=ropes))
