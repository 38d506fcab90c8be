"""The ops of kernels/moe.py on the GPU: which kernels a batch takes, in which pieces, and their launches; nothing is read on the host.

Few tokens multiply with each of their experts' weights as they come; more are grouped by expert first, so that a tile of tokens shares a
tile of weights. The kernels are in expert_rows.py and grouping.py beside this. Registered with the ops by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from flatout.kernels.activation import ACTIVATIONS
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.expert_rows import combine, tiles, vector
from flatout.kernels.gpu.grouping import choose, count, place
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.rows import FLOATS, column_blocks
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.moe import expected_experts, experts, route
from flatout.kernels.op import shape_class

MOST_EXPERTS, MOST_CHOICES, MOST_PAIRS = 256, 16, 1 << 19
MOST_ROWS, LEAST_ROWS = 256, 8  # of a tile, for the scratch's size
CHUNK, CHUNKED = 1024, 4096  # pairs that a program of `place` looks at: all of them, or one chunk of many


@dataclass(frozen=True, slots=True)
class Cut:
    """A product's programs: so many lines of an expert's weight, in steps of so many columns."""

    lines: int
    columns: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: the tokens of a tile, or 0 where every token multiplies by itself. up, down: of the first product, which gates, and the second."""

    rows: int
    up: Cut
    down: Cut


def _fitted(rows: int, cut: Cut, facts: Facts) -> Cut:
    """With as many stages as the shared memory holds (before 9.0 the last needs none), or else fewer lines."""
    while (cut.stages - (facts.capability < (9, 0))) * (cut.lines + rows) * cut.columns * 2 > facts.shared_memory:
        cut = replace(cut, stages=cut.stages - 1) if cut.stages > 3 else replace(cut, lines=cut.lines // 2)
    return cut


@cache
def config(tokens: int, top_k: int, count: int, outputs: int, exact: bool, invariant: bool, facts: Facts) -> Plan:
    """For `count` experts and `outputs` columns of the result; exact: float32; invariant: the same whatever the tokens."""
    pairs = tokens * top_k
    each = pairs / count
    if not (exact or invariant) and pairs <= 1.25 * expected_experts(tokens, top_k, count):
        # those that share an expert run side by side and find its weights in the L2
        few = tokens * outputs < 64 * facts.sms
        return Plan(0, Cut(4, 1024, 4), Cut(4, 2048, 8) if few else Cut(8, 1024, 4))
    if exact:
        rows, cut = 32, Cut(64, 32, 8, 3)
    elif invariant:
        rows, cut = 64, Cut(128, 64, 4, 4)
    elif each <= 10:
        rows, cut = 16, Cut(64, 128, 4, 4)
    elif each <= 48:
        rows, cut = 64, Cut(128, 64, 4, 4)
    else:
        rows, cut = 128, Cut(256 if facts.capability >= (9, 0) else 128, 64, 8, 4)
    cut = _fitted(rows, cut, facts)
    return Plan(rows, cut, cut)


@cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """int32: pairs in the order of their experts, with the gaps of their slots; the slots' experts; counts. 2.75 MB.

    For the calls of one stream: what a launch reads here, one before it in the same call has written.
    """
    slots = MOST_PAIRS // LEAST_ROWS + MOST_EXPERTS
    sizes = (MOST_PAIRS + MOST_ROWS * MOST_EXPERTS, slots, MOST_PAIRS // CHUNKED * MOST_EXPERTS)
    order, slot_experts, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    return order, slot_experts, counts


# ---------------------------------------------------------------- route


def _route_accepts(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> bool:
    return logits.is_cuda and logits.dtype in FLOATS and logits.shape[1] <= MOST_EXPERTS and chosen.shape[1] <= MOST_CHOICES


@route.implementation("triton", _route_accepts)
def route_triton(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> None:
    """Of equal logits the expert with the lowest id; torch.topk leaves open which."""
    device = facts(logits.device)
    tokens, number = logits.shape
    top_k = chosen.shape[1]
    launch(
        choose, (tokens,),
        weights, chosen, logits, logits.stride(0),
        EXPERTS=number, TOP_K=top_k, BLOCK=next_power_of_2(number), KEPT=next_power_of_2(top_k), RENORMALISE=renormalise,
        PDL=device.pdl, num_warps=1, launch_pdl=device.pdl,
    )  # fmt: skip


# ---------------------------------------------------------------- experts


def _experts_accepts(
    out: Tensor, act: Tensor, parts: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor,
    activation: str, invariant: bool,
) -> bool:  # fmt: skip
    """Rows of 16-byte units, and pairs that the scratch has room for."""
    return (
        x.is_cuda
        and x.dtype in FLOATS
        and all(t.dtype == x.dtype for t in (out, act, parts, gate_up, down))
        and gate_up.shape[2] % 16 == 0
        and down.shape[2] % 16 == 0
        and gate_up.shape[0] <= MOST_EXPERTS
        and chosen.shape[1] <= MOST_CHOICES
        and shape_class(chosen.shape[0]) * chosen.shape[1] <= MOST_PAIRS
        and activation in ACTIVATIONS
    )


@experts.implementation("triton", _experts_accepts)
def experts_triton(
    out: Tensor, act: Tensor, parts: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor,
    activation: str, invariant: bool,
) -> None:  # fmt: skip
    plan = config(*chosen.shape, gate_up.shape[0], out.shape[1], x.dtype == torch.float32, invariant, facts(x.device))
    (by_tiles if plan.rows else by_vectors)(plan, out, act, parts, x, gate_up, down, weights, chosen, activation)


def by_vectors(
    plan: Plan, out: Tensor, act: Tensor, parts: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor,
    activation: str,
) -> None:  # fmt: skip
    """Two launches: the second adds a token's experts up as one product over all of their columns."""
    device = facts(x.device)
    tokens, top_k = chosen.shape
    _, hidden, width = down.shape
    form = {"PDL": device.pdl, "launch_pdl": device.pdl}
    launch(
        vector, (tokens * top_k, cdiv(width, plan.up.lines // 2)),
        act, x, gate_up, chosen, None, width, width, x.stride(0),
        WIDTH=hidden, CHOICES=1, SHARE=top_k, LINES=plan.up.lines, UNITS=plan.up.columns // 8, ACTIVATION=activation,
        num_warps=plan.up.warps, **form,
    )  # fmt: skip
    launch(
        vector, (tokens, cdiv(hidden, plan.down.lines)),
        out, act, down, chosen, weights, hidden, out.stride(0), top_k * width,
        WIDTH=width, CHOICES=top_k, SHARE=1, LINES=plan.down.lines, UNITS=plan.down.columns // 8, ACTIVATION=None,
        num_warps=plan.down.warps, **form,
    )  # fmt: skip


def by_tiles(
    plan: Plan, out: Tensor, act: Tensor, parts: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor,
    activation: str,
) -> None:  # fmt: skip
    """Pairs of token and choice, grouped by expert; both products by tile; the sum over a token's choices, in their order."""
    device = facts(x.device)
    tokens, top_k = chosen.shape
    number, hidden, width = down.shape
    slot_experts, order, slots = group(chosen, number, plan.rows)
    form = {"ROWS": plan.rows, "PDL": device.pdl, "launch_pdl": device.pdl}
    for result, source, stride, weight, lines, cut, gated in (
        (act, x, x.stride(0), gate_up, width, plan.up, activation),
        (parts, act, width, down, hidden, plan.down, None),
    ):
        columns = weight.shape[2]
        launch(
            tiles, (slots * cdiv(lines, cut.lines // 2 if gated else cut.lines),),
            result, source, weight, slot_experts, order, slots, top_k if gated else 1, lines, columns, stride,
            LINES=cut.lines, BLOCK_K=cut.columns, GROUP=16, EVEN=columns % cut.columns == 0,
            STREAM=plan.rows <= 16, ACTIVATION=gated, num_warps=cut.warps, num_stages=cut.stages, **form,
        )  # fmt: skip
    programs, block, warps = column_blocks(tokens, hidden, device.sms)
    launch(
        combine, (programs,),
        out, parts, weights, out.stride(0),
        WIDTH=hidden, TOP_K=top_k, BLOCK=block, PDL=device.pdl, num_warps=warps, launch_pdl=device.pdl,
    )  # fmt: skip


def group(chosen: Tensor, number: int, rows: int) -> tuple[Tensor, Tensor, int]:
    """(the expert of each slot, the pairs in each slot, slots): a slot is a tile of up to `rows` pairs of one expert.

    int32 [slots], -1 in what is left over, and int32 [slots, rows], -1 where there is no pair. At most as many slots as the count of pairs allows.
    """
    device = facts(chosen.device)
    order, slot_experts, counts = _scratch(chosen.device)
    pairs = chosen.numel()
    slots = min(pairs, pairs // rows + number)
    single = pairs <= CHUNK
    chunk = CHUNK if single else CHUNKED
    chunks = cdiv(pairs, chunk)
    form = {
        "BLOCK": max(32, next_power_of_2(number)), "CHUNK": chunk, "PDL": device.pdl,
        "launch_pdl": device.pdl, "num_warps": 4 if single else 8,
    }  # fmt: skip
    if not single:
        launch(count, (chunks,), counts, chosen, pairs, **form)
    launch(place, (chunks, number), slot_experts, order, counts, chosen, pairs, slots, ROWS=rows, SINGLE=single, **form)
    return slot_experts, order, slots
