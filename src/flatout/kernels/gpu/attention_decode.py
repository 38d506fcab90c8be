"""Paged attention for rows of one query: all rows' contexts are one stream of tiles, cut evenly over programs whatever the rows' lengths.

Every KV head has the same number of workers; a worker takes the same share of its head's tiles as the others, so a batch of short rows, one
long row and any mix fill the device alike, and the grid depends on nothing but the device. A row whose tiles fall to several workers is put
together by the last of them to arrive, in the order of the tiles. Where attention_shared.py has taken the keys that rows share, the stream
holds the others alone. Called by attention.py of this package; launches nothing itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatout.kernels.gpu.attention_shared import stream


@triton.jit
def _tiles(lengths, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles, counted from position 0, that hold a key which the query at the end sees."""
    tiles = (lengths + TILE - 1) // TILE
    if WINDOW:
        tiles -= tl.maximum(lengths - WINDOW, 0) // TILE
    return tiles


@triton.jit
def _members(rows, kv_lens, first, count, TILE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Tiles of the rows listed from `first` on, ROWS of them; 0 past the end."""
    index = first + tl.arange(0, ROWS)
    row = index if rows is None else tl.load(rows + index, mask=index < count, other=0)
    return _tiles(tl.load(kv_lens + row, mask=index < count, other=0), TILE, WINDOW)


@triton.jit
def _fold(acc, top, weight, values, tops, weights):
    """One state [M, PAD], [M], [M] more by the pieces beside it: [M, pieces, PAD] and [M, pieces]; those that are not there have -inf, 0 and 0."""
    new = tl.maximum(top, tl.max(tops, 1))
    fade, fades = tl.exp2(top - new), tl.exp2(tops - new[:, None])
    return acc * fade[:, None] + tl.sum(values * fades[:, :, None], 1), new, weight * fade + tl.sum(weights * fades, 1)


@triton.jit
def _combine(states, partials, opener, pieces, keep, M: tl.constexpr, PAD: tl.constexpr, AT_ONCE: tl.constexpr):
    """The row's result from what its workers left, first tiles first. float32 [M, PAD], not yet divided by the float32 [M] beside it."""
    m, d = tl.arange(0, M), tl.arange(0, PAD)
    acc = tl.zeros((M, PAD), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    for some in range(0, pieces, AT_ONCE):
        piece = some + tl.arange(0, AT_ONCE)
        there = piece < pieces
        at = ((opener + piece) * 2 + (piece == 0).to(tl.int32))[None, :] * M + m[:, None]
        # other programs wrote these: past the first-level cache
        tops = tl.load(states + at * 2, mask=there[None, :], other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(states + at * 2 + 1, mask=there[None, :], other=0.0, cache_modifier=".cg")
        values = partials + at.to(tl.int64)[:, :, None] * PAD + d[None, None, :]
        values = tl.load(values, mask=there[None, :, None] & keep[:, None, :], other=0.0, cache_modifier=".cg")
        acc, top, weight = _fold(acc, top, weight, values, tops, weights)
    return acc, weight


@triton.jit
def _with_shared(
    acc,
    top,
    weight,
    partials,
    states,
    groups,
    group,
    place,
    head,
    workers,
    room,
    keep,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    PAD: tl.constexpr,
    SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A row's state and what attention_shared.py's workers left for it, the first tiles first. The row is at this place of this group."""
    g, m, d = tl.arange(0, GROUPS), tl.arange(0, M), tl.arange(0, PAD)
    items, lengths = stream(groups, GROUP, SHARED_M, SHARED_N, GROUPS)
    share = (tl.sum(lengths) + workers - 1) // workers
    tiles = (tl.load(groups + group * 4, cache_modifier=".cg") + SHARED_N - 1) // SHARED_N
    packed = place * GROUP + m
    begin = tl.sum(tl.where(g < group, lengths, 0)) + packed // SHARED_M * tiles
    opener = begin // share
    pieces = tl.where(m < GROUP, (begin + tiles - 1) // share - opener + 1, 0)
    opener += head * room + tl.sum(tl.where(g < group, items, 0)) + packed // SHARED_M
    for some in range(0, tl.max(pieces), AT_ONCE):
        piece = some + tl.arange(0, AT_ONCE)
        there = piece[None, :] < pieces[:, None]
        at = (opener[:, None] + piece[None, :]) * SHARED_M + (packed % SHARED_M)[:, None]
        tops = tl.load(states + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(states + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = partials + at.to(tl.int64)[:, :, None] * PAD + d[None, None, :]
        values = tl.load(values, mask=there[:, :, None] & keep[:, None, :], other=0.0, cache_modifier=".cg")
        acc, top, weight = _fold(acc, top, weight, values, tops, weights)
    return acc, top, weight


@triton.jit(
    do_not_specialize=["count", "table_stride", "shared_workers", "shared_room"],
    do_not_specialize_on_alignment=["rows", "q_starts", "kv_lens", "tables", "table_rows", "places", "groups"],
)
def decode(
    out,  # [T, heads * DIM]
    q,  # [T, heads * DIM]
    k_cache,  # [slots, kv_heads, DIM]
    v_cache,
    rows,  # int32 [count], or None: the rows are 0..count-1 and so are their tokens
    q_starts,  # int32 [R + 1]
    kv_lens,  # int32 [R]; with places, of each row's own keys alone
    tables,  # int32 [any, table_stride]
    table_rows,  # int32 [R]
    partials,  # float32 [kv_heads, workers, 2, M, PAD]
    states,  # float32 [kv_heads, workers, 2, M, 2]: greatest score and sum of weights of a piece
    arrivals,  # int32 [kv_heads, workers], zeros before and after
    places,  # int32 [R, 3] as kernels/prefixes.py:Shared has it, or None: no row shares keys
    groups,  # int32 [GROUPS, 4]
    shared_partials,  # of attention_shared.py, whose workers, room and tiles these are
    shared_states,
    shared_workers,
    shared_room,
    count,
    out_stride,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    factor,  # scores times this are powers of 2
    cap,
    GROUP: tl.constexpr,  # query heads of a KV head
    M: tl.constexpr,  # GROUP, padded
    DIM: tl.constexpr,
    PAD: tl.constexpr,  # DIM, padded
    BLOCK: tl.constexpr,  # positions of a block of the cache
    TILE: tl.constexpr,  # positions read at a time
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SHARED_M: tl.constexpr,
    SHARED_N: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (kv_heads, workers)."""
    head, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    # lengths and tables are there before the kernel before has ended: embedding.py's, the first of a step, sees to it
    total = 0
    for first in range(0, count, ROWS):
        total += tl.sum(_members(rows, kv_lens, first, count, TILE, WINDOW, ROWS))
    share = (total + workers - 1) // workers
    begin = worker * share
    end = tl.minimum(begin + share, total)
    # the row in which this worker begins, and how many tiles lie before that row; of one row both are known
    item, base, before = 0, 0, 0
    for first in range(0, tl.where(count > 1, count, 0), ROWS):
        tiles = _members(rows, kv_lens, first, count, TILE, WINDOW, ROWS)
        passed = (before + tl.cumsum(tiles) <= begin) & (tiles > 0)
        item += tl.sum(passed.to(tl.int32))
        base += tl.sum(tl.where(passed, tiles, 0))
        before += tl.sum(tiles)

    m, d, t = tl.arange(0, M), tl.arange(0, PAD), tl.arange(0, TILE)
    keep = (m < GROUP)[:, None] & (d < DIM)[None, :]
    inner = (head * GROUP + m[:, None]) * DIM + d[None, :]
    k_cache += head.to(tl.int64) * head_stride
    v_cache += head.to(tl.int64) * head_stride
    while begin < end:
        if rows is None:
            row, token = item, item
        else:
            row = tl.load(rows + item)
            token = tl.load(q_starts + row)
        length = tl.load(kv_lens + row)
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        shared = 0
        if places is not None:
            shared = tl.load(places + row * 3 + 2)
            table += shared // BLOCK
        tiles = _tiles(length, TILE, WINDOW)
        low = tl.maximum(length - WINDOW, 0) if WINDOW else 0
        skipped = low // TILE
        first, last = begin - base, tl.minimum(tiles, end - base)
        position = (skipped + first) * TILE + t
        blocks = tl.load(table + position // BLOCK, mask=position < length, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        query = tl.load(q + tl.cast(token, tl.int64) * q_stride + inner, mask=keep, other=0.0)
        acc = tl.zeros((M, PAD), tl.float32)
        top = tl.full((M,), float("-inf"), tl.float32)
        weight = tl.zeros((M,), tl.float32)
        for i in tl.range(skipped + first, skipped + last, num_stages=STAGES):
            position = i * TILE + t
            seen = position < length
            if WINDOW:
                seen &= position >= low
            at = ((blocks * BLOCK + position % BLOCK).to(tl.int64) * slot_stride)[:, None] + d[None, :]
            # a tile ahead, so that the pipeline's loads of keys do not wait for the table
            position += TILE
            blocks = tl.load(table + position // BLOCK, mask=position < length, other=0)
            there = seen[:, None] & (d < DIM)[None, :]
            k = tl.load(k_cache + at, mask=there, other=0.0)
            v = tl.load(v_cache + at, mask=there, other=0.0)
            s = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            if CAPPED:
                s = 1.0 - 2.0 / (tl.exp2(s * cap) + 1.0)
            s = tl.where(seen[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * factor)
            e = tl.exp2(tl.fma(s, factor, -new[:, None]))
            fade = tl.exp2(top - new)
            weight = weight * fade + tl.sum(e, 1)
            acc = tl.dot(e.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            top = new
        # only now that all keys are read: earlier, the next product's weights came before them (a row of 600 keys: 20 us for 10)
        if PDL:  # noqa: SIM102 - the outer test is made when compiling
            if base + tiles >= end:
                tl.extra.cuda.gdc_launch_dependents()
        if places is not None:  # noqa: SIM102
            if (first == 0) & (shared > 0):
                group, place = tl.load(places + row * 3), tl.load(places + row * 3 + 1)
                acc, top, weight = _with_shared(
                    acc,
                    top,
                    weight,
                    shared_partials,
                    shared_states,
                    groups,
                    group,
                    place,
                    head,
                    shared_workers,
                    shared_room,
                    keep,
                    GROUP,
                    M,
                    PAD,
                    SHARED_M,
                    SHARED_N,
                    GROUPS,
                    AT_ONCE,
                )
        to = out + tl.cast(token, tl.int64) * out_stride + inner
        if (first == 0) & (last == tiles):
            tl.store(to, (acc / weight[:, None]).to(out.dtype.element_ty), mask=keep)
        else:
            # a worker leaves at most two pieces: one of the row it begins in, one of the row it ends in
            opener = base // share
            pieces = (base + tiles - 1) // share - opener + 1
            mine = ((head * workers + worker) * 2 + (worker == opener).to(tl.int32)) * M + m
            tl.store(partials + mine.to(tl.int64)[:, None] * PAD + d[None, :], acc, mask=keep)
            tl.store(states + mine * 2, top)
            tl.store(states + mine * 2 + 1, weight)
            tl.debug_barrier()  # every thread's stores before the one arrival that publishes them
            if tl.atomic_add(arrivals + head * workers + opener, 1, sem="acq_rel") == pieces - 1:
                tl.store(arrivals + head * workers + opener, 0)
                acc, weight = _combine(states, partials, head * workers + opener, pieces, keep, M, PAD, AT_ONCE)
                tl.store(to, (acc / weight[:, None]).to(out.dtype.element_ty), mask=keep)
        begin = base + last
        base += tiles
        item += 1
    if PDL:  # a worker without work too: what comes next waits for this kernel alone
        tl.extra.cuda.gdc_wait()
