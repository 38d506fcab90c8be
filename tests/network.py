"""A decoder with its cache and hand-built batches: what tests of the network step by hand. Holds no tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.config import ModelConfig
from flatout.modelfile.sources import resolve_model
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import load_weights

CPU = torch.device("cpu")


@dataclass
class Sequence:
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Network:
    """On the decoder's device. `scattered`: blocks are handed out in a shuffled order, so that rows' blocks follow one another only by chance."""

    def __init__(
        self, decoder: Decoder, *, block_size: int = 8, num_blocks: int = 256, dtype: torch.dtype = torch.float32, scattered: bool = False
    ):
        self.decoder, self.block_size = decoder, block_size
        self.device = decoder.embed.weight.device
        self.backend = TorchBackend(decoder.spec, block_size)
        decoder.bind(self.backend.allocate_kv(decoder.spec, num_blocks, block_size, dtype, self.device))
        self.groups = len(decoder.spec.cache_groups())
        self.free = list(range(num_blocks - 1, 0, -1))
        if scattered:
            np.random.default_rng(0).shuffle(self.free)

    def batch(self, rows: list[tuple[Sequence, list[int]]]) -> tuple[ForwardBatch, HostBatch]:
        """The batch that extends each sequence by its ids; sample_rows: every token."""
        size = self.block_size
        for sequence, ids in rows:
            while len(sequence.blocks) * size < sequence.length + len(ids):
                sequence.blocks.append(self.free.pop())
        q_lens = np.array([len(ids) for _, ids in rows], np.int32)
        kv_lens = np.array([s.length + len(ids) for s, ids in rows], np.int32)
        table = np.zeros((len(rows), max(len(s.blocks) for s, _ in rows)), np.int32)
        for i, (sequence, _) in enumerate(rows):
            table[i, : len(sequence.blocks)] = sequence.blocks
        positions = np.concatenate([np.arange(k - q, k) for q, k in zip(q_lens, kv_lens)])
        row = np.repeat(np.arange(len(rows)), q_lens)
        slots = table[row, positions // size].astype(np.int64) * size + positions % size
        tokens = np.array([i for _, ids in rows for i in ids])
        starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        arrays = (
            tokens,
            positions.astype(np.int64),
            starts,
            kv_lens,
            table,
            np.arange(len(rows), dtype=np.int32),
            slots,
            np.arange(len(positions)),
        )
        tokens_, positions_, starts_, kv_lens_, table_, table_rows, slots_, sampled = (torch.from_numpy(a).to(self.device) for a in arrays)
        groups = self.groups
        batch = ForwardBatch(tokens_, positions_, starts_, kv_lens_, (table_,) * groups, table_rows, (slots_,) * groups, sampled)
        return batch, HostBatch(q_lens, kv_lens, (table,) * self.groups)

    def step(self, rows: list[tuple[Sequence, list[int]]]) -> list[np.ndarray]:
        """Run one step; float32 logits [ids, V] of each row."""
        batch, host = self.batch(rows)
        with torch.inference_mode():
            self.backend.plan(batch, host)
            hidden = self.decoder.forward(batch)
            pieces = [self.decoder.logits(hidden, rows).clone() for rows in batch.sample_rows.split(self.decoder.max_logits)]
        for sequence, ids in rows:
            sequence.length += len(ids)
        return [p.cpu().numpy() for p in torch.cat(pieces).split([len(ids) for _, ids in rows])]

    def forced(self, ids: list[int], chunks: list[int] | None = None) -> np.ndarray:
        """Logits at every position of one sequence, given whole or in chunks of these lengths (the last: the rest)."""
        sequence, made, begin = Sequence(), [], 0
        for count in [*(chunks or []), len(ids)]:
            if begin < len(ids):
                made.append(self.step([(sequence, ids[begin : begin + count])])[0])
                begin += count
        self.free += sequence.blocks
        return np.concatenate(made)


def build(
    spec: ModelSpec, *, max_model_len: int = 1024, dtype: torch.dtype = torch.float32, device: torch.device = CPU, max_tokens: int = 512
) -> Decoder:
    spec = spec.for_length(max_model_len)
    return Decoder(spec, dtype=dtype, device=device, max_tokens=max_tokens, max_logits=64, max_model_len=max_model_len)


def load(path: Path, *, max_model_len: int = 1024, dtype: torch.dtype = torch.float32, device: torch.device = CPU, **options) -> Network:
    """A checkpoint loaded as the engine loads it."""
    source = resolve_model(ModelConfig(model=str(path)))
    decoder = build(source.spec, max_model_len=max_model_len, dtype=dtype, device=device)
    load_weights(decoder, source)
    return Network(decoder, dtype=dtype, **options)
