"""Random rows for the op attention, with plain float64 attention to compare. Shared by the CPU's and the GPU's tests; holds none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flatout.attention.backend import AttentionBackend
from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.attention import AttentionWork, attention
from flatout.kernels.kv import pack, unpack
from flatout.modelfile.spec import LayerSpec, ModelSpec, RopeSpec

CPU = torch.device("cpu")
BLOCK = 4
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# of a token's root mean square. bfloat16 weights and results alone were up to 3.4e-2 off in 30,000 tokens of 5,120 values in exact arithmetic
RELATIVE = {**DTYPES, torch.bfloat16: 4e-2}
Rows = list[tuple[int, int]]  # (cached before, new) of each row


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None, softcap: float = 0.0) -> ModelSpec:
    layers, ropes = (LayerSpec(window=window),), (RopeSpec(base=10000.0, dim=dim),)
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "intermediate_size": 8}
    return ModelSpec("x", "llama", layers=layers, ropes=ropes, max_position=4096, norm_eps=1e-5, attn_softcap=softcap, **sizes)


def batch_of(rows: Rows, table: np.ndarray, device: torch.device = CPU, seed: int = 0) -> tuple[ForwardBatch, HostBatch]:
    """table int32 [R, W]: on the device its rows lie in any order among others' in a wider table whose other entries point nowhere."""
    rng = np.random.default_rng(seed)
    q_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((new, before + new) for before, new in rows)))
    slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
    tables = np.full((len(rows) + 2, table.shape[1] + 3), 1 << 30, np.int32)
    for slot, blocks, end in zip(slots, table, kv_lens):
        used = -(-int(end) // BLOCK)
        tables[slot, :used] = blocks[:used]
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    starts_, lengths, tables_, slots_ = (torch.from_numpy(a).to(device) for a in (starts, kv_lens, tables, slots))
    empty = torch.empty(0, dtype=torch.int64, device=device)
    batch = ForwardBatch(empty, empty, starts_, lengths, (tables_,), slots_, (empty,), empty)
    return batch, HostBatch(q_lens, kv_lens, (table,))


def plan_of(
    spec: ModelSpec,
    rows: Rows,
    table: np.ndarray,
    dtype: torch.dtype,
    device: torch.device = CPU,
    backend: AttentionBackend | None = None,
    on_device: bool = False,
    cache: torch.dtype | None = None,
) -> AttentionWork:
    """on_device: as for a captured step, all rows of one query. cache: its type, where that is not the queries'."""
    if backend is None:
        backend = TorchBackend(spec, BLOCK, dtype)
        backend.allocate_kv(spec, 1, BLOCK, cache or dtype, device)
    batch, host = batch_of(rows, table, device)
    if on_device:
        backend.plan_decode(batch)
    else:
        backend.plan(batch, host)
    (work,) = batch.attention
    return work


@dataclass(slots=True)
class Case:
    """Random queries, and keys of these rows in a cache of shuffled blocks."""

    spec: ModelSpec
    rows: Rows
    table: np.ndarray  # int32 [R, W]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    expected: torch.Tensor  # float64, as out

    def run(self, run: Callable[..., None], work: AttentionWork) -> torch.Tensor:
        """The operation into a poisoned output."""
        out = torch.full(self.expected.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        run(out, self.q, self.k_cache, self.v_cache, work, self.spec.softmax_scale, self.spec.attn_softcap)
        return out

    def holds(self, out: torch.Tensor, relative: bool = False) -> None:
        """relative: to each token's root mean square, which falls as more keys are averaged."""
        slack = torch.full_like(self.expected[:, :1], (RELATIVE if relative else DTYPES)[self.q.dtype])
        if relative:
            slack *= self.expected.square().mean(1, keepdim=True).sqrt()
        error = (out.double() - self.expected).abs() / slack
        worst = error.nan_to_num(torch.inf).max(1).values
        assert worst.max() <= 1, f"token {int(worst.argmax())} of {len(worst)} is {float(worst.max()):.3g} times the slack away"


def case_of(
    rows: Rows,
    spec: ModelSpec,
    dtype: torch.dtype,
    consecutive: bool = False,
    seed: int = 0,
    device: torch.device = CPU,
    cache: torch.dtype | None = None,
) -> Case:
    """cache: the type of keys and values, where that is not the queries'; what is expected is of the values that it holds."""
    held = cache or dtype
    rng, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    widths = [-(-(before + new) // BLOCK) for before, new in rows]
    blocks = np.arange(1, sum(widths) + 1)
    if not consecutive:
        rng.shuffle(blocks)
    table = np.zeros((len(rows), max(widths)), np.int32)
    for row, width, end in zip(table, widths, np.cumsum(widths)):
        row[:width] = blocks[end - width : end]
    tokens = sum(new for _, new in rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    # q lies in the fused projection; slots never written hold NaN, so that a read of one shows
    q = random(tokens, (heads + 2 * kv_heads) * dim)[:, : heads * dim]
    caches = [pack(torch.full(((len(blocks) + 1) * BLOCK, kv_heads, dim), torch.nan, device=device), held) for _ in range(2)]
    expected, begin = [], 0
    for (before, new), row in zip(rows, table):
        slots = torch.from_numpy((row[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: before + new]).to(device).long()
        key, value = (pack(random(before + new, kv_heads, dim), held) for _ in range(2))
        for part, new_values in zip(caches, (key, value)):
            part[slots] = new_values
        key, value = (unpack(part, torch.float64) for part in (key, value))
        query = q[begin : begin + new].view(new, heads, dim)
        expected.append(plain(query.double(), key, value, spec.layers[0].window, spec.softmax_scale, spec.attn_softcap))
        begin += new
    return Case(spec, rows, table, q, *caches, torch.cat(expected).reshape(tokens, -1))


def implementation(name: str) -> Callable[..., None]:
    """Of the op attention, whatever it accepts."""
    return attention.reference if name == "reference" else next(i.run for i in attention.implementations if i.name == name)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scale: float, softcap: float) -> torch.Tensor:
    """One row in float64: query [n, heads, D] the last n of key, value [L, kv_heads, D]. Head by head, in the plainest terms."""
    n, heads, _ = query.shape
    total, kv_heads, _ = key.shape
    position, keys = torch.arange(total - n, total, device=key.device)[:, None], torch.arange(total, device=key.device)[None, :]
    hidden = (keys > position) | (keys <= position - (window or total + 1))
    out = torch.empty_like(query)
    for h in range(heads):
        group = h // (heads // kv_heads)
        scores = query[:, h] @ key[:, group].T * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[:, h] = torch.softmax(scores.masked_fill(hidden, -torch.inf), 1) @ value[:, group]
    return out


def check(
    rows: Rows,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float,
    consecutive: bool,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = CPU,
    cache: torch.dtype | None = None,
) -> AttentionWork:
    """Run the op and its reference, planned by the torch backend; both must agree with plain(). The work it planned."""
    case = case_of(rows, spec_of(heads, kv_heads, dim, window, softcap), dtype, consecutive, seed, device, cache)
    work = plan_of(case.spec, rows, case.table, dtype, device, cache=cache)
    for run in (attention, attention.reference):
        case.holds(case.run(run, work))
    return work
