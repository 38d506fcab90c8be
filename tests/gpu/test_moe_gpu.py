"""Routing and expert nets on CUDA: real shapes against float64, the same bits again, in graphs, without a sync, and in any company."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import expert_nets as nets
import pytest
import torch
from expert_nets import Case

from flatout.kernels.gpu import moe as gpu
from flatout.kernels.moe import experts, route

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXTRAL = Case(0, 8, 2, 4096, 14336)
QWEN2_MOE = Case(0, 60, 4, 2048, 1408)
QWEN3_30B = Case(0, 128, 8, 2048, 768)
SMALL = Case(0, 12, 3, 144, 80)


@pytest.fixture(autouse=True)
def exact_float32():
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("number", "top_k"), [(1, 1), (8, 2), (60, 4), (64, 6), (128, 8), (200, 16), (256, 8)])
def test_route(number, top_k):
    for tokens in (1, 2, 33, 3000):
        for dtype in (FP32, FP16, BF16):
            logits = torch.randn(tokens, number + 8, device=CUDA)[:, :number].to(dtype)
            nets.check_route(logits, top_k, dtype == FP16)
            nets.check_route((logits * 2).round(), top_k, True)
    nets.check_route_without_numbers(CUDA)


@pytest.mark.parametrize("routing", ("even", "one", "last"))
@pytest.mark.parametrize(("number", "top_k", "rows"), [(8, 2, 64), (60, 4, 16), (128, 8, 128), (256, 1, 16)])
def test_groups(number, top_k, rows, routing):
    for pairs in (1, 1000, 1024, 1025, 4096, 4097, 20000):
        _, chosen = Case(-(-pairs // top_k), number, top_k, 1, 1, routing=routing, seed=pairs).choices(CUDA)
        nets.check_groups(chosen, number, rows)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("model", "tokens"),
    [(MIXTRAL, (1, 3, 40, 300)), (QWEN2_MOE, (1, 8, 17, 130, 800)), (QWEN3_30B, (1, 2, 8, 9, 64, 300, 1100))],
    ids=("mixtral", "qwen2-moe", "qwen3-30b"),
)
def test_real_shapes(model, tokens, dtype):
    for n in tokens:
        nets.check(replace(model, tokens=n, dtype=dtype, seed=n), device=CUDA)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_odd_shapes_and_uneven_routing(dtype):
    for tokens in (1, 2, 5, 16, 17, 63, 64, 65, 127, 129, 400):
        for i, routing in enumerate(("even", "one", "last")):
            activation = ("silu", "gelu", "gelu_tanh")[(tokens + i) % 3]
            case = replace(SMALL, tokens=tokens, dtype=dtype, activation=activation, routing=routing, seed=tokens)
            nets.check(case, device=CUDA)
            nets.check(case, device=CUDA, invariant=True)


def test_every_plan_on_the_same_work():
    """Plans that config() takes for other numbers of tokens."""
    made = {gpu.config(n, 8, 128, 2048, False, same, gpu.facts(CUDA)) for n in (1, 8, 64, 512, 8192) for same in (False, True)}
    assert len({plan.rows for plan in made}) == 4
    for plan in made:
        nets.check(replace(QWEN3_30B, tokens=30), plan, device=CUDA)


@pytest.mark.parametrize("tokens", (1, 8, 64, 700))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_graphs_follow_the_routing(dtype, tokens):
    """Captured once; replayed on other rows, routed elsewhere, it gives the bits that a call gives. No sync, no memory."""
    case = replace(SMALL if dtype == FP32 else QWEN3_30B, tokens=tokens, dtype=dtype)
    operands = case.operands(CUDA)
    run = nets.triton(experts)
    run(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                run(*operands)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before
    for seed, routing in enumerate(("even", "one", "last", "even")):
        other = replace(case, seed=seed + 1, routing=routing)
        for place, new in zip((3, 6, 7), itemgetter(3, 6, 7)(other.operands(CUDA)), strict=True):
            operands[place].copy_(new)
        graph.replay()
        replayed = operands[0].clone()
        nets.close(replayed, nets.truth(operands))
        for tensor in operands[:3]:
            tensor.fill_(float("nan"))
        run(*operands)
        assert torch.equal(operands[0], replayed)


@pytest.mark.parametrize("model", [QWEN3_30B, replace(SMALL, dtype=FP32)], ids=("qwen3-30b", "float32"))
def test_a_row_of_the_invariant_op_never_changes(model):
    case = replace(model, tokens=500)
    operands = case.operands(CUDA)
    run = nets.triton(experts)
    run(*operands[:-1], True)
    nets.close(operands[0], nets.truth(operands))
    for rows in (slice(0, 1), slice(499, 500), slice(3, 11), slice(64, 192), slice(17, 400)):
        some = nets.with_rows(case, operands, rows)
        run(*some[:-1], True)
        assert torch.equal(some[0], operands[0][rows])


def test_route_and_experts_by_choice():
    """As layers/moe.py calls them: whatever implementation is measured to be the fastest."""
    for dtype in (BF16, FP32):
        case = replace(SMALL, tokens=40, dtype=dtype)
        operands = case.operands(CUDA)
        logits = torch.randn(40, case.experts, device=CUDA).to(dtype)
        route(operands[6], operands[7], logits, True)
        experts(*operands)
        nets.close(operands[0], nets.truth(operands))
        assert torch.equal(operands[6].sum(1).round(decimals=5), torch.ones(40, device=CUDA))


@pytest.mark.parametrize("tokens", (1, 3, 64, 1000))
def test_grouped_products_of_torch(tokens):
    """The implementation that competes with ours."""
    operands = replace(SMALL, tokens=tokens, routing="last").operands(CUDA)
    for grouped in (i for i in experts.implementations if i.name == "grouped" and i.accepts(*operands)):
        grouped.run(*operands)
        nets.close(operands[0], nets.truth(operands))


def test_what_the_kernels_decline():
    """Rows that are no whole 16-byte units, more experts than a tile has, mixed dtypes."""
    (ours,) = [i for i in experts.implementations if i.name == "triton"]
    assert ours.accepts(*replace(SMALL, tokens=2).operands(CUDA))
    for case in (replace(SMALL, tokens=2, width=72), replace(SMALL, tokens=2, hidden=136), replace(SMALL, tokens=2, experts=300)):
        assert not ours.accepts(*case.operands(CUDA))
    mixed = replace(SMALL, tokens=2).operands(CUDA)
    mixed[4] = mixed[4].half()
    assert not ours.accepts(*mixed)
