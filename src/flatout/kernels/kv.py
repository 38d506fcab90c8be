"""How a head's keys and values lie in a cache: numbers of its type, or int8 codes with their scale behind them.

A cache is [slots, kv_heads, stored(D)]. In int8 a head of a token is D codes and a float32 scale d, value = d * code: a scale for each token and head, so
that what lies in a cache depends on nothing but the token itself (a block's scale would change with its neighbours), and it is read with its codes.
The arithmetic that the ops rope_kv_write and attention share; called by both, by kernels/native and by attention/.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
LEAST = 2.0**-100  # a scale below this is 0: quotients by it would not be exact


def stored(dim: int, cache: torch.dtype) -> int:
    """Elements that a head of `dim` takes in a cache of this type. In int8 dim is a multiple of 4, so that scales are aligned."""
    return dim + SCALE_BYTES if cache == torch.int8 else dim


def head_dim(cache: Tensor) -> int:
    """Of a cache [..., stored(D)]: D."""
    return cache.shape[-1] - SCALE_BYTES if cache.dtype == torch.int8 else cache.shape[-1]


def pack(values: Tensor, cache: torch.dtype) -> Tensor:
    """values [..., D] as a cache of this type holds them: [..., stored(D)]. To int8 codes round to the nearest, ties to even, by d = max|value| / 127;
    a head with anything but finite numbers comes back as NaN."""
    if cache != torch.int8:
        return values.to(cache)
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale < LEAST, 0.0, scale)
    codes = torch.where(scale.isfinite() & (scale > 0), (wide / scale).round(), 0.0).to(torch.int8)
    return torch.cat((codes, torch.where(scale.isfinite(), scale, torch.nan).view(torch.int8)), -1)


def unpack(held: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., D] of what a cache holds, in this type; a view where that is the cache's own."""
    if held.dtype != torch.int8:
        return held.to(dtype)
    dim = head_dim(held)
    return (held[..., :dim].float() * held[..., dim:].view(torch.float32)).to(dtype)
