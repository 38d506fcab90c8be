"""Slots: one permanent row per live request, on the device; diffs are staged on the host and applied in one go.

Holds what a step needs of the past without asking the host: the last sampled id and the block table. Sampling state is the
sampler's. Called by runner.py, graphs.py and inputs.py; knows nothing of requests' text, order or policy.
"""

from __future__ import annotations

import numpy as np
import torch

from flatout.kernels.upload import upload
from flatout.step import StepPlan


class Slots:
    """`tables` int32 [slots + 1, max_blocks] (host twin: `host_tables`), `last_ids` int64 [slots + 1].

    The last row, `spare`, is nobody's: a captured step's rows of padding work there, on the block that spare_block() names.
    """

    def __init__(self, max_slots: int, max_blocks: int, device: torch.device):
        self.device = device
        self.spare = max_slots
        self.last_ids = torch.zeros(max_slots + 1, dtype=torch.int64, device=device)
        self.host_tables = np.zeros((max_slots + 1, max_blocks), np.int32)
        self.tables = torch.from_numpy(self.host_tables)
        self._apart = device.type != "cpu"  # on the CPU the twin is the table itself
        if self._apart:
            self.tables = self.tables.to(device)

    def spare_block(self, block: int) -> None:
        """A block that no request will ever be given."""
        self.host_tables[self.spare] = block
        self.tables[self.spare] = block

    def apply(self, plan: StepPlan) -> None:
        """Write the plan's newly given blocks into the tables."""
        if news := self.write(plan):
            self.put(*upload(self.device, news))

    def write(self, plan: StepPlan) -> list[np.ndarray]:
        """apply() on the host. What put() wants of it on the device: three arrays, or nothing."""
        if len(plan.block_ids) == 0:
            return []
        self.host_tables[plan.block_slots, plan.block_columns] = plan.block_ids
        return [plan.block_slots.astype(np.int64), plan.block_columns.astype(np.int64), plan.block_ids] if self._apart else []

    def put(self, slots: torch.Tensor, columns: torch.Tensor, ids: torch.Tensor) -> None:
        self.tables.index_put_((slots, columns), ids)
