"""Checks of the small Triton kernels against float64, for tests/kernels (interpreted, on the CPU) and tests/gpu alike.

Each makes its operands from a seed, on the device given, with outputs poisoned and guarded; and calls the implementation itself, so that
neither accepts() nor a measured choice stands between.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flatout.kernels.activation import gate_mul
from flatout.kernels.embedding import embedding, gather_rows
from flatout.kernels.gpu import embedding as _embedding  # noqa: F401  registers
from flatout.kernels.gpu import gate as _gate  # noqa: F401
from flatout.kernels.gpu import greedy as _greedy  # noqa: F401
from flatout.kernels.gpu import inputs as _inputs  # noqa: F401
from flatout.kernels.gpu import norm as _norm  # noqa: F401
from flatout.kernels.gpu import rope as _rope  # noqa: F401
from flatout.kernels.inputs import FROM_DEVICE
from flatout.kernels.logits import finish_logits
from flatout.kernels.norm import add, rms_norm
from flatout.kernels.op import Op
from flatout.kernels.rope import rope_kv_write
from flatout.kernels.sampling import greedy

POISON = 77.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# what one rounding may change of 1, and a little of the float32 arithmetic before it; in float32 what sums and exponentials may
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 1.05 * 2.0**-11, torch.bfloat16: 1.05 * 2.0**-8}


def triton(op: Op):
    """The op's implementation of that name."""
    return next(i.run for i in op.implementations if i.name == "triton")


def random(seed: int, *shape: int, dtype=torch.float32, device="cpu") -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(hash((seed, *shape)) % (1 << 31))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def integers(seed: int, low: int, high: int, *shape: int, dtype=torch.int64, device="cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)


def widened(rows: Tensor, extra: int = 16) -> tuple[Tensor, Tensor]:
    """(rows as a view of wider ones, the poison beside them)."""
    wide = torch.full((rows.shape[0], rows.shape[1] + extra), POISON, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]], wide[:, rows.shape[1] :]


def poisoned(rows: int, width: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
    return widened(torch.full((rows, width), POISON, dtype=dtype, device=device))


def close(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """Within so many roundings of what the values themselves are, or of 1 where they are smaller."""
    if not found.is_cuda and found.dtype == torch.bfloat16:
        roundings *= 2  # the interpreter cuts off where the device rounds
    allowed = roundings * ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=allowed, atol=allowed)


def untouched(*guards: Tensor) -> None:
    for guard in guards:
        assert (guard == POISON).all()


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def check_norm(device, rows, width, dtype, offset, in_place, seed) -> None:
    x, beside = widened(random(seed, rows, width, dtype=dtype, device=device) * 3)
    weight = random(seed + 1, width, dtype=dtype, device=device)
    out, guard = (x, beside) if in_place else poisoned(rows, width, dtype, device)
    before = x.clone()
    triton(rms_norm)(out, x, weight, 1e-5, offset)
    close(out, normed(before, weight, 1e-5, offset), 1 if offset else 2)
    untouched(beside, guard)
    assert in_place or torch.equal(x, before)


def check_add(device, rows, width, dtype, scale, seed) -> None:
    (residual, guard), (x, _) = (widened(random(seed + i, rows, width, dtype=dtype, device=device)) for i in range(2))
    expected = residual.double() + scale * x.double()
    triton(add)(residual, x, scale)
    close(residual, expected)
    untouched(guard)


def check_gate(device, rows, width, dtype, activation, seed) -> None:
    gate_up, _ = widened(random(seed, rows, 2 * width, dtype=dtype, device=device) * 2)
    gate, up = gate_up.double().chunk(2, -1)
    expected = (
        up
        * {
            "silu": lambda: gate / (1 + torch.exp(-gate)),
            "gelu": lambda: gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
            "gelu_tanh": lambda: gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        }[activation]()
    )
    out, guard = poisoned(rows, width, dtype, device)
    triton(gate_mul)(out, gate_up, activation)
    # a GPU's exponential is approximate: an H200's float32 was 1.4e-6 off
    close(out, expected, 8 if out.is_cuda and dtype == torch.float32 else 1)
    untouched(guard)


def check_finish(device, rows, width, dtype, scale, softcap, seed) -> None:
    x = random(seed, rows, width, dtype=dtype, device=device) * 20
    out = x.clone() if dtype == torch.float32 else torch.full((rows, width), POISON, device=device)
    expected = x.double() * scale
    if softcap:
        expected = softcap * torch.tanh(expected / softcap)
    triton(finish_logits)(out, out if dtype == torch.float32 else x, scale, softcap)
    close(out, expected, 2)


def check_rows(device, rows, width, dtype, scale, seed) -> None:
    """embedding and gather_rows; ids repeat."""
    table, _ = widened(random(seed, 37, width, dtype=dtype, device=device))
    ids = integers(seed, 0, 37, rows, device=device)
    out, guard = poisoned(rows, width, dtype, device)
    triton(gather_rows)(out, table, ids)
    assert torch.equal(out, table[ids])
    out.fill_(POISON)
    triton(embedding)(out, ids, table, scale)
    close(out, table[ids].double() * scale)
    untouched(guard)


def check_rope(device, tokens, heads, kv_heads, dim, rotary, normalised, offset, dtype, seed) -> None:
    """`heads` are queries'. Then the first two tokens share a slot, as padding of a captured batch may: either's numbers are there."""
    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    before = random(seed, tokens, sum(widths), dtype=dtype, device=device)
    by_head = before.clone().view(tokens, heads + 2 * kv_heads, dim)
    caches = [torch.full((tokens + 5, kv_heads, dim), POISON, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(tokens + 5, generator=torch.Generator().manual_seed(seed))[:tokens].to(device)
    angles = random(seed + 2, tokens, rotary // 2, device=device) * 3
    rope = torch.cat([angles.cos(), angles.cos(), -angles.sin(), angles.sin()], 1).to(dtype)
    weights = [random(seed + 3 + i, dim, dtype=dtype, device=device) if normalised else None for i in range(2)]
    cos, sin = (part.unsqueeze(1) if rotary else None for part in rope.chunk(2, 1))
    expected = []
    for part, weight in zip(before.double().split(widths, 1), (*weights, None)):
        part = part.view(tokens, -1, dim)
        part = part.clone() if weight is None else normed(part, weight, 1e-6, offset)
        expected.append(part)
    half = rotary // 2
    for part in expected[:2]:
        cosine, sine = rope.double()[:, None, :half], rope.double()[:, None, 3 * half :]
        one, two = part[..., :half].clone(), part[..., half:rotary].clone()
        part[..., :half], part[..., half:rotary] = one * cosine - two * sine, two * cosine + one * sine
    run = triton(rope_kv_write)
    run(by_head[:, :-kv_heads], by_head[:, -kv_heads:], *caches, slots, cos, sin, *weights, 1e-6, offset)
    keys = by_head[:, heads : heads + kv_heads]
    close(by_head[:, :heads], expected[0])
    close(keys, expected[1])
    assert torch.equal(by_head[:, heads + kv_heads :].flatten(1), before[:, sum(widths[:2]) :])  # values stay
    assert torch.equal(caches[0][slots], keys) and torch.equal(caches[1][slots], by_head[:, heads + kv_heads :])
    others = torch.ones(tokens + 5, dtype=torch.bool, device=device)
    others[slots] = False
    untouched(*(cache[others] for cache in caches))
    if tokens > 1:
        by_head = before.clone().view_as(by_head)
        slots[1] = slots[0]
        run(by_head[:, :-kv_heads], by_head[:, -kv_heads:], *caches, slots, cos, sin, *weights, 1e-6, offset)
        shared = caches[0][slots[0]]
        assert ((keys[0] == shared) | (keys[1] == shared)).all()


def staged_step(seed: int, rows: int, diffs: int, used: int, slots: int, width: int, block_size: int, device) -> tuple[Tensor, ...]:
    """(tables, staged, last_ids) of a random step, with rows that share a slot where there are more rows than slots. Diffs in use are of
    distinct cells as long as there are so many."""
    tables = integers(seed, 0, 1000, slots, width, dtype=torch.int32, device=device)
    cells = torch.randperm(slots * width, generator=torch.Generator().manual_seed(seed)).repeat(1 + diffs // (slots * width))[:diffs]
    chosen = torch.randperm(slots, generator=torch.Generator().manual_seed(seed)).repeat(-(-rows // slots))[:rows]
    parts = [
        torch.tensor([used]),
        torch.where(integers(seed + 1, 0, 2, rows) > 0, integers(seed + 2, 0, 5000, rows), FROM_DEVICE),
        integers(seed + 3, 0, width * block_size, rows),
        chosen,
        cells // width,
        cells % width,
        integers(seed + 4, 1000, 2000, diffs),
    ]
    staged = torch.cat(parts).to(torch.int32)
    staged[1 + 3 * rows :].view(3, diffs)[:, used:] = 1 << 30  # what is not used may be anything
    return tables, staged.to(device), integers(seed + 5, 0, 5000, slots, device=device)


def check_decode_inputs(run, device, rows, diffs, used, slots, width, block_size, seed) -> None:
    """run: an implementation or the reference."""
    tables, staged, last_ids = staged_step(seed, rows, diffs, used, slots, width, block_size, device)
    before = tables.clone()
    made = [
        torch.full((rows + 3,), 77, dtype=dtype, device=device)
        for dtype in (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)
    ]
    run(*(out[:rows] for out in made), tables, staged, last_ids, block_size)
    host, table, last = staged.tolist(), before.tolist(), last_ids.tolist()
    for i in range(used):
        slot, column, block = (host[1 + 3 * rows + part * diffs + i] for part in range(3))
        table[slot][column] = block
    assert tables.tolist() == table
    for r in range(rows):
        token, position, slot = (host[1 + part * rows + r] for part in range(3))
        where = table[slot][position // block_size] * block_size + position % block_size
        expected = [last[slot] if token == FROM_DEVICE else token, position, position + 1, where, slot]
        assert [int(out[r]) for out in made] == expected
    for out in made:
        untouched(out[rows:])


def check_remember(run, device, rows, dtype, seed) -> None:
    last_ids = torch.full((rows + 4,), 77, dtype=torch.int64, device=device)
    slots = torch.randperm(rows + 4, generator=torch.Generator().manual_seed(seed))[:rows].to(dtype).to(device)
    ids = integers(seed, 1000, 2000, rows, device=device)
    run(last_ids, slots, ids)
    assert torch.equal(last_ids[slots.long()], ids) and (last_ids == 77).sum() == 4


def awkward_logits(seed: int, rows: int, width: int, device="cpu") -> Tensor:
    """Rows in turn: ordinary, coarse so that values tie, holed with -inf, with NaN, with +inf and the highest finite, all -inf, all NaN or
    -inf, all the lowest finite or -inf, all zeros of either sign, all negative."""
    logits = random(seed, rows, width, device=device) * 3
    some = random(seed + 1, rows, width, device=device)
    lowest, highest = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    for row in range(rows):
        x, s = logits[row], some[row]
        match row % 10:
            case 1:
                x.mul_(2).round_()
            case 2:
                x[s > 0] = -torch.inf
            case 3:
                x[s > 1] = torch.nan
            case 4:
                x[s > 1.5], x[s < -1.5] = torch.inf, highest
            case 5:
                x.fill_(-torch.inf)
            case 6:
                x.copy_(torch.where(s > 0, torch.nan, -torch.inf))
            case 7:
                x.copy_(torch.where(s > 1, lowest, -torch.inf))
            case 8:
                x.copy_(torch.where(s > 0, 0.0, -0.0))
            case 9:
                x.abs_().neg_()
    return logits


def check_greedy(device, rows, width, seed) -> None:
    logits, _ = widened(awkward_logits(seed, rows, width, device))
    before = logits.clone()
    ids = torch.full((rows + 2,), 77, device=device)
    for _ in range(2):  # again: the scratch is as it was
        ids.fill_(77)
        triton(greedy)(ids[:rows], logits)
        plain = torch.where(logits.isnan(), -torch.inf, logits).clamp(max=torch.finfo(torch.float32).max)
        assert ids[:rows].tolist() == [int((row == row.max()).nonzero()[0]) for row in plain.cpu()]
        untouched(ids[rows:])
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
