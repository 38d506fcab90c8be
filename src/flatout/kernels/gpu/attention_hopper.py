"""attention_prefill.py's kernel in Hopper's own instructions (wgmma), for which Triton's compiler would wait too early: written in Gluon.

While the tensor cores weigh the values of one tile of keys, the other units exponentiate the scores of the next: without that the two would
take turns. Keys and values come by cp.async, `STAGES` - 1 tiles ahead. `shared` is attention_shared.py's kernel on the same walk. Called by
attention.py on sm_90 alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _slots(table, tile, first, last, stride, N: gl.constexpr, BLOCK: gl.constexpr, COPY: gl.constexpr):
    """int64 [N] where a tile's keys lie. What is past either end is a key that is there, for the mask to hide: stray memory may hold a NaN."""
    key = gl.minimum(gl.maximum(tile * N + gl.arange(0, N, gl.SliceLayout(1, COPY)), first), last)
    return (gl.load(table + key // BLOCK) * BLOCK + key % BLOCK).to(gl.int64) * stride


@gluon.jit
def _copy(to, cache, slots, DIM: gl.constexpr, COPY: gl.constexpr):
    """[N, PAD] keys or values on their way to shared memory; columns past DIM are zeros."""
    d = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))
    at = cache + slots[:, None] + d[None, :]
    if to.shape[1] == DIM:
        async_copy.async_copy_global_to_shared(to, at)
    else:
        async_copy.async_copy_global_to_shared(to, at, mask=(d < DIM)[None, :])


@gluon.jit
def _landed(STAGES: gl.constexpr):
    """The oldest copies under way are there for every warp's tensor cores; every warp has left the tile before."""
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weights(s, top, total, masked, key, position, factor, cap, WINDOW: gl.constexpr, CAPPED: gl.constexpr):
    """Scores [M, N] to weights, the factor by which what was weighed before fades, the new greatest scores and sums."""
    if CAPPED:
        s = 1.0 - 2.0 / (gl.exp2(s * cap) + 1.0)
    if masked:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1) * factor)
    if WINDOW:  # a query that has seen no key yet
        shift = gl.where(new == float("-inf"), 0.0, new)
    else:
        shift = new
    e = gl.exp2(gl.fma(s, factor, -shift[:, None]))
    fade = gl.exp2(top - shift)
    return e, fade, new, total * fade + gl.sum(e, 1)


@gluon.jit
def _walk(
    queries,  # shared memory [M, PAD], their copies under way and in no group yet
    keys,  # [STAGES, N, PAD]
    values,
    k_cache,
    v_cache,
    table,
    begin,
    end,
    least,
    high,
    clear,
    masked,
    position,
    stride,
    factor,
    cap,
    M: gl.constexpr,
    N: gl.constexpr,
    DIM: gl.constexpr,
    PAD: gl.constexpr,
    BLOCK: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
    COPY: gl.constexpr,
):
    """Queries at these positions over tiles [begin, end) of the table's keys, [least, high] of which count: values weighed, float32 [M, PAD] in
    OUT's layout; greatest scores and sums of weights [M] in SCORES'. In tiles [clear, masked) every query sees every key."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = k_cache.dtype.element_ty
    # group i of the copies: keys of tile i, values of the tile before, which are used together
    slots = _slots(table, begin, least, high, stride, N, BLOCK, COPY)
    _copy(keys.index(0), k_cache, slots, DIM, COPY)
    async_copy.commit_group()
    for i in gl.static_range(1, STAGES - 1):
        _copy(values.index(i - 1), v_cache, slots, DIM, COPY)
        slots = _slots(table, begin + i, least, high, stride, N, BLOCK, COPY)
        _copy(keys.index(i), k_cache, slots, DIM, COPY)
        async_copy.commit_group()
    ahead = _slots(table, begin + STAGES - 1, least, high, stride, N, BLOCK, COPY)

    n = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    zeros = gl.zeros([M, N], gl.float32, SCORES)
    acc = gl.zeros([M, PAD], gl.float32, OUT)
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))

    _landed(STAGES)
    s = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    _copy(values.index(STAGES - 2), v_cache, slots, DIM, COPY)
    slots = ahead
    _copy(keys.index(STAGES - 1), k_cache, slots, DIM, COPY)
    async_copy.commit_group()
    ahead = _slots(table, begin + STAGES, least, high, stride, N, BLOCK, COPY)
    s = warpgroup_mma_wait(0, deps=(s,))
    blind = (begin < clear) | (begin >= masked)
    e, fade, top, total = _weights(s, top, total, blind, begin * N + n, position, factor, cap, WINDOW, CAPPED)
    p = gl.convert_layout(e.to(dtype), WEIGHTS)
    for i in range(1, end - begin):
        _landed(STAGES)
        s = warpgroup_mma(queries, keys.index(i % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, values.index((i + STAGES - 1) % STAGES), acc, is_async=True)
        _copy(values.index((i + STAGES - 2) % STAGES), v_cache, slots, DIM, COPY)
        slots = ahead
        _copy(keys.index((i + STAGES - 1) % STAGES), k_cache, slots, DIM, COPY)
        async_copy.commit_group()
        ahead = _slots(table, begin + i + STAGES, least, high, stride, N, BLOCK, COPY)
        s = warpgroup_mma_wait(1, deps=(s,))
        blind = (begin + i < clear) | (begin + i >= masked)
        e, fade, top, total = _weights(s, top, total, blind, (begin + i) * N + n, position, factor, cap, WINDOW, CAPPED)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        p = gl.convert_layout(e.to(dtype), WEIGHTS)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma(p, values.index((end - begin + STAGES - 1) % STAGES), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    return acc, top, total


@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles", "q_starts", "kv_lens", "tables", "table_rows"])
def prefill(
    out,
    q,
    k_cache,
    v_cache,
    tiles,
    q_starts,
    kv_lens,
    tables,
    table_rows,
    out_stride,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    factor,
    cap,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAD: gl.constexpr,
    BLOCK: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Operands as attention_prefill.py's. Grid (kv_heads, tiles); M = 16 * num_warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PAD, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PAD, PAD // 8], [num_warps, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PAD], dtype)
    head, tile = gl.program_id(0), gl.program_id(1)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    if tiles is None:
        row, first, start, count = tile, 0, tile, 1
    else:
        row, first = gl.load(tiles + tile * 2), gl.load(tiles + tile * 2 + 1)
        start = gl.load(q_starts + row)
        count = gl.load(q_starts + row + 1) - start
    length = gl.load(kv_lens + row)
    table = tables + gl.load(table_rows + row).to(gl.int64) * table_stride
    k_cache += head.to(gl.int64) * head_stride
    v_cache += head.to(gl.int64) * head_stride

    before = length - count
    low = before + first // GROUP  # position of the first query
    high = gl.minimum(before + (first + M - 1) // GROUP, length - 1)  # of the last, and the last key that any sees
    # key tiles in [begin, end); in [clear, masked) every query sees every key
    end, masked = high // N + 1, (low + 1) // N
    least, begin, clear = 0, 0, 0
    if WINDOW:
        least = gl.maximum(low - WINDOW + 1, 0)
        begin = least // N
        clear = (gl.maximum(high - WINDOW + 1, 0) + N - 1) // N

    packed = first + gl.arange(0, M, gl.SliceLayout(1, COPY))
    query = gl.minimum(packed // GROUP, count - 1)
    at = (start + query).to(gl.int64) * q_stride + (head * GROUP + packed % GROUP) * DIM
    queries = gl.allocate_shared_memory(dtype, [M, PAD], SHARED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, N, PAD], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, N, PAD], SHARED)
    _copy(queries, q, at, DIM, COPY)
    position = before + (first + gl.arange(0, M, gl.SliceLayout(1, SCORES))) // GROUP
    acc, _, total = _walk(
        queries, keys, values, k_cache, v_cache, table, begin, end, least, high, clear, masked, position, slot_stride, factor, cap,
        M, N, DIM, PAD, BLOCK, WINDOW, CAPPED, STAGES, SCORES, OUT, COPY,
    )  # fmt: skip

    # through the queries' place, for whole lines to be written
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    queries.store(acc.to(dtype))
    d = gl.arange(0, PAD, gl.SliceLayout(0, COPY))
    at = (start + packed // GROUP).to(gl.int64) * out_stride + (head * GROUP + packed % GROUP) * DIM
    mine = (packed // GROUP < count)[:, None] & (d < DIM)[None, :]
    gl.store(out + at[:, None] + d[None, :], queries.load(COPY), mask=mine)


@gluon.jit
def _lengths(groups, group, GROUP: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Of a group: its tiles of queries, its tiles of keys."""
    count = gl.load(groups + group * 4 + 1) * GROUP
    return (count + M - 1) // M, (gl.load(groups + group * 4) + N - 1) // N


@gluon.jit(do_not_specialize=["room", "table_stride"], do_not_specialize_on_alignment=["groups", "order", "tables", "table_rows"])
def shared(
    partials,
    states,
    q,
    k_cache,
    v_cache,
    groups,
    order,
    tables,
    table_rows,
    room,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    factor,
    cap,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAD: gl.constexpr,
    BLOCK: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    GROUPS: gl.constexpr,
    CAPPED: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Operands as attention_shared.py's. Grid (kv_heads, workers); M = 16 * num_warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, PAD, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PAD, PAD // 8], [num_warps, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PAD], dtype)
    head, worker, workers = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    total = 0
    for each in gl.static_range(GROUPS):
        items, tiles = _lengths(groups, each, GROUP, M, N)
        total += items * tiles
    share = (total + workers - 1) // workers
    begin = worker * share
    end = gl.minimum(begin + share, total)
    k_cache += head.to(gl.int64) * head_stride
    v_cache += head.to(gl.int64) * head_stride
    queries = gl.allocate_shared_memory(dtype, [M, PAD], SHARED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, N, PAD], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, N, PAD], SHARED)
    # the group in which this worker is, the tiles of queries and of keys before it
    group, before, base = 0, 0, 0
    while begin < end:
        items, tiles = _lengths(groups, group, GROUP, M, N)
        if begin >= base + items * tiles:
            group += 1
            before += items
            base += items * tiles
        else:
            record = groups + group * 4
            length, count = gl.load(record), gl.load(record + 1) * GROUP
            table = tables + gl.load(table_rows + gl.load(record + 3)).to(gl.int64) * table_stride
            item = (begin - base) // tiles
            first = begin - base - item * tiles
            last = gl.minimum(tiles, first + end - begin)
            # past the last query once more that one: what it gives is not stored
            packed = gl.minimum(item * M + gl.arange(0, M, gl.SliceLayout(1, COPY)), count - 1)
            row = gl.load(order + gl.load(record + 2) + packed // GROUP).to(gl.int64)
            _copy(queries, q, row * q_stride + (head * GROUP + packed % GROUP) * DIM, DIM, COPY)
            position = gl.arange(0, M, gl.SliceLayout(1, SCORES)) * 0 + length - 1
            acc, top, weight = _walk(
                queries, keys, values, k_cache, v_cache, table, first, last, 0, length - 1, 0, length // N, position, slot_stride, factor, cap,
                M, N, DIM, PAD, BLOCK, 0, CAPPED, STAGES, SCORES, OUT, COPY,
            )  # fmt: skip
            m = gl.arange(0, M, gl.SliceLayout(1, SCORES))
            piece = ((head * room + before + item + worker) * M + m).to(gl.int64)
            mine = item * M + m < count
            gl.store(states + piece * 2, top, mask=mine)
            gl.store(states + piece * 2 + 1, weight, mask=mine)
            m, d = gl.arange(0, M, gl.SliceLayout(1, OUT)), gl.arange(0, PAD, gl.SliceLayout(0, OUT))
            piece = ((head * room + before + item + worker) * M + m).to(gl.int64)
            gl.store(partials + piece[:, None] * PAD + d[None, :], acc, mask=((item * M + m < count)[:, None]) & (d < PAD)[None, :])
            gl.thread_barrier()  # all are done with the queries and the last tiles
            begin += last - first
