"""StepPlan + slots -> ForwardBatch: numpy on the host, one staging copy to the device, no host sync.

Decides nothing. Called by runner.py once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatout.batch import ForwardBatch, HostBatch
from flatout.runner.slots import Slots, to_device
from flatout.step import FROM_DEVICE, StepPlan


@dataclass(slots=True)
class Inputs:
    batch: ForwardBatch
    host: HostBatch
    sampled_slots: np.ndarray  # int32 [S] slots of the rows that yield a token
    sampled_positions: np.ndarray  # int32 [S] output index of each of those tokens
    sampled_slots_device: Tensor  # int64 [S]


def build_inputs(plan: StepPlan, slots: Slots, block_size: int, groups: int, narrow: bool = False) -> Inputs:
    """`groups`: number of cache groups; all of them share one table so far. narrow: only sampled tokens are asked about (ForwardBatch.last)."""
    counts = plan.counts.astype(np.int64)
    tokens = plan.num_tokens
    ends = np.cumsum(counts)
    positions = np.arange(tokens) + np.repeat(plan.starts + counts - ends, counts)
    slot_of_token = np.repeat(plan.slots, counts)
    columns = positions // block_size
    kv_slots = positions + (slots.host_tables[slot_of_token, columns] - columns) * block_size
    kv_lens = plan.starts.astype(np.int64) + counts
    sampled = np.flatnonzero(plan.samples)
    late = np.flatnonzero(plan.token_ids == FROM_DEVICE)

    # everything int64 travels as one array
    parts = [
        np.where(plan.token_ids == FROM_DEVICE, 0, plan.token_ids),
        positions,
        kv_slots,
        np.concatenate([[0], ends]),
        kv_lens,
        plan.slots,
        ends[sampled] - 1,
        plan.slots[sampled],
        late,
        slot_of_token[late],
        *([kv_lens[sampled], np.arange(len(sampled) + 1)] if narrow and len(sampled) < tokens else []),
    ]
    staged = to_device(np.concatenate(parts, dtype=np.int64), slots.device)
    token_ids, position, kv_slot, q_starts, kv_len, row_slots, sample_rows, sampled_slots, late_at, late_slots, *few = staged.split(
        [len(p) for p in parts]
    )
    if len(late):
        token_ids[late_at] = slots.last_ids[late_slots]

    width = -(-int(kv_lens.max()) // block_size)
    batch = ForwardBatch(
        tokens=token_ids,
        positions=position,
        q_starts=q_starts.to(torch.int32),
        kv_lens=kv_len.to(torch.int32),
        block_tables=(slots.tables,) * groups,
        table_rows=row_slots.to(torch.int32),
        kv_slots=(kv_slot,) * groups,
        sample_rows=sample_rows,
    )
    host = HostBatch(q_lens=plan.counts, kv_lens=kv_lens.astype(np.int32), block_tables=(slots.host_tables[plan.slots, :width],) * groups)
    if few:
        lengths, starts = few
        batch.last = ForwardBatch(
            tokens=sample_rows[:0],
            positions=sample_rows[:0],
            q_starts=starts.to(torch.int32),
            kv_lens=lengths.to(torch.int32),
            block_tables=batch.block_tables,
            table_rows=sampled_slots.to(torch.int32),
            kv_slots=(),
            sample_rows=starts[:-1],
        )
        if len(sampled):
            tables = tuple(table[sampled] for table in host.block_tables)
            host.last = HostBatch(np.ones(len(sampled), np.int32), host.kv_lens[sampled], tables)
    return Inputs(batch, host, plan.slots[sampled], plan.out_positions[sampled], sampled_slots)
