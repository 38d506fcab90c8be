"""How many KV blocks fit: weights and activations measured, the rest given to the pool, every term explained.

Allocates nothing that lasts. Called by build.py at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flatout.config import Config, ConfigError
from flatout.hardware import Hardware
from flatout.modelfile.spec import ModelSpec

CPU_SHARE = 0.25  # of the free memory: the machine has other things to do, and untouched blocks cost nothing
GIB = 1 << 30


@dataclass(frozen=True)
class Pool:
    num_blocks: int
    line: str  # the account in one line


def size_pool(
    config: Config, spec: ModelSpec, hardware: Hardware, block_bytes: int, weight_bytes: int, rehearse: Callable[[], int]
) -> Pool:
    """Blocks for the KV pool. `rehearse` runs the worst step on the GPU and returns its peak of transient bytes.

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
        total = torch.cuda.get_device_properties(0).total_memory
        free = torch.cuda.mem_get_info()[0]
        # what others hold, and what CUDA itself took, is neither ours nor free
        elsewhere = total - free - torch.cuda.memory_reserved()
        budget = int(total * cache.gpu_memory_utilization) - elsewhere - weight_bytes - transient
        # attention through gathers copies at most one layer's share of the pool
        blocks = max(budget, 0) * spec.num_layers // (spec.num_layers + 1) // block_bytes
        why = (
            f"{cache.gpu_memory_utilization:.0%} of {total / GIB:.1f} GiB less weights {weight_bytes / GIB:.2f}, "
            f"a worst step {transient / GIB:.2f}, outside {elsewhere / GIB:.2f} GiB"
        )
    else:
        blocks = min(int(hardware.memory_bytes * CPU_SHARE) // block_bytes, most)
        why = f"at most {CPU_SHARE:.0%} of {hardware.memory_bytes / GIB:.1f} GiB free"
    if blocks < 1:
        raise ConfigError(
            f"--gpu-memory-utilization: no room for the KV pool ({why}); one block of {cache.block_size} tokens takes "
            f"{block_bytes / 1e6:.1f} MB. Use a smaller model, a shorter --max-num-batched-tokens or a larger share"
        )
    tokens = blocks * cache.block_size
    size = blocks * block_bytes / GIB
    full = tokens / config.model.max_model_len
    line = f"KV pool: {blocks} blocks of {cache.block_size} = {tokens} tokens, {size:.2f} GiB ({why}); {full:.1f} sequences of {config.model.max_model_len} tokens"
    return Pool(blocks, line)
