"""Paged attention of one query a row over keys that many rows share: the rows of a group, all heads of a KV head packed, go through in tiles.

Only the part that a group shares (kernels/prefixes.py); attention_decode.py takes what each row has of its own, and puts the two together.
All groups' tiles of keys are one stream, cut evenly over programs; each leaves a piece of every tile of queries that it works at. Called by
attention.py of this package; launches nothing itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stream(groups, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """int32 [GROUPS] each: a group's tiles of queries, and its tiles of keys for all of those together."""
    at = groups + tl.arange(0, GROUPS) * 4
    items = (tl.load(at + 1) * GROUP + M - 1) // M
    return items, items * ((tl.load(at) + N - 1) // N)


@triton.jit(do_not_specialize=["room", "table_stride"], do_not_specialize_on_alignment=["groups", "order", "tables", "table_rows"])
def shared(
    partials,  # float32 [kv_heads, room, M, PAD]: of piece (tile of queries + worker), which two of the pairs never have in common
    states,  # float32 [kv_heads, room, M, 2]: greatest score and sum of weights
    q,  # [T, heads * DIM]
    k_cache,  # [slots, kv_heads, DIM]
    v_cache,
    groups,  # int32 [GROUPS, 4], as kernels/prefixes.py:Shared has them
    order,  # int32 [R]
    tables,  # int32 [any, table_stride]
    table_rows,  # int32 [R]
    room,
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
    GROUPS: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv_heads, workers)."""
    head, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, GROUPS)
    items, lengths = stream(groups, GROUP, M, N, GROUPS)
    ends, total = tl.cumsum(lengths), tl.sum(lengths)
    share = (total + workers - 1) // workers
    begin = worker * share
    end = tl.minimum(begin + share, total)
    m, d, n = tl.arange(0, M), tl.arange(0, PAD), tl.arange(0, N)
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    while begin < end:
        group = tl.sum((ends <= begin).to(tl.int32))
        item = tl.sum(tl.where(g < group, items, 0))
        within = begin - tl.sum(tl.where(g < group, lengths, 0))
        record = groups + group * 4
        keys, count = tl.load(record), tl.load(record + 1) * GROUP
        members, leader = order + tl.load(record + 2), tl.load(record + 3)
        table = tables + tl.load(table_rows + leader).to(tl.int64) * table_stride
        tiles = (keys + N - 1) // N
        item += within // tiles
        packed = within // tiles * M + m
        first = within % tiles
        last = tl.minimum(tiles, first + end - begin)
        mine = packed < count
        row = tl.load(members + packed // GROUP, mask=mine, other=0).to(tl.int64)
        inner = (head * GROUP + packed % GROUP)[:, None] * DIM + d[None, :]
        query = tl.load(q + row[:, None] * q_stride + inner, mask=mine[:, None] & (d < DIM)[None, :], other=0.0)
        acc = tl.zeros((M, PAD), tl.float32)
        top = tl.full((M,), float("-inf"), tl.float32)
        weight = tl.zeros((M,), tl.float32)
        key = first * N + n
        blocks = tl.load(table + key // BLOCK, mask=key < keys, other=0)
        for i in tl.range(first, last, num_stages=STAGES):
            key = i * N + n
            there = (key < keys)[:, None] & (d < DIM)[None, :]
            at = ((blocks * BLOCK + key % BLOCK).to(tl.int64) * slot_stride)[:, None] + d[None, :]
            # a tile ahead, so that the pipeline's loads of keys do not wait for the table
            blocks = tl.load(table + (key + N) // BLOCK, mask=key + N < keys, other=0)
            k = tl.load(k_cache + at, mask=there, other=0.0)
            v = tl.load(v_cache + at, mask=there, other=0.0)
            s = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            if CAPPED:
                s = 1.0 - 2.0 / (tl.exp2(s * cap) + 1.0)
            if (i + 1) * N > keys:
                s = tl.where((key < keys)[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * factor)
            e = tl.exp2(tl.fma(s, factor, -new[:, None]))
            fade = tl.exp2(top - new)
            weight = weight * fade + tl.sum(e, 1)
            acc = tl.dot(e.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            top = new
        piece = ((head * room + item + worker) * M + m).to(tl.int64)
        tl.store(partials + piece[:, None] * PAD + d[None, :], acc, mask=mine[:, None])
        tl.store(states + piece * 2, top, mask=mine)
        tl.store(states + piece * 2 + 1, weight, mask=mine)
        begin += last - first
