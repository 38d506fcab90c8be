"""Ops of mixture-of-experts blocks: route (which experts, with what weights) and experts (their feed-forward nets, weighed and summed).

Called by layers/moe.py. On CUDA in bfloat16 routing stays on the device; elsewhere the loop over experts reads the counts on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.activation import activate
from flatout.kernels.op import Cost, nbytes, op


def expected_experts(tokens: int, top_k: int, experts: int) -> float:
    """Distinct experts met by `tokens` tokens if routing is even: the cost is told before the routing is known."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _route_cost(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> Cost:
    return Cost(activations=nbytes(weights, chosen, logits), flops=5 * logits.numel())


def _experts_cost(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> Cost:
    tokens, top_k = chosen.shape
    one = gate_up[0].numel() + down[0].numel()
    met = expected_experts(tokens, top_k, gate_up.shape[0])
    return Cost(
        weights=round(met * one * gate_up.element_size()),
        activations=nbytes(out, x, weights, chosen),
        flops=tokens * top_k * (2 * one + 5 * down.shape[2] + 2 * down.shape[1]),
    )


@op(cost=_route_cost, outs=("weights", "chosen"))
def route(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> None:
    """The top_k of softmax(logits [T, E]) in float32: weights float32 [T, top_k], chosen int64 [T, top_k]; renormalise: weights sum to 1."""
    torch.topk(torch.softmax(logits, -1, dtype=torch.float32), chosen.shape[1], -1, out=(weights, chosen))
    if renormalise:
        weights.div_(weights.sum(-1, keepdim=True))


@op(cost=_experts_cost)
def experts(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> None:
    """out [T, H] = sum over a token's experts e of weights * down[e] @ (activation(gate) * up), with gate and up = gate_up[e] @ x.

    x [T, H]; gate_up [E, 2I, H], gate first; down [E, H, I]; weights float32, chosen int64 [T, top_k].
    """
    top_k = chosen.shape[1]
    order = torch.argsort(chosen.flatten(), stable=True)  # (token, choice) pairs, expert by expert
    sent = x.index_select(0, order // top_k)
    returned = torch.empty_like(sent)
    begin = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()):
        if count:
            gate, up = F.linear(sent[begin : begin + count], gate_up[expert]).chunk(2, -1)
            torch.mm(activate(gate, activation) * up, down[expert].t(), out=returned[begin : begin + count])
            begin += count
    _combine(out, returned, order, weights)


def _combine(out: Tensor, returned: Tensor, order: Tensor, weights: Tensor) -> None:
    """Weigh the experts' outputs and sum them by token, in float32 and in the order of choice: no atomics, always the same sum."""
    by_token = torch.empty_like(returned).index_copy_(0, order, returned).view(*weights.shape, -1)
    out.copy_((by_token * weights.unsqueeze(-1)).sum(1))


@experts.implementation("grouped", lambda out, x, gate_up, down, *rest: _grouped_runs(x, gate_up, down))
def _grouped(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> None:
    """Two grouped products whose group ends stay on the device."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    sent = x.index_select(0, order // chosen.shape[1])
    gate, up = torch._grouped_mm(sent, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    returned = torch._grouped_mm(activate(gate, activation) * up, down.transpose(1, 2), offs=ends)
    _combine(out, returned, order, weights)


def _grouped_runs(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """bfloat16 on compute capability 9.0 on, rows in whole 16 bytes."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and gate_up.shape[2] % 8 == 0
        and down.shape[2] % 8 == 0
    )
