"""AttentionBackend: what an attention implementation must give: a KV cache of its layout, and a plan once a step.

Layers run the plan through the op attention (kernels/attention.py). Chosen by select.py; driven by runner/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flatout.batch import ForwardBatch, HostBatch

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec


class AttentionBackend(Protocol):
    name: str

    def kv_bytes_per_block(self, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        ...

    def allocate_kv(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of each layer, [num_blocks, block_size, kv_heads, head_dim]."""
        ...

    def plan(self, batch: ForwardBatch, host: HostBatch) -> None:
        """Set batch.attention: one AttentionWork per cache group. Once a step, without a device sync."""
        ...
