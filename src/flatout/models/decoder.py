"""Decoder: the decoder-only transformer of every dense and MoE family, built from its ModelSpec.

The forward calls ops and views only: on meta tensors under a recorder it is the list of ops and costs. What differs between families
is a field of the spec; no family is named here. Called by runner/ and doctor/; filled by models/load.py.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from flatout.layers.norm import Around, Norm
from flatout.layers.picked import Picked
from flatout.layers.rotary import Rotary
from flatout.layers.workspace import Workspace
from flatout.modelfile.spec import ModelSpec
from flatout.quant.none import Plain
from flatout.quant.packed import Packed
from flatout.quant.scheme import Scheme, Schemes


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        max_logits: int,
        max_model_len: int,
        invariant: bool = False,
        packed: Mapping[str, int] | None = None,
        runs_on: str = "",
        embedding: str = "",
    ):
        """Weights and buffers are allocated, not filled.

        max_tokens: most tokens of one forward(). max_logits: most rows of one logits(). max_model_len: positions of the rope tables; the
        spec's ropes have their lengths fixed for it (ModelSpec.for_length). invariant: on CUDA a row's products have the same bits whatever
        rows are beside it. packed: bits of the projections that are kept packed, by their names in destinations(), "layers.0.attn.qkv".
        runs_on: the type of device that one on meta tensors stands for.
        embedding: how its table is kept (layers/embedding.py), "" in dtype, as it must be for a tied head that is not packed.
        """
        self.spec = spec
        self.max_logits = max_logits
        self._workspace = workspace = Workspace(max_tokens, dtype, device)
        plain = Plain(invariant)
        kept: dict[str, Scheme] = {name: Packed(bits) for name, bits in (packed or {}).items()}

        def schemes(name: str) -> Scheme:
            return kept.get(name, plain)

        groups = {layer: index for index, group in enumerate(spec.cache_groups()) for layer in group.layers}
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, spec.embed_scale, embedding, dtype=dtype, device=device)
        self.ropes = [Rotary(rope, i, max_model_len, workspace, dtype=dtype, device=device) for i, rope in enumerate(spec.ropes)]
        self.layers = [
            Layer(spec, i, schemes, plain, groups[i], self.ropes, workspace, dtype=dtype, device=device) for i in range(spec.num_layers)
        ]
        self.head = Head(spec, self.embed, schemes("head"), max_logits, runs_on or device.type, dtype=dtype, device=device)
        if self.embed.shares:
            self.embed.share(self.head.projection.tensors["weight"])
        self._stream = workspace.rows("stream", spec.hidden_size)
        self._picked = Picked(max_logits, spec.hidden_size, spec.q_size, dtype=dtype, device=device)

    def bind(self, kv_caches: list[tuple[Tensor, Tensor]]) -> None:
        """Use these KV caches: (k, v) of each layer, [num_blocks, block_size, kv_heads, head_dim]."""
        for layer, (k_cache, v_cache) in zip(self.layers, kv_caches, strict=True):
            layer.attention.bind(k_cache, v_cache)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The residual stream before the final norm, [T, hidden] or, if batch.last says so, [S, hidden]: good until the next forward.

        batch.attention must be planned. ValueError: more than max_tokens tokens.
        """
        self._workspace.resize(batch.tokens.shape[0])
        stream = self._stream.now
        self.embed(stream, batch.tokens)
        for rope in self.ropes:
            rope.select(batch.positions)
        *layers, last = self.layers
        for layer in layers:
            layer(stream, batch)
        if batch.last is None:
            last(stream, batch)
            return stream
        return self._narrowed(last, stream, batch, batch.last)

    def _narrowed(self, layer: Layer, stream: Tensor, batch: ForwardBatch, last: ForwardBatch) -> Tensor:
        """The last layer, which nobody asks about the tokens that are not sampled: they leave keys and values and are done. Of a prompt in a
        model of 28 layers that is 3 % of all operations."""
        layer.attention.store(stream, batch)
        few, queries = self._picked(stream, layer.attention.queries, batch.sample_rows)
        if few.shape[0]:
            self._workspace.resize(few.shape[0])
            layer.attention.mix(few, queries, last)
            layer.feed_forward(few)
        return few

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """float32 [S, vocab] of these rows (int64 [S], rising) of forward()'s result: a view of the head's buffer, good until the next call.

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
        """Bytes of the parameters that a step reads: all but an embedding that is not the head, too."""
        destinations = self.destinations()
        if "head.weight" in destinations:
            destinations.pop("embed.weight", None)
        return sum(d.tensor.nbytes for d in destinations.values())

    def buffer_bytes(self) -> int:
        """Bytes beside the parameters and the KV cache: what a forward of max_tokens and max_logits works on, and the tables of the ropes."""
        return self._workspace.nbytes + self._picked.nbytes + self.head.buffer_bytes() + sum(rope.table.nbytes for rope in self.ropes)


class Layer:
    """Attention and feed-forward, each with a norm before it, after it, or both."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        schemes: Schemes,
        plain: Plain,
        group: int,
        ropes: list[Rotary],
        workspace: Workspace,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        layer, hidden = spec.layers[index], spec.hidden_size

        def norm(wanted: bool) -> Norm | None:
            return Norm(hidden, spec.norm_eps, spec.norm_offset, dtype=dtype, device=device) if wanted else None

        def around() -> Around:
            return Around(norm(spec.pre_norm), norm(spec.post_norm), spec.residual_scale)

        rotary = None if layer.rope is None else ropes[layer.rope]

        def below(part: str) -> Schemes:
            return lambda name: schemes(f"layers.{index}.{part}.{name}")

        self.attention = Attention(spec, below("attn"), group, rotary, around(), workspace, dtype=dtype, device=device)
        self.feed_forward: MLP | MoE
        if layer.moe:
            assert spec.moe is not None
            self.feed_forward = MoE(
                spec.moe, below("moe"), plain, hidden, spec.activation, workspace, around=around(), dtype=dtype, device=device
            )
        else:
            width, bias = spec.intermediate_size, spec.mlp_bias
            self.feed_forward = MLP(
                below("mlp"), hidden, width, spec.activation, bias, workspace, around=around(), dtype=dtype, device=device
            )

    def __call__(self, stream: Tensor, batch: ForwardBatch) -> None:
        """Each block adds its output to the residual stream [T, hidden]."""
        self.attention(stream, batch)
        self.feed_forward(stream)

    def destinations(self) -> dict[str, Destination]:
        feed_forward = "moe" if isinstance(self.feed_forward, MoE) else "mlp"
        made = under("attn", self.attention.destinations()) | under(feed_forward, self.feed_forward.destinations())
        return made | self.attention.around.destinations("attn") | self.feed_forward.around.destinations("mlp")
