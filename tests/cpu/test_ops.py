"""Every op's implementations against float64, over random shapes; costs by hand; and the op seam's own promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import op as op_module
from flatout.kernels import timing
from flatout.kernels.activation import add_gated, gate_mul
from flatout.kernels.embedding import embedding, gather_rows
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.logits import finish_logits
from flatout.kernels.moe import expected_experts, experts, route
from flatout.kernels.norm import add, normalise, rms_norm
from flatout.kernels.op import Cost, op, recording
from flatout.kernels.rope import rope_kv_write

DTYPES = st.sampled_from((torch.float32, torch.bfloat16))
ROWS = st.sampled_from((1, 2, 3, 5, 8, 33))
WIDTH = st.sampled_from((8, 24, 60, 128))
SEED = st.integers(0, 99)


def random(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).normal(size=shape)).to(dtype)


def every(op, *operands) -> list[torch.Tensor]:
    """What the first output holds after the reference and after each implementation that accepts, on copies of all operands."""
    runs = [op.reference, *(i.run for i in op.implementations if i.accepts(*operands))]
    made = []
    for run in runs:
        copies = [o.clone() if isinstance(o, torch.Tensor) else o for o in operands]
        run(*copies)
        made.append(copies)
    return made


def close(found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    eps = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[found.dtype] * scale
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


def normed(x, weight, eps, offset):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (weight.double() + offset)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, width=WIDTH, dtype=DTYPES, offset=st.sampled_from((0.0, 1.0)), scale=st.sampled_from((1.0, 0.4)), seed=SEED)
def test_norms(rows, width, dtype, offset, scale, seed):
    x, residual, weight = (
        random(seed, rows, width, dtype=dtype),
        random(seed + 1, rows, width, dtype=dtype),
        random(seed, width, dtype=dtype),
    )
    out = torch.empty_like(x)
    for made in every(rms_norm, out, x, weight, 1e-5, offset):
        close(made[0], normed(x, weight, 1e-5, offset), 4)
    summed = residual.double() + scale * x.double()
    for made in every(add, residual, x, scale):
        close(made[0], summed, 4)
    normalise(x, x, weight, 1e-5, offset)  # in place
    close(x, normed(random(seed, rows, width, dtype=dtype), weight, 1e-5, offset), 4)


def test_norm_of_zeros_is_zero():
    for width in (8, 32):
        for out, *_ in every(rms_norm, torch.empty(2, width), torch.zeros(2, width), torch.ones(width), 1e-5, 0.0):
            assert (out == 0).all()


@settings(max_examples=120, deadline=None)
@given(rows=ROWS, columns=WIDTH, outputs=st.sampled_from((1, 7, 96)), dtype=DTYPES, biased=st.booleans(), seed=SEED)
def test_linear(rows, columns, outputs, dtype, biased, seed):
    x, weight = random(seed, rows, columns, dtype=dtype), random(seed, outputs, columns, dtype=dtype)
    bias = random(seed, outputs, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    for made in every(linear, torch.empty(rows, outputs, dtype=dtype), x, weight, bias, False):
        close(made[0], expected, 8)


ACTIVATIONS = st.sampled_from(("silu", "gelu", "gelu_tanh"))


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }[activation]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTH, dtype=DTYPES, activation=ACTIVATIONS, biased=st.booleans(), offset=st.sampled_from((0.0, 1.0)), seed=SEED)
def test_products_from_and_onto_the_stream(rows, width, dtype, activation, biased, offset, seed):
    """The fused forms against their parts in float64."""
    x, weight, norm = (
        random(seed, rows, width, dtype=dtype),
        random(seed, 2 * width, width, dtype=dtype),
        random(seed + 1, width, dtype=dtype),
    )
    bias = random(seed, 2 * width, dtype=dtype) if biased else None
    plain = x.double() @ weight.double().T + (bias.double() if biased else 0)
    from_norm = normed(x, norm, 1e-5, offset) @ weight.double().T + (bias.double() if biased else 0)
    stream, wide, scratch = random(seed + 2, rows, 2 * width, dtype=dtype), torch.empty(rows, 2 * width, dtype=dtype), torch.empty_like(x)
    rough = 16 * (width**0.5 if dtype == torch.bfloat16 else 1.0)  # operands were rounded once more on their way
    for made in every(linear_add, stream, torch.empty_like(stream), x, weight, bias, 0.5, False):
        close(made[0], stream.double() + 0.5 * plain, rough)
    for made in every(norm_linear, wide, scratch, x, norm, 1e-5, offset, weight, bias, False):
        close(made[0], from_norm, rough)
    gate, up = from_norm.chunk(2, -1)
    out = torch.empty(rows, width, dtype=dtype)
    for made in every(norm_gated, out, scratch, wide, x, norm, 1e-5, offset, weight, bias, activation, False):
        close(made[0], activated(gate, activation) * up, 4 * rough)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, width=WIDTH, dtype=DTYPES, activation=ACTIVATIONS, seed=SEED)
def test_feed_forward(rows, width, dtype, activation, seed):
    gate_up = random(seed, rows, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    for made in every(gate_mul, torch.empty(rows, width, dtype=dtype), gate_up, activation):
        close(made[0], activated(gate, activation) * up, 4)
    out, x, weight = random(seed, rows, width, dtype=dtype), random(seed + 1, rows, width, dtype=dtype), random(seed, rows, 1, dtype=dtype)
    for made in every(add_gated, out, x, weight):
        close(made[0], out.double() + x.double() / (1 + torch.exp(-weight.double())), 4)


@settings(max_examples=20, deadline=None)
@given(rows=ROWS, width=WIDTH, dtype=DTYPES, scale=st.sampled_from((1.0, 5.5)), softcap=st.sampled_from((0.0, 3.0)), seed=SEED)
def test_rows_and_logits(rows, width, dtype, scale, softcap, seed):
    table, ids = random(seed, 40, width, dtype=dtype), torch.from_numpy(np.random.default_rng(seed).integers(0, 40, rows))
    for made in every(embedding, torch.empty(rows, width, dtype=dtype), ids, table, scale):
        close(made[0], table[ids].double() * scale, 2)
    for made in every(gather_rows, torch.empty(rows, width, dtype=dtype), table, ids):
        assert torch.equal(made[0], table[ids])
    scaled = table.double() * scale
    for made in every(finish_logits, torch.empty(40, width), table, scale, softcap):
        close(made[0], softcap * torch.tanh(scaled / softcap) if softcap else scaled, 4)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    heads=st.sampled_from(((1, 1), (4, 2), (5, 1), (9, 3))),
    dims=st.sampled_from(((16, 16), (20, 20), (24, 8), (64, 0))),
    kind=st.sampled_from(("", "head", "full")),
    offset=st.sampled_from((0.0, 1.0)),
    dtype=DTYPES,
    seed=SEED,
)
def test_rope_kv_write(rows, heads, dims, kind, offset, dtype, seed):
    (queries, kv), (dim, rotary) = heads, dims
    qkv = random(seed, rows, (queries + 2 * kv) * dim, dtype=dtype)
    caches = [torch.zeros(50, kv, dim, dtype=dtype) for _ in range(2)]
    slots = torch.from_numpy(np.random.default_rng(seed).permutation(50)[:rows])
    angles = random(seed, rows, rotary // 2) * 3
    rope = torch.cat([angles.cos(), angles.cos(), -angles.sin(), angles.sin()], 1).to(dtype) if rotary else None
    weights = [None, None]
    if kind:
        weights = [random(seed + i, dim if kind == "head" else n * dim, dtype=dtype) for i, n in enumerate((queries, kv))]
    expected = list(qkv.double().split([queries * dim, kv * dim, kv * dim], 1))
    for i, (n, weight) in enumerate(zip((queries, kv), weights)):
        part = expected[i]
        if weight is not None:
            part = normed(part if kind == "full" else part.view(rows, n, dim), weight, 1e-6, offset)
        part = part.reshape(rows, n, dim).clone()
        if rope is not None:
            cos, sin = (a.double()[:, None] for a in (rope[:, : rotary // 2], rope[:, -rotary // 2 :]))
            one, two = part[..., : rotary // 2].clone(), part[..., rotary // 2 : rotary].clone()
            part[..., : rotary // 2], part[..., rotary // 2 : rotary] = one * cos - two * sin, two * cos + one * sin
        expected[i] = part
    by_head = qkv.view(rows, -1, dim)
    cos, sin = (None, None) if rope is None else (part.unsqueeze(1) for part in rope.chunk(2, 1))
    for made in every(rope_kv_write, by_head[:, :-kv], by_head[:, -kv:], *caches, slots, cos, sin, *weights, 1e-6, offset):
        close(made[0][:, :queries], expected[0], 6)
        close(made[2][slots], expected[1], 6)
        close(made[3][slots], expected[2].view(rows, kv, dim))
        assert (made[2].count_nonzero((1, 2)) > 0).sum() == rows  # and nothing else


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, count=st.sampled_from((1, 4, 7)), top_k=st.sampled_from((1, 2, 4)), dtype=DTYPES, seed=SEED, renormalise=st.booleans())
def test_experts(rows, count, top_k, dtype, seed, renormalise):
    top_k = min(top_k, count)
    logits = random(seed, rows, count, dtype=dtype)
    (_, probabilities, chosen), *_ = [
        (None, *made[:2])
        for made in every(route, torch.empty(rows, top_k), torch.empty(rows, top_k, dtype=torch.int64), logits, renormalise)
    ]
    exact, order = torch.softmax(logits.double(), -1).topk(top_k, -1)
    assert torch.equal(logits.gather(1, chosen), logits.gather(1, order))
    close(probabilities, exact / exact.sum(-1, keepdim=True) if renormalise else exact)
    x, gate_up, down = (
        random(seed, rows, 16, dtype=dtype),
        random(seed, count, 32, 16, dtype=dtype) / 4,
        random(seed, count, 16, 16, dtype=dtype) / 4,
    )
    expected = torch.zeros(rows, 16, dtype=torch.float64)
    for t in range(rows):
        for k in range(top_k):
            gate, up = (gate_up[chosen[t, k]].double() @ x[t].double()).chunk(2)
            expected[t] += probabilities[t, k].double() * (down[chosen[t, k]].double() @ (gate / (1 + torch.exp(-gate)) * up))
    scratch = torch.empty(rows, top_k * 16, dtype=dtype), torch.empty(rows, top_k * 16, dtype=dtype)
    for made in every(experts, torch.empty_like(x), *scratch, x, gate_up, down, probabilities, chosen, "silu", False):
        close(made[0], expected, 4)


def cost_of(op, *operands) -> Cost:
    with recording(execute=False) as recorder:
        op(*operands)
    return recorder.total()


def test_costs_by_hand():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    for rows, columns, outputs in ((1, 576, 960), (8, 576, 49152), (1024, 1536, 576)):
        cost = cost_of(linear, meta(rows, outputs), meta(rows, columns), meta(outputs, columns), None, False)
        assert cost == Cost(weights=2 * outputs * columns, activations=2 * rows * (columns + outputs), flops=2 * rows * columns * outputs)
    assert cost_of(linear, meta(1, 4), meta(1, 3), meta(4, 3), meta(4), False).weights == 2 * (12 + 4)
    assert cost_of(rms_norm, meta(7, 64), meta(7, 64), meta(64), 1e-5, 0.0) == Cost(
        weights=128, activations=2 * 2 * 7 * 64, flops=4 * 7 * 64
    )
    # scratch rows count nothing: a kernel that needs none is what the floor is about
    onto = cost_of(linear_add, meta(7, 64), meta(7, 64), meta(7, 96), meta(64, 96), None, 1.0, False)
    assert onto == Cost(weights=2 * 64 * 96, activations=2 * 7 * (64 + 64 + 96), flops=2 * 7 * 64 * 96 + 2 * 7 * 64)
    gated = cost_of(norm_gated, meta(7, 48), meta(7, 64), meta(7, 96), meta(7, 64), meta(64), 1e-5, 0.0, meta(96, 64), None, "silu", False)
    assert gated == Cost(weights=2 * (96 + 1) * 64, activations=2 * 7 * (64 + 48), flops=2 * 7 * 96 * 64 + 4 * 7 * 64 + 5 * 7 * 48)
    # 5 tokens, 9 + 2 * 3 heads of 64: q and k rotate; k and v go to the cache
    places, turn = (meta(80, 3, 64), meta(80, 3, 64), meta(5, dtype=torch.int64)), (meta(5, 1, 64), meta(5, 1, 64))
    rope = cost_of(rope_kv_write, meta(5, 12, 64), meta(5, 3, 64), *places, *turn, None, None, 1e-5, 0.0)
    assert rope == Cost(kv=2 * 2 * 5 * 192, activations=2 * 5 * (960 + 576 + 128) + 8 * 5, flops=3 * 5 * (576 + 192))
    # 3 tokens, 2 of 8 experts each
    moe = cost_of(
        experts,
        meta(3, 16),
        meta(3, 2 * 12),
        meta(3, 2 * 16),
        meta(3, 16),
        meta(8, 24, 16),
        meta(8, 16, 12),
        meta(3, 2, dtype=torch.float32),
        meta(3, 2, dtype=torch.int64),
        "silu",
        False,
    )
    assert moe.weights == round(8 * (1 - 0.75**3) * (24 * 16 + 16 * 12) * 2)
    assert expected_experts(1, 2, 8) == pytest.approx(2) and expected_experts(10_000, 2, 8) == pytest.approx(8)


# The op seam


def make_op(**options):
    @op(cost=lambda out, x: Cost(flops=1), **options)
    def double(out, x):
        """out = 2x"""
        out.copy_(x * 2)

    return double


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    monkeypatch.setattr(op_module, "choices", op_module.Choices())


def test_what_an_implementation_is_instead_of_is_no_candidate():
    calls = []
    double = make_op(last_resort=True)
    double.implementation("plain", lambda out, x: True)(lambda out, x: calls.append("plain"))
    double.implementation("better", lambda out, x: len(x) > 2, instead_of="plain")(lambda out, x: calls.append("better"))
    double(torch.empty(4), torch.ones(4))
    double(torch.empty(2), torch.ones(2))
    assert calls == ["better", "plain"], "neither was measured"


def test_what_is_sure_has_no_rival():
    calls = []
    double = make_op()  # not even the reference
    for name, sure in (("plain", None), ("overlapping", lambda out, x: len(x) > 2), ("other", lambda out, x: False)):
        double.implementation(name, lambda out, x: len(x) > 1, sure=sure)(lambda out, x, name=name: calls.append(name))
    double(torch.empty(4), torch.ones(4))
    assert calls == ["overlapping"]
    double(torch.empty(2), torch.ones(2))
    assert {"plain", "overlapping", "other"} <= set(calls[1:]), "elsewhere all are measured"


def test_the_faster_implementation_is_chosen_once_and_kept(tmp_path):
    calls = []

    def slow(out, x):
        calls.append("slow")
        for _ in range(200):
            torch.mul(x, 2, out=out)

    def fast(out, x):
        calls.append("fast")
        torch.mul(x, 2, out=out)

    double = make_op(last_resort=True)
    double.implementation("slow", lambda out, x: True)(slow)
    double.implementation("fast", lambda out, x: True)(fast)
    double.implementation("elsewhere", lambda out, x: x.is_cuda)(slow)
    op_module.choices.open(tmp_path / "choices.json")
    out, x = torch.empty(4), torch.ones(4)
    double(out, x)
    assert (out == 2).all() and calls.count("slow") == timing.TRIALS + 1 and calls[-1] == "fast"
    calls.clear()
    double(out, x)
    assert calls == ["fast"]
    op_module.choices.save()
    op_module.choices.open(tmp_path / "choices.json")
    assert op_module.choices.get(f"double {double.key(out, x)} of slow fast") == "fast"


def test_a_reference_of_last_resort_runs_only_where_nothing_accepts():
    double = make_op(last_resort=True)
    double.implementation("wide", lambda out, x: x.shape[0] > 2)(lambda out, x: out.fill_(7))
    out = torch.empty(4)
    double(out, torch.ones(4))
    assert (out == 7).all()
    out = torch.empty(2)
    double(out, torch.ones(2))
    assert (out == 2).all()


def make_op_that_adds():
    """Two implementations of a sum onto its first operand."""

    def accumulate(stream, scratch, x, weight):
        stream.add_(torch.mm(x, weight, out=scratch))

    made = op(cost=lambda *operands: Cost(), outs=("stream", "scratch"), updates=("stream",), last_resort=True)(accumulate)
    for name in ("one", "other"):
        made.implementation(name, lambda *operands: True)(accumulate)
    return made


def test_trials_leave_no_trace():
    residual, x, weight = torch.ones(64, 300), torch.ones(64, 300), torch.ones(300)
    scratch, square = torch.empty_like(x), torch.eye(300)
    trial = make_op_that_adds()
    trial(residual, scratch, x, square)
    assert (residual == 2).all()
    same = torch.full((77, 300), 3.0)
    rms_norm(same, same, weight * 5, 1e-5, 0.0)
    torch.testing.assert_close(same, torch.full_like(same, 5.0))
