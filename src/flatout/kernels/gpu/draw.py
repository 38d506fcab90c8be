"""Triton kernels of the op draw: survey (every logit once), narrow (what decides between few), choose (a program a row); no sort.

A vocabulary is cut into groups of GROUP tokens. Noise ranks the tokens before the filters do: the drawn token is the best scored one that
is kept, so mostly it takes a look at the best scored token, and at what lies above it, instead of the threshold. Everything that
decides is a count, an integer sum or a maximum with ties by id: neither the split over programs nor other rows can change a result.
Launched by sampling.py beside this file; what a row means is said in kernels/sampling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(128)  # tokens
PIVOTS = tl.constexpr(4)  # best scored tokens whose fate narrow() finds out; all four are dropped in (1 - top_p)^4 of the flattest rows
LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)
NOTHING = tl.constexpr(-(1 << 63))  # under every rank
ALWAYS = tl.constexpr((1 << 63) - 1)  # more than any mass
LOWEST_KEY = tl.constexpr(-(1 << 31))
HIGHEST_KEY = tl.constexpr((1 << 31) - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
# Scores and weights are powers of two over the first's. What has less than 2^-64 of its probability weighs nothing and cannot win, as
# noise is within (-4.6, 32): for filters and draw such tokens do not exist.
FAINTEST = tl.constexpr(-64.0)
UNIT = tl.constexpr(2.0**44)  # weight of the first; 2^19 of them fit 63 bits

# Pieces of larger tensors: their alignment must not select a variant to compile. (No argument may be named params: Triton's own is.)
UNALIGNED = ["ids", "rows", "asked", "keys"]


@triton.jit
def clean(x):
    """NaN counts as the lowest finite number and +inf as the highest; -inf, a token that is not allowed, stays."""
    return tl.where(x != x, LOWEST, tl.minimum(x, HIGHEST))


@triton.jit
def ordered(x):
    """int32 in the order of float32; both zeros are 0."""
    bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """What ordered() was given."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(key, token):
    """int64 in the order of an int32 key, lower token ids above higher ones among equals."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token)


@triton.jit
def token_of(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_of(rank):
    return (rank >> 32).to(tl.int32)


@triton.jit
def logits_of(base, group, vocab):
    """Cleaned logits of some groups (int32 [N]) as [N, GROUP], -inf beyond the vocabulary; and their token ids."""
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return clean(tl.load(base + token, mask=token < vocab, other=float("-inf"))), token


@triton.jit
def groups_of(tile, TILE: tl.constexpr):
    return tile * TILE + tl.arange(0, TILE)


@triton.jit
def kth(keys, low, k, slack):
    """An int32 that at least k of the int32 keys reach, as they do `low`, and, ties apart, k + slack at most; slack 0: the k-th largest
    or what is between it and the next."""
    low, high = low.to(tl.int64), tl.max(keys).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reach = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
        if reach < k:
            high = middle
        else:
            low = middle
            if reach <= k + slack:
                high = middle + 1
    return low.to(tl.int32)


@triton.jit
def _log2(x, CUDA: tl.constexpr):
    """Of a normal number. The hardware's own takes one instruction where tl.log2 takes 26, and errs by 2^-22."""
    if CUDA:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def noise(token, add, multiply, CUDA: tl.constexpr):
    """Gumbel noise over log 2, but for a constant, by kernels/sampling.py's definition, whose token table is computed here."""
    x = token.to(tl.uint32) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    x = (x ^ (x >> 15)) * multiply + add
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    signed = x.to(tl.int32, bitcast=True)
    uniform = (signed ^ (signed >> 15)).to(tl.float32) * 2.0**-31 + 2.0**-32
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # exponential over log 2; 1 - uniform would lose the small ones, which are the winners
    series = uniform * (LOG2_E + uniform * (LOG2_E / 2 + uniform * (LOG2_E / 3 + uniform * (LOG2_E / 4))))
    exponential = tl.where(uniform < 0.03125, series, -_log2(1 - uniform, CUDA))
    return -_log2(exponential, CUDA)


@triton.jit
def scale(x, peak, slope, floor):
    """Logits in powers of two over the peak, -inf where min_p or faintness drops a token."""
    scaled = (x - peak) * slope
    return tl.where(scaled >= floor, scaled, float("-inf"))


@triton.jit
def weight(scaled):
    return (tl.exp2(scaled) * UNIT).to(tl.int64)


@triton.jit
def winners(scaled, token, add, multiply, CUDA: tl.constexpr):
    """The best score of each row [N] of a tile, ranked."""
    scores = scaled + noise(token, add, multiply, CUDA)
    best = tl.max(scores, axis=1)
    first = tl.min(tl.where(scores == best[:, None], token, 0x7FFFFFFF), axis=1)
    return tl.where(best > float("-inf"), ranked(ordered(best), first), NOTHING)


@triton.jit
def _row(at, ids, logits, rows, asked, stride):
    """Where row `at` of the draw lies and what it asks: pointer, row, peak, slope, floor (see scale), top_k, top_p."""
    slope = LOG2_E / tl.load(asked + 4 * at).to(tl.float32)
    top_p = tl.load(asked + 4 * at + 1)
    min_p = tl.load(asked + 4 * at + 2).to(tl.float32)
    floor = tl.maximum(tl.log2(tl.maximum(min_p, 2.0**-100)), FAINTEST)
    top_k = tl.load(asked + 4 * at + 3).to(tl.int32)
    row = tl.load(rows + at)
    base = logits + row * stride
    peak = clean(tl.load(base + tl.load(ids + row)))
    return base, row, peak, slope, floor, top_k, top_p


@triton.jit
def _key(at, keys):
    return tl.load(keys + 2 * at).to(tl.uint32), tl.load(keys + 2 * at + 1).to(tl.uint32)


# In all kernels `few` is the largest top_k that narrow() collects for, and WIDE the length of the rows of tops and ranks: at least the
# groups of all tiles. The columns of no group hold -inf and NOTHING.


@triton.jit(do_not_specialize=["per"], do_not_specialize_on_alignment=UNALIGNED)
def survey(
    ids, logits, rows, asked, keys, tops, ranks, masses, above, count,
    vocab, stride, tiles, few, per, WIDE: tl.constexpr, TILE: tl.constexpr, CUDA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Read a row's tiles: the largest logit of each group; unless top_k is at most `few` its winner by score; the mass where top_p asks.

    Grid: splits, rows. tops float32 and ranks int64 [R, WIDE]; masses int64 [R, tiles], of which each split writes one. above and
    count are cleared for narrow().
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, at = tl.program_id(0), tl.program_id(1)
    base, _, peak, slope, floor, top_k, top_p = _row(at, ids, logits, rows, asked, stride)
    add, multiply = _key(at, keys)
    limited, scored = top_k < vocab, (top_k > few) | (top_k >= vocab)
    weighed = (not limited) & (top_p < 1)
    mass = tl.zeros([TILE, GROUP], tl.int64)
    for tile in range(split * per, tl.minimum(split * per + per, tiles)):
        x, token = logits_of(base, groups_of(tile, TILE), vocab)
        group = at * WIDE + groups_of(tile, TILE)
        if limited | weighed:
            tl.store(tops + group, tl.max(x, axis=1))
        if scored:
            scaled = scale(x, peak, slope, floor)
            tl.store(ranks + group, winners(scaled, token, add, multiply, CUDA))
            if weighed:
                mass += weight(scaled)
    if weighed:
        tl.store(masses + at * tiles + split, tl.sum(mass))
    if split == 0:
        tl.store(above + at * PIVOTS + tl.arange(0, PIVOTS), tl.zeros([PIVOTS], tl.int64))
        tl.store(count + at, 0)


@triton.jit
def _collect(
    base, peak, slope, floor, top_k, first, last, tops, count, found, found_ids,
    vocab, WIDE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Append the tokens that may be among the first top_k, in any order; count goes on where they are more than CANDIDATES."""
    bound = LOWEST_KEY
    if 2 * GROUP * top_k <= vocab:  # so many groups reach it that top_k tokens do, and seldom more than 1.4 times as many
        group = tl.arange(0, WIDE)
        key = ordered(tl.load(tops + group))
        bound = kth(key, tl.min(tl.where(group * GROUP < vocab, key, HIGHEST_KEY)), top_k, top_k // 8 + 8)
    for tile in range(first, last):
        top = tl.load(tops + groups_of(tile, TILE))
        if tl.max(((scale(top, peak, slope, floor) > float("-inf")) & (ordered(top) >= bound)).to(tl.int32)) > 0:
            x, token = logits_of(base, groups_of(tile, TILE), vocab)
            fits = (scale(x, peak, slope, floor) > float("-inf")) & (ordered(x) >= bound)
            place = tl.atomic_add(count + tl.zeros([TILE, GROUP], tl.int32), 1, mask=fits, sem="relaxed")
            fits &= place < CANDIDATES
            tl.store(found + place, x, mask=fits)
            tl.store(found_ids + place, token, mask=fits)


@triton.jit
def _weigh(base, peak, slope, floor, rank, first, last, tops, pivots, above, split, vocab, TILE: tl.constexpr):
    """Masses above the logits of the PIVOTS best scored tokens of `rank`. pivots: those logits, +inf where nothing was weighed."""
    bests: tl.tuple = ()
    for i in tl.static_range(PIVOTS):  # noqa: B007
        best = tl.max(rank)
        rank = tl.where(rank == best, NOTHING, rank)
        bests += (best,)
    levels: tl.tuple = ()
    masses: tl.tuple = ()
    lowest = float("inf")
    for i in tl.static_range(PIVOTS):
        level = clean(tl.load(base + token_of(bests[i]), mask=bests[i] != NOTHING, other=0.0))
        level = tl.where(bests[i] != NOTHING, level, float("inf"))
        if i > 0:  # the peak is always kept: nothing is open where it scores best
            level = tl.where(levels[0] < peak, level, float("inf"))
        lowest = tl.minimum(lowest, level)
        levels += (level,)
        masses += (tl.zeros([TILE, GROUP], tl.int64),)
        if split == 0:
            tl.store(pivots + i, level)
    if levels[0] < peak:
        for tile in range(first, last):
            if tl.max(tl.load(tops + groups_of(tile, TILE))) > lowest:
                x, _ = logits_of(base, groups_of(tile, TILE), vocab)
                mass = weight(scale(x, peak, slope, floor))
                sums: tl.tuple = ()
                for i in tl.static_range(PIVOTS):
                    sums += (masses[i] + tl.where(x > levels[i], mass, 0),)
                masses = sums
        for i in tl.static_range(PIVOTS):
            tl.atomic_add(above + i, tl.sum(masses[i]), sem="relaxed")


@triton.jit(do_not_specialize=["per"], do_not_specialize_on_alignment=UNALIGNED)
def narrow(
    ids, logits, rows, asked, tops, ranks, pivots, above, count, found, found_ids,
    vocab, stride, tiles, few, per, WIDE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What choose() needs besides: with top_k up to `few` the tokens that may be kept (found, found_ids [R, CANDIDATES], count [R]);
    with top_p alone the fate of the best scored ones (pivots, above [R, PIVOTS]). Grid as survey's; reads only tiles that matter."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, at = tl.program_id(0), tl.program_id(1)
    base, _, peak, slope, floor, top_k, top_p = _row(at, ids, logits, rows, asked, stride)
    first, last = split * per, tl.minimum(split * per + per, tiles)
    tops += at * WIDE
    if peak > LOWEST:
        if top_k < vocab:
            if top_k <= few:
                found += at * CANDIDATES
                found_ids += at * CANDIDATES
                _collect(base, peak, slope, floor, top_k, first, last, tops, count + at, found, found_ids, vocab, WIDE, TILE, CANDIDATES)
        elif top_p < 1:
            rank = tl.load(ranks + at * WIDE + tl.arange(0, WIDE))
            pivots += at * PIVOTS
            above += at * PIVOTS
            _weigh(base, peak, slope, floor, rank, first, last, tops, pivots, above, split, vocab, TILE)


@triton.jit
def _needed(top_p, mass):
    """The mass that, once reached, nothing more is kept."""
    return tl.where(top_p < 1, tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), ALWAYS)


@triton.jit
def _among_found(peak, slope, floor, top_k, top_p, count, add, multiply, found, found_ids, CANDIDATES: tl.constexpr, CUDA: tl.constexpr):
    """The drawn token of a row whose `count` candidates narrow() found; the first top_k are among them, and all equal to the last."""
    place = tl.arange(0, CANDIDATES)
    there = place < count
    x = tl.load(found + place, mask=there, other=float("-inf"))
    token = tl.load(found_ids + place, mask=there, other=0)
    key = ordered(x)
    scaled = scale(x, peak, slope, floor)
    mass = weight(scaled)
    last = LOWEST_KEY
    total = tl.sum(mass)
    if count > top_k:
        last = kth(key, tl.min(tl.where(there, key, HIGHEST_KEY)), top_k, 0)
        last = tl.min(tl.where(key >= last, key, HIGHEST_KEY))
        spare = top_k - tl.sum((key > last).to(tl.int32))  # of those equal to the last one, so many count
        total = tl.sum(tl.where(key > last, mass, 0)) + spare * tl.max(tl.where(key == last, mass, 0))
    needed = _needed(top_p, total)
    rank = tl.where(there & (key >= last), ranked(ordered(scaled + noise(token, add, multiply, CUDA)), token), NOTHING)
    drawn = -1
    while drawn < 0:
        best = tl.max(rank)
        level = tl.max(tl.where(rank == best, key, LOWEST_KEY))
        if tl.sum(tl.where(key > level, mass, 0)) < needed:
            drawn = token_of(best)
        else:
            rank = tl.where(key > level, rank, NOTHING)
    return drawn


@triton.jit
def _kth_of_row(base, k, vocab, tiles, TILE: tl.constexpr):
    """Key of the k-th largest logit of a row: eight bits at a time, by histograms."""
    flip = -(1 << 31)
    prefix = 0
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for tile in range(tiles):
            x, token = logits_of(base, groups_of(tile, TILE), vocab)
            rest = ((ordered(x) ^ flip ^ prefix).to(tl.uint32, bitcast=True) >> shift).to(tl.int32)
            alike = (rest >> 8 == 0) & (token < vocab)  # in the digits found so far
            counts += tl.histogram(tl.reshape(rest & 255, [TILE * GROUP]), 256, mask=tl.reshape(alike, [TILE * GROUP]))
        reach = tl.sum(counts) - tl.cumsum(counts) + counts  # of this digit or a larger one
        digit = tl.sum((reach >= k).to(tl.int32)) - 1
        k -= tl.max(tl.where(tl.arange(0, 256) == digit + 1, reach, 0))
        prefix = prefix | (digit << shift)
    return prefix ^ flip


@triton.jit
def _above(base, peak, slope, floor, key, vocab, tiles, TILE: tl.constexpr):
    """Number and mass of a row's logits over `key` (int32)."""
    number = tl.zeros([TILE, GROUP], tl.int32)
    mass = tl.zeros([TILE, GROUP], tl.int64)
    for tile in range(tiles):
        x, _ = logits_of(base, groups_of(tile, TILE), vocab)
        over = ordered(x) > key
        number += over.to(tl.int32)
        mass += tl.where(over, weight(scale(x, peak, slope, floor)), 0)
    return tl.sum(number), tl.sum(mass)


@triton.jit
def _among_all(
    base, peak, slope, floor, top_k, top_p, add, multiply, ranks, masses, splits, pivots, above,
    vocab, few, WIDE: tl.constexpr, TILE: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """The drawn token of any other row: the groups' winners are tried, best first, until one is kept.

    Keys over `known` are kept where they are at least `kept`, and up to `known` none is: only between the two a pass over the row decides.
    """
    tiles = tl.cdiv(vocab, TILE * GROUP)
    known, kept = LOWEST_KEY, LOWEST_KEY
    needed = ALWAYS
    if top_k < vocab:
        last = _kth_of_row(base, top_k, vocab, tiles, TILE)
        known = last - 1
        if top_p < 1:
            number, total = _above(base, peak, slope, floor, last, vocab, tiles, TILE)
            needed = _needed(top_p, total + (top_k - number) * weight(scale(value_of(last), peak, slope, floor)))
            kept = ordered(peak)
        if top_k <= few:  # too many equal logits for narrow(), and survey() left no scores
            for tile in range(tiles):
                x, token = logits_of(base, groups_of(tile, TILE), vocab)
                rank = winners(scale(x, peak, slope, floor), token, add, multiply, CUDA)
                tl.store(ranks + groups_of(tile, TILE), rank)
            tl.debug_barrier()
    elif top_p < 1:
        split = tl.arange(0, WIDE)
        needed = _needed(top_p, tl.sum(tl.load(masses + split, mask=split < splits, other=0)))
        place = tl.arange(0, PIVOTS)
        level, mass = ordered(tl.load(pivots + place)), tl.load(above + place)
        kept = tl.minimum(ordered(peak), tl.min(tl.where(mass < needed, level, HIGHEST_KEY)))
        known = tl.max(tl.where(mass < needed, LOWEST_KEY, level))
    rank = tl.load(ranks + tl.arange(0, WIDE))
    drawn = -1
    while drawn < 0:
        token = token_of(tl.max(rank))
        key = ordered(clean(tl.load(base + token)))
        if (key > known) & (key < kept):
            _, mass = _above(base, peak, slope, floor, key, vocab, tiles, TILE)
            if mass < needed:
                kept = key
            else:
                known = key
        if key > known:
            drawn = token
        else:  # what else its group has
            group = token // GROUP
            x, others = logits_of(base, group + tl.arange(0, 1), vocab)
            scaled = tl.where(ordered(x) > known, scale(x, peak, slope, floor), float("-inf"))
            best = tl.max(winners(scaled, others, add, multiply, CUDA))
            rank = tl.where(tl.arange(0, WIDE) == group, best, rank)
    return drawn


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=UNALIGNED)
def choose(
    ids, logits, rows, asked, keys, ranks, masses, pivots, above, count, found, found_ids,
    vocab, stride, tiles, few, splits, WIDE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
    CUDA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draw: ids [S] at rows [R]. Grid: rows. masses [R, tiles] holds `splits` of its columns."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0)
    base, row, peak, slope, floor, top_k, top_p = _row(at, ids, logits, rows, asked, stride)
    add, multiply = _key(at, keys)
    if peak > LOWEST:
        number = tl.load(count + at)
        if (top_k < vocab) & (top_k <= few) & (number <= CANDIDATES):
            found += at * CANDIDATES
            found_ids += at * CANDIDATES
            drawn = _among_found(peak, slope, floor, top_k, top_p, number, add, multiply, found, found_ids, CANDIDATES, CUDA)
        else:
            ranks += at * WIDE
            masses += at * tiles
            pivots += at * PIVOTS
            above += at * PIVOTS
            drawn = _among_all(
                base, peak, slope, floor, top_k, top_p, add, multiply, ranks, masses, splits, pivots, above, vocab, few, WIDE, TILE, CUDA
            )
        tl.store(ids + row, drawn)
