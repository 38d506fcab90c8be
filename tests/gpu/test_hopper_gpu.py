"""Products on sm_90 in CUDA C++: real shapes and every way of cutting them against float64, the same bits again, chained in graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from products import EPS, OPS, Case, chain_holds, close, implementation

if not torch.cuda.is_available():  # before triton is imported: tests/kernels choose its interpreter
    pytest.skip("needs a CUDA device", allow_module_level=True)

from flatout.kernels.gpu import cuda, hopper
from flatout.kernels.gpu.hopper import LEAST_GATED, LEAST_ROWS, MOST_NORMED, MOST_ROWS, Tiles
from flatout.kernels.norm import rms_norm

HERE = torch.device("cuda", torch.cuda.current_device())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda.available(HERE), reason="needs sm_90 and NVRTC")]
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    Case("norm_linear", 0, 4608, 3584, biased=True),  # Qwen2-7B
    Case("linear_add", 0, 3584, 18944),
    Case("norm_gated", 0, 18944, 3584),
    Case("linear", 0, 6144, 4096),  # Llama-3.1-8B
    Case("norm_gated", 0, 14336, 4096, FP16),
    Case("linear_add", 0, 2048, 8192, FP16, scale=0.22, biased=True),  # Llama-3.2-1B
    Case("norm_gated", 0, 1536, 576, activation="gelu", biased=True),
    Case("norm_gated", 0, 4864, 896, activation="gelu_tanh"),
]


def normed(case: Case, given: dict) -> torch.Tensor:
    """The rows as the product gets them."""
    if given["norm"] is None:
        return given["x"]
    rows = torch.empty_like(given["x"])
    rms_norm.dispatch(rows, given["x"], given["norm"], EPS, case.offset)
    return rows


def truth(case: Case, given: dict) -> torch.Tensor:
    """Of the rows as rounded by their norm: that rounding is the norm's."""
    plain = replace(case, form={"norm_linear": "linear"}.get(case.form, case.form))
    rows = normed(case, given)
    if case.form == "norm_gated":
        y = rows.double() @ given["weight"].double().T
        if given["bias"] is not None:
            y += given["bias"].double()
        gate, up = y.chunk(2, -1)
        act = {"silu": lambda g: g * torch.sigmoid(g), "gelu": torch.nn.functional.gelu}.get(
            case.activation, lambda g: torch.nn.functional.gelu(g, approximate="tanh")
        )
        return act(gate) * up
    return plain.truth({**given, "x": rows, "norm": None})


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.form}-{c.outputs}x{c.columns}")
def test_real_shapes(case):
    least = LEAST_GATED if case.form == "norm_gated" else LEAST_ROWS
    most = MOST_NORMED if case.form == "norm_linear" else MOST_ROWS
    for rows in (5, 9, 63, 64, 65, 127, 128, 129, 191, 192):
        if not least <= rows <= most:
            continue
        asked = replace(case, rows=rows)
        given = asked.operands("cuda")
        expected = truth(asked, given)
        again = {name: t if t is None else t.clone() for name, t in given.items()}
        operands = asked.arguments(given)
        assert next(i.accepts for i in OPS[case.form].implementations if i.name == "hopper")(*operands)
        run = implementation(OPS[case.form], "hopper")
        run(*operands)
        close(given["out"], expected, asked, rounded_rows=False)
        run(*asked.arguments(again))
        assert torch.equal(given["out"], again["out"]), rows


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_way_of_cutting(cluster):
    """Rows, outputs and columns that fill no tile; more programs than work and less; clusters of any size."""
    choose = random.Random(cluster)
    for seed in range(14):
        form = choose.choice(SHAPES)
        gated = form.form == "norm_gated"
        warpgroups = choose.choice((1, 2, 3))
        rows, outputs, columns = choose.randint(1, 64 * warpgroups), 8 * choose.randint(1, 160), 8 * choose.choice((8, 9, 31, 64, 100, 333))
        unit = 16 if gated else 8
        chosen = Tiles(choose.randrange(unit, 161 if warpgroups == 3 else 241, unit), warpgroups, choose.choice((2, 3, 4)), cluster)
        while cluster > 1 and chosen.rows * (chosen.weight + 4) * 4 > chosen.stages * (chosen.rows + chosen.weight) * 128:
            chosen = replace(chosen, stages=chosen.stages + 1)
        if chosen.shared_memory > 230_000:
            continue
        case = replace(form, rows=rows, outputs=outputs, columns=columns, seed=seed)
        given = case.operands("cuda")
        expected = truth(case, given)
        keywords = {k: v for k, v in case.keywords().items() if k in ("scale", "add", "activation")}
        hopper.product(given["out"], normed(case, given), given["weight"], given["bias"], **keywords, chosen=chosen)
        close(given["out"], expected, case, rounded_rows=False)


@pytest.mark.parametrize("rows", [5, 64, 100, 190])
def test_a_chain_in_a_graph_equals_one_step_at_a_time(rows):
    chain_holds(hopper.product, SHAPES[2], SHAPES[1], rows, normed=False)
