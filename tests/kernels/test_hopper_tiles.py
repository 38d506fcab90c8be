"""Which tiles hopper_product.cu is launched with: its own conditions hold for every shape. The kernel itself runs in tests/gpu."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flatout.kernels.gpu.device import Facts
from flatout.kernels.gpu.hopper import MOST_ROWS, tiles

H200 = Facts((9, 0), 132, 232_448, True)
FEWER = Facts((9, 0), 78, 232_448, True)


@given(
    warpgroups=st.integers(1, -(-MOST_ROWS // 64)),
    outputs=st.integers(128, 40_000).map(lambda n: n * 8),
    gated=st.booleans(),
    device=st.sampled_from((H200, FEWER)),
)
def test_tiles_fit(warpgroups, outputs, gated, device):
    t = tiles(warpgroups, outputs, gated, device)
    assert t.weight % (16 if gated else 8) == 0 and t.weight <= 256  # an instruction's columns, boxes that TMA takes
    # sums that a thread holds, beside some forty others, of the registers that it has
    assert t.weight // 2 + 40 <= {1: 255, 2: 232, 3: 160}[warpgroups]
    assert 2 <= t.stages <= 8 and t.shared_memory <= device.shared_memory
    if t.cluster > 1:
        assert t.rows * (t.weight + 4) * 4 <= t.stages * (t.rows + t.weight) * 128  # partial sums lie where the stages lay
        assert t.rows % t.cluster == 0


def test_a_seven_billion_model_on_an_h200():
    """What the sweep found best (docs/performance.md)."""
    assert [tiles(groups, 18944, True, H200).weight for groups in (1, 2, 3)] == [144] * 3
    assert [tiles(groups, 3584, False, H200).weight for groups in (1, 2)] == [120, 120]
    assert tiles(1, 3584, False, H200).cluster == 4
