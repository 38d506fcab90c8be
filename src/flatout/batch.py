"""ForwardBatch: the tensors a forward may see, nothing else.

Filled by runner/inputs.py from a StepPlan and the slots; read by models/, layers/ and attention/. Nothing here knows a request exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows laid end to end, S of them sampled. One entry of the tuples per cache group (ModelSpec.cache_groups)."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    q_starts: Tensor  # int32 [R+1] first token of each row
    kv_lens: Tensor  # int32 [R] context of each row after this step, its own tokens included
    block_tables: tuple[Tensor, ...]  # int32 [slots, W] blocks of every slot in order
    table_rows: Tensor  # int32 [R] which of their rows each row of the step has
    kv_slots: tuple[Tensor, ...]  # int64 [T] where each token's KV goes: block * block_size + offset
    sample_rows: Tensor  # int64 [S] index into T of the tokens whose logits are wanted
    attention: Any = None  # what the attention backend planned for this step
    # of a step whose other tokens only leave keys and values behind: the sampled ones, S rows of one query each, which are all that the last
    # layer goes on with. What no backend reads of it is empty
    last: ForwardBatch | None = None


@dataclass(slots=True)
class HostBatch:
    """The same lengths and tables on the host, for an attention backend's plan(): choices are made without a device sync."""

    q_lens: np.ndarray  # int32 [R]
    kv_lens: np.ndarray  # int32 [R]
    block_tables: tuple[np.ndarray, ...]  # int32 [R, W]
    last: HostBatch | None = None  # those of ForwardBatch.last, if it has rows
