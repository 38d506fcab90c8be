"""The benchmarks: the fixed work is the fixed work, offline counts right, compare hands Transformers the same model."""

import hashlib
import json
import re

import pytest

from flatout import engine
from flatout.bench import compare, ledger, offline
from flatout.bench.kernels import SHOWN, KernelTime, added, kernel_lines
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


def test_offline(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offline, "workload", lambda name: [(list(range(20 + i)), 4) for i in range(3)])
    argv = [
        "bench",
        "offline",
        "--work",
        "batch8,prefill8k",
        "--models",
        tiny,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    file = tmp_path / "figures.json"
    assert main([*argv, "--json", "--repeats", "2", "--output", str(file)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert json.loads(file.read_text()) == report
    (start,) = report["start_seconds"].values()
    assert set(start) >= {"config", "weights", "KV pool", "warm-up"}
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
    head, *rest = captured.out.rstrip("\n").split("\n")
    rows, accounts = rest[::2], rest[1::2]
    assert len(rows) == len(accounts) == 2
    assert re.fullmatch(
        r"  4 steps: floor \d+%.*, kernels over it \d+%, padding \d+%, launch \d+%, host \d+%, idle \d+%; host us a step: schedule \d+, .*",
        accounts[0],
    )
    assert len({len(line) for line in (head, *rows)}) == 1  # columns line up
    assert captured.err == ""


def test_a_kernel_counts_from_where_those_before_it_end():
    spans = [("b", 2.0, 5.0), ("a", 0.0, 3.0), ("waits", 2.5, 4.0), ("a", 7.0, 8.0), ("waits", 7.5, 10.0)]
    times = {t.name: (t.calls, t.seconds) for t in added(spans)}
    assert times == {"a": (2, 4.0), "b": (1, 2.0), "waits": (2, 2.0)}, "of the ten seconds two were idle"
    assert [t.name for t in added(spans)] == ["a", "b", "waits"]


def test_kernels_are_shown_longest_first():
    lines = kernel_lines([KernelTime("a" * 100, 4, 3e-3), *[KernelTime("b", 1, 1e-4)] * 20])
    assert len(lines) == SHOWN
    assert lines[0].split() == ["60%", "4", "x", "750.00", "us", "a" * 60]
    assert lines[1].split() == ["2%", "1", "x", "100.00", "us", "b"]


@pytest.mark.parametrize("help_flag", ["--help", "--help-all"])
def test_offline_tells_its_flags(help_flag, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "offline", help_flag])
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--work", "--models", "--repeats", "--kernels", "--output", "--json"))
    assert all(name in out for name in NAMES)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["--kernels"], "--kernels: needs a CUDA device"),
        (["--work", "batch9"], "--work: 'batch9' is not known (did you mean batch8?)"),
        (["--output", "/nowhere/figures.json"], "--output: /nowhere/figures.json: No such file or directory"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_model_loads(tiny, options, wrong, capsys, monkeypatch):
    monkeypatch.setattr(offline, "open_llm", None)
    assert main(["bench", "offline", "--models", tiny, *options]) == 2
    assert wrong in capsys.readouterr().err


def test_every_step_of_a_run_is_in_its_account(tiny, monkeypatch, capsys):
    """More steps than the engine remembers; a workload named twice is run once."""
    monkeypatch.setattr(offline, "workload", lambda name: [([20, 21], 90)])
    monkeypatch.setattr(engine, "RECORDS_KEPT", 8)
    argv = ["--models", tiny, "--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--json", "--quiet"]
    assert main(["bench", "offline", "--work", "batch1", "batch1", *argv]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["account"]["steps"] == 90


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
    assert [row["agree"]["Transformers"] for row in report["rows"]] == [4, 4, 1]
    for row in report["rows"]:
        assert row["ratios"]["Transformers"] == pytest.approx(row["medians"]["flatout"] / row["medians"]["Transformers"])


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


def test_bench_ledger(default_model, capsys):
    options = ["--batch", "1", "2", "--pairs", "2", "--steps", "5", "--max-model-len", "256", "--num-gpu-blocks-override", "64", "--quiet"]
    assert main(["bench", "ledger", *options, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["batch"] for cost in costs] == [1, 2]
    for cost in costs:
        assert cost["pairs"] == 2 and cost["on"] > 0 < cost["off"] and 0 < cost["bound"] <= cost["ratio"]
    assert main(["bench", "ledger", "--pairs", "1"]) == 1 and "--pairs: must be at least 2" in capsys.readouterr().err


def test_the_bound_of_a_ratio():
    assert ledger.lower_bound([1.0] * 20) == 1.0
    close = [0.99, 1.01] * 12
    assert 0.985 <= ledger.lower_bound(close) <= 1.0 < ledger.lower_bound([1.05, 1.07] * 12)
    assert ledger.lower_bound([0.95, 0.97] * 12) < 0.985
