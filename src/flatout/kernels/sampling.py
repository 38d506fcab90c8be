"""Ops that choose tokens and rate them: greedy, draw, token_logprobs; and the counter-based random numbers behind draw.

No generator state anywhere: the noise of a token is a function of (seed, sample index, output position, token id), so batching, order,
preemption, restart and parallel ranks change nothing. On CUDA no op here syncs or depends on the other rows of a batch; the kernels are
gpu/greedy.py's and gpu/sampling.py's. runner/sampler.py calls these; runner/sampling_reference.py says the same in float64, to read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.kernels import native
from flatout.kernels.logit_edits import DISALLOWED, HIGHEST, LOWEST
from flatout.kernels.op import Cost, nbytes, op

LOGPROB_FLOOR = -9999.0  # reported for a token of no probability, as in OpenAI's API: JSON has no -inf
FIRST_LOOK = 1024  # on the CPU top_p looks at so many of the largest first; a model's usual output needs no more
CHUNK = 1 << 24  # most logits worked on at once without kernels on a GPU: 64 MiB for each float32 temporary

# ---------------------------------------------------------------- random numbers
#
# host     key = mix64(mix64(mix64(seed) ^ index) ^ position), all uint64; add = key's low 32 bits, multiply = its high 32 bits | 1
# token    h = mix32(token id + 0x9E3779B9), a table
# draw     x = h * multiply + add; x ^= x >> 16; x *= A; x ^= x >> 15; x *= B; bits = x ^ (x >> 15, copying the sign bit)
#
# in 32-bit wrap-around arithmetic. The last shift leaves a 31-bit number >= 0 that is uniform when x is; float32 resolves it finely
# near 0, where the rare tokens' chances lie. u = (bits + 0.5) / 2^31; E = -log1p(-u) is exponential; the token with the largest
# logit / temperature - log(E) among those kept is drawn (Gumbel-max), which makes its chance exactly its softmax probability.

_GOLDEN_32, _GOLDEN_64 = 0x9E3779B9, 0x9E3779B97F4A7C15
_A, _B = 0x21F0AAAD, 0xD35A2D97
_NEAR = 9.0  # see _contenders
_LUCKY_BITS = 6_000_000


def _mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function on uint64 arrays."""
    x = x + np.uint64(_GOLDEN_64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sequence_key(seed: int, index: int) -> np.uint64:
    """What seed (taken modulo 2^64) and sample index contribute, once per sequence."""
    seeds, indices = np.array([seed % (1 << 64)], np.uint64), np.array([index], np.uint64)
    return _mix64(_mix64(seeds) ^ indices)[0]


def position_keys(sequence_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [R] keys of sequences and their output positions [R] -> int64 [R, 2]: (add, multiply) as signed 32-bit values."""
    key = _mix64(sequence_keys ^ positions.astype(np.uint64))
    return np.stack([key, (key >> np.uint64(32)) | np.uint64(1)], axis=1).astype(np.uint32).view(np.int32).astype(np.int64)


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """The table of draw(): int32 [V], the same on every device."""
    x = np.arange(vocab_size, dtype=np.uint32) + np.uint32(_GOLDEN_32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_A)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_B)
    return torch.from_numpy((x ^ (x >> np.uint32(15))).view(np.int32)).to(device)


def _noise_bits(hashes: np.ndarray, key: np.ndarray) -> np.ndarray:
    """31 random bits for each token hash (int32 [N]) under key (int64 [2]), as int32."""
    add, multiply = key.astype(np.uint32)
    x = hashes.view(np.uint32) * multiply
    x += add
    shifted = x >> np.uint32(16)
    x ^= shifted
    x *= np.uint32(_A)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x *= np.uint32(_B)
    signed = x.view(np.int32)
    signed ^= np.right_shift(signed, np.int32(15), out=shifted.view(np.int32))
    return signed


def _noise_bits_of_rows(hashes: Tensor, keys: Tensor) -> Tensor:
    """The same for all tokens of R rows: hashes int32 [V], keys int64 [R, 2] -> int32 [R, V]."""
    add, multiply = keys.to(torch.int32).unbind(1)
    x = hashes * multiply.unsqueeze(1)
    x += add.unsqueeze(1)
    shifted = (x >> 16).bitwise_and_(0xFFFF)  # >> copies the sign bit
    x ^= shifted
    x *= _A
    torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x ^= shifted
    x *= _B - (1 << 32)
    x ^= torch.bitwise_right_shift(x, 15, out=shifted)
    return x


# ---------------------------------------------------------------- ops


def _greedy_cost(ids: Tensor, logits: Tensor) -> Cost:
    return Cost(activations=nbytes(logits, ids))


def _draw_cost(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> Cost:
    cells = rows.shape[0] * logits.shape[1]
    return Cost(activations=cells * logits.element_size() + nbytes(rows, params, keys), flops=16 * cells)


def _draw_key(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> tuple[Any, ...]:
    return (logits.device.type, logits.dtype, logits.shape[1])


def _logprobs_cost(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> Cost:
    return Cost(activations=nbytes(logits, ids, chosen, ranks, top_ids, top_logprobs), flops=4 * logits.numel())


def _logprobs_key(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> tuple[Any, ...]:
    return (logits.device.type, logits.dtype, logits.shape[1], top_ids.shape[1])


@op(cost=_greedy_cost, outs=("ids",), last_resort=True)
def greedy(ids: Tensor, logits: Tensor) -> None:
    """ids int64 [S] = the largest of each row of logits [S, V]; the lowest id among equals.

    The CPU wants cleaned logits (logit_edits.clean_logits) below, and here where it has no native library; elsewhere NaN and +inf have the meaning
    that gives them.
    """
    if logits.device.type == "cpu":
        np.argmax(logits.numpy(), axis=1, out=ids.numpy())  # 4 us a row at V=49k where torch takes 93
    else:
        _greedy_together(ids, logits)


greedy.implementation(
    "native",
    lambda ids, logits: logits.device.type == "cpu" and native.available() and logits.dtype == torch.float32 and logits.stride(1) == 1,
    native=True,
)(native.greedy)


@op(cost=_draw_cost, outs=("ids",), updates=("ids",), key=_draw_key, last_resort=True)
def draw(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> None:
    """Draw a token for some rows: temperature, then min_p, top_k and top_p, then chance.

    ids int64 [S] holds each row's greedy choice and receives the drawn one at `rows` (int64 [R], distinct, in any order).
    logits float32 [S, V], unchanged. params float64 [R, 4]: temperature > 0, top_p, min_p, top_k (V: off).
    keys int64 [R, 2] from position_keys. hashes int32 [V] from token_hashes.

    Who is kept: sort the logits, falling. Keep those with a probability of at least min_p times the first's; of these the first
    top_k; of these the shortest beginning that holds at least top_p of their probability. A token equal to the last one kept stays
    too, so equal tokens fare alike whatever their ids. The first is always kept. A row in which nothing is over LOWEST (all banned)
    keeps its greedy choice.
    """
    if logits.device.type == "cpu":
        _draw_by_row(ids, logits, rows, params, keys, hashes)
        return
    step = max(1, CHUNK // logits.shape[1])
    for part in range(0, rows.shape[0], step):
        some = slice(part, part + step)
        _draw_together(ids, logits, rows[some], params[some], keys[some], hashes)


@op(cost=_logprobs_cost, outs=("chosen", "ranks", "top_ids", "top_logprobs"), key=_logprobs_key, last_resort=True)
def token_logprobs(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> None:
    """Log-probabilities under softmax(logits float32 [N, V]) of ids (int64 [N]) and of each row's K likeliest tokens.

    chosen float32 [N]; ranks int32 [N]: how many logits are at least as large, as vLLM counts (1: the likeliest, alone);
    top_ids int32 [N, K], top_logprobs float32 [N, K]: falling, lower ids first among equals. Nothing is under LOGPROB_FLOOR.
    """
    if logits.device.type == "cpu":
        _logprobs_by_row(chosen, ranks, top_ids, top_logprobs, logits, ids)
        return
    step = max(1, CHUNK // logits.shape[1])
    for part in range(0, ids.shape[0], step):
        some = slice(part, part + step)
        _logprobs_together(chosen[some], ranks[some], top_ids[some], top_logprobs[some], logits[some], ids[some])


# ---------------------------------------------------------------- CPU: a row at a time, in numpy, only tokens that matter
#
# numpy because torch's comparison, selection, argmax and sort take 10 to 30 times as long on one row (49k: sort 4558 us, numpy 170).
# A row at a time because the same calls on the same shapes give the same bits alone and in a crowd.


def _draw_by_row(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> None:
    chosen, table = ids.numpy(), hashes.numpy()
    matrix, key_rows = logits.numpy(), keys.numpy()
    with np.errstate(over="ignore"):  # a banned logit over a small temperature is -inf, as it should be
        for at, row, (temperature, top_p, min_p, top_k) in zip(range(len(rows)), rows.tolist(), params.tolist()):
            logit = matrix[row]
            peak = float(logit[chosen[row]])
            if peak <= LOWEST:
                continue
            kept = _kept(logit, peak, temperature, top_p, min_p, int(top_k))
            if kept is None:
                kept = _contenders(logit, peak, temperature, table, key_rows[at])
            uniform = (_noise_bits(table[kept], key_rows[at]) + 0.5) / 2.0**31
            score = (logit[kept].astype(np.float64) - peak) / temperature - np.log(-np.log1p(-uniform))
            chosen[row] = kept[score.argmax()]


def _kept(logit: np.ndarray, peak: float, temperature: float, top_p: float, min_p: float, top_k: int) -> np.ndarray | None:
    """Ids kept by the filters, rising; None when there is no filter."""
    vocab = len(logit)
    floor = peak + temperature * math.log(min_p) if min_p > 0 else -math.inf
    mass = None
    if top_k < vocab:
        ids = _largest(logit, top_k)
    elif top_p < 1:
        weight = logit - np.float32(peak)
        weight /= np.float32(temperature)
        np.exp(weight, out=weight)
        if min_p > 0:
            weight[logit < floor] = 0
        mass = float(weight.sum())
        ids = _largest(logit, min(FIRST_LOOK, vocab))
        if weight[ids].sum() < 1.0001 * mass * top_p:
            # Tokens each under (1 - top_p) / V of the mass hold less than 1 - top_p together: none of them is kept.
            ids = np.flatnonzero(weight >= 0.999 * mass * (1 - top_p) / vocab)
    elif min_p > 0:
        return np.flatnonzero(logit >= floor)
    else:
        return None
    values = logit[ids]
    falling = np.sort(values)[::-1][:top_k].astype(np.float64)
    falling = falling[falling >= floor]
    last = len(falling)
    if top_p < 1:
        held = np.cumsum(np.exp((falling - peak) / temperature))
        last = 1 + int(np.count_nonzero(held[:-1] < top_p * (held[-1] if mass is None else mass)))
    return ids[values >= falling[last - 1]]


def _largest(logit: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest and of all equal to the k-th, rising.

    The k-th largest of 1/32 as many maxima is a bound that k logits reach: one pass instead of selecting among all
    (V=152k: 75 us instead of 190, and 518 with torch.topk).
    """
    columns = len(logit) // 32
    bound = -np.inf
    if k < columns:
        bound = np.partition(logit[: 32 * columns].reshape(32, columns).max(axis=0), columns - k)[columns - k]
    ids = np.flatnonzero(logit >= bound)
    values = logit[ids]
    return ids[values >= np.partition(values, len(values) - k)[len(values) - k]]


def _contenders(logit: np.ndarray, peak: float, temperature: float, hashes: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ids among which the winner of an unfiltered draw is sure to be, rising: the likely ones and the lucky ones.

    The largest token scores at least the least noise, -log(32 log 2) > -3.1. One that lies _NEAR = 9 below it needs noise
    over 5.9 to win: E < e^-5.9, u < 0.00274, bits < 5.9e6. So most tokens need a hash but no logarithm.
    """
    near = np.nextafter(np.float32(peak - _NEAR * temperature), np.float32(-np.inf))
    return np.flatnonzero((logit >= near) | (_noise_bits(hashes, key) < np.int32(_LUCKY_BITS)))


def _logprobs_by_row(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> None:
    matrix, k = logits.numpy(), top_ids.shape[1]
    values, places, best_ids, best_values = chosen.numpy(), ranks.numpy(), top_ids.numpy(), top_logprobs.numpy()
    for row, token in enumerate(ids.tolist()):
        logit = matrix[row]
        total = float(torch.logsumexp(logits[row], 0))
        values[row] = max(float(logit[token]) - total, LOGPROB_FLOOR)
        places[row] = np.count_nonzero(logit >= logit[token])
        if k:
            best = _largest(logit, k)
            best = best[np.argsort(-logit[best], kind="stable")[:k]]
            best_ids[row] = best
            best_values[row] = np.maximum(logit[best].astype(np.float64) - total, LOGPROB_FLOOR)


# ---------------------------------------------------------------- without kernels on a GPU: rows together, no sync
#
# Sums that decide are of integers: exact, so their order and with it the shape of the batch cannot matter.


def _cleaned(logits: Tensor, lowest: float) -> Tensor:
    """A copy, as logit_edits.clean_logits would make it; -inf, which a mask may have put there, becomes `lowest`."""
    return logits.nan_to_num(nan=LOWEST, posinf=HIGHEST, neginf=lowest)


def _greedy_together(ids: Tensor, logits: Tensor) -> None:
    torch.argmax(_cleaned(logits, DISALLOWED), dim=1, out=ids)


def _draw_together(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> None:
    scaled = _cleaned(logits.index_select(0, rows), DISALLOWED)
    greedy_ids = ids.index_select(0, rows)
    peak = scaled.gather(1, greedy_ids.unsqueeze(1))
    temperature, top_p, min_p, top_k = (column.unsqueeze(1) for column in params.unbind(1))
    scaled -= peak
    scaled /= temperature.float()
    threshold = _threshold(scaled.sort(dim=1, descending=True).values, top_k, top_p, min_p.log().float())
    uniform = _noise_bits_of_rows(hashes, keys).float()
    uniform += 0.5
    uniform *= 2.0**-31
    noise = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()
    score = torch.where(scaled >= threshold, scaled - noise, float("-inf"))
    ids[rows] = torch.where(peak.squeeze(1) > LOWEST, score.argmax(dim=1), greedy_ids)


def _threshold(falling: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor) -> Tensor:
    """The last value kept: float32 [R, 1], of scaled logits float32 [R, V], falling from 0."""
    alive = (torch.arange(falling.shape[1], device=falling.device) < top_k) & (falling >= floor)
    # 2^44 for the first and at most 2^18 of them fit; what rounds to 0 has less than 2^-26 of the mass together
    weight = (falling.exp() * 2.0**44).to(torch.int64).masked_fill_(~alive, 0)
    held = weight.cumsum(dim=1)
    enough = (top_p * held[:, -1:]).ceil_().to(torch.int64)
    alive &= (held - weight < enough) | (top_p >= 1)
    last = alive.sum(dim=1, keepdim=True) - 1
    return falling.gather(1, last.clamp_(min=0))  # -1: a row of nothing but -inf


def _logprobs_together(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> None:
    logits = _cleaned(logits, LOWEST)
    logprobs = logits.log_softmax(dim=1).clamp_(min=LOGPROB_FLOOR)
    token = ids.unsqueeze(1)
    chosen.copy_(logprobs.gather(1, token).squeeze(1))
    ranks.copy_((logits >= logits.gather(1, token)).sum(dim=1))
    if k := top_ids.shape[1]:
        best = _ordered(logits).topk(k).values.bitwise_and_(0xFFFFFFFF).neg_().add_(0xFFFFFFFF)
        top_ids.copy_(best)
        top_logprobs.copy_(logprobs.gather(1, best))


def _ordered(logits: Tensor) -> Tensor:
    """int64 keys [N, V] in the order of logits, lower ids above higher ones among equals: topk alone promises no order for those."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) + torch.arange(0xFFFFFFFF, 0xFFFFFFFF - logits.shape[1], -1, device=logits.device)
