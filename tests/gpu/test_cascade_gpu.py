"""Attention that reads shared keys once, on CUDA at real sizes: against float64, in graphs whose groups change, bit for bit, and in whole steps."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from attention_rows import implementation, spec_of
from shared_rows import SharedCase, shared_case

from flatout import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS = ((28, 4, 128), (9, 3, 64), (32, 32, 64), (14, 2, 80), (8, 1, 256), (40, 1, 128), (64, 1, 16))
BLOCK = 16
COMPANIES = {
    "one": ([(48, 1024)], [1, 15, 16, 17, 63, 64, 65, 192, 300]),
    "edges": ([(n, keys) for n, keys in zip((2, 3, 9, 18, 19, 37), (16, 48, 64, 80, 128, 1040))], [1, 2, 64, 65, 127, 200]),
    "pairs and rows alone": ([(2, 64 + 16 * i) for i in range(20)], [1 + 37 * i % 250 for i in range(70)]),
}


@pytest.fixture(autouse=True)
def kernels():
    from flatout.kernels import gpu

    assert gpu.load()
    torch.set_float32_matmul_precision("highest")


def case_with(companies, own, heads=HEADS[0], dtype=BF16, softcap=0.0, seed=0) -> SharedCase:
    case = shared_case(companies, own, heads, dtype, BLOCK, softcap, seed, CUDA)
    case.backend.allocate_kv(spec_of(*heads, None, softcap), 1, BLOCK, dtype, CUDA)
    return case


def holds(case: SharedCase) -> None:
    from flatout.kernels.prefixes import shared_prefixes

    theirs, mine = case.plan(0, find=shared_prefixes.reference), case.plan(0)
    used = int(theirs.groups[:, 1].sum())
    for f in fields(mine):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        assert torch.equal(a[:used], b[:used]) if f.name == "order" else torch.equal(a, b), f.name
    first = case.run(implementation("triton"))
    case.holds(first)
    for _ in range(20):
        assert torch.equal(case.run(implementation("triton")), first)


@pytest.mark.parametrize("rows", COMPANIES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_float64(rows, heads):
    holds(case_with(*COMPANIES[rows], heads))


@pytest.mark.parametrize("case", ((FP16, HEADS[0], 0.0), (FP32, HEADS[0], 0.0), (FP32, HEADS[1], 20.0), (BF16, HEADS[0], 20.0)), ids=str)
def test_dtypes_and_soft_caps(case):
    dtype, heads, softcap = case
    for rows in COMPANIES.values():
        holds(case_with(*rows, heads, dtype, softcap))


def test_the_kernel_for_other_devices(monkeypatch):
    """Not in Hopper's instructions."""
    from flatout.kernels.gpu import attention as launches

    monkeypatch.setattr(launches, "_hopper", lambda capability, name: None)
    for heads in HEADS[:2]:
        for rows in COMPANIES.values():
            holds(case_with(*rows, heads))


def test_a_long_prefix_of_many():
    holds(case_with([(256, 4096)], [192, 100, 250]))
    holds(case_with([(128, 4096), (128, 2048)], [192, 1]))


def test_captured_steps_follow_their_tables():
    """One graph, in which groups are found too, for other groups, lengths and keys; and for none."""
    cases = [case_with([(20, 512), (20, 256)], [9, 100], seed=1), case_with([(7, 1024)], [33 + i for i in range(40)], seed=2),
             case_with([], [5 + 9 * i for i in range(40)], seed=3)]  # fmt: skip
    first = cases[0]
    width = max(case.batch.block_tables[0].shape[1] for case in cases)
    tables = torch.zeros(42, width, dtype=torch.int32, device=CUDA)
    first.batch.block_tables = (tables,)
    slots = max(case.k_cache.shape[0] for case in cases)
    caches = [torch.full((slots, 4, 128), torch.nan, dtype=BF16, device=CUDA) for _ in "kv"]
    q, out, depth = torch.zeros_like(first.q), torch.empty_like(first.q), torch.zeros(1, dtype=torch.int32, device=CUDA)
    originals = [(c.batch.kv_lens.clone(), c.batch.table_rows.clone(), c.batch.block_tables[0].clone()) for c in cases[1:]]
    fresh = case_with([(20, 512), (20, 256)], [9, 100], seed=1)
    originals.insert(0, (fresh.batch.kv_lens, fresh.batch.table_rows, fresh.batch.block_tables[0]))
    first.backend.plan_decode(first.batch, cascade=True)
    (work,) = first.batch.attention

    def fill(i: int) -> None:
        lens, rows, table = originals[i]
        first.batch.kv_lens.copy_(lens)
        first.batch.table_rows.copy_(rows)
        tables[:, : table.shape[1]] = table
        for mine, theirs in zip(caches, (cases[i].k_cache, cases[i].v_cache)):
            mine.fill_(torch.nan)
            mine[: theirs.shape[0]] = theirs
        q.copy_(cases[i].q)

    def run() -> None:
        first.backend.find_shared(first.batch, depth)
        for _ in range(3):
            implementation("triton")(out, q, *caches, work, first.scale, 0.0)

    fill(0)
    run()  # compiles, and makes the scratch
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for i in (0, 1, 2, 0, 2, 1):
        fill(i)
        out.fill_(torch.nan)
        graph.replay()
        cases[i].holds(out)


def test_no_host_sync():
    case = case_with([(40, 256)], [9])
    depth = torch.zeros(1, dtype=torch.int32, device=CUDA)
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            case.backend.plan_decode(case.batch, cascade=True)
            case.backend.find_shared(case.batch, depth)
            out = case.run(implementation("triton"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    case.holds(out)


def test_requests_with_one_prefix(default_model):
    """In an engine, float32: the same tokens with shared keys read once; captured for that only where it is asked for."""
    prompts = [[*(5 + i % 997 for i in range(300)), 100 + i] for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids = []
    for option in ({}, {"disable_cascade_attn": True}, {"deterministic": True}):
        options = {"dtype": "float32", "attention_backend": "triton", "max_num_seqs": 32, "num_gpu_blocks_override": 4096, **option}
        with LLM("smollm2", max_model_len=1024, **options) as llm:
            executor = llm.engine.runner.executor
            executor.backend.key_bytes = 1 << 20  # few keys are worth it
            ids.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
            assert any(step.cascade for step in executor.decodes.steps.values()) == (not option)
    assert ids[0] == ids[1]
