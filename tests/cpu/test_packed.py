"""Ops on packed weights: the layout, the references against float64, and the native library and the way by bfloat16 against those."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import native, packed
from flatout.kernels.packed import GROUP, LINES, pack, packed_add, packed_linear, packed_norm_gated, packed_norm_linear, unpacked
from flatout.kernels.packed_moe import packed_experts
from flatout.quant.packed import Packed

EPS = 1e-5


def weight(lines: int, columns: int, bits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed, float64 [lines, columns]); results of products with rows of the order of 1 are of that order too."""
    draw = torch.Generator().manual_seed(seed)
    shape = (lines, columns // GROUP)
    values = torch.randint(0, 1 << bits, (*shape, GROUP), dtype=torch.uint8, generator=draw)
    size = columns**-0.5 / (1 << (bits - 2))
    scales = ((torch.rand(shape, generator=draw) + 0.5) * size).half()
    minima = (-torch.rand(shape, generator=draw) * 16 * size).half() if bits == 4 else None
    exact = values.double() - (0 if bits == 4 else 128)
    exact = exact * scales.double()[..., None] + (0 if minima is None else minima.double()[..., None])
    return pack(values, scales, minima), exact.flatten(1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float64: as float32 arithmetic rounds it."""
    groups = x.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale == 0, 0, (groups / scale).round()).double() * scale.double()).flatten(1)


@settings(max_examples=30, deadline=None)
@given(blocks=st.integers(1, 5), groups=st.integers(1, 6), bits=st.sampled_from((4, 8)), seed=st.integers(0, 99))
def test_what_is_packed_comes_out_again(blocks, groups, bits, seed):
    made, exact = weight(blocks * LINES, groups * GROUP, bits, seed)
    assert made.shape == (blocks, groups, packed.BYTES[bits]) and made.dtype == torch.uint8
    assert torch.equal(unpacked(made).double(), exact.float().double()) or torch.allclose(unpacked(made).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_layout_is_as_the_native_library_reads_it(bits):
    values = torch.randint(0, 1 << bits, (48, 3, GROUP), dtype=torch.uint8)
    scales, minima = torch.rand(48, 3).half(), torch.randn(48, 3).half()
    made = pack(values, scales, minima if bits == 4 else None)
    for line in (0, 17, 40):
        for group in range(3):
            row, block = line % 16, made[line // 16, group]
            for column in range(GROUP):
                if bits == 8:
                    assert block[64 * (column // 4) + 4 * row + column % 4] == values[line, group, column]
                else:
                    byte = block[64 * (column % 16 // 4) + 4 * row + column % 4]
                    assert (byte >> 4 if column >= 16 else byte & 15) == values[line, group, column]
            end = 16 * GROUP * bits // 8
            assert block[end + 2 * row : end + 2 * row + 2].view(torch.float16) == scales[line, group]
            if bits == 4:
                assert block[end + 32 + 2 * row : end + 34 + 2 * row].view(torch.float16) == minima[line, group]


def cases():
    for bits in (4, 8):
        for rows, lines, columns in ((1, 32, 64), (3, 16, 576), (5, 96, 96), (17, 64, 32), (40, 160, 288)):
            yield bits, rows, lines, columns


MANY = ("bfloat16", "tiles")  # for many rows


def run_all(op, name, args):
    """The op's reference, or its implementation of that name."""
    if name == "reference":
        return op.reference(*args)
    chosen = next(i for i in op.implementations if i.name == name)
    if not chosen.accepts(*args):
        pytest.skip(f"{name} does not take these")
    return chosen.run(*args)


@pytest.mark.parametrize("name", ["reference", "native", "bfloat16", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_against_float64(name, dtype, monkeypatch):
    if name != "reference" and not native.available():
        pytest.skip("the native library was not built")
    if name == "bfloat16":
        monkeypatch.setattr(native, "has_tiles", lambda: False)
    digits = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-14
    ran = 0
    for bits, rows, lines, columns in cases():
        if name in MANY and rows < packed.LEAST_UNPACKED:
            continue
        ran += 1
        made, exact = weight(lines, columns, bits, rows)
        x = torch.randn(rows, columns).to(dtype)
        norm, bias = (torch.rand(columns) + 0.5).to(dtype), torch.randn(lines).to(dtype)
        taken = x.double() if name in MANY else rounded(x)
        # a norm that rounds otherwise in its last bit may put a value on the other side of a half: a step of int8
        wide = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS) * norm.double()
        after = wide if name in MANY else rounded(wide.float())
        step = 2.0**-6 if name == "native" else 0
        slack = {"reference": digits, "native": digits, "bfloat16": 2.0**-5, "tiles": 2.0**-5}[name]
        for shift in (None, bias):
            plus = 0 if shift is None else shift.double()
            out = torch.full((rows, lines), float("nan"), dtype=dtype)
            run_all(packed_linear, name, (out, x, made, shift))
            torch.testing.assert_close(out.double(), taken @ exact.T + plus, rtol=slack, atol=slack)
            stream = torch.randn(rows, lines).to(dtype)
            expected = stream.double() + 0.5 * (taken @ exact.T + plus)
            run_all(packed_add, name, (stream, torch.empty_like(out), x, made, shift, 0.5))
            torch.testing.assert_close(stream.double(), expected, rtol=slack, atol=2 * slack)
            out.fill_(float("nan"))
            run_all(packed_norm_linear, name, (out, torch.empty_like(x), x, norm, EPS, 0.0, made, shift))
            torch.testing.assert_close(out.double(), after @ exact.T + plus, rtol=slack, atol=2 * slack + step)
        if lines % 32:
            continue
        half = lines // 2
        for activation in ("silu", "gelu", "gelu_tanh"):
            y = after @ exact.T + bias.double()
            gate = torch.nn.functional.silu(y[:, :half]) if activation == "silu" else torch.nn.functional.gelu(
                y[:, :half], approximate="tanh" if activation == "gelu_tanh" else "none"
            )  # fmt: skip
            out = torch.full((rows, half), float("nan"), dtype=dtype)
            args = (out, torch.empty_like(x), torch.empty(rows, lines, dtype=dtype), x, norm, EPS, 0.0, made, bias, activation)
            run_all(packed_norm_gated, name, args)
            torch.testing.assert_close(out.double(), gate * y[:, half:], rtol=8 * slack, atol=8 * (slack + step))
    assert ran


@pytest.mark.parametrize("name", ["reference", "native", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_against_float64(name, dtype):
    if name != "reference" and not native.available():
        pytest.skip("the native library was not built")
    for bits, down_bits, tokens, count, top_k, hidden, width in (
        (4, 8, 3, 5, 2, 96, 64),
        (8, 4, 96, 4, 3, 64, 32),
        (4, 4, 64, 2, 2, 32, 96),
    ):
        if name == "tiles" and tokens < 64:
            continue
        gate_ups, downs = (
            [weight(*shape, b, e) for e in range(count)] for shape, b in (((2 * width, hidden), bits), ((hidden, width), down_bits))
        )
        x, out = torch.randn(tokens, hidden).to(dtype), torch.full((tokens, hidden), float("nan"), dtype=dtype)
        weights, chosen = torch.rand(tokens, count).topk(top_k)
        expected, by_tiles = torch.zeros(tokens, hidden, dtype=torch.float64), name == "tiles"
        for t in range(tokens):
            for w, e in zip(weights[t].double(), chosen[t].tolist()):
                one = x[t : t + 1].double() if by_tiles else rounded(x[t : t + 1])
                gate, up = (one @ gate_ups[e][1].T).chunk(2, -1)
                act = torch.nn.functional.silu(gate) * up
                expected[t] += w * ((act if by_tiles else rounded(act)) @ downs[e][1].T)[0]
        stacks = [torch.stack([made for made, _ in each]) for each in (gate_ups, downs)]
        run_all(packed_experts, name, (out, x, *stacks, weights, chosen, "silu"))
        # float32 may put a value on the other side of a half: a step of int8
        slack = 2.0**-4 if by_tiles else 2.0**-6 if dtype == torch.bfloat16 else 2.0**-7
        error, size = (out.double() - expected).abs(), expected.square().mean(1, keepdim=True).sqrt()  # a token's root mean square
        assert (error <= slack * (1 + size + expected.abs())).all()
        assert error.norm() < slack / 4 * expected.norm()


def test_logits_of_bfloat16_rows_are_float32():
    made, exact = weight(64, 96, 8)
    x, out = torch.randn(3, 96).bfloat16(), torch.empty(3, 64)
    packed_linear(out, x, made, None)
    torch.testing.assert_close(out.double(), rounded(x) @ exact.T, rtol=1e-5, atol=1e-5)


def test_a_scheme_has_whole_groups_only():
    assert Packed(4).tensors(32, 64, torch.bfloat16, torch.device("cpu"))["weight"].shape == (2, 2, 320)
    for rows, columns in ((24, 64), (32, 48)):
        with pytest.raises(ValueError, match=f"{rows} x {columns} cannot be packed: .* are no multiple of {16 if rows % 16 else 32}"):
            Packed(8).tensors(rows, columns, torch.bfloat16, torch.device("cpu"))


def test_costs_count_what_is_read():
    made, _ = weight(64, 96, 4)
    cost = packed_linear.cost(torch.empty(3, 64), torch.empty(3, 96), made, None)
    assert cost.weights == made.nbytes == 64 * 96 * 5 // 8 and cost.flops == 2 * 3 * 64 * 96
    stacks = torch.stack([weight(128, 96, 4)[0]] * 8), torch.stack([weight(96, 64, 8)[0]] * 8)
    rows = torch.empty(3, 96), torch.empty(3, 96), *stacks, torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int64)
    cost = packed_experts.cost(*rows, "silu")
    assert cost.weights == round(8 * (1 - 0.75**3) * (128 * 96 * 5 // 8 + 96 * 64 * 17 // 16))
    assert cost.flops == 3 * 2 * (2 * (128 * 96 + 96 * 64) + 5 * 64 + 2 * 96)
