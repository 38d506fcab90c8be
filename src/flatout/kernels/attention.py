"""Op attention: queries against the block-wise KV cache, and the arrangements of a step's rows that its implementations understand.

A backend (attention/) makes an AttentionWork once a step and cache group; the op runs it once a layer. Block tables, windows and
causality are all in the work, so nothing here knows a request or a model. Called by layers/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.kernels import kv, native
from flatout.kernels.op import Cost, nbytes, op, shape_class
from flatout.kernels.prefixes import Shared

SCORES_AT_ONCE = 1 << 25  # elements: the explicit path works through a chunk's queries in steps that keep its scores under 128 MB

# Where keys lie in the cache: a run of slots (first, end), taken as a view, or int64 slots to gather
Where = tuple[int, int] | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """Rows with one query each, their keys padded to one length."""

    tokens: slice | Tensor  # which queries
    rows: int
    length: int
    where: Where  # rows * length slots
    mask: Tensor | None  # float32 [rows, 1, 1, length], added to the scores: -inf on padding


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Neighbouring queries of one row; the last of them sees the last key, each one before it a key less."""

    first: int  # token of the first query
    count: int
    length: int  # keys, at least count
    where: Where
    window: int | None  # None: no query is that far from its first key
    mask: Tensor | None  # float32 [count, length] where a window cuts; None: plainly causal


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A step cut into calls of dense attention."""

    singles: list[Singles]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """On the CPU: rows of one query where their keys lie, by the native library, and the chunks of the others by dense attention."""

    rows: native.Rows
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True, eq=False)
class Varlen:
    """All rows end to end for CUDA's variable-length flash attention: keys are gathered, then one call."""

    slots: Tensor  # int64, the keys' slots row after row
    q_starts: Tensor  # int32 [R+1]
    k_starts: Tensor  # int32 [R+1]
    max_q: int
    max_k: int
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Rows attended where their keys lie in the cache; lengths and tables are read on the device (kernels/gpu/attention.py).

    Two kinds of work, either may be absent. Rows of one query, together: `singles` of them. Tiles of one row's queries, each by itself: a
    row's queries are packed with the query heads of a KV head, so that packed query i * group + g is query i under the group's head g.
    """

    tables: Tensor  # int32 [any, max_blocks] blocks in order
    table_rows: Tensor  # int32 [R] which row of `tables` each row has
    q_starts: Tensor  # int32 [R+1] first token of each row
    kv_lens: Tensor  # int32 [R] keys, the queries' own included; at least 1
    singles: int
    rows: Tensor | None  # int32 [singles] which rows; None: 0..singles-1, and these are their tokens too
    num_tiles: int
    tile_queries: int  # packed queries of a tile
    tiles: Tensor | None  # int32 [num_tiles, 2] row, its first packed query; None: tile i is row i, which has one query and is token i
    shared: Shared | None = None  # keys that several of the singles have in common are read once; only where `rows` is None


@dataclass(frozen=True, slots=True, eq=False)
class Long:
    """A long chunk of one row, for dense attention. Its queries and keys are padded to a round number: a library's plan for a size takes it
    tens of milliseconds to make."""

    first: int  # token of the first query
    count: int
    padded: int  # at least count
    before: int  # keys before the chunk's own
    slots: Tensor  # int64 [before + padded] the keys' slots in order, the last repeated for padding


@dataclass(frozen=True, slots=True, eq=False)
class LongChunks:
    """Long chunks for dense attention and the rest by paged kernels; or all by paged kernels: whichever is faster here."""

    chunks: tuple[Long, ...]
    rest: AttentionWork | None
    whole: Paged


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWork:
    """What one cache group's layers attend to in one step. Arrays are on the host, one entry a row; empty where only the device knows."""

    q_lens: np.ndarray  # int32 [R] queries; their tokens lie end to end
    kv_lens: np.ndarray  # int32 [R] keys, the queries' own included
    table: np.ndarray  # int32 [R, W] blocks in order
    block_size: int
    window: int | None  # a query sees itself and window - 1 keys before it
    kv_tokens: int  # keys that some query sees, summed over rows; 0 where only the device knows
    pairs: int  # (query, key it sees), summed over rows; likewise
    arrangement: Pieces | InPlace | Varlen | Paged | LongChunks


def _cost(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> Cost:
    return Cost(
        kv=2 * work.kv_tokens * nbytes(k_cache) // k_cache.shape[0],
        activations=2 * q.numel() * q.element_size(),
        flops=4 * work.pairs * q.shape[1],
    )


def _key(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> tuple[Any, ...]:
    arrangement = work.arrangement
    if isinstance(arrangement, LongChunks):
        longest = max(chunk.padded for chunk in arrangement.chunks)
        past = max(chunk.before for chunk in arrangement.chunks) > 0
        return (q.device.type, q.dtype, "LongChunks", q.shape[1], *k_cache.shape[1:], shape_class(longest), past)
    return (q.device.type, q.dtype, k_cache.dtype, type(arrangement).__name__)


@op(cost=_cost, key=_key, last_resort=True)
def attention(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """Causal softmax attention of T queries over their rows' cached keys.

    out, q [T, heads * D]; k_cache, v_cache [slots, kv_heads, stored(D)], heads a multiple of kv_heads. scale multiplies q.k; softcap c turns
    scores s into c * tanh(s / c), 0: off.
    """
    if q.shape[0] and not len(work.q_lens):
        raise ValueError("the reference needs a step's lengths on the host")
    kv_heads, dim = k_cache.shape[1], kv.head_dim(k_cache)
    wide = torch.promote_types(q.dtype, torch.float32)
    begin = 0
    for q_len, kv_len, table in zip(work.q_lens.tolist(), work.kv_lens.tolist(), work.table):
        places = torch.arange(kv_len)
        slots = (torch.from_numpy(table.astype(np.int64))[places // work.block_size] * work.block_size + places % work.block_size).to(
            q.device
        )
        query = q[begin : begin + q_len].view(q_len, kv_heads, -1, dim).to(wide)
        key, value = kv.unpack(k_cache[slots], wide), kv.unpack(v_cache[slots], wide)
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + _band(kv_len - q_len, kv_len, kv_len, work.window, q.device)
        mixed = torch.einsum("hgqk,khd->qhgd", torch.softmax(scores, -1), value)
        out[begin : begin + q_len] = mixed.reshape(q_len, -1).to(out.dtype)
        begin += q_len


def _band(first: int, end: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """float32 [end - first, keys] to add to scores: -inf where the query at a position may not see the key at another."""
    position = torch.arange(first, end, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def window_mask(count: int, length: int, window: int, device: torch.device) -> Tensor:
    """Chunk.mask of the last `count` queries over `length` keys."""
    return _band(length - count, length, length, window, device)


@attention.implementation("pieces", lambda out, q, k_cache, v_cache, work, scale, softcap: isinstance(work.arrangement, Pieces))
def _pieces(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """Dense attention piece by piece: torch's flash kernel on the CPU, explicit scores on CUDA (float32 stays exact) and for soft caps."""
    assert isinstance(work.arrangement, Pieces)
    explicit = bool(softcap) or q.is_cuda
    for singles in work.arrangement.singles:
        (_singles_explicit if explicit else _singles_flash)(out, q, k_cache, v_cache, singles, scale, softcap)
    _chunks(out, q, k_cache, v_cache, work.arrangement.chunks, scale, softcap)


def in_place_runs(device: torch.device, rows: torch.dtype, cache: torch.dtype, dim: int, group: int) -> bool:
    """Whether InPlace does: rows of one type on a cache of another or the same, group query heads to a KV head, of dim."""
    return device.type == "cpu" and native.available() and native.keeps(cache, rows) and dim % 16 == 0 and dim <= 256 and group <= 8


@attention.implementation(
    "in place", lambda out, q, k_cache, v_cache, work, scale, softcap: isinstance(work.arrangement, InPlace), native=True
)
def _in_place(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """9 heads on 3 of 64, 2 threads: a row of 128 keys 10 us, of 1,024 46, where torch's flash kernel takes 36 and 90."""
    assert isinstance(work.arrangement, InPlace)
    work.arrangement.rows.attend(out, q, k_cache, v_cache, scale, softcap)
    _chunks(out, q, k_cache, v_cache, work.arrangement.chunks, scale, softcap)


def _chunks(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: list[Chunk], scale: float, softcap: float) -> None:
    """The processor's matrix tiles do caches of 16 and 8 bits: 1,024 queries 4.5 ms where torch's flash kernel takes 6.6 in bfloat16 and 10.4 in float32,
    128 queries 0.17 for 0.39 and 0.44 (9 heads on 3 of 64, 2 threads)."""
    tiled = not q.is_cuda and not softcap and k_cache.element_size() <= 2 and kv.head_dim(k_cache) % 32 == 0 and native.has_tiles()
    tiled = tiled and native.keeps(k_cache.dtype, q.dtype)
    run = _chunk_tiled if tiled else _chunk_explicit if softcap or q.is_cuda else _chunk_flash
    for chunk in chunks:
        run(out, q, k_cache, v_cache, chunk, scale, softcap)


def _chunk_tiled(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Chunk, scale: float, softcap: float) -> None:
    tokens = slice(work.first, work.first + work.count)
    native.chunk(out[tokens], q[tokens], k_cache, v_cache, work.where, work.window, scale)


def _take(cache: Tensor, where: Where, dtype: torch.dtype) -> Tensor:
    return kv.unpack(cache.index_select(0, where) if isinstance(where, Tensor) else cache[where[0] : where[1]], dtype)


def _put(out: Tensor, tokens: slice | Tensor, value: Tensor) -> None:
    """value [rows, ...] to these rows of out."""
    if isinstance(tokens, Tensor):
        out.index_copy_(0, tokens, value.reshape(value.shape[0], -1))
    else:
        out[tokens].view(value.shape).copy_(value)


_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _singles_flash(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Singles, scale: float, softcap: float) -> None:
    """The query heads of one KV head become queries of that head, so that its keys are read once: 36 us where grouped heads take 60
    (9 heads on 3, 128 keys)."""
    kv_heads, dim = k_cache.shape[1], kv.head_dim(k_cache)
    query = q[work.tokens].view(work.rows, kv_heads, -1, dim)
    key = _take(k_cache, work.where, q.dtype).view(work.rows, work.length, kv_heads, dim).transpose(1, 2)
    value = _take(v_cache, work.where, q.dtype).view(work.rows, work.length, kv_heads, dim).transpose(1, 2)
    _put(out, work.tokens, _flash_cpu(query, key, value, 0.0, False, attn_mask=work.mask, scale=scale)[0])


def _singles_explicit(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Singles, scale: float, softcap: float) -> None:
    kv_heads, dim = k_cache.shape[1], kv.head_dim(k_cache)
    query = q[work.tokens].view(work.rows, kv_heads, -1, dim)
    key = _take(k_cache, work.where, q.dtype).view(work.rows, work.length, kv_heads, dim).permute(0, 2, 3, 1)
    value = _take(v_cache, work.where, q.dtype).view(work.rows, work.length, kv_heads, dim).transpose(1, 2)
    scores = _capped(torch.matmul(query, key), scale, softcap)
    if work.mask is not None:
        scores.add_(work.mask)
    _put(out, work.tokens, torch.matmul(torch.softmax(scores, -1).to(value.dtype), value))


def _chunk_flash(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Chunk, scale: float, softcap: float) -> None:
    """KV heads as batch, their query heads as heads of stride 0: no key is copied. Where a context lies before the chunk's own keys, the two
    parts are attended apart and weighed by their log-sum-exps: no mask of count x length exists."""
    kv_heads, dim = k_cache.shape[1], kv.head_dim(k_cache)
    shape = (work.count, kv_heads, -1, dim)
    # a cache of 16 bits says that wider rows may be, too; codes are exact numbers of the rows' type but for their scale
    kind = q.dtype if k_cache.dtype in (q.dtype, torch.int8) else torch.bfloat16
    query = q[work.first : work.first + work.count].to(kind).view(shape).permute(1, 2, 0, 3)
    groups = query.shape[1]
    key = _take(k_cache, work.where, kind).transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    value = _take(v_cache, work.where, kind).transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    before = work.length - work.count
    if work.mask is not None:
        mixed = _flash_cpu(query, key, value, 0.0, False, attn_mask=work.mask, scale=scale)[0]
    elif before == 0:
        mixed = _flash_cpu(query, key, value, 0.0, True, scale=scale)[0]
    else:
        far, far_weight = _flash_cpu(query, key[:, :, :before], value[:, :, :before], 0.0, False, scale=scale)
        near, near_weight = _flash_cpu(query, key[:, :, before:], value[:, :, before:], 0.0, True, scale=scale)
        mixed = torch.lerp(near, far, torch.sigmoid(far_weight - near_weight).unsqueeze(-1).to(near.dtype))
    out[work.first : work.first + work.count].view(shape).permute(1, 2, 0, 3).copy_(mixed)


def _chunk_explicit(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Chunk, scale: float, softcap: float) -> None:
    kv_heads, dim = k_cache.shape[1], kv.head_dim(k_cache)
    heads = q.shape[1] // dim
    key = _take(k_cache, work.where, q.dtype).permute(1, 2, 0)  # [kv_heads, D, length]
    value = _take(v_cache, work.where, q.dtype).transpose(0, 1)  # [kv_heads, length, D]
    before = work.length - work.count
    step = max(1, SCORES_AT_ONCE // (heads * work.length))
    for low in range(0, work.count, step):
        high = min(low + step, work.count)
        seen = before + high
        query = q[work.first + low : work.first + high].view(high - low, kv_heads, -1, dim).permute(1, 2, 0, 3)
        folded = query.reshape(kv_heads, -1, dim)  # the heads of a KV head as further queries: no key is copied
        scores = _capped(torch.matmul(folded, key[:, :, :seen]), scale, softcap).view(*query.shape[:3], seen)
        scores.add_(_band(before + low, seen, seen, work.window, q.device))
        weights = torch.softmax(scores, -1).to(value.dtype).view(kv_heads, -1, seen)
        mixed = torch.matmul(weights, value[:, :seen]).view(query.shape)
        out[work.first + low : work.first + high].view(high - low, kv_heads, -1, dim).copy_(mixed.permute(2, 0, 1, 3))


def _capped(scores: Tensor, scale: float, softcap: float) -> Tensor:
    """float32 scores, scaled and capped."""
    scores = scores.float().mul_(scale)
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


@attention.implementation("varlen", lambda out, q, k_cache, v_cache, work, scale, softcap: isinstance(work.arrangement, Varlen))
def _varlen(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """One call of torch's flash attention for all rows, after a gather of their keys and values."""
    plan = work.arrangement
    assert isinstance(plan, Varlen)
    dim = k_cache.shape[2]
    mixed = torch.ops.aten._flash_attention_forward(
        q.view(q.shape[0], -1, dim),
        k_cache.index_select(0, plan.slots),
        v_cache.index_select(0, plan.slots),
        plan.q_starts,
        plan.k_starts,
        plan.max_q,
        plan.max_k,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if plan.window is None else plan.window - 1,
        window_size_right=None if plan.window is None else 0,
    )[0]
    out.view(mixed.shape).copy_(mixed)


@attention.implementation("cudnn", lambda out, q, k_cache, v_cache, work, scale, softcap: isinstance(work.arrangement, LongChunks))
def _cudnn(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """cuDNN's attention for the long chunks: 608 TFLOP/s at 8,000 queries where our kernel makes 436 (H200, 28 heads on 4 of 128).

    It knows no offset of the diagonal: keys before the chunk are attended apart, and the two results weighed by their log-sum-exps.
    """
    plan = work.arrangement
    assert isinstance(plan, LongChunks)
    if plan.rest is not None:
        attention.dispatch(out, q, k_cache, v_cache, plan.rest, scale, softcap)
    dim = k_cache.shape[2]

    def heads_first(rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], -1, dim).transpose(0, 1).unsqueeze(0)

    for chunk in plan.chunks:
        query = heads_first(_padded(q, chunk.first, chunk.count, chunk.padded))
        key, value = (heads_first(cache.index_select(0, chunk.slots).flatten(1)) for cache in (k_cache, v_cache))
        near_keys, near_values = key[:, :, chunk.before :], value[:, :, chunk.before :]
        mixed, weight = _sdpa_cudnn(query, near_keys, near_values, None, chunk.before > 0, 0.0, True, False, scale=scale)[:2]
        if chunk.before:
            far_keys, far_values = key[:, :, : chunk.before], value[:, :, : chunk.before]
            far, far_weight = _sdpa_cudnn(query, far_keys, far_values, None, True, 0.0, False, False, scale=scale)[:2]
            share = torch.sigmoid(far_weight - weight).view(*mixed.shape[:3], 1)
            mixed = torch.lerp(mixed.float(), far.float(), share)
        place = out[chunk.first : chunk.first + chunk.count]
        place.view(chunk.count, -1, dim).copy_(mixed[0, :, : chunk.count].transpose(0, 1))


_sdpa_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def _padded(rows: Tensor, first: int, count: int, padded: int) -> Tensor:
    """[padded, width] from row `first` on, of which `count` matter; past them what happens to lie in the buffer, or copies of the last."""
    room = (rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset() - rows.shape[1]) // rows.stride(0) + 1
    if first + padded <= room:
        return rows.as_strided((padded, rows.shape[1]), rows.stride(), rows.storage_offset() + first * rows.stride(0))
    more = rows[first + count - 1].expand(padded - count, -1)
    return torch.cat((rows[first : first + count], more))


def cudnn_runs(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float) -> bool:
    """Whether cuDNN's attention can: 16 bits, compute capability 8.0 on, head_dim a multiple of 8 up to 128, no soft cap."""
    return varlen_runs(device, dtype, head_dim, softcap) and head_dim <= 128 and torch.backends.cudnn.is_available()


def varlen_runs(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float) -> bool:
    """Whether the flash kernel can: 16 bits, compute capability 8.0 on, head_dim a multiple of 8 up to 256, no soft cap."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and head_dim % 8 == 0
        and head_dim <= 256
        and not softcap
    )


def paged_runs(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether the paged kernels can: compute capability 8.0 on, head_dim a multiple of 16 up to 256 (float32: 128, by shared memory), up to
    64 query heads of a KV head."""
    most = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}.get(dtype, 0)
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and head_dim % 16 == 0
        and head_dim <= most
        and group <= 64
    )
