"""Functions of the native CPU library (native.h) on rows by themselves: norm, add, gate, route; and experts, a mixture's nets.

Tensors are on the CPU, rows float32 or bfloat16, their elements side by side. Each is one call, which a program can hold. No arithmetic and no choice
lives here. Called by kernels/norm.py, activation.py and moe.py, which have the references.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from flatout.kernels.native import _GATES, _PLAIN, _TYPES, BYTES, GROUP, LINES, _declined

MOST_EXPERTS = 1024  # of a router
_NORM, _ADD, _GATE = struct.Struct("3P4qi2f"), struct.Struct("3P5qif"), struct.Struct("2P4q2i")  # FlatoutNorm, FlatoutAdd, FlatoutGate
_ROUTE, _EXPERTS = struct.Struct("3P2q4i"), struct.Struct("6P7q5i")  # FlatoutRoute, FlatoutExperts


def suit(*rows: Tensor) -> bool:
    """Whether such rows [T, N] can be handed to the functions here: all of one type."""
    first = rows[0].dtype
    return first in (torch.float32, torch.bfloat16) and all(
        t.device.type == "cpu" and t.dtype == first and (t.shape[1] == 1 or t.stride(1) == 1) for t in rows
    )


def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """kernels/norm.py:rms_norm, whose operands these are; rows of a multiple of 16 elements, weight [H] of their type."""
    asked = _NORM.pack(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(x.stride(0), out.stride(0), *x.shape),
        _TYPES[x.dtype],
        eps,
        offset,
    )
    if _declined("norm", asked):
        raise ValueError(f"norm: the native library declines rows {tuple(x.shape)}")


def add(out: Tensor, x: Tensor, scale: float, gate: Tensor | None = None) -> None:
    """out [T, H] += scale * x, or with a gate [T, 1] out += scale * sigmoid(gate) * x."""
    asked = _ADD.pack(
        *(x.data_ptr(), 0 if gate is None else gate.data_ptr(), out.data_ptr()),
        *(x.stride(0), 0 if gate is None else gate.stride(0), out.stride(0), *x.shape),
        _TYPES[x.dtype],
        scale,
    )
    if _declined("add", asked):
        raise ValueError(f"add: the native library declines rows {tuple(x.shape)}")


def gate(out: Tensor, gate_up: Tensor, activation: str) -> None:
    """out [T, I] = activation(gate) * up, gate_up [T, 2I] with the gates first."""
    asked = _GATE.pack(
        *(gate_up.data_ptr(), out.data_ptr()),
        *(gate_up.stride(0), out.stride(0), *out.shape),
        _TYPES[out.dtype],
        _GATES[activation],
    )
    if _declined("gate", asked):
        raise ValueError(f"gate: the native library declines rows {tuple(gate_up.shape)}")


def route(weights: Tensor, chosen: Tensor, logits: Tensor, renormalise: bool) -> None:
    """kernels/moe.py:route, whose operands these are; equal logits in the order of their numbers, NaN after all finite ones. weights and chosen
    contiguous, at most MOST_EXPERTS logits a row."""
    rows, experts = logits.shape
    asked = _ROUTE.pack(
        *(logits.data_ptr(), weights.data_ptr(), chosen.data_ptr()),
        *(logits.stride(0), rows),
        *(experts, chosen.shape[1], _TYPES[logits.dtype], renormalise),
    )
    if _declined("route", asked):
        raise ValueError(f"route: the native library declines {tuple(logits.shape)} with {chosen.shape[1]} to choose")


def experts(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: str,
    kinds: tuple[int, int],
    many: bool = False,
) -> None:
    """out [T, H] = sum over a token's experts e of weights * down[e] @ (activation(gate) * up), gate and up = gate_up[e] @ x [T, H].

    gate_up, down: a weight for each expert as product() takes them, of these kinds: packed [E, 2I / 16, H / 32, bytes] and
    [E, H / 16, I / 32, bytes], or plain [E, 2I, H] and [E, H, I]; contiguous. weights float32, chosen int64 [T, top_k], contiguous. What is
    between products and sums is float32; a token has the same bits in any company. many: rows and packed weights are rounded to bfloat16
    instead, where has_tiles(). IndexError: a choice that is none of the experts. ValueError: shapes that do not fit.
    """
    tokens, hidden = x.shape
    count, top_k = gate_up.shape[0], chosen.shape[1]
    (lines, columns), (outputs, width) = (_shape(weight, kind) for weight, kind in zip((gate_up, down), kinds))
    fits = (lines, columns, outputs) == (2 * width, hidden, hidden) and down.shape[0] == count
    if not fits or out.shape != x.shape or weights.shape != chosen.shape or chosen.shape[0] != tokens:
        raise ValueError(f"experts: weights {tuple(gate_up.shape)} and {tuple(down.shape)} of kinds {kinds} do not fit x {tuple(x.shape)}")
    asked = _EXPERTS.pack(
        *(t.data_ptr() for t in (x, gate_up, down, weights, chosen, out)),
        *(x.stride(0), out.stride(0), tokens, hidden, width, count, top_k),
        *(_TYPES[x.dtype], *kinds, _GATES[activation], many),
    )
    if _declined("experts", asked):
        raise IndexError(f"experts: a choice is none of the {count} experts, or their weights {tuple(gate_up.shape)} have no such kernel")


def _shape(weight: Tensor, kind: int) -> tuple[int, int]:
    """Lines and columns of one expert's weight, or (0, 0): it is not of this kind."""
    if not weight.is_contiguous():
        return 0, 0
    if kind in BYTES:
        _, blocks, groups, size = weight.shape
        return (blocks * LINES, groups * GROUP) if size == BYTES[kind] else (0, 0)
    _, lines, columns = weight.shape
    return (lines, columns) if _PLAIN.get(weight.dtype) == kind else (0, 0)
