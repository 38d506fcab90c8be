"""The paged attention kernels in Triton's interpreter against plain float64 attention: every edge of tiles, splits, groups and windows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_rows import BLOCK, batch_of, case_of, implementation, plan_of, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from flatout.attention import triton as backends  # noqa: E402
from flatout.attention.sdpa import TorchBackend  # noqa: E402
from flatout.attention.triton import SMALL, TritonBackend  # noqa: E402
from flatout.kernels.gpu import attention as gpu  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests run the kernels themselves"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # packed queries past a row's end, never written
]

TILE = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that short rows have edges, several workers and several pieces."""
    monkeypatch.setattr(gpu, "decode_sizes", lambda width, group, rows, device: gpu.Sizes(TILE, 2, 4))
    monkeypatch.setattr(gpu, "prefill_sizes", lambda width, queries, exact, device: gpu.Sizes(TILE, 2, 4))
    monkeypatch.setattr(gpu, "ROWS", 4)
    monkeypatch.setattr(gpu, "AT_ONCE", 2)


def holds(rows, heads, window=None, softcap=0.0, dtype=torch.float32, deterministic=False, on_device=False, seed=0):
    case = case_of(rows, spec_of(*heads, window, softcap), dtype, seed=seed)
    backend = TritonBackend(case.spec, BLOCK, deterministic)
    case.holds(case.run(implementation("triton"), plan_of(case.spec, rows, case.table, dtype, backend=backend, on_device=on_device)))
    assert not any(scratch[2].any() for scratch in made)  # arrivals are left as they were found


made: list[tuple[torch.Tensor, ...]] = []


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    """Scratch of each case's own, NaN where nothing was written."""

    def scratch(device, pieces, state, workers):
        sizes = (pieces * state, pieces * 2)
        made[:] = [(*(torch.full((n,), torch.nan) for n in sizes), torch.zeros(workers, dtype=torch.int32))]
        return made[0]

    monkeypatch.setattr(gpu, "_scratch", scratch)


@pytest.mark.parametrize("lengths", ((1,), (15, 16, 17, 1), (63, 64, 1, 33), (200,), (1,) * 6, (129, 1, 80)), ids=str)
@pytest.mark.parametrize("window", (None, 1, 17, 40))
def test_rows_of_one_query(lengths, window):
    """Shares of the workers end within rows and at their ends; a row's tiles go to one worker, to two and to all."""
    rows = [(n - 1, 1) for n in lengths]
    for heads, on_device in (((3, 1, 32), False), ((9, 9, 16), True)):
        holds(rows, heads, window, on_device=on_device)


@pytest.mark.parametrize(
    "heads", ((1, 1, 64), (7, 1, 48), (28, 4, 128), (16, 1, 16), (17, 1, 16), (33, 1, 16), (64, 2, 16), (6, 2, 256)), ids=str
)
@pytest.mark.parametrize("deterministic", (False, True))
def test_head_counts_and_sizes(heads, deterministic):
    holds([(40, 1), (3, 1), (18, 6)], heads, dtype=torch.float16, deterministic=deterministic)


@pytest.mark.parametrize("heads", ((14, 2, 16), (5, 1, 32)), ids=str)
@pytest.mark.parametrize("window", (None, 1, 33))
def test_rows_of_several_queries(heads, window):
    """As many packed queries as a tile holds, one more and one less; contexts before them around the edges of tiles of keys."""
    full = SMALL // (heads[0] // heads[1])
    holds([(0, full - 1), (15, full)], heads, window)
    holds([(17, full + 1), (16, 2), (0, 2)], heads, window, 2.0)


@pytest.mark.parametrize("deterministic", (False, True))
def test_mixed_rows(deterministic):
    rows = [(30, 1), (0, 1), (5, 20), (64, 1), (0, 33), (15, 1)]
    holds(rows, (6, 2, 16), deterministic=deterministic)
    holds(rows, (6, 2, 16), 20, 3.0, deterministic=deterministic)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 30))), min_size=1, max_size=7),
    heads=st.sampled_from(((1, 1, 16), (4, 2, 16), (9, 3, 32), (14, 2, 16))),
    window=st.sampled_from((None, None, 1, 7, 30, 500)),
    softcap=st.sampled_from((0.0, 2.0)),
    deterministic=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_rows(rows, heads, window, softcap, deterministic, seed):
    holds(rows, heads, window, softcap, torch.float32, deterministic, all(new == 1 for _, new in rows), seed)


def test_other_rows_change_no_bit():
    """Deterministic: a prompt in one go, in chunks and by single tokens, alone and beside others."""
    spec, total = spec_of(6, 2, 16, None), 45
    backend = TritonBackend(spec, BLOCK, deterministic=True)
    case = case_of([(0, total), (0, 33)], spec, torch.float32)
    run = implementation("triton")

    def attend(rows, queries, tables, on_device=False):
        out = torch.full((sum(new for _, new in rows), case.q.shape[1]), torch.nan)
        work = plan_of(spec, rows, tables, torch.float32, backend=backend, on_device=on_device)
        run(out, case.q[queries], case.k_cache, case.v_cache, work, spec.softmax_scale, 0.0)
        return out

    whole = attend([(0, total)], slice(0, total), case.table[:1])
    assert torch.equal(attend([(0, total), (0, 33)], slice(None), case.table)[:total], whole)
    for cuts in ((1, 20, 44), (16, 17)):
        bounds = [0, *cuts, total]
        for low, high in pairwise(bounds):
            beside = [(20, 13), (low, high - low)]
            queries = [*range(total + 20, total + 33), *range(low, high)]
            assert torch.equal(attend(beside, queries, case.table[::-1])[13:], whole[low:high])
    singles = [(i, 1) for i in (0, 15, 16, 44)]
    alike = np.repeat(case.table[:1], len(singles), 0)
    for on_device in (False, True):
        assert torch.equal(attend(singles, [0, 15, 16, 44], alike, on_device), whole[[0, 15, 16, 44]])


@pytest.mark.parametrize("band", ((None, 0.0), (1, 0.0), (33, 2.0)), ids=str)
@pytest.mark.parametrize("sizes", ((32, 2, 4), (64, 3, 4), (32, 2, 8)), ids=str)
def test_hopper_kernel_in_a_standin(monkeypatch, band, sizes):
    """The order of its copies, products and waits; its masks at the edges of tiles of keys."""
    pytest.importorskip("triton.experimental.gluon")
    from gluon_standin import launcher

    from flatout.kernels.gpu.attention_hopper import prefill

    monkeypatch.setattr(gpu, "_hopper", lambda capability, name: launcher({"prefill": prefill}[name]))
    monkeypatch.setattr(gpu, "hopper_sizes", lambda width, queries: gpu.Sizes(*sizes))
    monkeypatch.setattr(backends, "SMALL", 16 * sizes[2])
    edges = [(sizes[0] - 2, 2), (sizes[0] - 1, 30), (sizes[0], 1), (2 * sizes[0] - 2, 25)]
    holds([(0, 1), (0, 50), (100, 30)], (6, 2, 48), *band, torch.float16, deterministic=True)
    holds(edges, (3, 1, 64), *band, torch.float16, deterministic=True)
    holds([(n, 1) for n in (0, 31, 63, 64)], (2, 1, 64), *band, torch.float16, deterministic=True, on_device=True)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 400), st.one_of(st.just(1), st.integers(1, 300))), min_size=1, max_size=9),
    heads=st.sampled_from(((1, 1, 16), (9, 3, 16), (28, 4, 16))),
    window=st.sampled_from((None, 1, 50)),
    deterministic=st.booleans(),
)
def test_a_plan_takes_every_query_once(rows, heads, window, deterministic):
    spec = spec_of(*heads, window)
    table = np.ones((len(rows), -(-700 // BLOCK)), np.int32)
    work = plan_of(spec, rows, table, torch.float32, backend=TritonBackend(spec, BLOCK, deterministic))
    plan, group = work.arrangement, heads[0] // heads[1]
    taken = [(row, 0) for row in (range(plan.singles) if plan.rows is None else plan.rows.tolist())]
    assert not (deterministic and taken) and all(rows[row][1] == 1 for row, _ in taken)
    tiles = [(row, 0) for row in range(plan.num_tiles)] if plan.tiles is None else plan.tiles.tolist()
    assert len(tiles) == plan.num_tiles
    for row, first in tiles:
        taken += [(row, packed) for packed in range(first, min(first + plan.tile_queries, rows[row][1] * group), group)]
    assert sorted({(row, packed // group) for row, packed in taken}) == [(r, q) for r, (_, new) in enumerate(rows) for q in range(new)]
    keys = [rows[row][0] + first // group for row, first in tiles]
    assert plan.tiles is None or keys == sorted(keys, reverse=True)
    torch_work = plan_of(spec, rows, table, torch.float32)
    assert (work.kv_tokens, work.pairs) == (torch_work.kv_tokens, torch_work.pairs)


def test_lengths_that_only_the_device_knows():
    """A plan for a captured step follows its buffers; its costs are unknown, and the reference refuses it."""
    spec, rows = spec_of(4, 2, 16, None), [(20, 1), (7, 1)]
    case = case_of(rows, spec, torch.float32)
    batch, _ = batch_of([(0, 1), (3, 1)], case.table)
    TritonBackend(spec, BLOCK).plan_decode(batch)
    now, _ = batch_of(rows, case.table)
    for mine, new in ((batch.kv_lens, now.kv_lens), (batch.block_tables[0], now.block_tables[0]), (batch.table_rows, now.table_rows)):
        mine.copy_(new)
    (work,) = batch.attention
    case.holds(case.run(implementation("triton"), work))
    assert (work.kv_tokens, work.pairs) == (0, 0)
    with pytest.raises(ValueError, match="lengths"):
        case.run(implementation("reference"), work)
    assert not TorchBackend(spec, BLOCK).captures


@pytest.mark.parametrize("size", (0, 3, 24, 2048))
def test_block_sizes_that_the_kernels_cannot_do(size):
    with pytest.raises(ValueError, match="power of two"):
        TritonBackend(spec_of(1, 1, 16, None), size)
