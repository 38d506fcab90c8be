"""How streaming.py cuts products: its kernel's own conditions, and that no multiprocessor gets more than its part. The kernel runs in tests/gpu."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flatout.kernels.gpu.device import Facts
from flatout.kernels.gpu.streaming import MOST_TILES, SHARED_MEMORY, cut

H200 = Facts((9, 0), 132, 232_448, True)
FEWER = Facts((9, 0), 78, 232_448, True)


@given(
    lines=st.integers(2, 40_000).map(lambda n: n * 8),
    columns=st.integers(1, 600).map(lambda n: n * 64),
    gated=st.booleans(),
    device=st.sampled_from((H200, FEWER)),
)
def test_cuts_fit(lines, columns, gated, device):
    c = cut(lines, columns, gated, device)
    assert 1 <= c.tiles <= MOST_TILES and (not gated or c.tiles % 2 == 0)
    assert c.stages >= 3 and 1 <= c.warps <= 8
    taken = c.shared_memory // 1024
    assert taken >= c.tiles * c.warps * c.stages and taken <= SHARED_MEMORY
    fit = (SHARED_MEMORY + 1) // (taken + 1)  # a kibibyte of each is the system's
    assert fit == c.most, "as many as are meant to, and no more, find room on a multiprocessor"
    programs = -(-lines // (8 * c.tiles))
    if -(-programs // device.sms) * (c.tiles * 4 + 1) <= SHARED_MEMORY + 1:
        assert fit * device.sms >= programs, "all of them at once"


def test_models_on_an_h200():
    """What the sweep found best, or within 0.3 % of it (docs/performance.md)."""
    sizes = {"gate": (37888, 3584, True), "down": (3584, 18944, False), "qkv": (4608, 3584, False), "o": (3584, 3584, False)}
    cuts = {name: cut(*size, H200) for name, size in sizes.items()}
    assert {name: (c.tiles, c.warps, c.most) for name, c in cuts.items()} == {
        "gate": (6, 1, 6), "down": (4, 8, 1), "qkv": (5, 8, 1), "o": (4, 8, 1),
    }  # fmt: skip
