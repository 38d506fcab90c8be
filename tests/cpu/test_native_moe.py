"""The native library's experts and router, and its functions on rows by themselves: on every instruction set of this machine against float64; the
bits of a token; what the ops leave to it; and steps of mixtures as one call. Sanitizers are test_native.py's; the truth is native_reference.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import native_reference as reference
import numpy as np
import pytest
import torch
from checkpoints import make
from native_cases import GATES, TYPES, check, rows_of
from native_reference import ACTIVATIONS, make_weight

from flatout import LLM
from flatout.kernels import native
from flatout.kernels.activation import add_gated, gate_mul
from flatout.kernels.moe import experts, route
from flatout.kernels.native import rows as by_rows
from flatout.kernels.norm import add, rms_norm
from flatout.kernels.op import Op
from flatout.request import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library was not built")
NAN, INF = float("nan"), float("inf")
DTYPE = pytest.mark.parametrize("dtype", list(TYPES))


def native_run(op):
    return next(i.run for i in op.implementations if i.name == "native")


# ---------------------------------------------------------------- experts


@dataclass
class Nets:
    """Weights of all experts as the library takes them, and as native_reference.py does."""

    gate_up: torch.Tensor
    down: torch.Tensor
    kinds: tuple[int, int]
    by_expert: list[tuple]


def nets_of(rng: np.random.Generator, kinds: tuple[int, int], count: int, hidden: int, width: int) -> Nets:
    stacked, exact = [], []
    for kind, lines, columns in zip(kinds, (2 * width, hidden), (hidden, width)):
        if kind in native.BYTES:
            made = [make_weight(rng, kind, lines, columns, 0.1) for _ in range(count)]
            stacked.append(torch.from_numpy(np.stack([one.packed for one in made])))
            exact.append(made)
        else:
            plain = torch.from_numpy(rng.normal(size=(count, lines, columns)).astype(np.float32) * 0.1)
            stacked.append(plain.to(torch.bfloat16 if kind == 16 else torch.float32))
            exact.append([one.float().numpy() for one in stacked[-1]])
    return Nets(*stacked, kinds, list(zip(*exact)))


def choices_of(rng: np.random.Generator, tokens: int, count: int, top_k: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and chosen int64 [tokens, top_k], distinct in a row; routing: even, one: all choose the first, last: only the last top_k are."""
    scores = rng.random((tokens, count))
    if routing == "one":
        scores[:, 0] += 2
    elif routing == "last":
        scores[:, -top_k:] += 2
    chosen = np.argsort(-scores, 1, kind="stable")[:, :top_k].astype(np.int64)
    return torch.from_numpy(rng.random((tokens, top_k)).astype(np.float32)), torch.from_numpy(chosen)


def between(kind: int, act: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows act, each element within error, as a weight of this kind meets them; and how far those may be off."""
    narrow, error = act.astype(np.float32), error + np.abs(act) * reference.EPSILON / 2
    if kind == 32:
        return act, error
    if kind == 16:
        return reference.to_bfloat16(narrow, error / (np.abs(np.ldexp(1.0, np.frexp(narrow)[1] - 24)) + 1e-45) + 1)
    groups, by_group = (a.reshape(len(act), -1, reference.GROUP) for a in (np.abs(act), error))
    worst = by_group.max(-1, keepdims=True)  # also of the largest element, and so of the scale
    rounded, slack = reference.rounded_rows(narrow, 2 * worst / (groups.max(-1, keepdims=True) / 127 + 1e-300) + 1e-4)
    return rounded, slack + 2 * worst.repeat(reference.GROUP, -1).reshape(act.shape)


def truth(x: torch.Tensor, nets: Nets, weights: torch.Tensor, chosen: torch.Tensor, gate: str) -> tuple[np.ndarray, np.ndarray]:
    """Float64 [T, H], and how far sums in float32 may be off."""
    wide, made, allowed = x.float().numpy(), np.zeros(x.shape), np.zeros(x.shape)
    for token, (row, w) in enumerate(zip(chosen.tolist(), weights.double().numpy())):
        one = wide[token : token + 1]
        for expert, weight in zip(row, w):
            gate_up, down = nets.by_expert[expert]
            if nets.kinds[0] in native.BYTES:
                act = reference.product(one, gate_up, gate=gate)
            else:
                act = reference.plain_product(one, gate_up, nets.kinds[0], gate=gate)
            rows, slack = between(nets.kinds[1], *act)
            exact = down.values if nets.kinds[1] in native.BYTES else down.astype(np.float64)
            # what a value of 4 bits is made of may cancel, so sums count the largest of its group
            size = np.abs(exact).reshape(len(exact), -1, 16).max(-1).repeat(16, -1)
            error = slack @ np.abs(exact).T + np.abs(rows) @ size.T * reference.EPSILON * (8 + exact.shape[1] // 4)
            made[token] += weight * (rows @ exact.T)[0]
            allowed[token] += weight * (error + 2 * len(w) * reference.EPSILON * np.abs(rows @ exact.T))[0]
    return made, allowed


def run(x: torch.Tensor, nets: Nets, weights: torch.Tensor, chosen: torch.Tensor, gate: str = "silu") -> torch.Tensor:
    out = torch.full((len(x), x.shape[1] + 3), 1.5, dtype=x.dtype)
    by_rows.experts(out[:, : x.shape[1]], x, nets.gate_up, nets.down, weights, chosen, gate, nets.kinds)
    assert (out[:, x.shape[1] :] == 1.5).all()
    return out[:, : x.shape[1]]


ROUTINGS = ("even", "one", "last")
CASES = [
    # tokens, experts, top_k, hidden, width, columns between rows
    *((1 + m % 9, 1 + m % 7, 1 + m % (1 + m % 7), 16 * (1 + m % 5), 16 * (1 + m % 3), m % 3) for m in range(60)),
    (1, 60, 4, 96, 48, 0),
    (64, 8, 2, 64, 80, 5),
    (33, 5, 5, 32, 32, 1),
    (50, 1, 1, 48, 16, 0),
]


PACKED = [(4, 4), (4, 8), (8, 4), (8, 8)]


@pytest.mark.parametrize("kinds", [(16, 16), (32, 32), (4, 16), *PACKED], ids=str)
def test_experts_are_the_references(isa, kinds):
    """One expert and many, all of them chosen and some by nobody, tiles full and not, while the threads change."""
    rng = np.random.default_rng(kinds)
    for number, (tokens, count, top_k, hidden, width, pad) in enumerate(CASES):
        if kinds not in ((16, 16), (32, 32)):
            hidden, width = 2 * hidden, 2 * width  # whole groups
        native.set_threads((1, 2, 3, 8)[number % 4])
        nets = nets_of(rng, kinds, count, hidden, width)
        x = rows_of(rng, tokens, hidden, "float32" if kinds == (32, 32) else ("bfloat16", "float32")[number // 2 % 2], pad)
        weights, chosen = choices_of(rng, tokens, count, top_k, ROUTINGS[number % 3])
        gate = GATES[1 + number % 3]
        check(run(x, nets, weights, chosen, gate), truth(x, nets, weights, chosen, gate))


@pytest.mark.parametrize("kinds", [(16, 16), (32, 32), (4, 8)], ids=str)
def test_a_tokens_bits_depend_on_nothing_else(isa, kinds):
    """Alone, in a batch of any height and routing, among any number of threads."""
    rng = np.random.default_rng(4)
    nets, x = nets_of(rng, kinds, 6, 96, 64), rows_of(rng, 40, 96)
    for routing in ROUTINGS:
        weights, chosen = choices_of(rng, 40, 6, 3, routing)
        alone = torch.cat([run(x[r : r + 1], nets, weights[r : r + 1], chosen[r : r + 1]) for r in range(40)])
        for threads in (1, 2, 4):
            assert native.set_threads(threads) == threads
            for m in range(1, 41) if threads == 2 else (1, 2, 17, 40):
                assert torch.equal(run(x[40 - m :], nets, weights[40 - m :], chosen[40 - m :]), alone[40 - m :])


def test_many_tokens_pass_in_chunks(isa):
    """More than the library's scratch holds at once: the bits of each are those it has alone."""
    rng = np.random.default_rng(5)
    nets, x = nets_of(rng, (16, 16), 3, 2048, 16), rows_of(rng, 2500, 2048, "bfloat16")
    weights, chosen = choices_of(rng, 2500, 3, 2, "even")
    native.set_threads(2)
    made = run(x, nets, weights, chosen)
    some = [0, 1, 700, 2040, 2499]
    assert torch.equal(run(x[some], nets, weights[some], chosen[some]), made[some])
    parts = [run(x[a : a + 100], nets, weights[a : a + 100], chosen[a : a + 100]) for a in range(0, 2500, 100)]
    assert torch.equal(torch.cat(parts), made)


@pytest.mark.parametrize("kinds", [(32, 32), (4, 8)], ids=str)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_token_that_is_not_finite_spoils_itself_alone(isa, kinds, bad):
    rng = np.random.default_rng(3)
    nets, x = nets_of(rng, kinds, 4, 64, 32), rows_of(rng, 7, 64)
    weights, chosen = choices_of(rng, 7, 4, 2, "even")
    clean, others = run(x, nets, weights, chosen), [0, 1, 3, 4, 5, 6]
    x[2, 40] = bad
    spoilt = run(x, nets, weights, chosen)
    assert torch.equal(spoilt[others], clean[others]) and not spoilt[2].isfinite().any()
    weights[2] = NAN
    x[2, 40] = 0
    assert torch.equal(run(x, nets, weights, chosen)[others], clean[others]) and run(x, nets, weights, chosen)[2].isnan().all()


@pytest.mark.skipif(not native.has_tiles(), reason="this machine has no matrix tiles (AMX)")
@pytest.mark.parametrize("kinds", PACKED, ids=str)
def test_many_rows_by_tiles(kinds):
    """As products of rows and weights rounded to bfloat16; groups that fill their tiles and others, an odd number of blocks, chunks."""
    rng = np.random.default_rng(9)
    for number, (tokens, count, top_k, hidden, width) in enumerate(
        ((1, 1, 1, 32, 32), (40, 3, 2, 96, 160), (70, 5, 1, 64, 32), (33, 2, 2, 544, 96), (4200, 4, 2, 1024, 32))
    ):
        nets, x = nets_of(rng, kinds, count, hidden, width), rows_of(rng, tokens, hidden, ("bfloat16", "float32")[number % 2], number % 3)
        weights, chosen = choices_of(rng, tokens, count, top_k, ROUTINGS[number % 3])
        made = []
        for threads in (1, 3):
            native.set_threads(threads)
            made.append(torch.full(x.shape, NAN))
            by_rows.experts(made[-1], x.float(), nets.gate_up, nets.down, weights, chosen, "silu", kinds, many=True)
        assert torch.equal(*made)
        wide, expected, allowed = x.double().numpy(), np.zeros(x.shape), np.zeros(x.shape)
        for expert, (gate_up, down) in enumerate(nets.by_expert):
            token, choice = np.nonzero(chosen.numpy() == expert)
            w = weights.double().numpy()[token, choice, None]
            gate, up = np.split(wide[token] @ gate_up.values.T, 2, 1)
            gate_size, up_size = np.split(np.abs(wide[token]) @ np.abs(gate_up.values).T, 2, 1)
            act = ACTIVATIONS["silu"](gate) * up
            off = 2.0**-6.9 * (1.2 * gate_size * np.abs(up) + up_size * np.abs(ACTIVATIONS["silu"](gate)) + 2.0**-6 * gate_size * up_size)
            np.add.at(expected, token, w * (act @ down.values.T))
            np.add.at(allowed, token, w * ((off + 2.0**-6.9 * np.abs(act)) @ np.abs(down.values).T))
        check(made[0], (expected, allowed))
        assert np.linalg.norm(made[0].numpy() - expected) < 0.02 * np.linalg.norm(expected)
    native.set_threads(1)
    plain = nets_of(rng, (32, 32), count, hidden, width)
    with pytest.raises(IndexError, match="no such kernel"):
        by_rows.experts(made[0], x.float(), plain.gate_up, plain.down, weights, chosen, "silu", (32, 32), many=True)


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(6)
    nets, x = nets_of(rng, (32, 32), 4, 64, 32), rows_of(rng, 3, 64)
    weights, chosen = choices_of(rng, 3, 4, 2, "even")
    out = torch.zeros(3, 64)
    for wrong in (-1, 4):
        beyond = chosen.clone()
        beyond[2, 1] = wrong
        with pytest.raises(IndexError, match="none of the 4 experts"):
            by_rows.experts(out, x, nets.gate_up, nets.down, weights, beyond, "silu", (32, 32))
    for bad in (
        lambda: by_rows.experts(out, x, nets.gate_up, nets.down, weights, chosen, "silu", (16, 32)),
        lambda: by_rows.experts(out, x, nets.gate_up[:, :32], nets.down, weights, chosen, "silu", (32, 32)),
        lambda: by_rows.experts(out, x, nets.gate_up, nets.down[:3], weights, chosen, "silu", (32, 32)),
        lambda: by_rows.experts(out, x, nets.gate_up, nets.down, weights[:2], chosen, "silu", (32, 32)),
        lambda: by_rows.experts(out[:2], x, nets.gate_up, nets.down, weights, chosen, "silu", (32, 32)),
        lambda: by_rows.experts(out, x, nets.gate_up.transpose(1, 2), nets.down, weights, chosen, "silu", (32, 32)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            bad()
    assert (out == 0).all()
    by_rows.experts(out[:0], x[:0], nets.gate_up, nets.down, weights[:0], chosen[:0], "silu", (32, 32))


# ---------------------------------------------------------------- the router


def routed(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = torch.full((len(logits), top_k), NAN), torch.full((len(logits), top_k), -1)
    by_rows.route(weights, chosen, logits, renormalise)
    return weights, chosen


@DTYPE
def test_routes(isa, dtype):
    """The largest logits, in order, with the softmax's weights; the lowest number first among equals, which bfloat16 has many of."""
    rng = np.random.default_rng(7)
    for tokens, count, top_k in ((1, 1, 1), (3, 4, 2), (64, 8, 8), (5, 60, 4), (9, 128, 8), (2, 1024, 3), (7, 33, 33), (40, 17, 6)):
        logits = torch.from_numpy(rng.normal(size=(tokens, count + 3)) * 5).to(TYPES[dtype])[:, :count]
        exact = torch.softmax(logits.double(), -1)
        order = torch.argsort(-logits.double(), dim=-1, stable=True)[:, :top_k]
        for renormalise in (False, True):
            native.set_threads(1 + renormalise)
            weights, chosen = routed(logits, top_k, renormalise)
            assert torch.equal(chosen, order)
            value = exact.gather(1, chosen)
            torch.testing.assert_close(
                weights.double(), value / value.sum(-1, keepdim=True) if renormalise else value, rtol=2e-6, atol=1e-37
            )


@DTYPE
def test_equal_logits_are_chosen_in_their_order(isa, dtype):
    weights, chosen = routed(torch.full((2, 12), 3.0, dtype=TYPES[dtype]), 5, True)
    assert chosen.tolist() == [list(range(5))] * 2 and torch.allclose(weights, torch.full((2, 5), 0.2))


def test_routes_without_numbers(isa):
    """Choices are experts that exist, and distinct; weights that are no numbers say so, in their own row alone."""
    rows = [[NAN] * 5, [-INF] * 5, [0, NAN, 3, 1, 2], [0, INF, 3, 1, INF], [-INF, 1, -INF, -INF, -INF], [0.0, 1, 2, 3, 4]]
    weights, chosen = routed(torch.tensor(rows), 3, True)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in chosen.tolist())
    assert weights[:4].isnan().all() and chosen[2].tolist() == [2, 4, 3]
    assert chosen[4].tolist() == [1, 0, 2] and weights[4].tolist() == [1, 0, 0]
    assert chosen[5].tolist() == [4, 3, 2] and weights[5].isfinite().all()


def test_what_cannot_be_routed_is_refused():
    for count, top_k in ((4, 5), (by_rows.MOST_EXPERTS + 1, 2)):
        with pytest.raises(ValueError, match="declines"):
            routed(torch.zeros(2, count), top_k, True)
    assert not next(i for i in route.implementations if i.name == "native").accepts(
        torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int64), torch.zeros(1, 1025), True
    )


# ---------------------------------------------------------------- rows by themselves


def beside(rows: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows apart, and all of the memory that they lie in."""
    whole = torch.full((rows, width + 7), 1.5, dtype=TYPES[dtype])
    return whole[:, :width].copy_(torch.randn(rows, width)), whole


@DTYPE
@pytest.mark.parametrize("width", [16, 48, 80, 2064])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(isa, dtype, width, offset):
    for rows in (1, 5, 70):
        native.set_threads(1 + rows % 3)
        (x, _), (out, whole), weight = beside(rows, width, dtype), beside(rows, width, dtype), torch.rand(width).to(TYPES[dtype]) + 0.5
        wide = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5)
        expected = wide * (weight.double() + offset)
        native_run(rms_norm)(out, x, weight, 1e-5, offset)
        unit = 2.0**-20 if dtype == "float32" else 2.0 ** (-7.9 if offset else -6.9)  # rounded before the weight too
        assert ((out.double() - expected).abs() <= unit * expected.abs() + 1e-30).all() and (whole[:, width:] == 1.5).all()
        native_run(rms_norm)(x, x, weight, 1e-5, offset)
        assert torch.equal(x, out)


@DTYPE
@pytest.mark.parametrize("width", [1, 15, 64, 257])
def test_sums_and_gates(isa, dtype, width):
    for rows in (1, 4, 33):
        native.set_threads(1 + rows % 3)
        (x, _), (out, whole), (gate, _) = (beside(rows, n, dtype) for n in (width, width, 1))
        start = out.double().clone()
        for op, operand, factor in ((add, 0.4, 0.4), (add_gated, gate, torch.sigmoid(gate.double()))):
            out.copy_(start)
            native_run(op)(out, x, operand)
            assert (whole[:, width:] == 1.5).all()
            unit = 2.0**-22 if dtype == "float32" else 2.0**-7.9
            assert ((out.double() - start - factor * x.double()).abs() <= unit * (start.abs() + x.double().abs())).all()
        both, _ = beside(rows, 2 * width, dtype)
        for activation in GATES[1:]:
            native_run(gate_mul)(out, both, activation)
            wide = both.double().numpy()
            gates, ups = wide[:, :width], wide[:, width:]
            exact = ACTIVATIONS[activation](gates) * ups
            check(out, (exact, np.abs(gates * ups) * 4e-7 + np.abs(exact) * 1e-6))  # erf and exp are good to so much
            assert (whole[:, width:] == 1.5).all()


def test_a_gate_that_is_no_number_says_so(isa):
    out = torch.ones(3, 20)
    native_run(add_gated)(out, torch.ones(3, 20), torch.tensor([[NAN], [-INF], [INF]]))
    assert out[0].isnan().all() and torch.equal(out[1:], torch.tensor([[1.0], [2.0]]).expand(2, 20))


# ---------------------------------------------------------------- ops and steps


def test_the_ops_leave_the_cpu_to_it():
    """Few rows without a trial; and what it cannot do to torch."""

    def operands(rows: int, dtype: torch.dtype = torch.float32, hidden: int = 32, width: int = 16, invariant: bool = False) -> list:
        made = [torch.zeros(rows, n, dtype=dtype) for n in (hidden, 2 * width, 2 * hidden, hidden)]
        nets = torch.zeros(8, 2 * width, hidden, dtype=dtype), torch.zeros(8, hidden, width, dtype=dtype)
        return [*made, *nets, torch.zeros(rows, 2), torch.zeros(rows, 2, dtype=torch.int64), "silu", invariant]

    for dtype in TYPES.values():
        for invariant in (False, True):
            assert experts.chosen(*operands(16, dtype, invariant=invariant)) is native_run(experts)
    for declined in (operands(3, hidden=24), operands(3, width=12), operands(3, torch.float16)):
        assert experts.chosen(*declined) is experts.reference
    x, weight = torch.zeros(64, 32), torch.zeros(32)
    assert rms_norm.chosen(x, x, weight, 1e-5, 0.0) is native_run(rms_norm)
    assert add_gated.chosen(x, x, x[:, :1]) is native_run(add_gated)
    assert add.chosen(x, x, 1.0) is native_run(add) and gate_mul.chosen(x[:, :16], x, "silu") is native_run(gate_mul)
    assert gate_mul.chosen(x[:, :16].half(), x.half(), "silu") is gate_mul.reference


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_step_of_a_mixture_is_one_call(family, tmp_path, monkeypatch):
    """And gives the tokens of steps op by op, of which each takes what its trials say."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1} | (
        {"shared_expert_intermediate_size": 48} if family == "qwen2_moe" else {}
    )
    if family == "qwen3_moe":
        sizes["head_dim"] = 32
    folder, prompts, found = make(family, tmp_path, **sizes), [[5, 9, 2, 7], [8] * 30], []
    measured = Op.chosen

    def native_if_it_can(op, *args):
        """Products of so few columns may be torch's by a hair."""
        return next((i.run for i in op.implementations if i.native and i.accepts(*args)), None) or measured(op, *args)

    for options in ({"enforce_eager": True}, {}):
        if not options:
            monkeypatch.setattr(Op, "chosen", native_if_it_can)
        with LLM(str(folder), dtype="float32", max_model_len=96, **options) as llm:
            tokens = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, tokens, use_tqdm=False)])
    assert found[0] == found[1]
    (part,) = llm.engine.runner.executor.decodes.steps[2].forward.parts
    names, sparse = part.run.names(), sum(layer.moe for layer in llm.spec.layers)
    assert names.count("route") == names.count("experts") == sparse and sparse >= 2
