"""What fits and how fast it would be: memory by what holds it, requests of a length, tokens per second at batch sizes, TTFT; before anything loads.

Adds up what doctor/predict.py says of a model on paper; the arithmetic of the pool is the same as runner/memory.py's. Called by cli/doctor/plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flatout.doctor.predict import OnPaper
from flatout.doctor.whatif import decode_shape
from flatout.ledger.table import CostTable, StepShape, shape_of

GIB = 1 << 30
LENGTHS, BATCHES, PROMPTS = (1024, 4096, 16384, 65536), (1, 8, 64, 256), (512, 2048, 8192)
# an estimate of CUDA's context, libraries and loaded kernels; tests/gpu/test_plan_gpu.py holds the sum to a start's
OUTSIDE = 600 << 20
SAMPLING = 2  # copies of a batch's logits that a sampled step with logprobs makes at its peak
CPU_SHARE = 0.25  # of free memory, as runner/memory.py gives the pool


@dataclass(frozen=True)
class Fit:
    length: int  # tokens of a request, prompt and output
    requests: int  # that the pool holds whole
    running: int  # of them, those that --max-num-seqs lets run


@dataclass(frozen=True)
class Rate:
    """A step in which `batch` requests of half the context decode."""

    batch: int
    context: int
    step_s: float
    floor_s: float

    @property
    def tokens_s(self) -> float:
        return self.batch / self.step_s


@dataclass(frozen=True)
class First:
    prompt: int  # tokens
    seconds: float  # until its first token, alone on the machine


@dataclass(frozen=True)
class Capacity:
    """Bytes; seconds."""

    model: str
    machine: str
    measured: bool  # the ceilings; else from a data sheet
    dtype: str
    memory: int  # of the machine: of the GPU in all, of the CPU's RAM what is free
    usable: int  # of it, what a start would take at most
    weights: int
    buffers: int
    worst_step: int  # what comes and goes in one
    outside: int
    pool: int
    pool_tokens: int
    kv_token: int
    fits: tuple[Fit, ...]
    rates: tuple[Rate, ...]
    firsts: tuple[First, ...]
    notes: tuple[str, ...]

    @property
    def held(self) -> int:
        """Of a start whose pool is in use."""
        return self.weights + self.buffers + self.pool

    @property
    def short(self) -> int:
        """Bytes that are missing to run at all."""
        return max(0, self.weights + self.buffers + self.worst_step + self.outside + self.kv_token - self.usable)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "held": self.held,
            "short": self.short,
            "rates": [{**asdict(r), "tokens_s": r.tokens_s} for r in self.rates],
        }


def capacity(
    paper: OnPaper, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = BATCHES, prompts: Sequence[int] = PROMPTS
) -> Capacity:
    """Lengths past --max-model-len are left out, and batches that --max-num-seqs or the pool do not hold."""
    config, table, spec = paper.config, paper.table, paper.spec
    scheduler, longest = config.scheduler, config.model.max_model_len
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and longest
    seqs, size = scheduler.max_num_seqs, config.cache.block_size
    cuda = paper.hardware.device == "cuda"
    logits = 4 * spec.vocab_size * seqs
    worst, outside = (SAMPLING * logits, OUTSIDE) if cuda else (0, 0)
    usable = int(paper.hardware.memory_bytes * config.cache.gpu_memory_utilization) if cuda else paper.hardware.memory_bytes
    room = usable - table.weight_bytes - paper.buffers - worst - outside
    blocks = _blocks(paper, room, -(-longest // size) * seqs, cuda)
    tokens = blocks * size
    lengths = [n for n in lengths if n <= longest] or [longest]
    fits = tuple(Fit(n, tokens // (-(-n // size) * size), min(seqs, tokens // (-(-n // size) * size))) for n in lengths)
    return Capacity(
        model=table.model,
        machine=paper.table.roof.name,
        measured=table.roof.measured,
        dtype=config.model.dtype,
        memory=paper.hardware.memory_bytes,
        usable=usable,
        weights=table.weight_bytes,
        buffers=paper.buffers,
        worst_step=worst,
        outside=outside,
        pool=blocks * paper.block_bytes,
        pool_tokens=tokens,
        kv_token=table.kv_bytes_token,
        fits=fits,
        rates=tuple(rate(paper, n, min(lengths[0], longest)) for n in batches if n <= min(seqs, tokens // size)),
        firsts=tuple(first(paper, n) for n in prompts if n < longest and n <= tokens),
        notes=paper.notes,
    )


def _blocks(paper: OnPaper, room: int, most: int, cuda: bool) -> int:
    cache, block = paper.config.cache, paper.block_bytes
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block
    if cuda:
        return max(0, room // block - 1)
    return max(0, min(int(paper.hardware.memory_bytes * CPU_SHARE) // block, most))


def chunk(table: CostTable, before: int, tokens: int, last: bool) -> StepShape:
    """A step with so many tokens of one prompt after `before`; last: it ends the prompt."""
    return shape_of(np.array([before]), np.array([tokens]), np.array([last]), table.windows)


def rate(paper: OnPaper, batch: int, context: int) -> Rate:
    shape = decode_shape(paper.table, batch, context)
    return Rate(batch, context, paper.table.step_seconds(shape, captured=True), paper.table.floor(shape).seconds)


def first(paper: OnPaper, prompt: int) -> First:
    budget = paper.config.scheduler.max_num_batched_tokens
    assert budget
    seconds = sum(
        paper.table.step_seconds(chunk(paper.table, begin, min(budget, prompt - begin), begin + budget >= prompt))
        for begin in range(0, prompt, budget)
    )
    return First(prompt, seconds)
