"""From a resolved Config to a warm Runner: decoder, weights, KV pool, warm-up, with the seconds of each phase.

Runs once at start; nothing here is on the step path. Called by engine.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from flatout.attention.select import select_backend
from flatout.config import Config, cache_dir
from flatout.hardware import Hardware
from flatout.kernels.op import choices, shape_class
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import load_weights
from flatout.request import MAX_LOGPROBS, Request, SamplingParams
from flatout.runner.memory import check_sizes, memory_errors_named, size_pool
from flatout.runner.runner import Runner
from flatout.step import StepPlan

MOST_WARMED = 64  # rows: beyond, implementations no longer differ


@dataclass(slots=True)
class Built:
    runner: Runner
    num_blocks: int
    weight_bytes: int
    lines: list[str]
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


def build(config: Config, source: ModelSource, spec: ModelSpec, hardware: Hardware) -> Built:
    """`spec` with its rope lengths fixed (ModelSpec.for_length). Raises ModelFileError or ConfigError."""
    with memory_errors_named(config):
        return _build(config, source, spec, hardware)


def _build(config: Config, source: ModelSource, spec: ModelSpec, hardware: Hardware) -> Built:
    model, scheduler, block_size = config.model, config.scheduler, config.cache.block_size
    longest, seqs, budget = model.max_model_len, scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert longest and seqs and budget and config.device.threads  # resolve() filled them
    device = torch.device(config.device.device)
    dtype = getattr(torch, model.dtype)
    backend = select_backend(config, spec)
    block_bytes = backend.kv_bytes_per_block(spec, block_size, dtype)
    check_sizes(config, spec, hardware, block_bytes)
    torch.set_num_threads(config.device.threads)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    choices.open(cache_dir() / f"choices-{hardware.fingerprint()}-torch{torch.__version__}.json")
    seconds: dict[str, float] = {}
    lap = time.perf_counter()

    def phase(name: str) -> None:
        nonlocal lap
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - lap
        lap = time.perf_counter()

    decoder = Decoder(
        spec,
        dtype=dtype,
        device=device,
        max_tokens=budget,
        max_logits=seqs,
        max_model_len=longest,
    )
    report = load_weights(decoder, source, seed=model.seed)
    phase("weights")
    max_blocks = -(-longest // block_size)
    runner = Runner(decoder, backend, max_slots=seqs, max_blocks=max_blocks, block_size=block_size, device=device)

    def rehearse() -> int:
        decoder.bind(backend.allocate_kv(spec, 1, block_size, dtype, device))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _warm_step(runner, longest, seqs, budget, logprobs=True)
        return torch.cuda.max_memory_allocated() - before

    pool = size_pool(config, spec, hardware, block_bytes, decoder.weight_bytes(), rehearse)
    decoder.bind(backend.allocate_kv(spec, pool.num_blocks, block_size, dtype, device))
    phase("KV pool")
    for rows, tokens in _warm_steps(device, seqs, budget):
        _warm_step(runner, longest, rows, tokens)
    if choices.unsaved:  # this model's shapes are new to this machine: measure the batches that users will make, once, not while they wait
        for rows in sorted({shape_class(n) for n in range(2, min(seqs, budget, MOST_WARMED) + 1)}):
            _warm_step(runner, longest, min(rows, seqs, budget), min(rows, seqs, budget))
    choices.save()
    phase("warm-up")
    return Built(runner, pool.num_blocks, decoder.weight_bytes(), [*report.lines(), pool.line], seconds)


def _warm_steps(device: torch.device, seqs: int, budget: int) -> list[tuple[int, int]]:
    """(rows, tokens) of the steps rehearsed at every start: what a first user meets."""
    if device.type == "cuda":
        return [(1, 1), (min(seqs, budget), budget), (1, 1)]
    return [(1, 1), (1, min(64, budget))]


def _warm_step(runner: Runner, longest: int, rows: int, tokens: int, logprobs: bool = False) -> None:
    """A step on block 0 with greedy and sampled rows, `tokens` in all or as many as contexts of `longest` hold; leaves only warm code."""
    counts = np.ones(rows, np.int32)
    counts += np.diff(np.minimum(np.arange(rows + 1) * (longest - 1), tokens - rows)).astype(np.int32)
    params = [SamplingParams(temperature=0.0, logprobs=MAX_LOGPROBS if logprobs else None), SamplingParams(temperature=1.0, top_p=0.9)]
    requests = [Request("warm-up", [0], params[i % 2], seed=i, slot=i) for i in range(rows)]
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        counts=counts,
        token_ids=np.zeros(counts.sum(), np.int32),
        samples=np.ones(rows, bool),
        out_positions=np.zeros(rows, np.int32),
        requests=requests,
        admitted=requests,
    )
    runner.launch(plan)()
