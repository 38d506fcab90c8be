"""The ops on 8-bit floats on CUDA: rows to the bit, products of real shapes against float64, the same bits again, in graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fp8_rows import E4M3, Case, close, quantised, truth, uneven_rows
from products import implementation

if not torch.cuda.is_available():  # before triton is imported: tests/kernels choose its interpreter
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs tensor cores of 8-bit floats", allow_module_level=True)

from flatout.kernels import fp8
from flatout.kernels.fp8 import linear_fp8, quantise_rows
from flatout.kernels.gpu import fp8 as gpu
from flatout.kernels.gpu.linear import scratch

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLAS = "scaled_mm" if torch.cuda.get_device_capability()[0] == 9 else "scaled_after"
SHAPES = [
    Case(0, 37888, 3584),
    Case(0, 3584, 18944),
    Case(0, 4608, 3584, biased=True),
    Case(0, 3584, 3584, one_scale=True),
    Case(0, 2048, 8192, FP16, biased=True),
    Case(0, 960, 592, biased=True, one_scale=True),
]


def twice(name: str, case: Case) -> None:
    """The implementation against float64, and against itself."""
    operands = case.operands("cuda")
    chosen = next(i for i in linear_fp8.implementations if i.name == name)
    assert chosen.accepts(*operands)
    chosen.run(*operands)
    first = operands[0].clone()
    close(first, truth(*operands[1:]), roundings=4 if name == "scaled_after" else 1)
    operands[0].fill_(float("nan"))
    chosen.run(*operands)
    assert torch.equal(first, operands[0])


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.outputs}x{c.columns}")
def test_few_rows(case):
    for rows in (1, 8, 9, 17, 33, 64):
        twice("skinny", replace(case, rows=rows))
    assert not scratch(torch.device("cuda", torch.cuda.current_device()))[1].any()


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.outputs}x{c.columns}")
def test_by_blas(case):
    if BLAS == "scaled_after" and case.dtype == FP16:
        pytest.skip("products of e4m3 pass float16's range before they are scaled")
    for rows in (1, 2, 15, 64, 257, 1000):
        twice(BLAS, replace(case, rows=rows))


def test_random_shapes_and_blocks():
    """Odd numbers of outputs, columns that fill no tile, many shares."""
    choose = random.Random(5)
    for seed in range(24):
        held = choose.choice((8, 16, 32, 64))
        warps = choose.choice((1, 2, 4)) if held < 32 else 4
        block_k = choose.choice((64, 128, 256) if warps < 4 else (64, 128))
        chosen = gpu.Blocks(
            held,
            choose.choice((16, 32)) * warps,
            block_k,
            warps,
            choose.choice((2, 3)),
            choose.choice((0, 512)),
            choose.choice((1, 2, 3, 9)),
        )
        case = Case(
            choose.randint(1, held), choose.choice((16, 17, 100, 257, 640)), 16 * choose.choice((1, 3, 16, 37, 129)),
            choose.choice((BF16, FP16)), choose.random() < 0.5, choose.random() < 0.5, seed,
        )  # fmt: skip
        operands = case.operands("cuda")
        gpu.product(*operands, chosen=chosen)
        close(operands[0], truth(*operands[1:]))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [16, 592, 3584, 18944, gpu.WIDEST])
def test_rows_to_the_bit(width, dtype):
    x = uneven_rows(width, dtype, "cuda")
    expected, expected_scales = quantised(x)
    for run in (quantise_rows.reference, implementation(quantise_rows, "triton")):
        out, scales = torch.full(x.shape, float("nan"), device="cuda").to(E4M3), torch.full(x.shape[:1], float("nan"), device="cuda")
        run(out, scales, x)
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(out.cpu().float(), expected.float())


def test_numbers_that_are_not_finite_stay_in_their_rows():
    x = torch.ones(4, 640, device="cuda", dtype=BF16)
    x[1, 5], x[2, 7] = float("nan"), float("-inf")
    made = []
    for run in (quantise_rows.reference, implementation(quantise_rows, "triton")):
        out, scales = torch.empty(x.shape, device="cuda").to(E4M3), torch.empty(4, device="cuda")
        run(out, scales, x)
        made.append((out, scales))
    for found, expected in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    out, scales = made[1]
    weight = torch.ones(640, 640, device="cuda").to(E4M3)
    for name in ("skinny", BLAS):
        y = torch.empty(4, 640, device="cuda", dtype=BF16)
        implementation(linear_fp8, name)(y, out, scales, weight, torch.ones(1, device="cuda"), None)
        assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_chain_in_a_graph_equals_one_step_at_a_time(rows):
    """Rows are quantised from what the product before wrote: with dependent launches a missing wait shows as other bits."""
    layers = [replace(SHAPES[3], rows=rows, outputs=1024, columns=1024, seed=s, one_scale=bool(s % 2)).operands("cuda") for s in range(8)]
    start = torch.randn(rows, 1024, device="cuda").to(BF16)
    stream, x, scales = start.clone(), torch.empty(rows, 1024, device="cuda").to(E4M3), torch.empty(rows, device="cuda")
    quantise, product = implementation(quantise_rows, "triton"), implementation(linear_fp8, "skinny")

    def forward(synchronous: bool) -> None:
        for _, _, _, weight, weight_scales, bias in layers * 6:
            quantise(x, scales, stream)
            if synchronous:
                torch.cuda.synchronize()
            product(stream, x, scales, weight, weight_scales, bias)
            if synchronous:
                torch.cuda.synchronize()

    forward(True)
    expected = stream.clone()
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(False)
    for _ in range(20):
        stream.copy_(start)
        x.zero_()
        scales.fill_(float("nan"))
        graph.replay()
        assert torch.equal(stream, expected)


@pytest.mark.parametrize("one_scale", [False, True])
def test_blas_in_a_graph(one_scale):
    """What it keeps was made before; it runs on the capturing stream."""
    operands = Case(300, 1024, 2048, biased=True, one_scale=one_scale).operands("cuda")
    run = implementation(linear_fp8, BLAS)
    run(*operands)
    expected = operands[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*operands)
    operands[0].fill_(float("nan"))
    graph.replay()
    assert torch.equal(operands[0], expected)


def test_sums_are_in_float32():
    """A large product, then thousands of small ones that fast sums of tensor cores lose: the last of 14 bits of 448 * 448 is worth 16, and these are 9."""
    x, weight = torch.full((16, 16384), 3.0, device="cuda").to(E4M3), torch.full((64, 16384), 3.0, device="cuda").to(E4M3)
    x[:, 0], weight[:, 0] = 448, 448
    ones = torch.ones(16, device="cuda")
    expected = 448 * 448 + 9.0 * 16383
    assert not fp8.FAST_SUMS
    for name in ("skinny", BLAS):
        out = torch.empty(16, 64, device="cuda", dtype=BF16)
        implementation(linear_fp8, name)(out, x, ones, weight, torch.ones(64, device="cuda"), None)
        assert (out.float() / expected - 1).abs().max() < 2**-6, name
