"""The native library's attention of single queries and its rotation: on every instruction set, against float64 and torch's own bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_rows import case_of, plan_of, spec_of

from flatout.kernels import native
from flatout.kernels.attention import InPlace, attention
from flatout.kernels.kv import stored, unpack
from flatout.kernels.rope import rope_kv_write

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library was not built")


def attended(rows, spec, dtype, seed, threads=1):
    """The case, and what the implementation made of it."""
    native.set_threads(threads)
    case = case_of(rows, spec, dtype, seed=seed)
    work = plan_of(spec, rows, case.table, dtype)
    assert isinstance(work.arrangement, InPlace)
    return case, case.run(next(i.run for i in attention.implementations if i.name == "in place"), work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_shape(isa, dtype):
    draw = np.random.default_rng(3)
    for seed in range(30):
        kv_heads, group, dim = int(draw.integers(1, 4)), int(draw.integers(1, 9)), int(draw.choice([16, 48, 64, 80, 128, 256]))
        window, softcap = [None, None, 1, 7, 300][draw.integers(5)], float(draw.choice([0, 0, 30]))
        lengths = [int(draw.choice([1, 15, 16, 17, 255, 256, 257, 700])) for _ in range(draw.integers(1, 5))]
        rows = [(length - 1, 1) for length in lengths] + ([(3, 4)] if seed % 3 == 0 else [])  # a chunk among them
        spec = spec_of(kv_heads * group, kv_heads, dim, window, softcap)
        case, out = attended(rows, spec, dtype, seed)
        case.holds(out)
        assert torch.equal(out, attended(rows, spec, dtype, seed, threads=2)[1]), "whatever the threads"


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16])
def test_caches_of_16_bits_beside_float32(isa, cache, block):
    """As float64 has it from what the cache holds: within a query's rounding to bfloat16 where matrix tiles multiply, else within float32's.
    What lies behind a row's last key, in its block, does not matter."""
    draw = np.random.default_rng(block)
    tiles = cache == torch.bfloat16 and native.has_tiles()
    for seed in range(12):
        torch.manual_seed(seed)
        kv_heads, group, dim = int(draw.integers(1, 6)), int(draw.integers(1, 9)), int(draw.choice([32, 64, 80, 128, 256]))
        window, softcap = [None, 7, 100][seed % 3], [0.0, 20.0][seed % 2]
        lengths = np.array([draw.choice([1, 15, 16, 17, 63, 64, 65, 127, 129, 300]) for _ in range(3)], np.int32)
        width = -(-int(lengths.max()) // block)
        table = draw.permutation(3 * width).astype(np.int32).reshape(3, width)
        keys, values = (torch.randn(3 * width * block, kv_heads, dim).to(cache) for _ in "kv")
        q, out = torch.randn(3, kv_heads * group * dim), torch.empty(3, kv_heads * group * dim)
        every = np.arange(3, dtype=np.int32)
        slots = [torch.from_numpy((row[:, None] * block + np.arange(block)).reshape(-1)[:n]).long() for row, n in zip(table, lengths)]
        for row, n in zip(table, lengths):
            behind = row[(n - 1) // block] * block + np.arange((n - 1) % block + 1, block)
            keys[behind] = values[behind] = torch.nan
        native.Rows(table, lengths, every, every, block, window).attend(out, q, keys, values, dim**-0.5, softcap)
        for row, seen in enumerate(slots):
            seen = seen[-window:] if window else seen
            k, v = (part[seen].double().repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", q[row].double().view(-1, dim), k) * dim**-0.5
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            expected = torch.einsum("hk,khd->hd", scores.softmax(1), v).reshape(-1)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=3e-2 if tiles else 1e-5)


def test_a_row_has_the_same_bits_alone_and_in_company(isa):
    spec = spec_of(6, 2, 64, None)
    rows = [(599, 1), (9, 1), (300, 1)]
    case, together = attended(rows, spec, torch.bfloat16, 0, threads=2)
    run = next(i.run for i in attention.implementations if i.name == "in place")
    for index, row in enumerate(rows):
        work = plan_of(spec, [row], case.table[index : index + 1], torch.bfloat16)
        alone = torch.empty_like(together[:1])
        run(alone, case.q[index : index + 1], case.k_cache, case.v_cache, work, spec.softmax_scale, 0.0)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("group", range(1, 9))
def test_what_all_values_are_comes_back(isa, group):
    """However weights are rounded, they make one in all: with nothing lost between pieces, tiles and lanes."""
    spec = spec_of(2 * group, 2, 96, None)
    rows = [(length - 1, 1) for length in (1, 17, 64, 100, 300)]
    case = case_of(rows, spec, torch.bfloat16)
    value = torch.linspace(-3, 3, 2 * 96).bfloat16().view(2, 96)
    case.v_cache[:] = value
    out = case.run(next(i.run for i in attention.implementations if i.name == "in place"), plan_of(spec, rows, case.table, torch.bfloat16))
    torch.testing.assert_close(out.view(len(rows), 2, group, 96), value[:, None].expand(len(rows), 2, group, 96), rtol=0, atol=0)


@pytest.mark.parametrize("part", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none_stay_so(isa, dtype, part):
    spec = spec_of(2, 1, 32, None)
    case = case_of([(40, 1), (5, 1)], spec, dtype)
    getattr(case, part)[case.table[0, 3] * 4] = float("nan")
    work = plan_of(spec, case.rows, case.table, dtype)
    out = case.run(next(i.run for i in attention.implementations if i.name == "in place"), work)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize(
    "dtype, cache",
    [
        *((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)),
        *((torch.float32, torch.int8), (torch.bfloat16, torch.int8)),
    ],
)
@pytest.mark.parametrize("heads, kv_heads, dim, rotary", [(9, 3, 64, 64), (4, 2, 64, 32), (3, 1, 128, 0), (2, 2, 80, 64)])
def test_rotation_has_torchs_bits(isa, dtype, cache, heads, kv_heads, dim, rotary):
    native.set_threads(2)
    torch.manual_seed(dim)
    tokens = 70
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    table = torch.randn(tokens, 2 * rotary).to(dtype)  # cos and sin side by side, as layers/rotary.py has them
    cos, sin = (table[:, :rotary].unsqueeze(1), table[:, rotary:].unsqueeze(1)) if rotary else (None, None)
    slots = torch.randperm(100)[:tokens]
    found = []
    for run in (rope_kv_write.reference, native.rotate):
        rows = fused.clone().view(tokens, heads + 2 * kv_heads, dim)
        caches = [torch.zeros(100, kv_heads, stored(dim, cache), dtype=cache) for _ in "kv"]
        run(rows[:, : heads + kv_heads], rows[:, heads + kv_heads :], *caches, slots, cos, sin, None, None, 1e-5, 0.0)
        found.append((rows, *caches))
    if isa == "scalar" and dtype == torch.float32:  # which has no fused multiply-add
        for one, other in zip(*found):
            close = {dtype: 1e-6, torch.int8: 4e-2}.get(one.dtype, 8e-3)  # a step of the cache, where the last bit before it differs
            torch.testing.assert_close(unpack(one, torch.float32), unpack(other, torch.float32), rtol=close, atol=close)
    else:
        assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_of_heads(isa, offset):
    heads, kv_heads, dim, tokens = 4, 2, 64, 9
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim)
    q_norm, k_norm = torch.rand(dim) + 0.5, torch.rand(dim) + 0.5
    found = []
    for run in (rope_kv_write.reference, native.rotate):
        rows, caches = fused.clone(), [torch.zeros(20, kv_heads, dim) for _ in "kv"]
        args = (torch.arange(tokens), None, None, q_norm, k_norm, 1e-5, offset)
        run(rows[:, : heads + kv_heads], rows[:, heads + kv_heads :], *caches, *args)
        found.append((rows, *caches))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_what_it_cannot_do_is_refused():
    table, one = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    rows = native.Rows(table, one, np.zeros(1, np.int32), np.zeros(1, np.int32), 4, None)
    for dim, heads in ((24, 1), (512, 1), (16, 9)):
        q, cache = torch.zeros(1, heads * dim), torch.zeros(4, 1, dim)
        with pytest.raises(ValueError, match="attend: the native library declines queries"):
            rows.attend(torch.empty_like(q), q, cache, cache, 1.0, 0.0)
    qk = torch.zeros(1, 2, 24)
    with pytest.raises(ValueError, match="rotate: the native library declines"):
        native.rotate(
            qk, qk[:, 1:], *(torch.zeros(4, 1, 24) for _ in "kv"), torch.zeros(1, dtype=torch.int64), None, None, None, None, 1e-5, 0.0
        )
