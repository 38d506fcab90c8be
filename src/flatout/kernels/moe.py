"""Ops of mixture-of-experts blocks: route (which experts, with what weights) and experts (their feed-forward nets, weighed and summed).

The reference loops over experts and so reads their counts on the host; on CUDA kernels/gpu/moe.py has what reads nothing, on the CPU the
native library. Called by layers/moe.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.activation import activate
from flatout.kernels.native import rows
from flatout.kernels.op import Cost, nbytes, op, shape_class

# rows an expert has on average up to which the native library is taken unmeasured: a trial at a start, whose rows are all alike and so all
# choose the same experts, would show more
NATIVE_ROWS_EACH = {torch.bfloat16: 8, torch.float32: 16}


def expected_experts(tokens: int, top_k: int, experts: int) -> float:
    """Distinct experts met by `tokens` tokens if routing is even: the cost is told before the routing is known."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _route_cost(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> Cost:
    return Cost(activations=nbytes(weights, chosen, logits), flops=5 * logits.numel())


@op(cost=_route_cost, outs=("weights", "chosen"), last_resort=True)
def route(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> None:
    """The top_k of softmax(logits [T, E]) in float32: weights float32 [T, top_k], chosen int64 [T, top_k]; renormalise: weights sum to 1.

    Which of equal logits come first is open, as in torch.topk.
    """
    torch.topk(torch.softmax(logits, -1, dtype=torch.float32), chosen.shape[1], -1, out=(weights, chosen))
    if renormalise:
        weights.div_(weights.sum(-1, keepdim=True))


def _route_native_accepts(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> bool:
    contiguous = weights.is_contiguous() and chosen.is_contiguous()
    return native.available() and rows.suit(logits) and logits.shape[1] <= rows.MOST_EXPERTS and contiguous


@route.implementation("native", _route_native_accepts, native=True)
def _route_native(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> None:
    rows.route(weights, chosen, logits, renormalise)


def _experts_cost(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> Cost:
    tokens, top_k = chosen.shape
    one = gate_up[0].numel() + down[0].numel()
    met = expected_experts(tokens, top_k, gate_up.shape[0])
    return Cost(
        weights=round(met * one * gate_up.element_size()),
        activations=nbytes(out, x, weights, chosen),
        flops=tokens * top_k * (2 * one + 5 * down.shape[2] + 2 * down.shape[1]),
    )


@op(cost=_experts_cost, outs=("out", "act", "parts"), last_resort=True)
def experts(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> None:
    """out [T, H] = sum over a token's experts e of weights * down[e] @ (activation(gate) * up), with gate and up = gate_up[e] @ x.

    x [T, H]; gate_up [E, 2I, H], gate first; down [E, H, I]; weights float32, chosen int64 [T, top_k]. The sum is in float32, in the order
    of choice. act [T, top_k * I] and parts [T, top_k * H]: of no use afterwards; they, weights and chosen have no gaps between rows.
    invariant: only implementations may run that give a row the same bits whatever other rows are there.
    """
    order = torch.argsort(chosen.flatten(), stable=True)  # (token, choice) pairs, expert by expert
    by_pair = parts.view(order.shape[0], out.shape[1])
    begin = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()):
        if count:
            pairs = order[begin : begin + count]
            gate, up = F.linear(x[pairs // chosen.shape[1]], gate_up[expert]).chunk(2, -1)
            by_pair[pairs] = F.linear(activate(gate, activation) * up, down[expert])
            begin += count
    _combine(out, parts, weights)


def _combine(out: Tensor, parts: Tensor, weights: Tensor) -> None:
    out.copy_((parts.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1))


def _grouped_accepts(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> bool:
    """bfloat16 on compute capability 9.0 on, rows in whole 16 bytes."""
    return (
        x.is_cuda
        and not invariant
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and gate_up.shape[2] % 8 == 0
        and down.shape[2] % 8 == 0
    )


@experts.implementation("grouped", _grouped_accepts)
def _grouped(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> None:
    """Two grouped products of torch's whose group ends stay on the device."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    sent = x.index_select(0, order // chosen.shape[1])
    gate, up = torch._grouped_mm(sent, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    returned = torch._grouped_mm(activate(gate, activation) * up, down.transpose(1, 2), offs=ends)
    parts.view(order.shape[0], -1).index_copy_(0, order, returned)
    _combine(out, parts, weights)


def _looped_accepts(*operands: Any) -> bool:
    *_, x, _, _, _, _, _, invariant = operands
    return x.device.type == "cpu" and not invariant


experts.implementation("looped", _looped_accepts)(experts.reference)


def _native_accepts(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> bool:
    """Whatever the number of rows: none of them changes another's bits."""
    return (
        native.available()
        and rows.suit(out, x)
        and gate_up.dtype == down.dtype == x.dtype
        and gate_up.shape[2] % 16 == 0
        and down.shape[2] % 16 == 0
        and all(t.is_contiguous() for t in (gate_up, down, weights, chosen))
    )


def _native_sure(*operands: Any) -> bool:
    *_, gate_up, _, _, chosen, _, _ = operands
    return shape_class(chosen.shape[0]) * chosen.shape[1] <= NATIVE_ROWS_EACH[gate_up.dtype] * gate_up.shape[0]


@experts.implementation("native", _native_accepts, sure=_native_sure, native=True)
def _native(
    out: Tensor,
    act: Tensor,
    parts: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    invariant: bool,
) -> None:
    kind = 8 * gate_up.element_size()
    rows.experts(out, x, gate_up, down, weights, chosen, activation, (kind, kind))
