"""Decoder: the decoder-only transformer of every dense and MoE family, built from its ModelSpec.

The forward calls ops and views only: on meta tensors under a recorder it is the list of ops and costs. What differs between families
is a field of the spec; no family is named here. Called by runner/ and doctor/; filled by models/load.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.batch import ForwardBatch
from flatout.layers.attention import Attention
from flatout.layers.destination import Destination
from flatout.layers.embedding import Embedding
from flatout.layers.head import Head
from flatout.layers.linear import under
from flatout.layers.mlp import MLP
from flatout.layers.moe import MoE
from flatout.layers.norm import Join, Norm
from flatout.layers.rotary import Rotary
from flatout.layers.workspace import Workspace
from flatout.modelfile.spec import ModelSpec
from flatout.quant.none import Plain
from flatout.quant.scheme import Scheme


class Decoder:
    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, max_tokens: int, max_logits: int, max_model_len: int):
        """Weights and buffers are allocated, not filled.

        max_tokens: most tokens of one forward(). max_logits: most rows of one logits(). max_model_len: positions of the rope tables; the
        spec's ropes have their lengths fixed for it (ModelSpec.for_length).
        """
        self.spec = spec
        self.max_logits = max_logits
        self._workspace = workspace = Workspace(max_tokens, dtype, device)
        scheme: Scheme = Plain()
        groups = {layer: index for index, group in enumerate(spec.cache_groups()) for layer in group.layers}
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, spec.embed_scale, dtype=dtype, device=device)
        self.ropes = [Rotary(rope, i, max_model_len, workspace, dtype=dtype, device=device) for i, rope in enumerate(spec.ropes)]
        self.layers = [Layer(spec, i, scheme, groups[i], self.ropes, workspace, dtype=dtype, device=device) for i in range(spec.num_layers)]
        self.last_join = Join(None, spec.residual_scale, spec.hidden_size, workspace)
        self.head = Head(spec, self.embed, scheme, max_logits, dtype=dtype, device=device)
        self._stream = workspace.rows("stream", spec.hidden_size)

    def bind(self, kv_caches: list[tuple[Tensor, Tensor]]) -> None:
        """Use these KV caches: (k, v) of each layer, [num_blocks, block_size, kv_heads, head_dim]."""
        for layer, (k_cache, v_cache) in zip(self.layers, kv_caches, strict=True):
            layer.attention.bind(k_cache, v_cache)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The residual stream [T, hidden] before the final norm: a view of the workspace, good until the next forward.

        batch.attention must be planned. ValueError: more than max_tokens tokens.
        """
        self._workspace.resize(batch.tokens.shape[0])
        stream = self._stream.now
        self.embed(stream, batch.tokens)
        for rope in self.ropes:
            rope.select(batch.positions)
        delta = None
        for layer in self.layers:
            delta = layer(stream, delta, batch)
        return self.last_join(stream, delta)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """float32 [S, vocab] of these rows (int64 [S]) of forward()'s result: a view of the head's buffer, good until the next call.

        ValueError: more than max_logits rows.
        """
        return self.head(hidden, rows)

    def destinations(self) -> dict[str, Destination]:
        """Where each parameter is loaded, by canonical name; a tied head has none of its own."""
        made = under("embed", self.embed.destinations())
        for i, layer in enumerate(self.layers):
            made |= under(f"layers.{i}", layer.destinations())
        return made | self.head.destinations()

    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(d.tensor.numel() * d.tensor.element_size() for d in self.destinations().values())


class Layer:
    """Attention and feed-forward, each with a norm before it, after it, or both."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        scheme: Scheme,
        group: int,
        ropes: list[Rotary],
        workspace: Workspace,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        layer, hidden = spec.layers[index], spec.hidden_size

        def norm() -> Norm:
            return Norm(hidden, spec.norm_eps, spec.norm_offset, dtype=dtype, device=device)

        def join() -> Join:
            return Join(norm() if spec.pre_norm else None, spec.residual_scale, hidden, workspace)

        self.attn_join, self.mlp_join = join(), join()
        self.attn_post_norm: Norm | None = norm() if spec.post_norm else None
        self.mlp_post_norm: Norm | None = norm() if spec.post_norm else None
        rotary = None if layer.rope is None else ropes[layer.rope]
        self.attention = Attention(spec, scheme, group, rotary, workspace, dtype=dtype, device=device)
        self.feed_forward: MLP | MoE
        if layer.moe:
            assert spec.moe is not None
            self.feed_forward = MoE(spec.moe, scheme, hidden, spec.activation, workspace, dtype=dtype, device=device)
        else:
            width, bias = spec.intermediate_size, spec.mlp_bias
            self.feed_forward = MLP(scheme, hidden, width, spec.activation, bias, workspace, dtype=dtype, device=device)

    def __call__(self, stream: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Adds the delta of the block before to the residual stream and returns its own, not yet added: each add shares an op with the norm
        that follows it."""
        delta = self.attention(self.attn_join(stream, delta), batch)
        if self.attn_post_norm is not None:
            self.attn_post_norm(delta, delta)
        delta = self.feed_forward(self.mlp_join(stream, delta))
        if self.mlp_post_norm is not None:
            self.mlp_post_norm(delta, delta)
        return delta

    def destinations(self) -> dict[str, Destination]:
        parts: dict[str, Attention | MLP | MoE | Join | Norm | None] = {
            "attn_norm": self.attn_join,
            "attn": self.attention,
            "attn_post_norm": self.attn_post_norm,
            "mlp_norm": self.mlp_join,
            "moe" if isinstance(self.feed_forward, MoE) else "mlp": self.feed_forward,
            "mlp_post_norm": self.mlp_post_norm,
        }
        return {k: d for name, part in parts.items() if part is not None for k, d in under(name, part.destinations()).items()}
