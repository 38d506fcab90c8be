"""StepPlan + slots -> ForwardBatch: numpy on the host, one staging copy to the device, no host sync.

Decides nothing. Called by runner.py once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.upload import upload
from flatout.runner.slots import Slots
from flatout.step import FROM_DEVICE, StepPlan


@dataclass(slots=True)
class Inputs:
    batch: ForwardBatch
    host: HostBatch
    sampled_slots: np.ndarray  # int32 [S] slots of the rows that yield a token
    sampled_positions: np.ndarray  # int32 [S] output index of each of those tokens
    sampled_slots_device: Tensor  # int64 [S]


def build_inputs(plan: StepPlan, slots: Slots, block_size: int, groups: int, narrow: bool = False) -> Inputs:
    """Gives slots the plan's blocks. `groups`: number of cache groups; all of them share one table so far. narrow: only sampled tokens are asked
    about (ForwardBatch.last)."""
    news = slots.write(plan)
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

    narrow = narrow and len(sampled) < tokens
    few: list[np.ndarray] = (
        [kv_lens[sampled].astype(np.int32), np.arange(len(sampled) + 1, dtype=np.int32), np.arange(len(sampled))] if narrow else []
    )
    token_ids, position, kv_slot, sample_rows, sampled_slots, late_at, late_slots, q_starts, kv_len, table_rows, last_rows, *others = (
        upload(
            slots.device,
            [
                np.where(plan.token_ids == FROM_DEVICE, 0, plan.token_ids).astype(np.int64),
                positions,
                kv_slots,
                ends[sampled] - 1,
                plan.slots[sampled].astype(np.int64),
                late,
                slot_of_token[late].astype(np.int64),
                np.concatenate([[0], ends], dtype=np.int32),
                kv_lens.astype(np.int32),
                plan.slots,
                plan.slots[sampled],
                *few,
                *news,
            ],
        )
    )
    if news:
        slots.put(*others[len(few) :])
    if len(late):
        token_ids[late_at] = slots.last_ids[late_slots]

    width = -(-int(kv_lens.max()) // block_size)
    batch = ForwardBatch(
        tokens=token_ids,
        positions=position,
        q_starts=q_starts,
        kv_lens=kv_len,
        block_tables=(slots.tables,) * groups,
        table_rows=table_rows,
        kv_slots=(kv_slot,) * groups,
        sample_rows=sample_rows,
    )
    host = HostBatch(q_lens=plan.counts, kv_lens=kv_lens.astype(np.int32), block_tables=(slots.host_tables[plan.slots, :width],) * groups)
    if narrow:
        lengths, starts, every = others[: len(few)]
        batch.last = ForwardBatch(
            tokens=sample_rows[:0],
            positions=sample_rows[:0],
            q_starts=starts,
            kv_lens=lengths,
            block_tables=batch.block_tables,
            table_rows=last_rows,
            kv_slots=(),
            sample_rows=every,
        )
        if len(sampled):
            tables = tuple(table[sampled] for table in host.block_tables)
            host.last = HostBatch(np.ones(len(sampled), np.int32), host.kv_lens[sampled], tables)
    return Inputs(batch, host, plan.slots[sampled], plan.out_positions[sampled], sampled_slots)
