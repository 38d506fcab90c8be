"""Head: from rows of the residual stream to float32 logits: pick, final norm, projection, scale and cap.

The projection is the embedding's own table where the model ties them. Called by models/decoder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.kernels.embedding import gather_rows
from flatout.kernels.logits import finish_logits
from flatout.layers.destination import Destination
from flatout.layers.embedding import Embedding
from flatout.layers.linear import Linear, under
from flatout.layers.norm import Norm
from flatout.layers.workspace import Workspace
from flatout.quant.scheme import Scheme

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec


class Head:
    def __init__(
        self,
        spec: ModelSpec,
        embed: Embedding,
        scheme: Scheme,
        max_rows: int,
        runs_on: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """A tied head of plain weights reads the embedding's; packed ones it has for itself. runs_on: type of the device that the ops are for."""
        self.norm = Norm(spec.hidden_size, spec.norm_eps, spec.norm_offset, dtype=dtype, device=device)
        packed = scheme.lines > 1
        tied = embed.weight if spec.tie_embeddings and not packed else None
        self.projection = Linear(scheme, spec.vocab_size, spec.hidden_size, tied=tied, dtype=dtype, device=device)
        self.scale = spec.logit_scale
        self.softcap = spec.logit_softcap
        self._workspace = Workspace(max_rows, dtype, device)
        self._picked = self._workspace.rows("picked", spec.hidden_size)
        self._scratch = self._workspace.rows("normed", spec.hidden_size)
        self._logits = self._workspace.rows("logits", spec.vocab_size, torch.float32)
        # products on CUDA, and of packed weights, give float32 at once; in a float32 model both are the same buffer
        self._raw = self._logits if runs_on == "cuda" or packed else self._workspace.rows("logits", spec.vocab_size)

    def __call__(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """float32 [S, vocab] of rows (int64 [S], rising) of hidden [T, hidden]."""
        self._workspace.resize(rows.shape[0])
        picked, raw, logits = hidden, self._raw.now, self._logits.now
        if rows.shape[0] < hidden.shape[0]:  # else all of them
            picked = self._picked.now
            gather_rows(picked, hidden, rows)
        self.projection.after(self.norm, raw, self._scratch.now, picked)
        if raw is not logits or self.scale != 1.0 or self.softcap:
            finish_logits(logits, raw, self.scale, self.softcap)
        return logits

    def buffer_bytes(self) -> int:
        """Of the rows it works on, logits above all."""
        return self._workspace.nbytes

    def destinations(self) -> dict[str, Destination]:
        return under("norm", self.norm.destinations()) | under("head", self.projection.destinations())
