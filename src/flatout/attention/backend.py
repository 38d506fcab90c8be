"""AttentionBackend: what an attention implementation must give: a KV cache of its layout, and a plan once a step.

Layers run the plan through the op attention (kernels/attention.py). Chosen by select.py; driven by runner/. Beside it, what every plan counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from flatout.batch import ForwardBatch, HostBatch

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec


class AttentionBackend(Protocol):
    name: str

    @property
    def captures(self) -> bool:
        """plan_decode works."""
        ...

    cascades: bool  # and with cascade; else shared_depth is always -1

    def kv_bytes_per_block(self, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        ...

    def allocate_kv(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of each layer, [num_blocks, block_size, kv_heads, stored(head_dim)] (kernels/kv.py)."""
        ...

    def plan(self, batch: ForwardBatch, host: HostBatch) -> None:
        """Set batch.attention: one AttentionWork per cache group. Once a step, without a device sync."""
        ...

    def plan_decode(self, batch: ForwardBatch, cascade: bool = False) -> None:
        """Set batch.attention for rows of one query each, row i token i, whose lengths (at least 1) and blocks are read on the device each
        time the plan is run: for captured steps. cascade: keys that rows share are read once, by what find_shared() has found before."""
        ...

    def find_shared(self, batch: ForwardBatch, depth: Tensor) -> None:
        """Run the op that finds, for a plan with cascade, which rows share keys now. depth int32 [1]: a column of their tables."""
        ...

    def shared_depth(self, tables: np.ndarray, table_rows: np.ndarray, kv_lens: np.ndarray) -> int:
        """The column at which such a step's rows are best grouped, -1 where sharing reads is not worth while. A guess within a few us.

        tables int32 [slots, W]; table_rows, kv_lens int32 [R]: each row's place there and its keys.
        """
        ...


def pairs(q_lens: np.ndarray, kv_lens: np.ndarray, window: int | None) -> int:
    """(query, key it sees), summed over rows. int64 [R] each."""

    def up_to(length: np.ndarray) -> np.ndarray:
        if window is None:
            return length * (length + 1) // 2
        inside = np.minimum(length, window)
        return inside * (inside + 1) // 2 + window * (length - inside)

    return int((up_to(kv_lens) - up_to(kv_lens - q_lens)).sum())
