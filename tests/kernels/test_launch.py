"""kernels/gpu/launch.py: which launches are told apart, and what a remembered one passes on. Kernels run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flatout.kernels.gpu import launch as module
from flatout.kernels.gpu.launch import launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, runs):
        self.run = lambda *args: runs.append(args)


class Kernel:
    arg_names = ("out", "x", "stride", "scale", "WIDTH", "PDL")

    def __init__(self, compiles=True):
        self.compiles, self.met, self.runs = compiles, [], []

    def __getitem__(self, grid):
        def first(*operands, **form):
            self.met.append((grid, operands, form))
            return Compiled(self.runs) if self.compiles else None

        return first


class Here(torch.Tensor):
    def get_device(self):
        return 0


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_KNOWN_VERSION", True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def tensor(at=0, dtype=torch.bfloat16):
    return torch.zeros(64, dtype=dtype)[at:].as_subclass(Here)


def test_like_operands_go_past_triton():
    kernel, x, y = Kernel(), tensor(), tensor()
    launch(kernel, (3,), x, None, 8, 1.0, WIDTH=64, PDL=False, num_warps=4)
    launch(kernel, (5, 2), y, None, 8, 1.0, WIDTH=64, PDL=False, num_warps=4)
    assert len(kernel.met) == 1
    ((*grid, stream, function, metadata, a, b, c, out, bias, stride, scale, width, pdl),) = kernel.runs
    assert (grid, stream, function, metadata, a, b, c) == ([5, 2, 1], 7, "function", "metadata", None, None, None)
    assert out is y and (bias, stride, scale, width, pdl) == (None, 8, 1.0, 64, False)


@pytest.mark.parametrize(
    "operands, form",
    [
        ((tensor(), tensor(), 16, 1.0), {}),
        ((tensor(), tensor(), 8, 2.0), {}),
        ((tensor(), tensor(), 8, 1), {}),  # an integer, which Triton compiles in
        ((tensor(1), tensor(), 8, 1.0), {}),
        ((tensor(dtype=torch.float16), tensor(), 8, 1.0), {}),
        ((tensor(), None, 8, 1.0), {}),
        ((tensor(), tensor(), 8, 1.0), {"WIDTH": 32}),
        ((tensor(), tensor(), 8, 1.0), {"num_warps": 8}),
    ],
)
def test_other_operands_do_not(operands, form):
    kernel, usual = Kernel(), {"WIDTH": 64, "PDL": False, "num_warps": 4}
    launch(kernel, (1,), tensor(), tensor(), 8, 1.0, **usual)
    launch(kernel, (1,), *operands, **usual | form)
    assert len(kernel.met) == 2 and not kernel.runs


def test_what_was_not_compiled_is_not_remembered(monkeypatch):
    kernel = Kernel(compiles=False)  # the interpreter, or a start that only collects
    for _ in range(2):
        launch(kernel, (1,), tensor(), tensor(), 8, 1.0, WIDTH=64, PDL=False)
    assert len(kernel.met) == 2 and not module._known
    monkeypatch.setattr(module, "_MOST", 3)
    for width in range(10):
        launch(Kernel(), (1,), tensor(), tensor(), 8, 1.0, WIDTH=width, PDL=False)
    assert len(module._known) <= 3


def test_nothing_is_launched_while_kernels_are_collected():
    kernel = Kernel()
    launch(kernel, (1,), tensor(), tensor(), 8, 1.0, WIDTH=64, PDL=False)
    kernel.warmup = lambda *operands, grid, **form: kernel.warmed.append((operands, grid, form))
    kernel.warmed = []
    with module.without_launches():
        for width in (64, 32):  # met before or not
            launch(kernel, (2,), tensor(), tensor(), 8, 1.0, WIDTH=width, PDL=False, num_warps=4)
    assert len(kernel.met) == 1 and not kernel.runs
    assert [(grid, form["WIDTH"]) for _, grid, form in kernel.warmed] == [((2,), 64), ((2,), 32)]
    launch(kernel, (1,), tensor(), tensor(), 8, 1.0, WIDTH=64, PDL=False)
    assert len(kernel.runs) == 1
