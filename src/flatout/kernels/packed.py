"""Ops on weights of 4 or 8 bits in groups of 32 with scales of their own, times rows rounded to int8: packed_linear, packed_add, packed_norm_linear,
packed_norm_gated, as kernels/linear.py has them for plain weights.

The packed layout is this file's: pack() makes it, unpacked() reads it. On the CPU the native library multiplies them as they lie; many rows, where
that is faster, in bfloat16: by the processor's matrix tiles, or unpacked for torch where it has none. Checkpoint formats are quant/'s. Called by quant/packed.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.activation import gate_mul
from flatout.kernels.linear import linear
from flatout.kernels.native import BYTES, GROUP, LINES
from flatout.kernels.norm import add, rms_norm
from flatout.kernels.op import Cost, nbytes, op, shape_class

BITS = {size: bits for bits, size in BYTES.items()}
LEAST_UNPACKED = 16  # rows from which unpacking is worth trying


def pack(values: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """uint8 [lines / 16, columns / 32, BYTES] of values uint8 [lines, columns / 32, 32] and float16 [lines, columns / 32].

    With minima a weight is scale * value + minimum, its value of 4 bits; without scale * (value - 128). A byte of 4 bits holds column c of the
    group below column 16 + c. Lanes of four columns of each line come one after the other.
    """
    lines, groups, _ = values.shape
    bits = 8 if minima is None else 4
    if bits == 4:
        values = values[..., : GROUP // 2] | (values[..., GROUP // 2 :] << 4)
    lanes = values.view(torch.int32).view(lines // LINES, LINES, groups, -1).permute(0, 2, 3, 1).contiguous()
    parts = [lanes.view(torch.uint8).view(lines // LINES, groups, -1)]
    for each in (scales,) if minima is None else (scales, minima):
        parts.append(each.view(lines // LINES, LINES, groups).transpose(1, 2).contiguous().view(torch.uint8))
    return torch.cat(parts, 2)


def unpacked(weight: Tensor) -> Tensor:
    """float32 [lines, columns] of a packed weight."""
    blocks, groups, size = weight.shape
    bits = BITS[size]
    lanes = weight[..., : LINES * GROUP * bits // 8].reshape(blocks, groups, -1, LINES, 4).permute(0, 3, 1, 2, 4)
    values = lanes.reshape(blocks, LINES, groups, -1)
    factors = [
        part.contiguous().view(torch.float16).float().transpose(1, 2)[..., None]
        for part in weight[..., LINES * GROUP * bits // 8 :].split(2 * LINES, 2)
    ]
    if bits == 4:
        made = torch.cat([values & 15, values >> 4], -1) * factors[0] + factors[1]
    else:
        made = (values.float() - 128) * factors[0]
    return made.reshape(blocks * LINES, groups * GROUP)


def rounded(x: Tensor) -> Tensor:
    """float32 [T, K]: x [T, K] as int8 times a scale for each 32 columns, which is their largest magnitude / 127; a group that is not finite
    is NaN."""
    groups = x.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scales == 0, 0.0, (groups / scales).round()) * scales).flatten(1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [T, lines]: what every op here multiplies."""
    y = rounded(x) @ unpacked(weight).t()
    return y if bias is None else y + bias


def normed(x: Tensor, norm_weight: Tensor, eps: float, offset: float) -> Tensor:
    """float32 [T, K], not rounded on the way."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (norm_weight.float() + offset)


def _cost(out: Tensor, x: Tensor, weight: Tensor, *rest: Tensor | None, updates: bool = False) -> Cost:
    weights = weight.shape[0] * LINES * weight.shape[1] * GROUP
    return Cost(weights=nbytes(weight, *rest), activations=nbytes(out, x, out if updates else None), flops=2 * x.shape[0] * weights)


def _key(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    return (x.device.type, x.dtype, out.dtype, shape_class(x.shape[0]), weight.shape, *rest)


def _able(out: Tensor, x: Tensor) -> bool:
    kinds = (torch.float32, torch.bfloat16)
    return x.device.type == "cpu" and native.available() and x.dtype in kinds and out.dtype in kinds


_space = torch.empty(0, dtype=torch.bfloat16)


def _as_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """bfloat16 [T, lines]: rows and weight in that type, which torch multiplies by AMX where that is. The weight is unpacked into memory that the
    next call uses again: a model's largest matrix."""
    global _space
    lines, columns = weight.shape[0] * LINES, weight.shape[1] * GROUP
    if _space.numel() < lines * columns:
        _space = torch.empty(lines * columns, dtype=torch.bfloat16)
    plain = _space[: lines * columns].view(lines, columns)
    native.dequantise(plain, weight, BITS[weight.shape[2]])
    out = torch.empty(x.shape[0], lines, dtype=torch.bfloat16)
    linear.dispatch(out, x.bfloat16(), plain, None if bias is None else bias.bfloat16(), False)
    return out


def _many(out: Tensor, x: Tensor) -> bool:
    return _able(out, x) and x.shape[0] >= LEAST_UNPACKED and not native.has_tiles()


def _tiled(out: Tensor, x: Tensor) -> bool:
    return _able(out, x) and x.shape[0] >= LEAST_UNPACKED and native.has_tiles()


# ---------------------------------------------------------------- linear


@op(
    cost=lambda out, x, weight, bias: _cost(out, x, weight, bias),
    key=lambda out, x, weight, bias: _key(out, x, weight, bias is None),
    last_resort=True,
)
def packed_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [T, N] = x [T, K] @ weight^T + bias [N]; weight packed, [N / 16, K / 32, bytes]; x rounded to int8, or, of
    many rows, to bfloat16."""
    out.copy_(product(x, weight, bias))


@packed_linear.implementation("native", lambda out, x, weight, bias: _able(out, x), native=True)
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    native.product(out, x, weight, BITS[weight.shape[2]], bias)


@packed_linear.implementation("tiles", lambda out, x, weight, bias: _tiled(out, x), native=True)
def _linear_tiles(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    native.product(out, x, weight, BITS[weight.shape[2]], bias, many=True)


@packed_linear.implementation("bfloat16", lambda out, x, weight, bias: _many(out, x))
def _linear_bfloat16(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(_as_bfloat16(x, weight, bias))


# ---------------------------------------------------------------- onto the stream


@op(
    cost=lambda stream, scratch, x, weight, bias, scale: _cost(stream, x, weight, bias, updates=True),
    outs=("stream", "scratch"),
    updates=("stream",),
    key=lambda stream, scratch, x, weight, bias, scale: _key(stream, x, weight, bias is None, scale == 1.0),
    last_resort=True,
)
def packed_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    """stream [T, N] += scale * (x [T, K] @ weight^T + bias), as packed_linear. scratch [T, N]: holds nothing of use afterwards."""
    stream.copy_(stream + scale * product(x, weight, bias))


@packed_add.implementation("native", lambda stream, scratch, x, weight, bias, scale: _able(stream, x), native=True)
def _add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    native.product(stream, x, weight, BITS[weight.shape[2]], bias, add=True, scale=scale)


@packed_add.implementation("tiles", lambda stream, scratch, x, weight, bias, scale: _tiled(stream, x), native=True)
def _add_tiles(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    native.product(stream, x, weight, BITS[weight.shape[2]], bias, add=True, scale=scale, many=True)


@packed_add.implementation("bfloat16", lambda stream, scratch, x, weight, bias, scale: _many(stream, x))
def _add_bfloat16(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    add.dispatch(stream, scratch.copy_(_as_bfloat16(x, weight, bias)), scale)


# ---------------------------------------------------------------- from the stream


@op(
    cost=lambda out, scratch, x, norm_weight, eps, offset, weight, bias: _cost(out, x, weight, bias, norm_weight),
    outs=("out", "scratch"),
    key=lambda out, scratch, x, norm_weight, eps, offset, weight, bias: _key(out, x, weight, bias is None, offset),
    last_resort=True,
)
def packed_norm_linear(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None
) -> None:
    """out [T, N] = rms_norm(x [T, K]) @ weight^T + bias, as packed_linear. scratch [T, K]: holds nothing of use afterwards."""
    out.copy_(product(normed(x, norm_weight, eps, offset), weight, bias))


@packed_norm_linear.implementation("native", lambda out, scratch, x, *_: _able(out, x), native=True)
def _norm_linear(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None
) -> None:
    native.product(out, x, weight, BITS[weight.shape[2]], bias, norm=(norm_weight, eps, offset))


@packed_norm_linear.implementation("tiles", lambda out, scratch, x, *_: _tiled(out, x), native=True)
def _norm_linear_tiles(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None
) -> None:
    native.product(out, x, weight, BITS[weight.shape[2]], bias, norm=(norm_weight, eps, offset), many=True)


@packed_norm_linear.implementation("bfloat16", lambda out, scratch, x, *_: _many(out, x))
def _norm_linear_bfloat16(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None
) -> None:
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    out.copy_(_as_bfloat16(scratch, weight, bias))


@op(
    cost=lambda out, scratch, wide, x, norm_weight, eps, offset, weight, bias, activation: _cost(out, x, weight, bias, norm_weight),
    outs=("out", "scratch", "wide"),
    key=lambda out, scratch, wide, x, norm_weight, eps, offset, weight, bias, activation: _key(
        out, x, weight, bias is None, offset, activation
    ),
    last_resort=True,
)
def packed_norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str,
) -> None:  # fmt: skip
    """out [T, N] = activation(gate) * up of rms_norm(x [T, K]) @ weight^T + bias, gate's lines first. scratch [T, K] and wide [T, 2N]: hold nothing
    of use afterwards."""
    both = product(normed(x, norm_weight, eps, offset), weight, bias)
    result = torch.empty_like(both[:, : out.shape[1]])
    gate_mul.reference(result, both, activation)
    out.copy_(result)


@packed_norm_gated.implementation("native", lambda out, scratch, wide, x, *_: _able(out, x), native=True)
def _norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str,
) -> None:  # fmt: skip
    native.product(out, x, weight, BITS[weight.shape[2]], bias, norm=(norm_weight, eps, offset), gate=activation)


@packed_norm_gated.implementation("tiles", lambda out, scratch, wide, x, *_: _tiled(out, x), native=True)
def _norm_gated_tiles(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str,
) -> None:  # fmt: skip
    native.product(out, x, weight, BITS[weight.shape[2]], bias, norm=(norm_weight, eps, offset), gate=activation, many=True)


@packed_norm_gated.implementation("bfloat16", lambda out, scratch, wide, x, *_: _many(out, x))
def _norm_gated_bfloat16(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str,
) -> None:  # fmt: skip
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    gate_mul.dispatch(out, wide.copy_(_as_bfloat16(scratch, weight, bias)), activation)
