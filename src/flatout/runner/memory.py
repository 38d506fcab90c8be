"""What fits: settings that ask for more memory than there is are refused by name; how many KV blocks are left, every term explained.

Allocates nothing that lasts. Called by build.py: check_sizes() before anything is loaded, size_pool() once the weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flatout.config import Config, ConfigError, flag_of
from flatout.hardware import Hardware
from flatout.modelfile.spec import ModelSpec

CPU_SHARE = 0.25  # of the free memory: the machine has other things to do, and untouched blocks cost nothing
GIB = 1 << 30


@dataclass(frozen=True)
class Pool:
    num_blocks: int
    line: str  # the account in one line


def check_sizes(config: Config, spec: ModelSpec, hardware: Hardware, block_bytes: int) -> None:
    """Raises ConfigError where the buffers of a setting, or a KV pool of a given size, cannot fit. `block_bytes`: of one KV block.

    On the CPU pages cost nothing until they are touched: without this a pool far too large would be taken now and end the process later.
    """
    cache, scheduler, length = config.cache, config.scheduler, config.model.max_model_len
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and length
    element = getattr(torch, config.model.dtype).itemsize
    if cache.kv_cache_memory_bytes is not None and cache.kv_cache_memory_bytes < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes: {cache.kv_cache_memory_bytes} is less than one block of {cache.block_size} tokens takes; give at least {block_bytes}"
        )
    logits = spec.vocab_size * (4 if element == 4 else 4 + element)  # the projection's and, of another dtype, those in float32
    widths = 3 * spec.hidden_size + 2 * (spec.q_size + spec.kv_size) + 3 * spec.intermediate_size  # of the workspace, the large ones
    asked = [  # the sequences first: without a token budget of one's own it follows them
        ("max_num_seqs", scheduler.max_num_seqs, logits + element * spec.hidden_size + 4 * -(-length // cache.block_size)),
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, element * widths),
    ]
    if cache.num_gpu_blocks_override is not None:
        asked.append(("num_gpu_blocks_override", cache.num_gpu_blocks_override, block_bytes))
    if cache.kv_cache_memory_bytes is not None:
        asked.append(("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1))
    free = torch.cuda.mem_get_info()[0] if config.device.device == "cuda" else hardware.memory_bytes
    weights = spec.num_parameters * element
    room, beside = (free - weights, " beside the weights") if weights < free else (free, "")  # a model too large is no fault of these
    for name, count, each in asked:
        if count * each > room:
            raise ConfigError(
                f"{flag_of(name)}: {count} takes {count * each / GIB:.1f} GiB, but {room / GIB:.1f} GiB is free{beside}; at most {room // each} fit"
            )


@contextmanager
def memory_errors_named(config: Config) -> Iterator[None]:
    """An allocation that fails inside becomes a ConfigError with the settings that take memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has a class of its own for GPUs alone
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        scheduler, cuda = config.scheduler, config.device.device == "cuda"
        raise ConfigError(
            f"out of {'GPU memory' if cuda else 'memory'} while loading; lower --max-num-seqs (now {scheduler.max_num_seqs}), "
            f"--max-num-batched-tokens (now {scheduler.max_num_batched_tokens}) or {_pool_setting(config)}, or use a smaller model "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


def _pool_setting(config: Config) -> str:
    """The flag that decides the pool's size."""
    if config.cache.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if config.cache.kv_cache_memory_bytes is not None or config.device.device == "cpu":
        return "--kv-cache-memory-bytes"
    return "--gpu-memory-utilization"


def size_pool(config: Config, spec: ModelSpec, hardware: Hardware, block_bytes: int, graph_bytes: int, rehearse: Callable[[], int]) -> Pool:
    """Blocks for the KV pool; a size that was given has passed check_sizes(). `rehearse` runs the worst step on the GPU, when weights
    and buffers are there, and returns its peak of transient bytes. `graph_bytes`: what captured steps will take.

    Raises ConfigError when not even one block fits.
    """
    cache, scheduler = config.cache, config.scheduler
    assert scheduler.max_num_seqs and config.model.max_model_len
    most = scheduler.max_num_seqs * -(-config.model.max_model_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        blocks, why = cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        blocks, why = cache.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    elif config.device.device == "cuda":
        transient = rehearse()
        held = torch.cuda.memory_allocated()  # weights, and the buffers of a step and its logits
        total = torch.cuda.get_device_properties(0).total_memory
        free = torch.cuda.mem_get_info()[0]
        # what others hold, and what CUDA itself took, is neither ours nor free
        elsewhere = total - free - torch.cuda.memory_reserved()
        budget = int(total * cache.gpu_memory_utilization) - elsewhere - held - graph_bytes - transient
        if config.device.attention_backend == "torch":  # its gathers copy at most one layer's share of the pool
            budget = budget * spec.num_layers // (spec.num_layers + 1)
        blocks = budget // block_bytes - 1  # one is the spare slot's
        why = (
            f"{cache.gpu_memory_utilization:.0%} of {total / GIB:.1f} GiB less weights and buffers {held / GIB:.2f}, "
            f"a worst step {transient / GIB:.2f}, graphs {graph_bytes / GIB:.2f}, outside {elsewhere / GIB:.2f} GiB"
        )
    else:
        blocks = min(int(hardware.memory_bytes * CPU_SHARE) // block_bytes, most)
        why = f"at most {CPU_SHARE:.0%} of {hardware.memory_bytes / GIB:.1f} GiB free"
    if blocks < 1:
        mend = "a lower --max-num-batched-tokens or a larger share" if config.device.device == "cuda" else "or say how much it may take"
        raise ConfigError(
            f"{_pool_setting(config)}: no room for the KV pool ({why}); one block of {cache.block_size} tokens takes "
            f"{block_bytes / 1e6:.1f} MB. Use a smaller model, {mend}"
        )
    tokens = blocks * cache.block_size
    size = blocks * block_bytes / GIB
    full = tokens / config.model.max_model_len
    kind = cache.kv_cache_dtype + (" with a scale for each token and head" if cache.kv_cache_dtype == "int8" else "")
    line = f"KV pool: {blocks} blocks of {cache.block_size} = {tokens} tokens, {size:.2f} GiB of {kind} ({why}); {full:.1f} sequences of {config.model.max_model_len} tokens"
    return Pool(blocks, line)
