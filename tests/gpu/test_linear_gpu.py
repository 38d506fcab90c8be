"""Products of few rows and the invariant product on CUDA: real shapes against float64, the same bits again, in graphs and in any company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from products import OPS, Case, chain_holds, close, implementation

if not torch.cuda.is_available():  # before triton is imported: tests/kernels choose its interpreter
    pytest.skip("needs a CUDA device", allow_module_level=True)

from flatout.kernels.gpu import linear as gpu
from flatout.kernels.linear import linear

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QWEN2_7B = [
    Case("norm_linear", 0, 4608, 3584, biased=True),
    Case("linear_add", 0, 3584, 3584),
    Case("norm_gated", 0, 18944, 3584),
    Case("linear_add", 0, 3584, 18944),
]
OTHERS = [
    Case("norm_linear", 0, 128256, 2048, wide=True),
    Case("linear", 0, 2048, 2048, FP16, biased=True),
    Case("linear", 0, 2048, 2048, FP16, wide=True),
    Case("norm_gated", 0, 8192, 2048, activation="gelu_tanh", offset=1.0, biased=True),
    Case("norm_gated", 0, 1536, 576, activation="gelu"),
    Case("norm_linear", 0, 960, 576, wide=True),
    Case("linear_add", 0, 3577, 8192, scale=0.22, biased=True),
]


def twice(case: Case) -> None:
    """The implementation against float64, and against itself."""
    given = case.operands("cuda")
    expected = case.truth(given)
    run = implementation(OPS[case.form], "skinny")
    operands = case.arguments(given)
    accepts = next(i.accepts for i in OPS[case.form].implementations if i.name == "skinny")
    assert accepts(*operands)
    again = {name: t if t is None else t.clone() for name, t in given.items()}
    run(*operands)
    close(given["out"], expected, case, rounded_rows=case.rows > gpu.VECTOR_ROWS)
    run(*case.arguments(again))
    assert torch.equal(given["out"], again["out"])


@pytest.mark.parametrize("case", QWEN2_7B + OTHERS, ids=lambda c: f"{c.form}-{c.outputs}x{c.columns}")
def test_real_shapes(case):
    for rows in (1, gpu.VECTOR_ROWS + 1, 8, 17, gpu.MOST_ROWS):  # a kernel each takes a second to compile
        if case.dtype == FP16 and "norm" in case.form and rows > gpu.VECTOR_ROWS:
            continue
        twice(replace(case, rows=rows))
    assert not gpu.scratch(torch.device("cuda", torch.cuda.current_device()))[1].any()


def test_random_shapes_and_blocks():
    """Odd numbers of outputs, columns that fill no tile, many shares."""
    choose = random.Random(5)
    for seed in range(32):
        form = choose.choice([*QWEN2_7B, *OTHERS])
        rows, outputs, columns = (
            choose.randint(1, gpu.MOST_ROWS),
            choose.choice((16, 17, 100, 127, 257, 640)),
            16 * choose.choice((1, 3, 16, 37, 64, 129)),
        )
        held = max(8, 1 << (rows - 1).bit_length())
        warps = choose.choice((1, 4)) if held < 32 else 4
        chosen = gpu.Config(
            "tiles", held, 16 * warps, choose.choice((32, 64, 128)), warps, choose.choice((1, 2, 3, 9)), 3, choose.choice((0, 512))
        )
        if rows <= 4 and choose.random() < 0.7:
            chosen = gpu.Config(
                "vector", 1 << (rows - 1).bit_length(), choose.choice((2, 8)), 256 * warps, warps, ahead=choose.choice((0, columns))
            )
        case = replace(form, rows=rows, outputs=outputs, columns=columns, seed=seed)
        given = case.operands("cuda")
        expected = case.truth(given)
        gpu.product(given["out"], given["x"], given["weight"], given["bias"], given["norm"], **case.keywords(), chosen=chosen)
        close(given["out"], expected, case, rounded_rows=chosen.kernel == "tiles")


@pytest.mark.parametrize("rows", [1, 4, 7, gpu.MOST_ROWS])
def test_a_chain_in_a_graph_equals_one_step_at_a_time(rows):
    chain_holds(gpu.product, QWEN2_7B[2], QWEN2_7B[3], rows, normed=True)


def invariant(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=dtype, device="cuda")
    implementation(linear, "invariant")(out, x, weight, bias, True)
    return out


@pytest.mark.parametrize(
    ("outputs", "columns", "dtype", "wide", "most"),
    [(4608, 3584, BF16, False, 4096), (3584, 18944, BF16, False, 1024), (960, 576, BF16, False, 20_000), (4864, 896, FP16, True, 2048),
     (1000, 2056, BF16, True, 300), (2048, 2048, FP32, False, 700), (333, 1001, FP32, False, 300)],
)  # fmt: skip
def test_a_row_of_the_invariant_product_never_changes(outputs, columns, dtype, wide, most):
    case = Case("linear", most, outputs, columns, dtype, biased=True, wide=wide)
    given = case.operands("cuda")
    x, weight, bias = given["x"], given["weight"], given["bias"]
    whole = invariant(x, weight, bias, given["out"].dtype)
    few = slice(0, 200)
    close(whole[few], case.truth({**given, "x": x[few], "out": given["out"][few]}), case, rounded_rows=False)
    for count in (1, 2, 3, 8, 17, 64, 127, 128, 129, 130, 255, 257, most - 1):
        for first in {0, 1, (most - count) // 2, most - count}:
            rows = slice(first, first + count)
            assert torch.equal(invariant(x[rows], weight, bias, whole.dtype), whole[rows]), (count, first)


def test_asked_for_invariance_nothing_else_runs():
    for dtype in (BF16, FP16, FP32):
        for rows in (1, 7, 300):
            case = Case("linear", rows, 64, 128, dtype)
            operands = case.arguments(case.operands("cuda"), invariant=True)
            assert [i.name for i in linear.implementations if i.accepts(*operands)] == ["invariant"]
    for op in OPS.values():
        if op is not linear:
            form = Case(op.name, 3, 64, 128)
            operands = form.arguments(form.operands("cuda"), invariant=True)
            assert [i.name for i in op.implementations if i.accepts(*operands)] == ["composed"]
