"""The kernels of expert nets in Triton's interpreter: routing, grouping, and both products over the edges of every tile."""

from __future__ import annotations

from dataclasses import replace

import expert_nets as nets
import pytest
import torch
from expert_nets import Case

from flatout.kernels import native
from flatout.kernels.gpu import moe as gpu
from flatout.kernels.gpu.device import INTERPRETED, Facts
from flatout.kernels.gpu.moe import Cut, Plan
from flatout.kernels.moe import experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has them compiled")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("number", "top_k"), [(1, 1), (2, 2), (7, 3), (33, 16), (64, 6), (65, 2), (128, 8), (200, 1)])
def test_route(number, top_k):
    for seed, dtype in enumerate((FP32, FP16, BF16)):
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(3, number + 3, generator=draw)[:, :number].to(dtype)
        logits[0] = (logits[0] * 2).round()  # ties: the lower id
        nets.check_route(logits, top_k, seed > 0)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_route_of_what_is_no_number():
    nets.check_route_without_numbers("cpu")


@pytest.mark.parametrize(("number", "top_k", "rows"), [(1, 1, 2), (5, 1, 4), (4, 3, 2)])
def test_groups(number, top_k, rows, monkeypatch):
    """One pair, one chunk with its edges, several chunks with theirs."""
    monkeypatch.setattr(gpu, "CHUNK", 16)
    monkeypatch.setattr(gpu, "CHUNKED", 8)
    for seed, pairs in enumerate((1, 15, 16, 17, 24, 25)):
        case = Case(-(-pairs // top_k), number, top_k, 1, 1, routing=("even", "one", "last")[seed % 3], seed=seed)
        nets.check_groups(case.choices()[1], number, rows)


VECTORS = Plan(0, Cut(32, 64, 1), Cut(16, 64, 1))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_vectors_over_the_edges_of_their_blocks(dtype):
    """Columns one unit of 16 below, at and above a step, of one choice and of several."""
    for seed, (hidden, width, top_k, activation) in enumerate(
        [(48, 16, 1, "silu"), (64, 32, 1, "gelu"), (80, 48, 2, "gelu_tanh"), (16, 80, 3, "silu"), (128, 16, 4, "silu"), (16, 64, 2, "silu")]
    ):
        nets.check(Case(1 + seed % 2, 7, top_k, hidden, width, dtype, activation, seed=seed), VECTORS)


def test_vectors_of_blocks_with_a_rest():
    """Lines that the blocks do not divide."""
    nets.check(Case(2, 4, 2, 80, 48), Plan(0, Cut(64, 64, 1), Cut(32, 64, 1)))


TILES = Plan(4, Cut(16, 32, 1), Cut(16, 32, 1))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_tiles_over_their_edges(dtype):
    """Columns below, at and above a step; one token to a tile and one more; all at one expert and none at most."""
    for seed, (tokens, number, top_k, hidden, width, activation, routing) in enumerate(
        [
            (1, 3, 1, 16, 16, "silu", "even"),
            (3, 3, 1, 32, 48, "gelu", "one"),
            (4, 2, 1, 48, 32, "silu", "one"),
            (5, 2, 2, 64, 16, "gelu_tanh", "one"),
            (4, 5, 2, 16, 80, "silu", "last"),
            (6, 4, 3, 80, 16, "silu", "even"),
        ]
    ):
        nets.check(Case(tokens, number, top_k, hidden, width, dtype, activation, routing, seed), TILES)


def test_tiles_of_lines_with_a_rest(monkeypatch):
    """Lines that the blocks do not divide, and more slots than programs go through together, of several chunks."""
    monkeypatch.setattr(gpu, "CHUNK", 16)
    monkeypatch.setattr(gpu, "CHUNKED", 16)
    nets.check(Case(34, 3, 1, 48, 16), Plan(2, Cut(64, 16, 1), Cut(32, 16, 1)))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_blocks_that_the_op_takes(dtype):
    for tokens in (1, 5, 40):
        nets.check(Case(tokens, 4, 2, 48, 32, dtype, seed=tokens))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_row_of_the_invariant_op_never_changes(dtype):
    case = Case(70, 3, 2, 48, 32, dtype)
    operands = case.operands()
    run = nets.triton(experts)
    run(*operands[:-1], True)
    nets.close(operands[0], nets.truth(operands))
    for rows in (slice(0, 1), slice(5, 8), slice(3, 69)):
        some = nets.with_rows(case, operands, rows)
        run(*some[:-1], True)
        assert torch.equal(some[0], operands[0][rows])


def test_who_runs_where(monkeypatch):
    """On the CPU the native library and, where a row's bits may depend on its company, torch; on a device nothing that the kernels cannot do."""
    case = Case(3, 4, 2, 32, 16)
    operands = case.operands()
    assert {i.name for i in experts.implementations if i.accepts(*operands)} == {"looped", *(["native"] if native.available() else [])}
    monkeypatch.setattr(native, "available", lambda: False)
    assert [i.name for i in experts.implementations if i.accepts(*operands)] == ["looped"]
    experts(*operands[:-1], False)
    nets.close(operands[0], nets.truth(operands))
    with pytest.raises(RuntimeError, match="experts: none of its implementations can give a row the same bits"):
        experts(*operands[:-1], True)


SM_80, SM_90 = Facts((8, 0), 108, 166_912, False), Facts((9, 0), 132, 232_448, True)


@pytest.mark.parametrize("device", [INTERPRETED, SM_80, SM_90], ids=lambda d: str(d.capability))
def test_blocks_fit_the_device(device):
    for number, hidden, top_k in ((8, 4096, 2), (60, 2048, 4), (128, 2048, 8), (256, 7168, 8), (4, 64, 2)):
        invariant = set()
        for tokens in (*range(1, 70), 100, 300, 512, 1000, 8192, 16384):
            for exact in (False, True):
                for same in (False, True):
                    plan = gpu.config(tokens, top_k, number, hidden, exact, same, device)
                    assert plan.rows or not (exact or same)
                    for cut in (plan.up, plan.down):
                        if plan.rows:
                            held = cut.stages - (device.capability < (9, 0))  # before 9.0 the last stage needs no memory
                            assert (plan.rows + cut.lines) * cut.columns * held * (4 if exact else 2) <= device.shared_memory
                        else:
                            assert cut.columns == 256 * cut.warps
                    if same and not exact:
                        invariant.add(plan)
        assert len(invariant) == 1
        plan = gpu.config(16384, top_k, number, hidden, False, False, device)
        assert gpu.LEAST_ROWS <= plan.rows <= gpu.MOST_ROWS and 16384 * top_k <= gpu.MOST_PAIRS


def test_few_tokens_take_the_vectors():
    def rows(tokens: int, top_k: int, number: int) -> int:
        return gpu.config(tokens, top_k, number, 2048, False, False, SM_90).rows

    assert [rows(t, 8, 128) for t in (1, 8, 64, 512, 8192)] == [0, 0, 16, 64, 128]
    assert [rows(t, 2, 8) for t in (1, 8, 64, 512, 8192)] == [0, 16, 64, 128, 128]


def test_cases_can_fail():
    """The checks see one wrong expert, one wrong weight, one step of columns left out."""
    case = Case(6, 4, 2, 64, 48)
    operands = case.operands()
    expected = nets.truth(operands)
    experts.reference(*operands)
    nets.close(operands[0], expected)
    for spoil in (lambda o: o[7][3].copy_(o[7][3].flip(0)), lambda o: o[6][2].mul_(1.1), lambda o: o[5][..., -16:].zero_()):
        spoilt = replace(case).operands()
        spoil(spoilt)
        experts.reference(*spoilt)
        with pytest.raises(AssertionError):
            nets.close(spoilt[0], expected)
