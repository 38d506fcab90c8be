"""Attention: one layer's projections, and the ops between them; its KV cache is bound after load.

What a step's rows attend to was planned by the backend (batch.attention). Called by models/decoder.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.batch import ForwardBatch
from flatout.kernels.attention import attention
from flatout.kernels.rope import rope_kv_write
from flatout.layers.destination import Destination
from flatout.layers.linear import Linear, under
from flatout.layers.norm import Around
from flatout.layers.rotary import Rotary
from flatout.layers.workspace import Workspace
from flatout.quant.scheme import Schemes

if TYPE_CHECKING:
    from flatout.modelfile.spec import ModelSpec


class Attention:
    def __init__(
        self,
        spec: ModelSpec,
        schemes: Schemes,
        group: int,
        rotary: Rotary | None,
        around: Around,
        workspace: Workspace,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """group: the layer's cache group. rotary: None for a layer without position encoding."""
        q, kv, hidden = spec.q_size, spec.kv_size, spec.hidden_size
        self.group = group
        self.rotary = rotary
        self.around = around
        self.scale = spec.softmax_scale
        self.softcap = spec.attn_softcap
        self.eps = spec.norm_eps
        self.norm_offset = spec.norm_offset
        segments = {"q": q, "k": kv, "v": kv}
        self.qkv = Linear(schemes("qkv"), q + 2 * kv, hidden, bias=spec.qkv_bias, segments=segments, dtype=dtype, device=device)
        self.o = Linear(schemes("o"), hidden, q, bias=spec.o_bias, dtype=dtype, device=device)
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        if spec.qk_norm:
            widths = (q, kv) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            self.q_norm, self.k_norm = (torch.empty(width, dtype=dtype, device=device) for width in widths)
        heads, kv_heads = spec.num_heads + spec.num_kv_heads, spec.num_kv_heads
        self._qkv = workspace.rows("qkv", q + 2 * kv)
        by_head = workspace.view("by head", self._qkv, lambda rows: rows.view(rows.shape[0], heads + kv_heads, spec.head_dim))
        self._qk = workspace.view("qk", by_head, lambda rows: rows[:, :heads])
        self._value = workspace.view("value", by_head, lambda rows: rows[:, heads:])
        self._q = workspace.view("q", self._qkv, lambda rows: rows[:, :q])
        self._mixed = workspace.rows("mixed", q)
        self._scratch = workspace.rows("delta", hidden)

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Use this cache: [num_blocks, block_size, kv_heads, stored(head_dim)] each. Ops address it by slot."""
        self.k_cache, self.v_cache = k_cache.flatten(0, 1), v_cache.flatten(0, 1)

    def __call__(self, stream: Tensor, batch: ForwardBatch) -> None:
        """Adds its output to the residual stream [T, hidden]; keys and values of the step's tokens are in the cache."""
        self.store(stream, batch)
        self.mix(stream, self.queries, batch)

    @property
    def queries(self) -> Tensor:
        """[T, heads * head_dim] of the last store()."""
        return self._q.now

    def store(self, stream: Tensor, batch: ForwardBatch) -> None:
        """Keys and values of the step's tokens into the cache; their queries are ready."""
        self.qkv.after(self.around.norm, self._qkv.now, self._scratch.now, stream)
        cos, sin = (None, None) if self.rotary is None else (self.rotary.cos, self.rotary.sin)
        slots, k_cache, v_cache = batch.kv_slots[self.group], self.k_cache, self.v_cache
        rope_kv_write(
            self._qk.now, self._value.now, k_cache, v_cache, slots, cos, sin, self.q_norm, self.k_norm, self.eps, self.norm_offset
        )

    def mix(self, stream: Tensor, queries: Tensor, batch: ForwardBatch) -> None:
        """What the queries find in the cache, onto their rows of the stream."""
        mixed = self._mixed.now
        attention(mixed, queries, self.k_cache, self.v_cache, batch.attention[self.group], self.scale, self.softcap)
        self.o.onto(stream, self.around.post_norm, self._scratch.now, mixed, self.around.scale)

    def destinations(self) -> dict[str, Destination]:
        made = under("qkv", self.qkv.destinations()) | under("o", self.o.destinations())
        if self.q_norm is not None and self.k_norm is not None:
            made |= {"q_norm.weight": Destination(self.q_norm), "k_norm.weight": Destination(self.k_norm)}
        return made
