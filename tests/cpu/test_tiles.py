"""Products of many rows by the processor's matrix tiles against float64 on values rounded to bfloat16; skipped, and counted, where it has none."""

from __future__ import annotations

import math

import native_reference as reference
import numpy as np
import pytest
import torch
from native_cases import TYPES, check, rows_of
from native_reference import make_weight

from flatout.kernels import linear as ops
from flatout.kernels import native
from flatout.kernels.op import shape_class

pytestmark = pytest.mark.skipif(not native.has_tiles(), reason="needs AMX and the native library")
GATES = (None, "silu", "gelu_tanh", "gelu")


@pytest.fixture(autouse=True)
def one_thread_after():
    yield
    native.set_threads(1)


def brain(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().double().numpy()


def drawn(seed: int):
    """A product's operands: columns around what stays in the L1, outputs of odd and even numbers of blocks, rows around whole tiles."""
    rng = np.random.default_rng(seed)
    kind, gate = int(rng.choice([4, 8])), GATES[seed % 4]
    rows = int(rng.choice([1, 15, 16, 17, 31, 32, 33, 64, 70]))
    columns, outputs = 32 * int(rng.choice([1, 2, 15, 16, 17, 33])), 16 * int(rng.choice([1, 2, 3, 8]))
    weight = make_weight(rng, kind, outputs * (2 if gate else 1), columns)
    kinds = [torch.float32, torch.bfloat16]
    x = torch.from_numpy(rng.normal(size=(rows, columns + 8)).astype(np.float32) * 3).to(kinds[seed % 3 == 0])[:, :columns]
    return rng, kind, gate, weight, x, torch.from_numpy(rng.normal(size=(rows, outputs))).to(kinds[seed % 5 == 0])


@pytest.mark.parametrize("seed", range(60))
def test_products_are_the_references(seed):
    rng, kind, gate, weight, x, out = drawn(seed)
    columns, outputs = x.shape[1], out.shape[1]
    bias = rng.normal(size=weight.values.shape[0]).astype(np.float32) if seed % 2 else None
    norm = rng.normal(size=columns).astype(np.float32) if seed % 3 else None
    add, scale = seed % 4 > 1, 0.5 if seed % 4 == 3 else 1.0
    native.set_threads(1 + seed % 3)
    taken = x.float().numpy()
    if norm is not None:
        taken = reference.normed(taken, norm, 1e-5, 0.25)
    wide, lines = brain(taken), brain(weight.values)
    y = wide @ lines.T
    # sums in float32; of normed rows elements may lie in the middle between two numbers of bfloat16
    slack = columns * 2.0**-23 * (np.abs(wide) @ np.abs(lines.T)) + (2.0**-9 * np.sqrt(wide**2 @ lines.T**2) if norm is not None else 0)
    if bias is not None:
        y = y + bias
    if gate:
        gates, ups = y[:, :outputs], y[:, outputs:]
        slack = slack[:, :outputs] * 1.2 * (np.abs(ups) + slack[:, outputs:]) + slack[:, outputs:] * np.abs(gates) + 1e-5 * np.abs(ups)
        y = reference.ACTIVATIONS[gate](gates) * ups
    y = scale * y + (out.double().numpy() if add else 0)
    given = None if norm is None else (torch.from_numpy(norm), 1e-5, 0.25)
    native.product(
        out, x, torch.from_numpy(weight.packed), kind, None if bias is None else torch.from_numpy(bias), given, gate, add, scale, True
    )
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-22
    assert (np.abs(out.double().numpy() - y) <= slack + rounding * (np.abs(y) + 1)).all()


@pytest.mark.parametrize("seed", range(40))
def test_products_of_plain_weights(seed):
    """Of bfloat16, as they lie."""
    rng = np.random.default_rng(seed)
    gate, rows = GATES[seed % 4], int(rng.choice([1, 5, 15, 16, 17, 32, 33, 64, 70]))
    columns, outputs = 32 * int(rng.choice([1, 2, 15, 16, 17, 33])), 16 * int(rng.choice([1, 2, 3, 8]))
    lines = outputs * (2 if gate else 1)
    weight = torch.from_numpy(rng.normal(size=(lines, columns)).astype(np.float32) * 0.05).bfloat16()
    x_type, out_type = (("float32", "bfloat16")[seed % n == 0] for n in (3, 5))
    x, out = rows_of(rng, rows, columns, x_type, seed % 3), torch.from_numpy(rng.normal(size=(rows, outputs))).to(TYPES[out_type])
    bias = rng.normal(size=lines).astype(np.float32) if seed % 2 else None
    norm = (rng.normal(size=columns).astype(np.float32), 1e-5, 0.25) if seed % 3 else None
    add, scale = seed % 4 > 1, 0.5 if seed % 4 == 3 else 1.0
    truth = reference.plain_product(
        x.float().numpy(), weight.float().numpy(), 16, bias, norm, gate, out.double().numpy() if add else None, scale
    )
    given = None if norm is None else (torch.from_numpy(norm[0]), *norm[1:])
    native.set_threads(1 + seed % 3)
    native.product(out, x, weight, 16, None if bias is None else torch.from_numpy(bias), given, gate, add, scale, True)
    check(out, truth)


def test_every_element_of_a_plain_weight_is_met():
    """Integers are exact."""
    rng = np.random.default_rng(7)
    for lines, columns in ((16, 32), (48, 96), (80, 544)):
        x, weight = (torch.from_numpy(rng.integers(-9, 10, (n, columns)).astype(np.float32)) for n in (21, lines))
        out = torch.empty(21, lines)
        native.product(out, x, weight.bfloat16(), 16, many=True)
        assert torch.equal(out, x @ weight.t())


def test_plain_weights_that_are_no_whole_blocks_are_declined():
    for lines, columns, kind in ((17, 64, torch.bfloat16), (32, 48, torch.bfloat16), (32, 64, torch.float32)):
        weight, x, out = torch.zeros(lines, columns, dtype=kind), torch.zeros(9, columns), torch.full((9, lines), 7.0)
        with pytest.raises(ValueError, match="product: the native library declines"):
            native.product(out, x, weight, 8 * weight.element_size(), many=True)
        assert (out == 7).all()


def test_the_ops_offer_tiles_for_several_rows_of_bfloat16():
    """From 5 rows on, in whole classes of rows, as the choice is one for a class."""

    def offered(rows: int, columns: int = 64, outputs: int = 32, dtype: torch.dtype = torch.bfloat16, invariant: bool = False) -> bool:
        x, out, weight = (torch.zeros(*shape, dtype=dtype) for shape in ((rows, columns), (rows, outputs), (outputs, columns)))
        norm = (torch.ones(columns, dtype=dtype), 1e-5, 0.0)
        forms = {
            ops.linear: (out, x, weight, None, invariant),
            ops.linear_add: (out, out, x, weight, None, 1.0, invariant),
            ops.norm_linear: (out, x, x, *norm, weight, None, invariant),
            ops.norm_gated: (out, x, out, x, *norm, torch.zeros(2 * outputs, columns, dtype=dtype), None, "silu", invariant),
        }
        found = {next(i for i in op.implementations if i.name == "tiles").accepts(*operands) for op, operands in forms.items()}
        assert len(found) == 1
        return found.pop()

    assert [rows for rows in (1, 4, 5, 8, 64, 65, 256, 257) if offered(rows)] == [5, 8, 64, 65, 256]
    assert shape_class(ops.FEWEST_TILED) > shape_class(ops.FEWEST_TILED - 1) and shape_class(ops.MOST_TILED) == ops.MOST_TILED
    assert (
        not offered(8, columns=48) and not offered(8, outputs=24) and not offered(8, dtype=torch.float32) and not offered(8, invariant=True)
    )


@pytest.mark.parametrize("kind", [4, 16])
def test_a_rows_bits_depend_on_nothing_else(kind):
    """Not on how many rows are beside it, nor on the threads."""
    rng = np.random.default_rng(1)
    packed = torch.from_numpy(make_weight(rng, 4, 80, 1056).packed)
    weight = packed if kind == 4 else torch.from_numpy(rng.normal(size=(80, 1056)).astype(np.float32)).bfloat16()
    x = torch.from_numpy(rng.normal(size=(97, 1056)).astype(np.float32))
    norm = torch.rand(1056), 1e-5, 0.0
    whole = torch.empty(97, 80)
    native.product(whole, x, weight, kind, norm=norm, many=True)
    for threads in (1, 2, 4):
        native.set_threads(threads)
        for first, end in ((0, 1), (5, 38), (64, 97), (0, 97)):
            part = torch.empty(end - first, 80)
            native.product(part, x[first:end], weight, kind, norm=norm, many=True)
            assert torch.equal(part, whole[first:end])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad):
    rng = np.random.default_rng(2)
    weight = torch.from_numpy(make_weight(rng, 8, 32, 64).packed)
    x = torch.from_numpy(rng.normal(size=(40, 64)).astype(np.float32))
    fine, out = torch.empty(40, 32), torch.empty(40, 32)
    native.product(fine, x, weight, 8, many=True)
    x[17, 3] = bad
    native.product(out, x, weight, 8, many=True)
    others = torch.arange(40) != 17
    assert torch.equal(out[others], fine[others]) and not out[17].isfinite().any()


def test_values_are_rounded_to_the_nearest():
    """Numbers of bfloat16 pass exactly, ties go to even; in rows and in weights."""
    codes = np.full((32, 32), 128)
    np.fill_diagonal(codes, 129)
    one = torch.from_numpy(reference.pack(8, codes, np.ones((32, 1), np.float16), None).packed)
    drawn = np.random.default_rng(3).normal(size=(300, 32)) * 10.0 ** np.arange(-15, 15).repeat(10)[:, None]
    x = torch.from_numpy(drawn.astype(np.float32))
    x[0] = torch.tensor(1 + 2.0**-8)  # between two, the lower is even
    x[1] = torch.tensor(1 + 3 * 2.0**-8)  # the upper is
    out = torch.empty_like(x)
    native.product(out, x.clone(), one, 8, many=True)
    assert torch.equal(out, x.bfloat16().float())
    fractions = np.linspace(0.01, 3, 32).astype(np.float16)[:, None]
    scaled = torch.from_numpy(reference.pack(8, codes, fractions, None).packed)
    native.product(out, torch.ones(300, 32), scaled, 8, many=True)
    assert torch.equal(out[0], torch.from_numpy(fractions[:, 0]).bfloat16().float())


def attended(q, k, v, scale, window, kv_heads):
    """float64 [T, heads * D] of q [T, heads, D] and k, v [L, kv_heads, D]; the last query sees the last key."""
    count, heads, _ = q.shape
    length = k.shape[0]
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    query, key = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = (key > query) | (key <= query - (window or length))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)


@pytest.mark.parametrize("seed", range(40))
def test_attention_of_chunks(seed):
    """Queries and keys around whole blocks of 32 and 64, keys before the chunk, windows, keys in a run or anywhere, all kinds of rows and caches."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    count = int(rng.choice([1, 2, 31, 32, 33, 63, 64, 65, 130]))
    length = count + int(rng.choice([0, 0, 1, 31, 32, 64, 100, 300]))
    kv_heads, group, dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 8])), int(rng.choice([32, 64, 96, 256]))
    window = [None, None, 1, 32, 70, 1000][seed % 6]
    kind = [torch.float32, torch.float32, torch.bfloat16][seed % 3]
    cached = torch.bfloat16 if kind == torch.bfloat16 else torch.float16
    native.set_threads(1 + seed % 3)
    q = torch.randn(count, kv_heads * group * dim + 16).to(kind)[:, :-16]
    caches = [torch.randn(length + 40, kv_heads, dim).to(cached) for _ in range(2)]
    where = (5, 5 + length) if seed % 2 else torch.randperm(length + 40)[:length]
    k, v = ((c[5 : 5 + length] if seed % 2 else c[where]).double() for c in caches)
    out = torch.full((count, kv_heads * group * dim + 8), math.nan, dtype=kind)
    native.chunk(out[:, :-8], q, *caches, where, window, dim**-0.5)
    expected = attended(q.double().view(count, -1, dim), k, v, dim**-0.5, window, kv_heads)
    assert out[:, -8:].isnan().all()
    # rounding of q, k, v and the weights: 2^-9 each, of scores of the order of 1
    assert (out[:, :-8].double() - expected).abs().max() < 0.03
    assert (out[:, :-8].double() - expected).square().mean().sqrt() < 0.004
    again = torch.full_like(out, math.nan)
    native.set_threads(3)
    native.chunk(again[:, :-8], q, *caches, where, window, dim**-0.5)
    assert torch.equal(out[:, :-8], again[:, :-8])


def test_attention_of_extremes():
    """Scores far beyond what an exponential holds; a query that is not finite spoils itself alone."""
    q, k, v = torch.randn(40, 64) * 60, torch.randn(40, 1, 64).half() * 60, torch.randn(40, 1, 64).half()
    out = torch.empty(40, 64)
    native.chunk(out, q, k, v, (0, 40), None, 1.0)
    expected = attended(q.bfloat16().double().view(40, 1, 64), k.bfloat16().double(), v.double(), 1.0, None, 1)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    spoilt = q.clone()
    spoilt[11, 3] = math.nan
    other = torch.empty(40, 64)
    native.chunk(other, spoilt, k, v, (0, 40), None, 1.0)
    assert other[11].isnan().all() and torch.equal(other[torch.arange(40) != 11], out[torch.arange(40) != 11])


def test_what_is_no_chunk_is_declined():
    q, cache = torch.randn(8, 64), torch.randn(16, 1, 64)
    out = torch.full((8, 64), 7.0)
    for wrong, where in ((cache, (0, 8)), (cache.half()[:, :, :48].contiguous(), (0, 8)), (cache.half(), (0, 7))):
        with pytest.raises(ValueError, match="chunk: the native library declines"):
            native.chunk(out, q, wrong, wrong, where, None, 1.0)
    assert (out == 7).all()
