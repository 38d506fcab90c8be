"""Random rows for the op attention, with plain float64 attention to compare. Shared by the CPU's and the GPU's tests; holds none."""

from __future__ import annotations

import numpy as np
import torch

from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.attention import AttentionWork, attention
from flatout.modelfile.spec import LayerSpec, ModelSpec, RopeSpec

CPU = torch.device("cpu")
BLOCK = 4
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None, softcap: float = 0.0) -> ModelSpec:
    layers, ropes = (LayerSpec(window=window),), (RopeSpec(base=10000.0, dim=dim),)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "intermediate_size": 8}
    return ModelSpec("x", "llama", layers=layers, ropes=ropes, max_position=4096, norm_eps=1e-5, attn_softcap=softcap, **sizes)


def plan_of(
    spec: ModelSpec, rows: list[tuple[int, int]], table: np.ndarray, dtype: torch.dtype, device: torch.device = CPU
) -> AttentionWork:
    """rows: (cached before, new)."""
    backend = TorchBackend(spec, BLOCK)
    backend.allocate_kv(spec, 1, BLOCK, dtype, device)
    q_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((new, before + new) for before, new in rows)))
    empty = torch.empty(0, dtype=torch.int64)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32))
    starts, lengths, tables, empty = (t.to(device) for t in (starts, torch.from_numpy(kv_lens), torch.from_numpy(table), empty))
    batch = ForwardBatch(empty, empty, starts, lengths, (tables,), (empty,), empty)
    backend.plan(batch, HostBatch(q_lens, kv_lens, (table,)))
    (work,) = batch.attention
    return work


def plain(query, key, value, window, scale, softcap):
    """One row in float64: query [n, heads, D] the last n of key, value [L, kv_heads, D]."""
    n, heads, _ = query.shape
    total, kv_heads, _ = key.shape
    out = np.empty_like(query)
    for i in range(n):
        position = total - n + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(heads):
            group = h // (heads // kv_heads)
            scores = key[first : position + 1, group] @ query[i, h] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ value[first : position + 1, group]
    return out


def check(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float,
    consecutive: bool,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = CPU,
) -> AttentionWork:
    """Run the op and its reference on random keys of these rows, (cached before, new); both must agree with plain(). The work it planned."""
    rng = np.random.default_rng(seed)
    spec = spec_of(heads, kv_heads, dim, window, softcap)
    width = max(-(-(before + new) // BLOCK) for before, new in rows)
    blocks = np.arange(1, len(rows) * width + 1)
    if not consecutive:
        rng.shuffle(blocks)
    table = blocks.reshape(len(rows), width).astype(np.int32)
    work = plan_of(spec, rows, table, dtype, device)
    tokens = sum(new for _, new in rows)
    # q lies in the fused projection; slots never written hold NaN, so that a read of one shows
    fused = torch.from_numpy(rng.normal(size=(tokens, (heads + 2 * kv_heads) * dim))).to(device, dtype)
    cache = [torch.full(((len(blocks) + 1) * BLOCK, kv_heads, dim), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    scale, out = dim**-0.5, torch.full((tokens, heads * dim), torch.nan, dtype=dtype, device=device)
    q = fused[:, : heads * dim]
    expected, begin = [], 0
    for (before, new), row in zip(rows, table):
        slots = (row[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: before + new]
        for c in cache:
            c[torch.from_numpy(slots)] = torch.from_numpy(rng.normal(size=(before + new, kv_heads, dim))).to(device, dtype)
        query = q[begin : begin + new].double().cpu().numpy().reshape(new, heads, dim)
        expected.append(
            plain(query, *(c[torch.from_numpy(slots)].double().cpu().numpy() for c in cache), window, scale, softcap).reshape(new, -1)
        )
        begin += new
    for run in (attention, attention.reference):
        out.fill_(torch.nan)
        run(out, q, *cache, work, scale, softcap)
        np.testing.assert_allclose(out.double().cpu().numpy(), np.concatenate(expected), rtol=0, atol=DTYPES[dtype])
    return work
