"""The kernels of few rows and the invariant product in Triton's interpreter: every form over the edges of every tile."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from products import OPS, Case, close, implementation

triton = pytest.importorskip("triton")

from flatout.kernels.gpu import linear as gpu  # noqa: E402
from flatout.kernels.gpu.device import INTERPRETED, Facts  # noqa: E402
from flatout.kernels.linear import linear  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests run the kernels themselves")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = [
    Case("linear", 0, 0, 0, biased=True),
    Case("linear", 0, 0, 0, FP16),
    Case("linear_add", 0, 0, 0, scale=0.5, biased=True),
    Case("linear_add", 0, 0, 0, FP16),
    Case("norm_gated", 0, 0, 0, FP16),
    Case("norm_linear", 0, 0, 0, biased=True),
    Case("norm_linear", 0, 0, 0, wide=True, offset=1.0),
    Case("norm_gated", 0, 0, 0),
    Case("norm_gated", 0, 0, 0, biased=True, activation="gelu_tanh", offset=1.0),
    Case("norm_gated", 0, 0, 0, activation="gelu"),
]
NAMES = [f"{c.form}-{str(c.dtype)[6:]}-{c.activation}" for c in FORMS]


def run(case: Case, chosen: gpu.Config) -> None:
    given = case.operands()
    expected = case.truth(given)
    gpu.product(given["out"], given["x"], given["weight"], given["bias"], given["norm"], **case.keywords(), chosen=chosen)
    close(given["out"], expected, case, rounded_rows=chosen.kernel == "tiles")


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_vector_over_the_edges_of_its_tiles(form):
    """Rows up to what a program holds; outputs and columns one unit below, at and above a tile."""
    width = 4 if form.form == "norm_gated" else 8
    for held, rows, outputs, columns in (
        (1, 1, width - 1, 48), (1, 1, width, 64), (1, 1, width + 1, 80), (1, 1, 2 * width, 192), (1, 1, 1, 16),
        (2, 2, width + 1, 64), (4, 3, width - 1, 80), (4, 4, width, 128),
    ):  # fmt: skip
        run(replace(form, rows=rows, outputs=outputs, columns=columns, seed=outputs), gpu.Config("vector", held, 8, 64, 1))


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_tiles_over_their_edges_and_shares(form):
    """More shares than steps leave some of them nothing to do. Counters are left at zero."""
    width = 8 if form.form == "norm_gated" else 16
    for held, rows, outputs, columns, shares in (
        (8, 7, width - 1, 48, 1), (8, 8, width, 64, 1), (16, 9, width + 1, 80, 1),
        (8, 5, width + 1, 160, 2), (16, 16, width, 80, 5), (16, 15, 2 * width - 1, 224, 5),
    ):  # fmt: skip
        chosen = gpu.Config("tiles", held, 16, 32, 1, shares=shares, stages=2)
        run(replace(form, rows=rows, outputs=outputs, columns=columns, seed=outputs), chosen)
    assert not gpu.scratch(torch.device("cpu"))[1].any()


@pytest.mark.parametrize("rows", [1, 3, 5, 9, 64])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[5], FORMS[6]], ids=lambda c: c.form)
def test_implementations_with_their_own_blocks(form, rows):
    case = replace(form, rows=rows, outputs=40, columns=144, seed=rows)
    given = case.operands()
    expected = case.truth(given)
    implementation(OPS[case.form], "skinny")(*case.arguments(given))
    close(given["out"], expected, case, rounded_rows=rows > gpu.VECTOR_ROWS)


def test_rows_in_strides_and_nothing_beyond():
    """x and out are columns of wider buffers; what lies beside stays as it was."""
    for rows in (1, 4, 7):
        case = Case("linear", rows, 24, 64)
        given = case.operands()
        expected = case.truth(given)
        wide_x, wide_out = torch.full((rows + 2, 96), float("nan"), dtype=BF16), torch.full((rows + 2, 48), 7.0, dtype=BF16)
        wide_x[1:-1, 16:80] = given["x"]
        gpu.product(wide_out[1:-1, 8:32], wide_x[1:-1, 16:80], given["weight"], None)
        close(wide_out[1:-1, 8:32], expected, case, rounded_rows=False)
        wide_out[1:-1, 8:32] = 7.0
        assert (wide_out == 7.0).all()


def invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=dtype)
    implementation(linear, "invariant")(out, x, weight, bias, True)
    return out


@pytest.mark.parametrize(("dtype", "wide"), [(BF16, False), (FP16, True), (FP32, False)])
def test_a_row_of_the_invariant_product_never_changes(dtype, wide):
    case = Case("linear", 259, 70, 136 if dtype != FP32 else 83, dtype, biased=True, wide=wide)
    given = case.operands()
    x, weight, bias = given["x"], given["weight"], given["bias"]
    whole = invariant(x, weight, bias, given["out"].dtype)
    close(whole, case.truth(given), case, rounded_rows=False)
    for rows in (slice(0, 1), slice(63, 66), slice(127, 256)):
        assert torch.equal(invariant(x[rows], weight, bias, whole.dtype), whole[rows])


def test_who_runs_where():
    """On the CPU none of it; asked for invariance, no other implementation than those that have it."""
    case = Case("linear", 2, 32, 64)
    operands = case.arguments(case.operands())
    assert {i.name for i in linear.implementations if i.accepts(*operands) and not i.native} == {"blas", "weight_first"}
    assert not {i.name for i in linear.implementations if i.accepts(*operands[:-1], True)}
    with pytest.raises(RuntimeError, match="linear: none of its implementations can give a row the same bits"):
        linear(*case.arguments(case.operands(), invariant=True))


@pytest.mark.parametrize("device", [INTERPRETED, Facts((8, 0), 108, 166_912, False), Facts((9, 0), 132, 232_448, True)])
def test_blocks_fit_the_device(device):
    shapes = [(37888, 3584), (3584, 18944), (152064, 3584), (2048, 2048), (64, 16), (576, 576), (262144, 8192), (16, 65536)]
    for (n, k), normed in product(shapes, (False, True)):
        for m in range(1, gpu.MOST_ROWS + 1):
            c = gpu.config(m, n, k, normed, device)
            assert c.rows >= m and c.block_n >= 2
            if c.kernel == "vector":
                assert c.block_k == 256 * c.warps
                continue
            blocks = -(-n // c.block_n)
            assert c.shared_memory() <= device.shared_memory and c.shares >= 1
            if c.shares > 1:
                assert blocks <= gpu.ARRIVALS and blocks * c.shares * (c.block_n + 1) * c.rows <= gpu.PARTIALS
