"""The ops on 8-bit floats: their references against float64 and by hand, what becomes of extremes and NaN, and their costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_rows import E4M3, Case, close, quantised, truth, uneven_rows

from flatout.kernels.fp8 import linear_fp8, quantise_rows
from flatout.kernels.op import Cost, recording

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = torch.full(x.shape, NAN).to(E4M3), torch.full(x.shape[:1], NAN)
    quantise_rows(out, scales, x)
    return out, scales


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [16, 80, 576])
def test_every_value_is_the_nearest(width, dtype):
    x = uneven_rows(width, dtype)
    out, scales = rows_of(x)
    expected, expected_scales = quantised(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(out.float(), expected.float())
    assert out.float().isfinite().all() and (scales > 0).all() and scales.isfinite().all()


def test_rows_by_hand():
    """A row's largest becomes 448 of either sign; what is half a step between two becomes the even one; what is too small becomes 0."""
    x = torch.tensor([[448, -448, 17, 19, 2**-9, 2**-10], [-0.5, 0.25, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    out, scales = rows_of(x)
    assert scales.tolist() == [1, pytest.approx(0.5 / 448, rel=1e-7), 1]
    assert out.float().tolist() == [[448, -448, 16, 20, 2**-9, 0], [-448, 224, 0, 0, 0, 0], [0] * 6]


def test_the_largest_saturates():
    """Whatever the largest of a row is, divided by its scale it is 448 to a rounding; it never becomes NaN, which is what follows 448."""
    x = torch.rand(4096, 16, generator=torch.Generator().manual_seed(1)) * 1e-3
    out, _ = rows_of(x)
    assert (out.float().amax(-1) == 448).all()


def test_numbers_that_are_not_finite_stay_in_their_rows():
    x = torch.ones(4, 32)
    x[1, 5], x[2, 7] = NAN, -INF
    out, scales = rows_of(x)
    assert scales[1].isnan() and out[1].float().isnan().all()
    assert scales[2] == INF and out[2, 7].float().isnan() and (out[2, :7].float() == 0).all()
    assert (out[[0, 3]].float() == 448).all()


def test_a_quantised_row_is_near_the_row():
    """Half of the last of three binary places, or of the least step."""
    x = torch.randn(7, 640, generator=torch.Generator().manual_seed(2))
    out, scales = rows_of(x)
    error = (out.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= x.abs() * 2.0**-4 + scales[:, None] * 2.0**-10).all()


CASES = [Case(0, 40, 64), Case(0, 17, 48, FP16, biased=True), Case(0, 33, 592, biased=True, one_scale=True), Case(0, 1, 16, one_scale=True)]


@pytest.mark.parametrize("rows", [1, 2, 9, 70])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, rows):
    operands = replace(case, rows=rows).operands()
    linear_fp8(*operands)
    close(operands[0], truth(*operands[1:]))


def test_products_of_the_largest_and_of_nothing():
    """Sums of 448 * 448 pass float16's range and need float32; NaN reaches its own row and its own output only."""
    x, weight = torch.full((3, 4096), 448.0).to(E4M3), torch.full((16, 4096), 448.0).to(E4M3)
    x[1], weight[5] = 0, torch.zeros(4096)
    out = torch.empty(3, 16, dtype=FP16)
    scale = torch.tensor([1e-4, 1.0, 1e-5])
    linear_fp8(out, x, scale, weight, torch.tensor([1e-4]), None)
    expected = torch.tensor([448 * 448 * 4096 * 1e-8, 0, 448 * 448 * 4096 * 1e-9])[:, None].repeat(1, 16)
    expected[:, 5] = 0
    torch.testing.assert_close(out.float(), expected, rtol=2**-10, atol=0)
    x[0, 3], weight[7, 9] = NAN, NAN
    linear_fp8(out, x, scale, weight, torch.tensor([1e-4]), None)
    stained = torch.zeros(3, 16, dtype=torch.bool)
    stained[0], stained[:, 7] = True, True
    assert torch.equal(out.isnan(), stained)


def test_from_floats_through_both():
    """Rows quantised and multiplied, against the product of the floats: e4m3 keeps 4 binary digits, whose errors add up at random."""
    draw = torch.Generator().manual_seed(4)
    x, weight = torch.randn(5, 1024, generator=draw), torch.randn(48, 1024, generator=draw) / 32
    out = torch.empty(5, 48, dtype=BF16)
    linear_fp8(out, *rows_of(x), *rows_of(weight), None)
    assert (out.float() - x @ weight.T).square().mean().sqrt() < 0.05


def test_costs():
    """On meta tensors, by hand: one byte a weight."""
    with recording(execute=False) as recorder, torch.device("meta"):
        x, scales, wide = torch.empty(3, 64, dtype=E4M3), torch.empty(3), torch.empty(3, 64, dtype=BF16)
        quantise_rows(x, scales, wide)
        out, weight, bias = torch.empty(3, 32, dtype=BF16), torch.empty(32, 64, dtype=E4M3), torch.empty(32, dtype=BF16)
        linear_fp8(out, x, scales, weight, torch.empty(32), bias)
        linear_fp8(out, x, scales, weight, torch.empty(1), None)
    quantise, product, plain = (e.cost for e in recorder.entries)
    assert quantise == Cost(activations=3 * 64 * 3 + 12, flops=3 * 3 * 64)
    assert product == Cost(weights=32 * 64 + 32 * 4 + 32 * 2, activations=3 * 32 * 2 + 3 * 64 + 12, flops=2 * 3 * 32 * 64 + 2 * 3 * 32)
    assert plain.weights == 32 * 64 + 4


def test_nothing_but_the_references_runs_on_the_cpu():
    operands = Case(2, 32, 64).operands()
    assert not [i.name for i in linear_fp8.implementations if i.accepts(*operands)]
    assert not [i.name for i in quantise_rows.implementations if i.accepts(operands[1], operands[2], operands[1].to(BF16))]
