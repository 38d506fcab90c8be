"""The kernels on 8-bit floats in Triton's interpreter: products over the edges of every tile and in shares, rows to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_rows import E4M3, Case, close, quantised, truth, uneven_rows
from products import implementation

triton = pytest.importorskip("triton")

from flatout.kernels.fp8 import linear_fp8, quantise_rows  # noqa: E402
from flatout.kernels.gpu import fp8 as gpu  # noqa: E402
from flatout.kernels.gpu.device import INTERPRETED, Facts  # noqa: E402
from flatout.kernels.gpu.linear import ARRIVALS, PARTIALS, scratch  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests run the kernels themselves")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = [
    Case(0, 0, 0, biased=True),
    Case(0, 0, 0, FP16),
    Case(0, 0, 0, one_scale=True),
    Case(0, 0, 0, FP16, biased=True, one_scale=True),
]


@pytest.fixture(autouse=True)
def conversions(monkeypatch):
    """Triton 3.6's interpreter converts to e4m3 by cutting bits, and past 448 to other numbers: torch's conversion, which rounds, after a clamp, as the GPU's."""
    from triton.language import float8e4nv, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_fp_to_fp

    def convert(self, src, dst_type, rounding_mode):
        if dst_type.scalar != float8e4nv:
            return plain(self, src, dst_type, rounding_mode)
        assert src.dtype.scalar == float32
        made = torch.from_numpy(src.data.copy()).clamp(-448, 448).to(E4M3)
        return TensorHandle(made.view(torch.uint8).numpy(), float8e4nv)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", convert)


def quantise(x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(x.shape, float("nan")).to(E4M3) if out is None else out
    scales = torch.full(x.shape[:1], float("nan"))
    implementation(quantise_rows, "triton")(out, scales, x)
    return out, scales


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [16, 63, 64, 65, 592])
def test_rows(width, dtype):
    x = uneven_rows(width, dtype)
    if dtype == BF16:
        x[7] = 0  # the interpreter's bfloat16 has no subnormal numbers
    out, scales = quantise(x)
    expected, expected_scales = quantised(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(out.float(), expected.float())


def test_rows_that_are_not_finite():
    x = torch.ones(4, 48)
    x[1, 5], x[2, 7] = float("nan"), float("-inf")
    found, scales = quantise(x)
    expected, expected_scales = torch.empty_like(found), torch.empty_like(scales)
    quantise_rows.reference(expected, expected_scales, x)
    torch.testing.assert_close(scales, expected_scales, equal_nan=True, rtol=0, atol=0)
    assert found[1].float().isnan().all()  # the infinite row's NaN, 0 times infinity, is clamped by this file's conversion
    assert torch.equal(found[[0, 3]].float(), expected[[0, 3]].float()) and (found[2, :7].float() == 0).all()


def test_rows_in_strides_and_nothing_beside():
    wide = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(BF16)
    out = torch.full((5, 80), 3.0).to(E4M3)
    _, scales = quantise(wide[:, 16:80], out[:, :64])
    expected, expected_scales = quantised(wide[:, 16:80])
    assert torch.equal(scales, expected_scales) and torch.equal(out[:, :64].float(), expected.float())
    assert (out[:, 64:].float() == 3).all()


def run(case: Case, chosen: gpu.Blocks | None = None) -> torch.Tensor:
    operands = case.operands()
    gpu.product(*operands, chosen=chosen)
    close(operands[0], truth(*operands[1:]))
    return operands[0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tiles_over_their_edges_and_shares(form):
    """More shares than steps leave some of them nothing to do. Counters are left at zero."""
    for held, rows, outputs, columns, shares in (
        (8, 1, 15, 48, 1), (8, 7, 15, 48, 1), (8, 8, 16, 64, 1), (16, 9, 17, 80, 1), (8, 5, 17, 160, 2), (16, 16, 16, 80, 5),
        (16, 15, 31, 224, 5), (64, 64, 33, 96, 2),
    ):  # fmt: skip
        run(replace(form, rows=rows, outputs=outputs, columns=columns, seed=outputs), gpu.Blocks(held, 16, 32, 1, 2, shares=shares))
    assert not scratch(torch.device("cpu"))[1].any()


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 33, 64])
def test_with_its_own_blocks(rows):
    for form in FORMS[::3]:
        run(replace(form, rows=rows, outputs=40, columns=1040, seed=rows))
    case = replace(FORMS[0], rows=rows, outputs=130, columns=144)
    assert torch.equal(run(case), run(case))


def test_rows_of_a_product_in_strides_and_nothing_beside():
    _, x, *rest = Case(5, 24, 64, biased=True).operands()
    expected = truth(x, *rest)
    wide_x, wide_out = torch.full((5, 96), 1.0).to(E4M3), torch.full((5, 40), 7.0, dtype=BF16)
    wide_x[:, 16:80] = x
    gpu.product(wide_out[:, 8:32], wide_x[:, 16:80], *rest)
    close(wide_out[:, 8:32], expected)
    assert (wide_out[:, :8] == 7).all() and (wide_out[:, 32:] == 7).all()


def test_from_floats_through_both():
    draw = torch.Generator().manual_seed(4)
    x, weight = torch.randn(5, 512, generator=draw), torch.randn(48, 512, generator=draw) / 512**0.5
    out = torch.empty(5, 48, dtype=BF16)
    implementation(linear_fp8, "skinny")(out, *quantise(x), *quantise(weight), None)
    assert (out.float() - x @ weight.T).square().mean().sqrt() < 0.05


@pytest.mark.parametrize("device", [INTERPRETED, Facts((8, 9), 128, 101_376, False), Facts((9, 0), 132, 232_448, True)])
def test_blocks_fit_the_device(device):
    for n, k in [(37888, 3584), (3584, 18944), (152064, 3584), (2048, 2048), (64, 16), (576, 576), (262144, 8192), (16, 65536)]:
        for m in range(1, gpu.MOST_ROWS + 1):
            c = gpu.blocks(m, n, k, device)
            assert c.rows >= m and c.shared_memory() <= device.shared_memory and c.stages >= 2 and c.shares >= 1
            assert c.block_n <= 32 * c.warps or not device.pdl  # a thread for each line that is fetched ahead
            if c.shares > 1:
                count = -(-n // c.block_n)
                assert count <= ARRIVALS and count * c.shares * c.block_n * c.rows <= PARTIALS
