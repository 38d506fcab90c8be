"""The benchmarks: the fixed work is the fixed work, offline counts right, compare hands Transformers the same model."""

import hashlib
import json

import pytest

from flatout.bench import compare, offline
from flatout.bench.workloads import NAMES, VOCAB, fold, workload
from flatout.cli import main

# of the lists of (prompt ids, output tokens), so that figures of different days and engines speak of the same work
HASHES = {
    "batch1": "59e4b27b",
    "batch8": "9f694e55",
    "batch64": "be992187",
    "batch256": "bd2ba8a4",
    "mixed256": "11d66a27",
    "mixed1024": "054fa209",
    "prefill8k": "ec9a207c",
    "prefill32k": "935851f1",
    "shared_prefix": "ec41611d",
    "long_decode": "096e8d3f",
}
TINY = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_the_work_is_fixed(name):
    work = workload(name)
    assert hashlib.sha256(repr(work).encode()).hexdigest()[:8] == HASHES[name]
    assert all(10 <= i < VOCAB for prompt, _ in work for i in prompt)


def test_small_vocabularies_get_the_same_shapes():
    folded = fold(workload("batch8"), 300)
    assert [(len(p), n) for p, n in folded] == [(len(p), n) for p, n in workload("batch8")]
    assert all(10 <= i < 300 for prompt, _ in folded for i in prompt)
    assert fold(workload("batch1"), VOCAB) == workload("batch1")


def test_offline(tiny, monkeypatch, capsys):
    monkeypatch.setattr(offline, "workload", lambda name: [(list(range(20 + i)), 4) for i in range(3)])
    argv = ["bench", "offline", "batch8", "prefill8k", "--models", tiny, "--load-format", "dummy", "--dtype", "float32", "--threads", "1"]
    assert main([*argv, "--json", "--repeats", "2"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [r["work"] for r in report["results"]] == ["batch8", "prefill8k"]
    first = report["results"][0]
    assert first["requests"] == 3
    assert first["total_tok_s"] / first["out_tok_s"] == pytest.approx((20 + 21 + 22 + 12) / 12)
    assert first["ttft_ms"] > 0
    assert first["tpot_ms"] > 0
    assert 0 < first["of_floor"] < 1  # a tiny model is all overhead
    assert report["results"][1]["of_floor"] is None
    assert main([*argv, "--quiet"]) == 0
    captured = capsys.readouterr()
    head, *rows = captured.out.rstrip("\n").split("\n")
    assert len(rows) == 2
    assert len({len(line) for line in (head, *rows)}) == 1  # columns line up
    assert captured.err == ""


def test_shapes_are_readable():
    from flatout.config import ModelConfig
    from flatout.modelfile.sources import resolve_model

    for path in offline.SHAPES.glob("*.json"):
        source = resolve_model(ModelConfig(**offline._model_options(path.stem)))
        assert source.kind == "dummy"
        assert source.spec.num_layers > 10


@pytest.mark.long
def test_compare_is_the_same_model(default_model, monkeypatch, capsys):
    """Float32 on both sides gives the same greedy tokens: what is compared is one model."""
    monkeypatch.setattr(compare, "PROMPT", 16)
    argv = ["--dtype", "float32", "--new-tokens", "4", "--prefill", "16", "--repeats", "1", "--max-model-len", "512", "--threads", "1"]
    assert main(["bench", "compare", "--json", "--quiet", *argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [c["agree"] for c in report["cases"]] == [4, 4, 1]
    for case in report["cases"]:
        assert case["ratio"] == pytest.approx(case["ours"] / case["theirs"])


def test_compare_with_random_weights(tiny, capsys):
    argv = [
        "--model",
        tiny,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--new-tokens",
        "3",
        "--prefill",
        "16",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    assert main(["bench", "compare", *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("3 of 3") == 2  # random, but the same
    assert "prefill 16" in out
    assert "transformers" in out
