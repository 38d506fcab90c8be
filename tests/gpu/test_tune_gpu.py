"""`flatout tune` on CUDA: algorithms of a model's products are tried in its steps, kept, and taken by the next start."""

from __future__ import annotations

import pytest
import torch

from flatout.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_tune(default_model, capsys, monkeypatch):
    from flatout.kernels.gpu import blaslt
    from flatout.runner import tune

    kept = []
    keep = blaslt.keep
    monkeypatch.setattr(blaslt, "keep", lambda product, algorithm: (kept.append((product, bytes(algorithm))), keep(product, algorithm)))
    monkeypatch.setattr(tune, "GAIN", 2.0)  # whatever is fastest is kept
    monkeypatch.setattr(tune, "FIRST", 0.01)
    monkeypatch.setattr(tune, "AGAIN", 0.01)
    options = ["--max-model-len", "2048", "--gpu-memory-utilization", "0.3", "--quiet"]
    assert main(["tune", str(default_model), "--tokens", "256", "700", *options]) == 0
    head, *rows, end = capsys.readouterr().out.strip().split("\n")
    assert "ms before" in head and "s; starts on this machine" in end
    assert [row.split()[0] for row in rows] == ["256", "700"]
    assert len(kept) >= 6
    for product, algorithm in kept:
        fresh = blaslt.Product(product.form, product.device)
        assert bytes(blaslt._choose(fresh)) == algorithm, "found in the choices"
