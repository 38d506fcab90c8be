"""Op rope_kv_write: from the fused projection to attention's inputs: qk-norm, rotary embedding, keys and values into the cache.

One op so that a kernel can do it in one pass. Frequencies are made in layers/rotary.py. Called by layers/attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.kv import pack
from flatout.kernels.norm import normalise
from flatout.kernels.op import Cost, nbytes, op, shape_class


def _cost(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> Cost:
    flops = qk.numel() * ((4 if q_norm is not None else 0) + (3 if cos is not None else 0))
    q_written = (qk.numel() - value.numel()) * qk.element_size() if flops else 0
    return Cost(
        weights=nbytes(q_norm, k_norm),
        kv=2 * value.shape[0] * nbytes(k_cache) // k_cache.shape[0],
        activations=nbytes(qk, value, slots, cos, sin) + q_written,
        flops=flops,
    )


def _key(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Any, ...]:
    """Not the size of the cache: it follows the free memory of the day."""
    norms = (None, None) if q_norm is None or k_norm is None else (q_norm.shape[0], k_norm.shape[0])
    rotary = 0 if cos is None else cos.shape[2]
    rows, heads, dim = qk.shape
    return (qk.device.type, qk.dtype, k_cache.dtype, shape_class(rows), heads, value.shape[1], dim, rotary, *norms)


@op(cost=_cost, outs=("qk", "k_cache", "v_cache"), updates=("qk",), key=_key, last_resort=True)
def rope_kv_write(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    """Normalise and rotate queries and keys where they lie; then copy keys and values to their slots of the cache.

    qk [T, heads + kv_heads, D], keys last, and value [T, kv_heads, D]: views of the fused projection. k_cache, v_cache [slots, kv_heads, stored(D)].
    slots int64 [T]. cos, sin [T, 1, R] rotate the first R dims of each head in halves, sin negated in its first half; None: no rotation.
    q_norm, k_norm: weights of an rms norm over D (each head by itself) or over all heads; None: none. eps, offset: its own.
    """
    kv_heads, dim = value.shape[1:]
    key = qk[:, -kv_heads:]
    if q_norm is not None and k_norm is not None:
        for part, weight in ((qk[:, :-kv_heads], q_norm), (key, k_norm)):
            rows = part if weight.shape[0] == dim else part.flatten(1)
            normalise(rows, rows, weight, eps, offset)
    if cos is not None and sin is not None:
        rotary = cos.shape[2]
        rotating = qk if rotary == dim else qk[:, :, :rotary]
        halves_swapped = torch.roll(rotating, rotary // 2, 2)
        rotating.mul_(cos).addcmul_(halves_swapped, sin)
    k_cache.index_copy_(0, slots, pack(key, k_cache.dtype))
    v_cache.index_copy_(0, slots, pack(value, v_cache.dtype))


def _native_accepts(
    qk: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor | None, sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float,
) -> bool:  # fmt: skip
    """Rotated dims in whole vectors; norms of heads by themselves."""
    dim = qk.shape[2]
    return (
        qk.device.type == "cpu"
        and native.available()
        and qk.dtype in (torch.float32, torch.bfloat16)
        and native.keeps(k_cache.dtype, qk.dtype)
        and dim % 16 == 0
        and (cos is None or cos.shape[2] % 32 == 0)
        and (q_norm is None or k_norm is None or q_norm.shape[0] == k_norm.shape[0] == dim)
    )


rope_kv_write.implementation("native", _native_accepts, native=True)(native.rotate)
