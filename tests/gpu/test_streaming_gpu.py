"""Products of few rows in CUDA C++: real shapes and every way of cutting them against float64, the same bits again, chained in graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from products import OPS, Case, chain_holds, close, implementation

if not torch.cuda.is_available():  # before triton is imported: tests/kernels choose its interpreter
    pytest.skip("needs a CUDA device", allow_module_level=True)

from flatout.kernels import gpu
from flatout.kernels.gpu import cuda, streaming
from flatout.kernels.gpu.streaming import LEAST_ROWS, MOST_GATED, MOST_ROWS, Cut

HERE = torch.device("cuda", torch.cuda.current_device())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda.available(HERE), reason="needs sm_90 and NVRTC")]
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    Case("norm_linear", 0, 4608, 3584, biased=True),  # Qwen2-7B
    Case("linear_add", 0, 3584, 18944),
    Case("norm_gated", 0, 18944, 3584),
    Case("norm_linear", 0, 152064, 3584, wide=True),
    Case("linear", 0, 6144, 4096, FP16, biased=True),  # Llama-3.1-8B
    Case("linear", 0, 128256, 2048, wide=True),  # Llama-3.2-1B
    Case("linear_add", 0, 2048, 8192, FP16, scale=0.22, biased=True),
    Case("norm_gated", 0, 1544, 576, activation="gelu", biased=True),
    Case("norm_gated", 0, 4864, 896, activation="gelu_tanh", offset=1.0),
    Case("linear", 0, 8, 64),
]
gpu.load()


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.form}-{c.outputs}x{c.columns}")
def test_real_shapes(case):
    for rows in range(LEAST_ROWS, (MOST_GATED if case.form == "norm_gated" else MOST_ROWS) + 1):
        asked = replace(case, rows=rows)
        given = asked.operands("cuda")
        expected = asked.truth(given)
        again = {name: t if t is None else t.clone() for name, t in given.items()}
        operands = asked.arguments(given)
        chosen = next(i for i in OPS[case.form].implementations if i.name == "stream")
        assert chosen.accepts(*operands) and chosen.sure(*operands) == (case.outputs > 2000), "of low weights it competes"
        chosen.run(*operands)
        close(given["out"], expected, asked, rounded_rows=case.form.startswith("norm"))
        chosen.run(*asked.arguments(again))
        assert torch.equal(given["out"], again["out"]), rows


@pytest.mark.parametrize("warps", [1, 3, 8, 16])
def test_every_way_of_cutting(warps):
    """Outputs that fill no program, more warps than stages of columns, fewer columns than stages; gated rows up to 16 too."""
    choose = random.Random(warps)
    for seed in range(14):
        form = choose.choice(SHAPES)
        gated = form.form == "norm_gated"
        rows, outputs, columns = choose.randint(1, 16), 8 * choose.randint(1, 160), 64 * choose.choice((1, 2, 3, 5, 14, 40))
        tiles = choose.choice((2, 4, 6) if gated else (1, 2, 3, 5))
        chosen = Cut(tiles, warps, choose.choice((2, 3, 5)), choose.choice((1, 2, 8)))
        if chosen.shared_memory > 227 * 1024:
            continue
        case = replace(form, rows=rows, outputs=outputs, columns=columns, seed=seed)
        given = case.operands("cuda")
        expected = case.truth(given)
        norm = {"norm_weight": given["norm"]} if given["norm"] is not None else {}
        streaming.product(given["out"], given["x"], given["weight"], given["bias"], **norm, **case.keywords(), chosen=chosen)
        close(given["out"], expected, case, rounded_rows=bool(norm))


def test_rows_further_apart_than_they_are_long():
    whole = torch.randn(11, 1024 + 64, device="cuda").bfloat16()
    weight = torch.randn(512, 1024, device="cuda").bfloat16() / 32
    wide = torch.full((11, 640), float("nan"), device="cuda", dtype=torch.bfloat16)
    x, out = whole[:, 8 : 8 + 1024], wide[:, 64 : 64 + 512]
    streaming.product(out, x, weight, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=2**-7)
    assert wide[:, :64].isnan().all() and wide[:, 64 + 512 :].isnan().all()


def test_what_it_declines():
    def accepts(case: Case) -> bool:
        operands = case.arguments(case.operands("cuda"))
        return next(i for i in OPS[case.form].implementations if i.name == "stream").accepts(*operands)

    plain, gated = Case("linear", 8, 1024, 1024), Case("norm_gated", 8, 1024, 1024)
    assert accepts(plain) and accepts(gated)
    for other in (
        replace(plain, rows=1), replace(plain, rows=17), replace(plain, columns=1024 + 32), replace(plain, outputs=1028),
        replace(plain, dtype=torch.float32), replace(gated, rows=9), replace(gated, dtype=FP16),
    ):  # fmt: skip
        assert not accepts(other), other
    assert not next(i for i in OPS["linear"].implementations if i.name == "stream").accepts(*plain.arguments(plain.operands("cuda"), True))


@pytest.mark.parametrize("rows", [2, 8, 13])
def test_a_chain_in_a_graph_equals_one_step_at_a_time(rows):
    chain_holds(streaming.product, SHAPES[2], SHAPES[1], rows, normed=True)


def test_it_is_what_runs():
    assert implementation(OPS["linear"], "stream") is OPS["linear"]._choose(
        ("test",), replace(SHAPES[4], rows=8).arguments(replace(SHAPES[4], rows=8).operands("cuda"))
    )
