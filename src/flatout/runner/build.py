"""From a resolved Config to a warm Runner: decoder, weights, KV pool, warm-up, with the seconds of each phase; what a config may rely on here.

Runs once at start; nothing here is on the step path. Called by engine.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import numpy as np
import torch

from flatout import __version__
from flatout.attention.select import select_backend
from flatout.attention.triton import FARTHEST, LONG
from flatout.config import Config, cache_dir
from flatout.hardware import Hardware
from flatout.kernels import gpu, native
from flatout.kernels.op import choices, shape_class
from flatout.ledger.roofs import roof_here
from flatout.ledger.table import CostTable
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import kept_packed, load_weights
from flatout.request import MAX_LOGPROBS, Request, SamplingParams
from flatout.runner.costs import cost_table
from flatout.runner.graphs import DecodeGraphs, ladder
from flatout.runner.memory import GIB, check_sizes, memory_errors_named, size_pool
from flatout.runner.packing import kept_weights
from flatout.runner.runner import Runner
from flatout.runner.threads import Threads
from flatout.step import StepPlan

# what captured steps take: 36 of a 7B model 0.15 GiB on an H200, where libraries were loaded before
BYTES_BESIDE, BYTES_A_GRAPH = 256 << 20, 8 << 20
MOST_CLASSES = 4096  # tokens: chunks of more are rehearsed for attention's sake
MOST_WARMED = 64  # rows of decode steps that are rehearsed where none is captured


@dataclass(slots=True)
class Built:
    runner: Runner
    num_blocks: int
    weight_bytes: int
    costs: Callable[[], CostTable]  # made when somebody asks, as a first token need not wait for it
    lines: list[str]
    seconds: dict[str, float] = field(default_factory=dict)  # by phase


def abilities(source: ModelSource) -> dict[str, bool]:
    """What resolve() asks of this installation and file: whether the native library is there, whether weights can be kept as they are."""
    return {"native": native.available(), "kept": source.gguf is not None and bool(kept_packed(source))}


def build(config: Config, source: ModelSource, spec: ModelSpec, hardware: Hardware) -> Built:
    """`spec` with its rope lengths fixed (ModelSpec.for_length). Raises ModelFileError or ConfigError."""
    with memory_errors_named(config):
        return _build(config, source, spec, hardware)


def _build(config: Config, source: ModelSource, spec: ModelSpec, hardware: Hardware) -> Built:
    model, scheduler, block_size = config.model, config.scheduler, config.cache.block_size
    longest, seqs, budget = model.max_model_len, scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert longest and seqs and budget and config.device.threads  # resolve() filled them
    device = torch.device(config.device.device)
    dtype, kv_dtype = getattr(torch, model.dtype), getattr(torch, config.cache.kv_cache_dtype)
    backend = select_backend(config, spec)
    block_bytes = backend.kv_bytes_per_block(spec, block_size, kv_dtype)
    check_sizes(config, spec, hardware, block_bytes)
    torch.set_num_threads(config.device.threads)
    torch.set_float32_matmul_precision("highest")  # float32 means float32: no TF32
    choices.open(cache_dir() / f"choices-{hardware.fingerprint()}-torch{torch.__version__}.json")
    seconds: dict[str, float] = {}
    lacking: list[str] = []
    lap = time.perf_counter()

    def phase(name: str) -> None:
        nonlocal lap
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - lap
        lap = time.perf_counter()

    if hardware.capability is not None and hardware.capability >= (8, 0):  # what the kernels are written for
        gpu.load(cache_dir() / "cuda")
        phase("kernels")
        lacking = gpu.lacking(device)
    kept = kept_weights(config, source, spec)
    lacking += [kept.left] if kept.left else []
    if device.type == "cpu":
        lacking += native.lacking()
        if native.available():
            native.set_threads(config.device.threads)
    with _one_torch_thread():
        decoder = Decoder(
            spec,
            dtype=dtype,
            device=device,
            max_tokens=budget,
            max_logits=seqs,
            max_model_len=longest,
            invariant=config.device.deterministic,
            packed=kept.packed,
            embedding=kept.embedding,
        )
    report = load_weights(decoder, source, seed=model.seed)
    phase("weights")
    max_blocks = -(-longest // block_size)
    runner = Runner(decoder, backend, max_slots=seqs, max_blocks=max_blocks, block_size=block_size, device=device)
    captured = min(config.device.max_cudagraph_capture_size or 0, seqs) if backend.captures else 0
    graphs = DecodeGraphs(runner.executor, runner.slots, block_size, ladder(captured)) if captured else None
    lines = report.lines() + lacking
    if device.type == "cuda":
        decoder.bind(backend.allocate_kv(spec, 1, block_size, kv_dtype, device))
        if backend.captures:
            lines += _compile_ahead(runner, graphs, _mark(spec, config), longest, seqs, budget, config.device.threads)
            phase("compile")

    def rehearse() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _warm_step(runner, longest, seqs, budget, logprobs=True)
        for start, tokens in _long_chunks(longest, budget):
            _warm_step(runner, longest, 1, tokens, start=start)
        return torch.cuda.max_memory_allocated() - before

    pool = size_pool(config, spec, hardware, block_bytes, BYTES_BESIDE + BYTES_A_GRAPH * len(graphs.sizes) if graphs else 0, rehearse)
    decoder.bind(backend.allocate_kv(spec, pool.num_blocks + 1, block_size, kv_dtype, device))
    runner.slots.spare_block(pool.num_blocks)
    phase("KV pool")
    for rows, tokens in _warm_steps(device, seqs, budget):
        _warm_step(runner, longest, rows, tokens)
    # this model's shapes are new to this machine: measure the batches that users will make, once, not while they wait. Graphs measure theirs
    if graphs is None and choices.unsaved:
        _warm_step(runner, longest, 1, min(64, budget))
        for rows in sorted({shape_class(n) for n in range(2, min(seqs, budget, MOST_WARMED) + 1)}):
            _warm_step(runner, longest, min(rows, seqs, budget), min(rows, seqs, budget))
    phase("warm-up")
    lines.append(pool.line)
    if device.type == "cpu" and native.available() and config.device.threads > 1:
        runner.threads = Threads(config.device.threads, native.set_threads)
        lines.append(f"threads: {config.device.threads}, or fewer while other processes use the cores and steps are faster so")
    if device.type == "cpu" and backend.captures and not config.device.enforce_eager:
        most = min(seqs, MOST_WARMED)
        runner.executor.decodes = DecodeGraphs(runner.executor, runner.slots, block_size, range(1, most + 1))
        lines.append(f"programs: decode steps of up to {most} rows run as the native library's, each made when its size is first met")
    if graphs is not None:
        free = torch.cuda.mem_get_info()[0]
        if why := graphs.capture():
            lines.append(f"graphs: none, an op of this model waits for the device ({why})")
        else:
            runner.executor.decodes = graphs
            lines.append(f"graphs: decode steps of {_sizes(graphs.sizes)} rows, {(free - torch.cuda.mem_get_info()[0]) / GIB:.2f} GiB")
        phase("graphs")
    choices.save()
    costs = partial(
        cost_table,
        spec,
        name=source.name,
        dtype=model.dtype,
        kv_dtype=config.cache.kv_cache_dtype,
        packed=kept.packed,
        embedding=kept.embedding,
        runs_on=device.type,
        roof=roof_here(hardware),
    )
    return Built(runner, pool.num_blocks, decoder.weight_bytes(), costs, lines, seconds)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Rope tables of 8,192 positions take 7 ms of one thread; of two, which start and meet for them, 70 to 85 ms of CPU, and 0.2 s where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _mark(spec: ModelSpec, config: Config) -> str:
    """Stands for what a start compiles: the model's sizes, and the settings that kernels are made for."""
    versions = (__version__, torch.__version__, version("triton"))
    made_for = (versions, spec, config.model.dtype, config.cache.block_size, config.device)
    return "kernels for " + hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]


def _compile_ahead(runner: Runner, graphs: DecodeGraphs | None, name: str, longest: int, seqs: int, budget: int, threads: int) -> list[str]:
    """On the first start of this model here: every kernel that the start will meet, compiled by all cores at once. `name` stands for model and
    settings. Returns lines for the user."""
    if choices.get(name) == "compiled":
        return []
    from flatout.kernels.gpu.ahead import collect, compile_all

    begin = time.perf_counter()
    choices.surveying = True
    try:
        with collect() as wanted:
            for rows, tokens in ((1, 1), (1, budget), (seqs, budget)):
                _warm_step(runner, longest, rows, tokens, logprobs=True)
            for start, tokens in _long_chunks(longest, budget):
                _warm_step(runner, longest, 1, tokens, start=start)
            for tokens in sorted({shape_class(n) for n in range(MOST_WARMED + 1, min(budget, longest - 1, MOST_CLASSES) + 1)}):
                _warm_step(runner, longest, 1, tokens)
            if graphs is not None:
                for size in sorted({shape_class(n) for n in graphs.sizes if n <= MOST_WARMED} & set(graphs.sizes)):
                    graphs.rehearse(size)
                if graphs.backend.cascades:  # its first step of the kind then waits for a capture alone
                    graphs.rehearse(graphs.sizes[-1], cascade=True)
    finally:
        choices.surveying = False
    failed = compile_all(wanted, threads)
    if not failed:
        choices.put(name, "compiled")
    line = f"kernels: {len(wanted.kernels)} compiled in {time.perf_counter() - begin:.1f} s; the next start finds them"
    return [line + (f" ({failed} compiling processes failed: their kernels are compiled as they are met)" if failed else "")]


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) < 8 else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"


def _warm_steps(device: torch.device, seqs: int, budget: int) -> list[tuple[int, int]]:
    """(rows, tokens) of the steps rehearsed at every start: what a first user meets."""
    if device.type == "cuda":
        return [(1, 1), (min(seqs, budget), budget), (1, 1)]
    return [(1, 1)]  # a prompt of 64 as well took 0.18 s on a busy machine, and saved the first one 0.09


def _long_chunks(longest: int, budget: int) -> list[tuple[int, int]]:
    """(start, tokens) of single chunks for which attention has a choice of its own: of each class of length, and one with most keys before it."""
    tokens = min(budget, longest - 1)
    lengths = [n for n in (LONG, 2 * LONG, 4 * LONG) if n <= tokens]
    start = min(FARTHEST, (longest - 1 - tokens) // LONG * LONG)
    return [*((0, n) for n in lengths), *([(start, tokens)] if start else [])]


def _warm_step(runner: Runner, longest: int, rows: int, tokens: int, logprobs: bool = False, start: int = 0) -> None:
    """A step on block 0 with greedy and sampled rows, `tokens` in all or as many as contexts of `longest` hold, after `start` that count as
    computed; leaves only warm code."""
    counts = np.ones(rows, np.int32)
    counts += np.diff(np.minimum(np.arange(rows + 1) * (longest - 1), tokens - rows)).astype(np.int32)
    params = [SamplingParams(temperature=0.0, logprobs=MAX_LOGPROBS if logprobs else None), SamplingParams(temperature=1.0, top_p=0.9)]
    requests = [Request("warm-up", [0], params[i % 2], seed=i, slot=i) for i in range(rows)]
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, start, np.int32),
        counts=counts,
        token_ids=np.zeros(counts.sum(), np.int32),
        samples=np.ones(rows, bool),
        out_positions=np.zeros(rows, np.int32),
        requests=requests,
        admitted=requests,
    )
    runner.launch(plan)()
