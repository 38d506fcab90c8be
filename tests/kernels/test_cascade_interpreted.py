"""Attention that reads shared keys once, in Triton's interpreter against plain float64 attention; groups as the op's reference finds them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from attention_rows import implementation
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_rows import SharedCase, shared_case

triton = pytest.importorskip("triton")

from flatout.kernels.gpu import attention as gpu  # noqa: E402
from flatout.kernels.gpu import prefixes as finding  # noqa: E402
from flatout.kernels.prefixes import GROUPS, shared_prefixes  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests run the kernels themselves")

TILE, QUERIES, BLOCK = 16, 16, 4
find = finding.shared_prefixes_triton


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that short rows have edges, several workers and several pieces; scratch is NaN where nothing was written."""
    monkeypatch.setattr(gpu, "decode_sizes", lambda width, group, rows, device: gpu.Sizes(TILE, 2, 4))
    monkeypatch.setattr(gpu, "shared_sizes", lambda width, exact, hopper, device: (QUERIES, gpu.Sizes(TILE, 2, 4)))
    monkeypatch.setattr(
        gpu, "_pieces", lambda device, pieces, state: (torch.full((pieces * state,), torch.nan), torch.full((pieces * 2,), torch.nan))
    )
    monkeypatch.setattr(gpu, "ROWS", 4)
    monkeypatch.setattr(gpu, "AT_ONCE", 2)
    monkeypatch.setattr(finding, "SPAN", 8)


def found_alike(case: SharedCase, depth: int) -> None:
    """The kernels find what the reference finds."""
    mine = case.plan(depth, find=find)
    theirs = case.plan(depth, find=shared_prefixes.reference)
    used = int(theirs.groups[:, 1].sum())
    for f in fields(mine):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        assert torch.equal(a[:used], b[:used]) if f.name == "order" else torch.equal(a, b), f.name
    assert (mine.own >= 1).all()


def holds(case: SharedCase, depth: int = 0) -> None:
    found_alike(case, depth)
    found = case.plan(depth, find=find)
    first = case.run(implementation("triton"))
    case.holds(first)
    assert torch.equal(case.run(implementation("triton")), first)
    assert (found.places[:, 2] > 0).any() or not int(found.groups.any())


@pytest.mark.parametrize("keys", (BLOCK, TILE - BLOCK, TILE, TILE + BLOCK, 5 * TILE), ids=str)
@pytest.mark.parametrize("heads", ((1, 1, 16), (4, 1, 16), (7, 1, 16)), ids=str)
def test_lengths_around_a_tile(keys, heads):
    """Own keys from one on: a block's edge is none of theirs."""
    holds(shared_case([(5, keys)], [1, 2, BLOCK, BLOCK + 1, 33], heads, torch.float32))


@pytest.mark.parametrize("heads", ((28, 4, 128), (8, 2, 64), (3, 3, 48), (17, 1, 16)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_head_counts_and_dtypes(heads, dtype):
    holds(shared_case([(3, 20), (2, 36)], [3, 18, 5, 1, 1, 7, 40], heads, dtype))


@pytest.mark.parametrize("softcap", (0.0, 2.0))
def test_many_groups_and_rows_alone(softcap):
    """More companies than there are groups; pairs; two that fill more than a tile of queries."""
    many = [(2, 4 * (1 + i % 3)) for i in range(GROUPS + 2)]
    if not softcap:
        holds(shared_case(many, [1 + i % 5 for i in range(2 * len(many) + 3)], (2, 1, 16), torch.float32))
    holds(shared_case([(11, 48), (6, 16)], [1 + 5 * (i % 5) for i in range(19)], (4, 1, 16), torch.float32, softcap=softcap))


@pytest.mark.parametrize("softcap", (0.0, 2.0))
def test_hopper_kernel_in_a_standin(monkeypatch, softcap):
    """The order of its copies, products and waits over several pieces; its masks at the edges of tiles of keys."""
    pytest.importorskip("triton.experimental.gluon")
    from gluon_standin import launcher

    from flatout.kernels.gpu.attention_hopper import shared

    monkeypatch.setattr(gpu, "_hopper", lambda capability, name: launcher({"shared": shared}[name]))
    monkeypatch.setattr(gpu, "shared_sizes", lambda width, exact, hopper, device: (64, gpu.Sizes(32, 2, 4)))
    for keys, heads in ((28, (7, 1, 64)), (36, (3, 1, 64)), (160, (6, 2, 48))):
        holds(shared_case([(11, keys), (2, 4), (3, 32)], [1 + 3 * (i % 7) for i in range(17)], heads, torch.float16, softcap=softcap))
    holds(shared_case([], [3, 5], (6, 2, 48), torch.float16, softcap=softcap))


def test_nothing_shared():
    case = shared_case([], [1, 4, 5, 40, 17], (4, 2, 16), torch.float32)
    holds(case)
    assert not case.plan(0, find=find).groups.any()


def test_what_all_have_in_common():
    """A member whose blocks part early, or that ends early, shortens its group; one that parts before the depth has none."""
    case = shared_case([(6, 40)], [9], (2, 1, 16), torch.float32, shuffle=False)
    slots, tables = case.batch.table_rows.tolist(), case.batch.block_tables[0]
    tables[slots[3], 7] = tables[slots[3], 11]  # its eighth block is another
    assert case.plan(2, find=find).groups[0].tolist() == [28, 6, 0, 0]
    found_alike(case, 2)
    assert case.plan(9, find=find).groups[0].tolist() == [40, 5, 0, 0]
    found_alike(case, 9)
    case.batch.kv_lens[4] = 21
    found_alike(case, 4)
    assert case.plan(4, find=find).groups[0].tolist() == [20, 6, 0, 0]
    case.batch.kv_lens[4] = 20  # the last block holds its last key
    assert case.plan(3, find=find).groups[0].tolist() == [16, 6, 0, 0]
    assert case.plan(4, find=find).groups[0].tolist() == [28, 5, 0, 0]
    found_alike(case, 4)


def test_groups_follow_the_tables():
    """Nothing of a step before stays."""
    case = shared_case([(4, 24)], [5, 6, 7, 8, 9, 10], (2, 1, 16), torch.float32)
    found = case.plan(0, find=find)
    assert found.groups[0, 1] == 4
    case.batch.kv_lens.clamp_(max=4)
    operands = [getattr(found, f.name) for f in fields(found)]
    find(*operands, *case.batch.block_tables, case.batch.table_rows, case.batch.kv_lens, torch.zeros(1, dtype=torch.int32), BLOCK)
    assert not found.groups.any() and torch.equal(found.own, case.batch.kv_lens) and (found.places[:, 0] == -1).all()


@settings(max_examples=6, deadline=None)
@given(
    companies=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 15).map(lambda n: n * BLOCK)), max_size=4),
    own=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads=st.sampled_from(((1, 1, 16), (4, 2, 16), (7, 1, 32))),
    depth=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_any_rows(companies, own, heads, depth, seed):
    rows = sum(count for count, _ in companies) + 2
    holds(shared_case(companies, [own[i % len(own)] for i in range(rows)], heads, torch.float32, seed=seed), depth)


class TestDecision:
    """Which steps read shared keys once, and by which column their rows are grouped."""

    def depth(self, companies, own, **changes) -> int:
        case = shared_case(companies, own, (4, 4, 16), torch.float32, seed=3)
        case.backend.key_bytes = 1 << 20  # so that few keys are many bytes
        for name, value in changes.items():
            setattr(case.backend, name, value)
        return case.backend.shared_depth(case.tables, np.arange(len(case.lengths)), case.lengths)

    def test_shared(self):
        assert 0 < self.depth([(40, 400)], [40] * 40) < 100
        assert 0 <= self.depth([(20, 400), (20, 200)], [40] * 40) < 100
        assert 0 <= self.depth([(20, 400)], [40] * 40) < 100

    def test_a_common_beginning_does_not_hide_what_is_shared_after_it(self):
        case = shared_case([(40, 400)], [40] * 40, (4, 4, 16), torch.float32)
        case.backend.key_bytes = 1 << 20
        tables = case.tables.copy()
        tables[::2, 1:100] += 1000  # two companies with one block in common
        depth = case.backend.shared_depth(tables, np.arange(40), case.lengths)
        assert 10 < depth < 100
        case.batch.block_tables[0][case.batch.table_rows.long()] = torch.from_numpy(tables)
        assert case.plan(depth, find=find).groups[:3, :2].tolist() == [[400, 20], [400, 20], [0, 0]]

    def test_not_worth_while(self):
        assert self.depth([], [100] * 40) == -1
        assert self.depth([(40, 8)], [400] * 40) == -1  # little of all keys
        assert self.depth([(4, 400)], [400] * 40) == -1
        assert self.depth([(15, 400)], [4] * 15) == -1  # few rows
        assert self.depth([(40, 400)], [40] * 40, key_bytes=4) == -1  # few bytes
        assert self.depth([], [1] * 40) == -1  # no row has a block

    def test_never(self):
        assert self.depth([(40, 400)], [40] * 40, cascades=False) == -1

    def test_one_long_row_does_not_hide_the_others(self):
        assert self.depth([(40, 400)], [40] * 40 + [10_000]) >= 0
