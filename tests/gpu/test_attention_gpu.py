"""The paged attention kernels on CUDA at real sizes: against float64, in graphs, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_rows import BLOCK, Case, batch_of, case_of, implementation, plan_of, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = ((28, 4, 128), (9, 3, 64), (14, 2, 80), (8, 1, 256), (40, 1, 128), (64, 1, 16))
BANDS = (((28, 4, 128), 1000, 0.0), ((28, 4, 128), 33, 20.0), ((9, 3, 64), 1, 0.0), ((9, 3, 64), 64, 20.0), ((12, 4, 192), None, 20.0))
ROWS = {
    "edges": [(n, 1) for n in (0, 1, 15, 31, 32, 62, 63, 64, 65, 126, 127, 128, 129, 255, 256, 500, 1023, 2000)],
    "one": [(8000, 1)],
    "many": [(n % 700, 1) for n in range(0, 300 * 37, 37)],
    "prompts": [(0, n) for n in (2, 17, 18, 19, 63, 64, 65, 127, 128, 129, 500)],
    "chunks": [(before, new) for before in (1, 63, 64, 127, 130, 1000) for new in (2, 9, 10, 37, 150)],
    "mixed": [(300, 1), (0, 65), (17, 30), (0, 1), (63, 1), (0, 700), (4000, 1), (700, 64)],
}


@pytest.fixture(autouse=True)
def kernels():
    from flatout.kernels import gpu

    assert gpu.load()
    torch.set_float32_matmul_precision("highest")


def backend_of(case: Case, deterministic: bool = False):
    from flatout.attention.triton import TritonBackend

    backend = TritonBackend(case.spec, BLOCK, deterministic)
    backend.allocate_kv(case.spec, 1, BLOCK, case.q.dtype, CUDA)
    return backend


def holds(rows, heads, window=None, softcap=0.0, dtype=BF16, deterministic=False) -> None:
    case = case_of(rows, spec_of(*heads, window, softcap), dtype, device=CUDA)
    backend = backend_of(case, deterministic)
    for on_device in (False, True) if all(new == 1 for _, new in rows) else (False,):
        work = plan_of(case.spec, rows, case.table, dtype, CUDA, backend, on_device)
        case.holds(case.run(implementation("triton"), work), relative=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_float64(rows, heads):
    holds(ROWS[rows], heads)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_deterministic_against_float64(rows, heads):
    holds(ROWS[rows], heads, deterministic=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_windows_and_soft_caps(rows, band):
    holds(ROWS[rows], *band)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", ((FP16, HEADS[0]), (FP32, HEADS[0]), (FP32, HEADS[2])), ids=str)
def test_dtypes(rows, case):
    holds(ROWS[rows], case[1], dtype=case[0])


@pytest.mark.parametrize("rows", ([(65_535, 1)], [(65_000, 300), (40_000, 1), (5, 1)], [(0, 9000)]), ids=str)
def test_long_contexts(rows):
    for heads in ((28, 4, 128), (8, 8, 64)):
        holds(rows, heads)


@pytest.mark.parametrize("deterministic", (False, True))
def test_captured_steps_follow_their_buffers(deterministic):
    """One graph for other lengths, tables, keys and queries."""
    spec, width = spec_of(28, 4, 128, None), 600
    cases = [
        case_of([(n, 1) for n in lengths], spec, BF16, seed=seed, device=CUDA)
        for seed, lengths in enumerate(((700, 3, 64, 1500, 0, 127), (0, 900, 63, 2, 1000, 1)))
    ]

    def batch_for(case: Case):
        return batch_of(case.rows, np.pad(case.table, ((0, 0), (0, width - case.table.shape[1]))), CUDA)[0]

    batch = batch_for(cases[0])
    backend_of(cases[0], deterministic).plan_decode(batch)
    (work,) = batch.attention
    slots = max(case.k_cache.shape[0] for case in cases)
    k_cache, v_cache = (torch.full((slots, 4, 128), torch.nan, dtype=BF16, device=CUDA) for _ in range(2))
    q, out = torch.zeros_like(cases[0].q), torch.empty(cases[0].expected.shape, dtype=BF16, device=CUDA)

    def fill(case: Case) -> None:
        now = batch_for(case)
        batch.kv_lens.copy_(now.kv_lens)
        batch.table_rows.copy_(now.table_rows)
        batch.block_tables[0].copy_(now.block_tables[0])
        k_cache[: case.k_cache.shape[0]] = case.k_cache
        v_cache[: case.v_cache.shape[0]] = case.v_cache
        q.copy_(case.q)

    def run() -> None:
        implementation("triton")(out, q, k_cache, v_cache, work, spec.softmax_scale, 0.0)

    fill(cases[0])
    run()  # compiles, and makes the scratch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    for case in (*cases, cases[0]):
        fill(case)
        out.fill_(torch.nan)
        graph.replay()
        case.holds(out, relative=True)


@pytest.mark.parametrize("rows", ("edges", "one", "many", "mixed"))
def test_the_same_bits_twice(rows):
    """Whichever worker comes last: partial results are put together in the order of the tiles."""
    case = case_of(ROWS[rows], spec_of(28, 4, 128, None), BF16, device=CUDA)
    work = plan_of(case.spec, case.rows, case.table, BF16, CUDA, backend_of(case))
    first = case.run(implementation("triton"), work)
    for _ in range(50):
        assert torch.equal(case.run(implementation("triton"), work), first)


@pytest.mark.parametrize("case", ((BF16, HEADS[0]), (BF16, HEADS[1]), (FP32, HEADS[0])), ids=str)
def test_other_rows_change_no_bit(case):
    """Deterministic: a prompt in one go, in chunks, after a cached prefix and by single tokens, alone and in a crowd."""
    dtype, heads = case
    total = 700
    case = case_of([(0, total), (0, 333)], spec_of(*heads, None), dtype, device=CUDA)
    backend, run = backend_of(case, deterministic=True), implementation("triton")

    def attend(rows, queries, tables, on_device=False):
        out = torch.full((sum(new for _, new in rows), case.q.shape[1]), torch.nan, dtype=dtype, device=CUDA)
        work = plan_of(case.spec, rows, tables, dtype, CUDA, backend, on_device)
        run(out, case.q[queries], case.k_cache, case.v_cache, work, case.spec.softmax_scale, 0.0)
        return out

    whole = attend([(0, total)], slice(0, total), case.table[:1])
    assert torch.equal(attend([(0, total), (0, 333)], slice(None), case.table)[:total], whole)
    for cuts in ((1, 128, 129, 500), (64, 320), (17, 34, 699), (256, 512)):
        for low, high in pairwise([0, *cuts, total]):
            crowd = [(200, 133)] + [(332, 1)] * 40 + [(low, high - low)]
            queries = [*range(total + 200, total + 333), *[total + 332] * 40, *range(low, high)]
            tables = np.concatenate([np.repeat(case.table[1:], 41, 0), case.table[:1]])
            assert torch.equal(attend(crowd, queries, tables)[173:], whole[low:high]), (low, high)
    singles = [*range(0, total, 13)]
    alike = np.repeat(case.table[:1], len(singles), 0)
    for on_device in (False, True):
        assert torch.equal(attend([(i, 1) for i in singles], singles, alike, on_device), whole[singles])


def test_no_host_sync():
    case = case_of(ROWS["mixed"], spec_of(28, 4, 128, 500), BF16, device=CUDA)
    backend = backend_of(case)
    batch, host = batch_of(case.rows, case.table, CUDA)
    out = torch.empty_like(case.q)
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            backend.plan(batch, host)
            implementation("triton")(out, case.q, case.k_cache, case.v_cache, batch.attention[0], case.spec.softmax_scale, 0.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    case.holds(out, relative=True)
