"""The native library's products of plain weights, bfloat16 and float32: on every instruction set of this machine, against float64; the bits of a
row; what the ops of kernels/linear.py leave to it. Pool and sanitizers are test_native.py's; the truth is native_reference.py's.
"""

from __future__ import annotations

import native_reference as reference
import numpy as np
import pytest
import torch
from native_cases import GATES, TYPES, check, rows_of

from flatout.kernels import linear as ops
from flatout.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library was not built")
KINDS = {16: torch.bfloat16, 32: torch.float32}
BOTH = pytest.mark.parametrize("kind", list(KINDS))


def weight_of(rng: np.random.Generator, kind: int, lines: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=(lines, columns)).astype(np.float32) * 0.05).to(KINDS[kind])


def product(x: torch.Tensor, weight: torch.Tensor, outputs: int | None = None, dtype: torch.dtype = torch.float32, **how) -> torch.Tensor:
    out = torch.empty(len(x), len(weight) if outputs is None else outputs, dtype=dtype)
    native.product(out, x, weight, 8 * weight.element_size(), **how)
    return out


LINES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 19, 31, 32, 33, 48, 61)  # around every tile of every instruction set
CASES = [
    # rows, outputs, columns; gate, types of x and out, columns between rows
    *((1 + m % 20, LINES[m % 17], 16 * (1 + m % 9), GATES[m % 4], "float32", "float32", m % 3) for m in range(180)),
    (1, 960, 576, None, "bfloat16", "bfloat16", 0),
    (5, 193, 592, "silu", "bfloat16", "bfloat16", 8),
    (7, 576, 1536, None, "bfloat16", "float32", 3),
    (16, 49, 2064, "gelu_tanh", "float32", "bfloat16", 5),
    (33, 64, 96, "gelu", "bfloat16", "bfloat16", 1),
    (64, 130, 272, None, "bfloat16", "bfloat16", 0),
]


@BOTH
def test_products_are_the_references(isa, kind):
    """Every tile, its edges and gates, with and without bias, norm and residual, while the threads change; and nothing beside is written."""
    rng = np.random.default_rng(kind)
    for number, (m, n, k, gate, x_type, out_type, pad) in enumerate(CASES):
        native.set_threads((1, 2, 3, 8)[number % 4])
        lines = 2 * n if gate else n
        weight = weight_of(rng, kind, lines, k)
        x = rows_of(rng, m, k, x_type, pad)
        whole = torch.full((m + 1, n + 5), 1.5, dtype=TYPES[out_type])
        out = whole[:m, :n].copy_(torch.from_numpy(rng.normal(size=(m, n))))
        bias = rng.normal(size=lines).astype(np.float32) if number % 3 else None
        norm = (rng.normal(size=k).astype(np.float32), 1e-5, float(number % 2)) if number % 5 < 3 else None
        add, scale = number % 7 < 4, (1.0, 0.25)[number % 2]
        truth = reference.plain_product(
            x.float().numpy(), weight.float().numpy(), kind, bias, norm, gate, out.double().numpy() if add else None, scale
        )
        native.product(
            out, x, weight, kind,
            None if bias is None else torch.from_numpy(bias),
            (torch.from_numpy(norm[0]), *norm[1:]) if norm else None,
            gate, add, scale,
        )  # fmt: skip
        check(out, truth)
        assert (whole[:, n:] == 1.5).all() and (whole[m] == 1.5).all()


@BOTH
def test_integers_are_exact(isa, kind):
    """Every column meets its own, whatever lies around them."""
    rng = np.random.default_rng(1)
    for columns in range(16, 500, 16):
        m, n = int(rng.integers(1, 20)), int(rng.integers(1, 50))
        x, weight = (torch.from_numpy(rng.integers(-9, 10, (rows, columns)).astype(np.float32)) for rows in (m, n))
        around = torch.full((n * columns + 2,), float("nan"), dtype=KINDS[kind])
        around[1:-1] = weight.flatten()
        assert torch.equal(product(x, around[1:-1].view(n, columns)), x @ weight.t())


def test_rows_are_rounded_to_the_weights_type(isa):
    """To the nearest bfloat16, ties to even, as torch rounds; float32 stays as it is. Whatever their sizes."""
    rng = np.random.default_rng(2)
    x = torch.from_numpy((rng.normal(size=(200, 48)) * 10.0 ** rng.integers(-30, 36, (200, 1))).astype(np.float32))
    x[0] = 1 + torch.arange(48) * 2.0**-8  # every other one in the middle between two
    assert torch.equal(product(x, torch.eye(48).bfloat16()), x.bfloat16().float())
    assert torch.equal(product(x, torch.eye(48)), x)


def test_a_norm_is_rounded_once(isa):
    x, norm = torch.randn(5, 96), torch.rand(96) + 0.5
    wide = (x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5) * norm.double()).float()
    found = product(x, torch.eye(96).bfloat16(), norm=(norm, 1e-5, 0.0))
    assert torch.equal(found, found.bfloat16().float())
    assert (found == wide.bfloat16().float()).float().mean() > 0.99  # but where float32 fell on the other side of a middle
    torch.testing.assert_close(found, wide, rtol=2.0**-8, atol=0)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(isa, kind, bad):
    rng = np.random.default_rng(3)
    weight, x = weight_of(rng, kind, 70, 112), rows_of(rng, 7, 112)
    others = [0, 1, 3, 4, 5, 6]
    for how in ({}, {"norm": (torch.ones(112), 1e-5, 0.0)}, {"outputs": 35, "gate": "silu"}):
        clean = product(x, weight, **how)
        spoilt = x.clone()
        spoilt[2, 40] = bad
        out = product(spoilt, weight, **how)
        assert torch.equal(out[others], clean[others])
        assert not out[2].isfinite().all() if "gate" in how else not out[2].isfinite().any()
    nan = product(torch.full((3, 112), float("nan")), weight, dtype=torch.bfloat16)
    assert nan.isnan().all()


@BOTH
@pytest.mark.parametrize("gate", GATES)
def test_a_rows_bits_depend_on_nothing_else(isa, kind, gate):
    """Alone, in a batch of any height, among any number of threads, and whatever lines are beside a line."""
    rng = np.random.default_rng(4)
    k, n = 304, 203
    weight, x = weight_of(rng, kind, 2 * n if gate else n, k), rows_of(rng, 40, k)
    how = {"norm": (torch.from_numpy(rng.normal(size=k).astype(np.float32)), 1e-6, 1.0), "gate": gate}
    alone = torch.cat([product(x[r : r + 1], weight, n, **how) for r in range(40)])
    for threads in (1, 2, 4):
        assert native.set_threads(threads) == threads
        for m in range(1, 41) if threads == 2 else (1, 2, 3, 16, 29, 40):
            assert torch.equal(product(x[40 - m :], weight, n, **how), alone[40 - m :])
    if gate is None:
        for first, last in ((1, 2), (3, 40), (16, 203)):
            assert torch.equal(product(x, weight[first:last], **how), alone[:, first:last])


@BOTH
def test_out_may_be_x(isa, kind):
    rng = np.random.default_rng(5)
    weight, x = weight_of(rng, kind, 80, 80), rows_of(rng, 9, 80)
    expected = product(x, weight)
    native.product(x, x, weight, kind)
    assert torch.equal(x, expected)


def test_what_does_not_fit_is_refused():
    x, out, weight = torch.zeros(2, 64), torch.zeros(2, 33), torch.zeros(33, 64)
    for bad in (
        lambda: native.product(out, x, weight, 16),
        lambda: native.product(out, x, weight.half(), 16),
        lambda: native.product(out[:, :16], x, weight, 32),
        lambda: native.product(out, x, weight, 32, gate="silu"),
        lambda: native.product(out, x, torch.zeros(64, 33).t(), 32),
        lambda: native.product(out, x[:, :56], torch.zeros(33, 56), 32),
        lambda: native.product(out, x, weight, 32, bias=torch.zeros(32)),
        lambda: native.product(out, x, weight, 32, norm=(torch.zeros(32), 0.0, 0.0)),
        lambda: native.product(out[:, :0], x, weight[:0], 32),
    ):
        with pytest.raises(ValueError, match=r"does not fit|needs|declines"):
            bad()
    assert (out == 0).all()
    native.product(out[:0], x[:0], weight, 32)


# ---------------------------------------------------------------- the ops


def taken(op, *operands) -> bool:
    return next(i for i in op.implementations if i.name == "native").accepts(*operands)


def test_the_ops_leave_few_rows_on_the_cpu_to_it():
    x, out, weight, bias = torch.zeros(64, 32), torch.zeros(64, 48), torch.zeros(48, 32), torch.zeros(48)
    norm, stream = (torch.ones(32), 1e-5, 0.0), torch.zeros(64, 48)
    forms = {
        ops.linear: lambda x, out, weight, invariant: (out, x, weight, bias, invariant),
        ops.linear_add: lambda x, out, weight, invariant: (out, stream, x, weight, bias, 1.0, invariant),
        ops.norm_linear: lambda x, out, weight, invariant: (out, x, x, *norm, weight, bias, invariant),
        ops.norm_gated: lambda x, out, weight, invariant: (out[:, :24], x, out, x, *norm, weight, bias, "silu", invariant),
    }
    for op, form in forms.items():
        assert taken(op, *form(x, out, weight, False))
        assert taken(op, *form(x.bfloat16(), out, weight.bfloat16(), False))
        for declined in (
            form(x, out, weight, True),
            form(x.repeat(2, 1), out.repeat(2, 1), weight, False),
            form(x.half(), out.half(), weight.half(), False),
            form(x, out, torch.zeros(32, 48).t(), False),
            form(x[:, :24], out, weight[:, :24].contiguous(), False),
            form(*(t.to("meta") for t in (x, out, weight)), False),
        ):
            assert not taken(op, *declined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_may_be_float32(dtype):
    x, weight = torch.randn(3, 96).to(dtype), torch.randn(100, 96).to(dtype)
    out = torch.empty(3, 100)
    next(i.run for i in ops.linear.implementations if i.name == "native")(out, x, weight, None, False)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
