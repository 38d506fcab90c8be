"""Paged attention for rows of several queries: a program takes a tile of one row's queries, all heads of a KV head packed, and walks the row's keys.

Tiles of keys are aligned to absolute positions and visited in order, and a query's arithmetic knows nothing of the queries beside it: its bits
do not depend on how a prompt was cut. The portable form; attention_hopper.py has the same in Hopper's own instructions. Called by attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles", "q_starts", "kv_lens", "tables", "table_rows"])
def prefill(
    out,  # [T, heads * DIM]
    q,  # [T, heads * DIM]
    k_cache,  # [slots, kv_heads, DIM]
    v_cache,
    tiles,  # int32 [tiles, 2]: row, first packed query (query * GROUP + head in the group). None: tile i is row i's only one, of one query
    q_starts,  # int32 [R + 1]
    kv_lens,  # int32 [R]
    tables,  # int32 [any, table_stride]
    table_rows,  # int32 [R]
    out_stride,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    factor,  # scores times this are powers of 2
    cap,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    PAD: tl.constexpr,  # DIM, padded
    BLOCK: tl.constexpr,  # positions of a block of the cache
    M: tl.constexpr,  # packed queries of a tile
    N: tl.constexpr,  # keys of a tile
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv_heads, tiles)."""
    head, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tiles is None:
        row, first, start, count = tile, 0, tile, 1
    else:
        row, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
        start = tl.load(q_starts + row)
        count = tl.load(q_starts + row + 1) - start
    length = tl.load(kv_lens + row)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    packed = first + tl.arange(0, M)
    d, n = tl.arange(0, PAD), tl.arange(0, N)
    mine = (packed // GROUP < count)[:, None] & (d < DIM)[None, :]
    token = (start + packed // GROUP).to(tl.int64)
    inner = (head * GROUP + packed % GROUP)[:, None] * DIM + d[None, :]
    query = tl.load(q + token[:, None] * q_stride + inner, mask=mine, other=0.0)

    before = length - count
    position = before + packed // GROUP
    low = before + first // GROUP  # position of the first query
    high = tl.minimum(before + (first + M - 1) // GROUP, length - 1)  # of the last, and the last key that any sees
    # key tiles in [begin, end); in [clear, masked) every query sees every key
    end, masked = high // N + 1, (low + 1) // N
    begin, clear = 0, 0
    if WINDOW:
        begin = tl.maximum(low - WINDOW + 1, 0) // N
        clear = (tl.maximum(high - WINDOW + 1, 0) + N - 1) // N
    acc = tl.zeros((M, PAD), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    key = begin * N + n
    blocks = tl.load(table + key // BLOCK, mask=key <= high, other=0)
    for i in tl.range(begin, end, num_stages=STAGES):
        key = i * N + n
        there = (key <= high)[:, None] & (d < DIM)[None, :]
        at = ((blocks * BLOCK + key % BLOCK).to(tl.int64) * slot_stride)[:, None] + d[None, :]
        # a tile ahead, so that the pipeline's loads of keys do not wait for the table
        blocks = tl.load(table + (key + N) // BLOCK, mask=key + N <= high, other=0)
        k = tl.load(k_cache + at, mask=there, other=0.0)
        v = tl.load(v_cache + at, mask=there, other=0.0)
        s = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            s = 1.0 - 2.0 / (tl.exp2(s * cap) + 1.0)
        if (i < clear) | (i >= masked):
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen &= key[None, :] > position[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        if WINDOW:  # a query that has seen no key yet
            shift = tl.where(new == float("-inf"), 0.0, new)
        else:
            shift = new
        e = tl.exp2(tl.fma(s, factor, -shift[:, None]))
        fade = tl.exp2(top - shift)
        weight = weight * fade + tl.sum(e, 1)
        acc = tl.dot(e.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new
    tl.store(out + token[:, None] * out_stride + inner, (acc / weight[:, None]).to(out.dtype.element_ty), mask=mine)
