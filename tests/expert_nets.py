"""Cases of the ops of kernels/moe.py, their truth in float64, and checks that both the interpreter's tests and the GPU's make.

Used by tests/kernels/test_moe_interpreted.py and tests/gpu/test_moe_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flatout.kernels.activation import activate
from flatout.kernels.gpu import moe as gpu
from flatout.kernels.moe import experts, route
from flatout.kernels.op import Op

NAN = float("nan")
# half a unit in the last place of 1; the interpreter cuts bfloat16 off where the device rounds
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}


def triton(op: Op) -> Callable[..., None]:
    """The op's implementation of that name."""
    return next(i.run for i in op.implementations if i.name == "triton")


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    top_k: int
    hidden: int
    width: int  # of an expert
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    routing: str = "even"  # even | one: as many as can choose expert 0 first | last: none but the last top_k
    seed: int = 0

    def choices(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """weights float32 and chosen int64 [tokens, top_k], distinct in a row."""
        draw = torch.Generator(device).manual_seed(self.seed)
        scores = torch.rand(self.tokens, self.experts, generator=draw, device=device)
        if self.routing == "one":
            scores[:, 0] = 2
        elif self.routing == "last":
            scores[:, -self.top_k :] += 2
        return tuple(t.clone() for t in scores.topk(self.top_k, -1))

    def operands(self, device: torch.device | str = "cpu") -> list[Tensor | str | bool]:
        """The op's, results and scratch poisoned, rows of x and out in strides; results are of the order of 1."""
        draw = torch.Generator(device).manual_seed(self.seed)

        def normal(*shape: int, spread: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw, device=device) * spread).to(self.dtype)

        def poison(columns: int) -> Tensor:
            return torch.full((self.tokens, columns), NAN, dtype=self.dtype, device=device)

        x, out = poison(self.hidden + 16), poison(self.hidden + 32)
        x[:, : self.hidden] = normal(self.tokens, self.hidden)
        gate_up = normal(self.experts, 2 * self.width, self.hidden, spread=self.hidden**-0.5)
        down = normal(self.experts, self.hidden, self.width, spread=2 * self.width**-0.5)
        scratch = (poison(self.top_k * self.width), poison(self.top_k * self.hidden))
        views = (out[:, : self.hidden], *scratch, x[:, : self.hidden])
        return [*views, gate_up, down, *self.choices(device), self.activation, False]


def truth(operands: list) -> tuple[Tensor, Tensor, Tensor]:
    """float64 [T, H]: the result; the root of the sum of its terms' squares, which errors of rounding grow with; the same with what the
    terms' own sums came from, which errors of float32 sums grow with (a small gate may be the sum of large products)."""
    _, _, _, x, gate_up, down, weights, chosen, activation, _ = operands
    result, squares, summed = (torch.zeros(*x.shape, dtype=torch.float64, device=x.device) for _ in range(3))
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        gate_terms, up_terms = (x[token].double() ** 2 @ gate_up[expert].double().T ** 2).chunk(2, -1)
        act, weight = activate(gate, activation) * up, weights[token, choice, None].double()
        from_sums = act**2 + gate_terms * up**2 + up_terms * activate(gate, activation) ** 2
        result.index_add_(0, token, weight * (act @ down[expert].double().T))
        squares.index_add_(0, token, weight**2 * (act**2 @ down[expert].double().T ** 2))
        summed.index_add_(0, token, weight**2 * (from_sums @ down[expert].double().T ** 2))
    return result, squares.sqrt(), summed.sqrt()


def close(out: Tensor, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    """Within what rounding `act`, `parts` and `out`, and sums in float32, may come to."""
    value, spread, summed = expected
    unit = ROUNDING[out.dtype] * (2 if not out.is_cuda and out.dtype == torch.bfloat16 else 1)
    allowed = (12 if out.is_cuda else 6) * unit * (value.abs() + spread) + 2.0**-20 * summed + 1e-7
    wrong = ~((out.double() - value).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"


def run(plan: gpu.Plan, operands: list) -> None:
    *tensors, activation, _ = operands
    (gpu.by_tiles if plan.rows else gpu.by_vectors)(plan, *tensors, activation)


def check(case: Case, plan: gpu.Plan | None = None, device: torch.device | str = "cpu", invariant: bool = False) -> Tensor:
    """Runs what the op would, or this plan; nothing is written beside the result. Returns it."""
    operands = case.operands(device)
    expected = truth(operands)
    if plan is None:
        triton(experts)(*operands[:-1], invariant)
    else:
        run(plan, operands)
    out = operands[0]
    close(out, expected)
    beside = torch.as_strided(out, (case.tokens - 1, 32), out.stride(), case.hidden)
    assert beside.isnan().all()
    return out


def check_groups(chosen: Tensor, experts: int, rows: int) -> None:
    """Every pair is in a slot of its expert, in order, and slots are filled one after the other."""
    slot_experts, order, slots = gpu.group(chosen, experts, rows)
    slot_experts, order, pairs = slot_experts[:slots].tolist(), order[: slots * rows].view(slots, rows).tolist(), chosen.flatten().tolist()
    expected: list[tuple[int, list[int]]] = []
    for expert in range(experts):
        mine = [p for p, e in enumerate(pairs) if e == expert]
        for first in range(0, len(mine), rows):
            some = mine[first : first + rows]
            expected.append((expert, some + [-1] * (rows - len(some))))
    assert slot_experts == [e for e, _ in expected] + [-1] * (slots - len(expected))
    assert order[: len(expected)] == [row for _, row in expected]


def check_route(logits: Tensor, top_k: int, renormalise: bool) -> None:
    """Logits are first made to differ by 2^-12 or not at all, so that probabilities in float32 are in their order."""
    tokens = logits.shape[0]
    logits.copy_((logits.double() * 4096).round() / 4096)
    weights = torch.full((tokens, top_k), NAN, device=logits.device)
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int64, device=logits.device)
    triton(route)(weights, chosen, logits, renormalise)
    exact = torch.softmax(logits.double(), -1)
    # in order of the logits, then of the ids
    rank = torch.argsort(torch.argsort(-logits.double(), dim=-1, stable=True), dim=-1)
    assert torch.equal(rank.gather(1, chosen), torch.arange(top_k, device=logits.device).expand(tokens, -1))
    value = exact.gather(1, chosen)
    value = value / value.sum(-1, keepdim=True) if renormalise else value
    torch.testing.assert_close(weights.double(), value, rtol=4e-6, atol=1e-9)


def check_route_without_numbers(device: torch.device | str) -> None:
    """Whatever the logits, choices are experts that exist, and distinct; weights that are no numbers say so."""
    inf = float("inf")
    rows = [[NAN] * 5, [-inf] * 5, [0, NAN, 3, 1, 2], [0, inf, 3, 1, inf], [-inf, 1, -inf, -inf, -inf]]
    logits, weights = torch.tensor(rows, device=device), torch.zeros(5, 3, device=device)
    chosen = torch.full((5, 3), -1, device=device)
    triton(route)(weights, chosen, logits, True)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in chosen.tolist())
    assert weights[:4].isnan().any(1).all() and chosen[4].tolist() == [1, 0, 2] and weights[4].tolist() == [1, 0, 0]


def with_rows(case: Case, operands: list, rows: slice) -> list:
    """The same work for some of the tokens."""
    made = replace(case, tokens=len(range(case.tokens)[rows])).operands(operands[0].device)
    for i in (3, 6, 7):
        made[i] = operands[i][rows]
    made[4:6] = operands[4:6]
    return made
