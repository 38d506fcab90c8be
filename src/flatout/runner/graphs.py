"""Executor: how a forward is run: plan attention once, then the decoder's ops one by one. Captured steps go here.

The seam for CUDA graphs and native step programs: runner.py calls forward() and does not know which. Holds no request state.
"""

from __future__ import annotations

from torch import Tensor

from flatout.attention.backend import AttentionBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.op import Entry, recording
from flatout.models.decoder import Decoder


class Executor:
    def __init__(self, decoder: Decoder, backend: AttentionBackend):
        self.decoder = decoder
        self.backend = backend

    def forward(self, batch: ForwardBatch, host: HostBatch) -> Tensor:
        """Residual stream [T, H] before the final norm."""
        self.backend.plan(batch, host)
        return self.decoder.forward(batch)

    def record(self, batch: ForwardBatch, host: HostBatch) -> list[Entry]:
        """Run a step and list its ops with their costs, for the ledger."""
        with recording() as recorder:
            self.decoder.logits(self.forward(batch, host), batch.sample_rows)
        return recorder.entries
