"""The plain twin of a model: the same weights in float32, every op by its reference in torch, whole prompts. Slow and right.

Also the batch that both it and the served model are given. No fast path may be reached from here. Called by selfcheck.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.batch import ForwardBatch, HostBatch
from flatout.config import ConfigError
from flatout.hardware import available_memory
from flatout.kernels.attention import AttentionWork, Pieces
from flatout.kernels.op import Op, recording_by
from flatout.kernels.packed import unpacked
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import load_weights

GIB = 1 << 30
BLOCK = 16  # tokens of a block of the twin's cache
LOGITS_AT_ONCE = 32  # rows of the head's product: of a vocabulary of 150,000 they take 19 MB
# Prompts go together up to so many tokens: torch's threads meet after every small op, and where others want the cores too each meeting takes
# milliseconds (20 prompts one by one took five times as long)
TOKENS_AT_ONCE = 1024


class References:
    """Runs each op by its reference alone."""

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        op.reference(*args)


def extend(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], sampled: Sequence[int], block_size: int, groups: int, device: torch.device
) -> tuple[ForwardBatch, HostBatch]:
    """The batch that extends sequences: each row is (new ids, tokens that its cache holds, its blocks in order). sampled: tokens of the batch,
    rising, that batch.sample_rows is to name."""
    counts = np.array([len(ids) for ids, _, _ in rows], np.int32)
    before = np.array([start for _, start, _ in rows], np.int32)
    lengths = before + counts
    table = np.zeros((len(rows), max(len(blocks) for _, _, blocks in rows)), np.int32)
    for line, (_, _, blocks) in zip(table, rows):
        line[: len(blocks)] = blocks
    row = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate([np.arange(start, end) for start, end in zip(before, lengths)])
    slots = table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    batch = ForwardBatch(
        tokens=there(np.array([i for ids, _, _ in rows for i in ids], np.int64)),
        positions=there(positions.astype(np.int64)),
        q_starts=there(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        kv_lens=there(lengths),
        block_tables=(there(table),) * groups,
        table_rows=there(np.arange(len(rows), dtype=np.int32)),
        kv_slots=(there(slots),) * groups,
        sample_rows=there(np.array(sampled, np.int64)),
    )
    return batch, HostBatch(counts, lengths, (table,) * groups)


def logits_of(decoder: Decoder, hidden: Tensor, rows: Tensor) -> Tensor:
    """float32 [S, V] on the host: of rows (int64 [S]) of a forward's result."""
    most = min(decoder.max_logits, LOGITS_AT_ONCE)
    return torch.cat([decoder.logits(hidden, piece).cpu().clone() for piece in rows.split(most)])


class Exact:
    """The twin of `source`. Raises ConfigError where no memory holds it, ModelFileError as a load does."""

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        max_model_len: int,
        longest: int,
        device: str,
        weights: Mapping[str, Tensor] | None = None,
    ):
        """spec: with its rope lengths fixed for max_model_len. longest: tokens of the longest prompt. device: where it should be. weights:
        values by destination, plain or packed, instead of those of the source's files."""
        self.spec, self.most = spec, max(TOKENS_AT_ONCE, -(-longest // BLOCK) * BLOCK)
        self.device = torch.device(_roomy(source.name, spec, self.most, longest, device))
        torch.set_float32_matmul_precision("highest")  # no TF32
        self.decoder = Decoder(
            spec, dtype=torch.float32, device=self.device, max_tokens=self.most, max_logits=LOGITS_AT_ONCE, max_model_len=max_model_len
        )
        if weights is None:
            load_weights(self.decoder, source)
        else:
            for name, destination in self.decoder.destinations().items():
                value = weights[name]
                destination.tensor.copy_(unpacked(value) if value.dtype == torch.uint8 else value)
        shape = (self.most // BLOCK, BLOCK, spec.num_kv_heads, spec.head_dim)
        self.decoder.bind(
            [(torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)) for _ in range(spec.num_layers)]
        )

    def logits(self, prompts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Tensor]:
        """Of each prompt (ids, positions rising): float32 [positions, V] on the host, after the tokens there."""
        together: list[tuple[Sequence[int], Sequence[int]]] = []
        for prompt in prompts:
            if together and sum(_whole(ids) for ids, _ in [*together, prompt]) > self.most:
                yield from self._forward(together)
                together = []
            together.append(prompt)
        yield from self._forward(together)

    def _forward(self, prompts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, ...]:
        rows: list[tuple[Sequence[int], int, Sequence[int]]] = []
        sampled: list[int] = []
        blocks = tokens = 0
        for ids, positions in prompts:
            rows.append((ids, 0, range(blocks, blocks + _whole(ids) // BLOCK)))
            sampled += [tokens + at for at in positions]
            blocks += _whole(ids) // BLOCK
            tokens += len(ids)
        groups = self.spec.cache_groups()
        batch, host = extend(rows, sampled, BLOCK, len(groups), self.device)
        batch.attention = tuple(
            AttentionWork(host.q_lens, host.kv_lens, table, BLOCK, group.window, 0, 0, Pieces([], []))
            for group, table in zip(groups, host.block_tables)
        )
        with torch.inference_mode(), recording_by(References()):
            logits = logits_of(self.decoder, self.decoder.forward(batch), batch.sample_rows)
        return logits.split([len(positions) for _, positions in prompts])


def _whole(ids: Sequence[int]) -> int:
    """Tokens of the blocks that a prompt takes."""
    return -(-len(ids) // BLOCK) * BLOCK


def _roomy(name: str, spec: ModelSpec, tokens: int, longest: int, device: str) -> str:
    """Where the twin fits with so many tokens at once: the served model's device, else the CPU."""
    widths = 6 * spec.hidden_size + 3 * (spec.q_size + spec.kv_size) + 3 * spec.intermediate_size
    elements = (
        tokens * (widths + 2 * spec.num_layers * spec.kv_size) + 2 * spec.num_heads * longest**2 + 2 * LOGITS_AT_ONCE * spec.vocab_size
    )
    need = 4 * (spec.num_parameters + elements)
    if device == "cuda":
        torch.cuda.empty_cache()
        if need <= torch.cuda.mem_get_info()[0]:
            return device
    if need <= (free := available_memory()):
        return "cpu"
    raise ConfigError(
        f"selfcheck: the float32 twin of {name} takes {need / GIB:.1f} GiB and {free / GIB:.1f} GiB is free; use a machine with more memory"
    )
