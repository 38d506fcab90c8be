"""How streaming.py cuts products: its kernel's own conditions, and that no multiprocessor gets more than its part. The kernel runs in tests/gpu."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flatout.kernels.gpu.device import Facts
from flatout.kernels.gpu.streaming import EVEN, MOST_TILES, SHARED_MEMORY, STAGES, TAKEN, WARPS, cut, evenness

H200 = Facts((9, 0), 132, 232_448, True)
FEWER = Facts((9, 0), 78, 232_448, True)


@given(
    lines=st.integers(2, 40_000).map(lambda n: n * 8),
    columns=st.integers(1, 600).map(lambda n: n * 64),
    gated=st.booleans(),
    device=st.sampled_from((H200, FEWER)),
)
@example(lines=49152, columns=576, gated=False, device=H200)
@example(lines=42248, columns=3072, gated=True, device=FEWER)
def test_cuts_fit(lines, columns, gated, device):
    c = cut(lines, columns, gated, device)
    assert 1 <= c.tiles <= MOST_TILES and (not gated or c.tiles % 2 == 0)
    assert c.stages >= 2 and 1 <= c.warps <= WARPS
    assert c.tiles * c.warps * c.stages * 1024 <= c.shared_memory <= device.shared_memory
    fit = SHARED_MEMORY // (c.shared_memory + TAKEN)
    assert fit == c.most, "as many as are meant to, and no more, find room on a multiprocessor"
    programs = -(-lines // (8 * c.tiles))
    if -(-programs // device.sms) * (c.tiles * STAGES * 1024 + TAKEN) <= SHARED_MEMORY:
        assert fit * device.sms >= programs, "all of them at once"


def test_models_on_an_h200():
    """As they were measured in captured steps of 2 to 16 rows (tests/gpu/sweeps/step.py)."""
    sizes = {"gate": (37888, 3584, True), "down": (3584, 18944, False), "qkv": (4608, 3584, False), "o": (3584, 3584, False)}
    cuts = {name: cut(*size, H200) for name, size in sizes.items()}
    assert {name: (c.tiles, c.warps, c.most) for name, c in cuts.items()} == {
        "gate": (6, 2, 6), "down": (4, 16, 1), "qkv": (5, 14, 1), "o": (4, 14, 1),
    }  # fmt: skip


def test_where_few_multiprocessors_get_work_others_compete():
    def even(lines, columns, gated=False):
        return evenness(lines, cut(lines, columns, gated, H200).tiles, H200) >= EVEN

    assert even(37888, 3584, True) and even(3584, 18944) and even(4608, 3584) and even(2048, 8192) and even(128256, 2048)
    assert not even(8, 4096) and not even(128, 2048) and not even(576, 1536) and not even(1536, 8960)
