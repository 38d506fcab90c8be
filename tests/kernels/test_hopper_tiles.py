"""Which tiles hopper_product.cu is launched with: its own conditions hold for every shape. The kernel itself runs in tests/gpu."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flatout.kernels.gpu.device import Facts
from flatout.kernels.gpu.hopper import FEW_ROWS, MOST_ROWS, SHARES, WIDEST, tiles

H200 = Facts((9, 0), 132, 232_448, True)
FEWER = Facts((9, 0), 78, 232_448, True)


@given(
    rows=st.integers(1, MOST_ROWS),
    outputs=st.integers(128, 40_000).map(lambda n: n * 8),
    gated=st.booleans(),
    device=st.sampled_from((H200, FEWER)),
)
def test_tiles_fit(rows, outputs, gated, device):
    t = tiles(rows, outputs, gated, device)
    parts = (1 if t.weight <= WIDEST else 2) * (2 if gated else 1)
    assert t.weight % (8 * parts) == 0 and t.weight // parts <= 256  # instructions of whole columns, boxes that TMA takes
    assert t.rows <= 256 and t.rows >= min(rows, 2 * FEW_ROWS, 256)
    assert t.weight * t.blocks // 2 <= 176  # sums that a thread holds, of the 232 registers it may have
    assert 2 <= t.stages <= 8 and t.shared_memory <= device.shared_memory
    assert t.share in SHARES and (t.cluster > 1) == (t.share != "nothing")
    if t.share == "columns":
        assert t.rows * (t.weight + 4) * 4 <= t.stages * (t.rows + t.weight) * 128  # partial sums lie where the stages lay
        assert t.rows % t.cluster == 0


def test_a_seven_billion_model_on_an_h200():
    """What the sweep found best (docs/performance.md)."""
    assert [tiles(r, 18944, True, H200).weight for r in (8, 64, 128, 256, 512)] == [144] * 5
    assert [tiles(r, 3584, False, H200).weight for r in (64, 256)] == [128, 128]
    assert tiles(64, 3584, False, H200).cluster == 4
