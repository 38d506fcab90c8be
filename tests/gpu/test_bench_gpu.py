"""`flatout bench offline` on CUDA: the account of a work and the kernels it ran, those of captured steps one by one."""

from __future__ import annotations

import json

import pytest
import torch

from flatout.bench.kernels import kernel_times
from flatout.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_kernel_times():
    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(5):
            torch.mul(x, 2, out=out)

    def run() -> None:
        for _ in range(3):
            graph.replay()
        x.add_(1)

    times = kernel_times(run)
    assert {3 * 5, 1} <= {t.calls for t in times}
    assert [t.seconds for t in times] == sorted((t.seconds for t in times), reverse=True)
    assert all(0 < t.seconds < 1 for t in times)


def test_bench_offline(default_model, tmp_path, capsys):
    output = tmp_path / "figures.json"
    options = ["--work", "batch1,batch8", "--kernels", "--max-model-len", "2048", "--gpu-memory-utilization", "0.3"]
    assert main(["bench", "offline", *options, "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    assert [r["work"] for r in results] == ["batch1", "batch8"]
    for result in results:
        account = result["account"]
        parts = account["parts"]
        assert 0 < parts["floor_bandwidth"] + parts["floor_compute"] < account["decode_s"] + account["chunk_s"] <= 1.02 * account["seconds"]
        assert sum(parts.values()) == pytest.approx(account["seconds"])
        assert f"  {account['steps']} steps: floor " in shown
    assert shown.count(" us  ") >= 10
