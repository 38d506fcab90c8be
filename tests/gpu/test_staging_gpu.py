"""Weights through pinned memory: every byte arrives, whatever the sizes, dtypes, strides and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flatout.models import staging
from flatout.models.staging import PIECE, Staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def value_of(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arrives(copies: Staging, place: torch.Tensor, value: torch.Tensor) -> None:
    torch.cuda.synchronize()  # what fills the place is of another stream
    copies.copy(place, value)
    copies.finish()
    assert torch.equal(place.cpu(), value.to(place.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_sizes_around_a_piece_and_casts(dtype, target, monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 4096)
    copies, each = Staging(CUDA), 4096 // dtype.itemsize
    for count in (0, 1, 7, each - 1, each, each + 1, 2 * each, 5 * each + 3):
        arrives(copies, torch.full((count,), torch.nan, dtype=target, device=CUDA), value_of(count, count, dtype=dtype))


def test_real_pieces():
    rows = 3 * PIECE // (1001 * 2) + 5
    value = value_of(0, rows, 1001, dtype=torch.bfloat16)
    arrives(Staging(CUDA), torch.zeros_like(value, device=CUDA), value)


def test_strides(monkeypatch):
    """A part of a fused weight is contiguous; a transposed value, or a place with gaps, goes another way."""
    monkeypatch.setattr(staging, "PIECE", 1024)
    copies, value = Staging(CUDA), value_of(1, 300, 40, dtype=torch.float32)
    whole = torch.zeros(700, 40, device=CUDA)
    arrives(copies, whole[100:400], value)
    assert not whole[:100].any() and not whole[400:].any()
    arrives(copies, torch.zeros(40, 300, device=CUDA), value.T)
    wide = torch.zeros(300, 64, device=CUDA)
    arrives(copies, wide[:, 3:43], value)
    assert not wide[:, :3].any() and not wide[:, 43:].any()


def test_many_threads(monkeypatch):
    """Each has buffers of its own; one finish() waits for them all."""
    monkeypatch.setattr(staging, "PIECE", 1 << 16)
    copies = Staging(CUDA)
    values = [value_of(i, 20_000 + 997 * i, dtype=DTYPES[i % 3]) for i in range(48)]
    places = [torch.full_like(value, torch.nan, dtype=DTYPES[i % 2], device=CUDA) for i, value in enumerate(values)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copies.copy, places, values))
    copies.finish()
    for place, value in zip(places, values):
        assert torch.equal(place.cpu(), value.to(place.dtype))
