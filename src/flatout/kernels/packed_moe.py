"""packed_experts: the op experts of kernels/moe.py on weights that kernels/packed.py packs, rows rounded to int8 before each product.

On the CPU the native library multiplies them as they lie. Called by quant/packed.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.activation import activate
from flatout.kernels.moe import expected_experts
from flatout.kernels.native import GROUP, LINES, rows
from flatout.kernels.op import Cost, nbytes, op, shape_class
from flatout.kernels.packed import BITS, product

# rows an expert has on average from which matrix tiles are tried: each expert's weights are unpacked for its rows alone. Of 8 experts, top 2,
# 2048 x 1408, 4 bits, 2 threads: 64 rows 17 to 35 ms by tiles, 22 to 31 without; 128 rows 39 and 40 ms, without 58 and 59; with 34 rows, of 60 experts,
# tiles were 1.2 to 2 times slower. Beside another process
LEAST_EACH = 64


def _cost(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> Cost:
    tokens, top_k = chosen.shape
    count, hidden, width = gate_up.shape[0], out.shape[1], down.shape[2] * GROUP
    met = expected_experts(tokens, top_k, count)
    elements = gate_up[0].shape[0] * LINES * gate_up.shape[2] * GROUP + hidden * width
    return Cost(
        weights=round(met * nbytes(gate_up, down) / count),
        activations=nbytes(out, x, weights, chosen),
        flops=tokens * top_k * (2 * elements + 5 * width + 2 * hidden),
    )


@op(cost=_cost, last_resort=True)
def packed_experts(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> None:
    """out [T, H] = sum over a token's experts e of weights * down[e] @ (activation(gate) * up), with gate and up = gate_up[e] @ x [T, H].

    gate_up packed [E, 2I / 16, H / 32, bytes], gates first; down packed [E, H / 16, I / 32, bytes], each of 4 or 8 bits; weights float32,
    chosen int64 [T, top_k], without gaps between rows. Many rows may be rounded to bfloat16 instead. What is between products and sums is
    float32; the sum goes in the order of choice.
    """
    parts = torch.empty(*chosen.shape, out.shape[1], device=x.device)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = product(x[token], gate_up[expert], None).chunk(2, -1)
        parts[token, choice] = product(activate(gate, activation) * up, down[expert], None)
    out.copy_((parts * weights.unsqueeze(-1)).sum(1))


def _able(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> bool:
    return native.available() and rows.suit(out, x) and all(t.is_contiguous() for t in (gate_up, down, weights, chosen))


def _many(*operands: Any) -> bool:
    """So many rows an expert, if routing is even, that the processor's matrix tiles may be faster."""
    _, _, gate_up, _, _, chosen, _ = operands
    return _able(*operands) and native.has_tiles() and shape_class(chosen.shape[0]) * chosen.shape[1] >= LEAST_EACH * gate_up.shape[0]


@packed_experts.implementation("native", _able, native=True)
def _native(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> None:
    rows.experts(out, x, gate_up, down, weights, chosen, activation, (BITS[gate_up.shape[3]], BITS[down.shape[3]]))


@packed_experts.implementation("tiles", _many, native=True)
def _tiles(out: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, activation: str) -> None:
    rows.experts(out, x, gate_up, down, weights, chosen, activation, (BITS[gate_up.shape[3]], BITS[down.shape[3]]), many=True)
