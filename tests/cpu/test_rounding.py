"""Weights rounded to 4 and 8 bits: how near they are, what no scale holds, and that no more than a few megabytes are ever read at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatout.kernels.packed import GROUP, unpacked
from flatout.quant import rounding
from flatout.quant.rounding import rounded_weight


def made(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float32: what is left of the values."""
    return unpacked(rounded_weight(lambda first, end: values[first:end], *values.shape, bits))


def normal(rows: int = 64, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().sum().sqrt() / wanted.square().sum().sqrt())


def from_end_to_end(values: torch.Tensor) -> np.ndarray:
    """4 bits as Q4_1 has them: levels from the least value of a group to the largest, in numpy."""
    groups = values.numpy().reshape(-1, GROUP)
    low = groups.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((groups.max(1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    return (np.clip(np.round((groups - low) / scale), 0, 15) * scale + low).reshape(values.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_half_a_step_off(dtype):
    values = normal().to(dtype)
    wanted = values.float()
    step = wanted.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True) / 127
    away = (made(values, 8) - wanted).unflatten(1, (-1, GROUP)).abs()
    assert torch.all(away <= step * 0.5 + step * 127 / 2048)  # and what rounding the scale to float16 moves
    assert 0.004 < off(made(values, 8), wanted) < 0.006


def test_four_bits_are_nearer_than_levels_from_end_to_end():
    values = normal()
    simple = torch.from_numpy(from_end_to_end(values))
    found, before = off(made(values, 4), values), off(simple, values)
    assert 0.07 < found < 0.93 * before
    squares = [(some - values).unflatten(1, (-1, GROUP)).square().sum(-1) for some in (made(values, 4), simple)]
    assert torch.all(squares[0] <= squares[1] * 1.02)  # in every group; float16 may round two scales differently
    heavy = values * torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).exp()
    assert off(made(heavy, 4), heavy) < 0.96 * off(torch.from_numpy(from_end_to_end(heavy)), heavy)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_the_levels_say_stays(bits):
    """Zeros; one value a group; sixteen evenly spaced ones, of 8 bits around zero."""
    assert torch.equal(made(torch.zeros(16, 64), bits), torch.zeros(16, 64))
    one = torch.full((16, 64), 0.375)
    assert off(made(one, bits), one) < 1e-3
    ladder = (torch.arange(16 * 64) % 16).float().view(16, 64) * 0.25 - (0.5 if bits == 4 else 0)
    assert off(made(ladder, bits), ladder) < (1e-3 if bits == 4 else 5e-3)


@pytest.mark.parametrize("scale", [1e-30, 2e-8, 1e-6, 1e-3, 1.0, 1000.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_small_and_large_values(bits, scale):
    """Down to where float16's smallest step, 6e-8, is all that is left: of 15 levels eight such at most, half of one for each."""
    values = normal() / 0.02 * scale
    away = (made(values, bits) - values).abs()
    most = values.unflatten(1, (-1, GROUP)).abs().amax(-1, keepdim=True) / {4: 7, 8: 127}[bits] + {4: 8, 8: 1}[bits] * 2.0**-24
    assert torch.all(away.unflatten(1, (-1, GROUP)) <= most)


def test_one_outlier_costs_its_own_group_alone():
    values = normal()
    values[3, 70] = 5.0
    for bits in (4, 8):
        away = (made(values, bits) - values).abs()
        assert away[3, 70] < 0.05
        away[3, 64:96] = 0
        assert away.max() < {4: 0.01, 8: 0.0006}[bits]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e9])
def test_what_no_scale_holds_is_refused(bits, bad):
    values = normal()
    values[17, 33] = bad
    with pytest.raises(ValueError, match=f"values that float16 scales for {bits} bits do not hold"):
        made(values, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (2064, 1056), (16, 1 << 19)])
def test_a_few_rows_are_read_at_a_time_each_once(bits, rows, columns):
    values = normal(rows, 32).repeat(1, columns // 32)
    read = []

    def some(first: int, end: int) -> torch.Tensor:
        read.append((first, end))
        return values[first:end]

    packed = rounded_weight(some, rows, columns, bits)
    assert [first for first, _ in read] == [0, *(end for _, end in read[:-1])] and read[-1][1] == rows
    assert all((end - first) * columns <= max(rounding.CHUNK, 16 * columns) for first, end in read)
    assert torch.equal(unpacked(packed), made(values[:, :32], bits).repeat(1, columns // 32))
