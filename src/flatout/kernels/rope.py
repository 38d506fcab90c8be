"""Op rope_kv_write: from the fused projection to attention's inputs: qk-norm, rotary embedding, keys and values into the cache.

One op so that a kernel can do it in one pass. Frequencies are made in layers/rotary.py. Called by layers/attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.norm import normalise
from flatout.kernels.op import Cost, nbytes, op


def _cost(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rope: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> Cost:
    tokens, width = qkv.shape
    kv = k_cache.shape[1] * k_cache.shape[2]
    size = qkv.element_size()
    q_written = tokens * (width - 2 * kv) * size
    flops = tokens * (width - kv) * ((4 if q_norm is not None else 0) + (3 if rope is not None else 0))
    return Cost(
        weights=nbytes(q_norm, k_norm),
        kv=2 * tokens * kv * k_cache.element_size(),
        activations=nbytes(qkv, slots, rope) + (q_written if flops else 0),
        flops=flops,
    )


@op(cost=_cost, outs=("qkv", "k_cache", "v_cache"), updates=("qkv",))
def rope_kv_write(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rope: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    """Normalise and rotate q and k where they lie in qkv; then copy k and v to their slots of the cache.

    qkv [T, (heads + 2 * kv_heads) * D]: q, k, v in this order. k_cache, v_cache [slots, kv_heads, D]. slots int64 [T].
    rope [T, 2 * R]: cos then sin of the first R dims of each head (sin negated in its first half); None: no rotation.
    q_norm, k_norm: weights of an rms norm over D (each head by itself) or over the whole projection; None: none. eps, offset: its own.
    """
    tokens = qkv.shape[0]
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.view(tokens, -1, dim)
    rotating, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
    key = rotating[:, -kv_heads:]
    if q_norm is not None and k_norm is not None:
        query = rotating[:, :-kv_heads]
        for part, weight in ((query, q_norm), (key, k_norm)):
            normalise(*(part, part) if weight.shape[0] == dim else (part.flatten(1), part.flatten(1)), weight, eps, offset)
    if rope is not None:
        cos, sin = rope.unsqueeze(1).chunk(2, -1)
        rotary = cos.shape[-1]
        if rotary < dim:
            rotating = rotating[..., :rotary]
        halves_swapped = torch.roll(rotating, rotary // 2, -1)
        rotating.mul_(cos).addcmul_(halves_swapped, sin)
    k_cache.index_copy_(0, slots, key)
    v_cache.index_copy_(0, slots, value)
