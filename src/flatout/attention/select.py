"""Which attention backend runs: by --attention-backend, for this model. The only place that knows them all.

Called by runner/build.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flatout.attention.backend import AttentionBackend
from flatout.attention.sdpa import TorchBackend
from flatout.config import Config, ConfigError

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec


def select_backend(config: Config, spec: ModelSpec) -> AttentionBackend:
    """The backend named by a resolved config. ConfigError: an unknown name."""
    name, block_size = config.device.attention_backend, config.cache.block_size
    if name == "triton":
        from flatout.attention.triton import TritonBackend

        return TritonBackend(spec, block_size, deterministic=config.device.deterministic, cascade=not config.device.disable_cascade_attn)
    if name != "torch":
        raise ConfigError(f"--attention-backend: {name!r} is not built; use torch or triton")
    return TorchBackend(spec, block_size, getattr(torch, config.model.dtype))
