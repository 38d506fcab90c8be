"""Sampling written for reading: one row at a time, float64, plain Python. What every fast path is tested against.

Read it top to bottom to learn what the parameters mean; nothing here is fast and nothing in the engine calls it. It shares no code with
runner/sampler.py and kernels/sampling.py, whose results it must predict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.request import Request

LOWEST = -3.4028234663852886e38  # the lowest finite float32
NOT_ALLOWED = -math.inf
LOGPROB_FLOOR = -9999.0
GREEDY_BELOW = 1e-5


@dataclass
class Choice:
    """The token of one row and how sure it is."""

    token_id: int
    kept: list[int]  # ids that the filters left, rising
    scores: dict[int, float]  # by id: logit, or logit / temperature plus noise; the largest wins
    margin: float  # how far the best score is ahead of the next; infinite when one token is left
    filter_margin: float  # how far the filters were from keeping other tokens: the least distance of a score or mass from its limit


def choose(logits: Sequence[float], request: Request, output_ids: Sequence[int]) -> Choice:
    """The token that comes after output_ids, from the model's logits for it."""
    params = request.params
    edited = edit([clean(x) for x in logits], request, output_ids)
    if params.temperature < GREEDY_BELOW or params.top_k == 1 or max(edited) <= LOWEST:
        scores = {token: x for token, x in enumerate(edited) if x > NOT_ALLOWED}
        kept, filter_margin = sorted(scores), math.inf
    else:
        kept, filter_margin = keep(edited, params.temperature, params.min_p, params.top_k, params.top_p)
        scores = {token: edited[token] / params.temperature + noise(request.seed, request.index, len(output_ids), token) for token in kept}
    best = min(scores, key=lambda token: (-scores[token], token))
    margin = min((scores[best] - score for token, score in scores.items() if token != best), default=math.inf)
    return Choice(best, kept, scores, margin, filter_margin)


def clean(x: float) -> float:
    if math.isnan(x):
        return LOWEST
    return min(max(x, LOWEST), -LOWEST)


def edit(logits: Sequence[float], request: Request, output_ids: Sequence[int]) -> list[float]:
    """Bias, penalties and masks."""
    params = request.params
    edited = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += bias

    counts = Counter(output_ids)
    for token in set(request.prompt_ids) | set(output_ids):
        x = edited[token]
        edited[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token, count in counts.items():
        edited[token] -= params.frequency_penalty * count
        edited[token] -= params.presence_penalty

    banned: set[int] = set()
    if len(output_ids) < params.min_tokens:
        banned |= request.eos_ids | set(params.stop_token_ids or ())
    for word in request.bad_words_ids:
        *prefix, last = word
        if len(prefix) <= len(output_ids) and list(output_ids[len(output_ids) - len(prefix) :]) == prefix:
            banned.add(last)
    for token in banned:
        edited[token] = LOWEST

    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        edited = [max(x, LOWEST) if token in allowed else NOT_ALLOWED for token, x in enumerate(edited)]
    return edited


def keep(logits: Sequence[float], temperature: float, min_p: float, top_k: int, top_p: float) -> tuple[list[int], float]:
    """Ids that min_p, top_k and top_p leave, rising, and how close the closest call was."""
    peak = max(logits)
    falling = sorted(logits, reverse=True)
    scaled = [(x - peak) / temperature for x in falling]  # logs of the probabilities over the first's
    weights = [math.exp(x) for x in scaled]
    calls = [math.inf]

    last = len(falling)
    if min_p > 0:
        floor = math.log(min_p)
        last = sum(x >= floor for x in scaled)
        calls += [abs(x - floor) for x in scaled[last - 1 : last + 1] if x != floor]
    if top_k > 0:
        last = min(last, top_k)
    if top_p < 1:
        mass = math.fsum(weights[:last])
        held, needed = 0.0, 0
        while needed < last and held < top_p * mass:
            held += weights[needed]
            needed += 1
        calls += [abs(held / mass - top_p), abs((held - weights[needed - 1]) / mass - top_p)]
        last = needed
    threshold = falling[last - 1]
    calls += [(threshold - x) / temperature for x in falling[last:] if x < threshold][:1]
    return [token for token, x in enumerate(logits) if x >= threshold], min(calls)


def logprobs(logits: Sequence[float], token_id: int, top: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Of the model's own logits: (logprob of token_id, its rank, the `top` likeliest as (id, logprob))."""
    cleaned = [clean(x) for x in logits]
    peak = max(cleaned)
    total = peak + math.log(math.fsum(math.exp(x - peak) for x in cleaned))
    rated = [max(x - total, LOGPROB_FLOOR) for x in cleaned]
    rank = sum(x >= cleaned[token_id] for x in cleaned)
    order = sorted(range(len(cleaned)), key=lambda token: (-cleaned[token], token))
    return rated[token_id], rank, [(token, rated[token]) for token in order[:top]]


def noise(seed: int, index: int, position: int, token_id: int) -> float:
    """Gumbel noise of a token: the same wherever, whenever and beside whomever it is asked."""
    uniform = (noise_bits(seed, index, position, token_id) + 0.5) / 2**31
    return -math.log(-math.log1p(-uniform))


def noise_bits(seed: int, index: int, position: int, token_id: int) -> int:
    """31 random bits."""
    key = _mix64(_mix64(_mix64(seed % 2**64) ^ index) ^ position)
    add, multiply = key % 2**32, (key >> 32) | 1
    x = _mix32((token_id + 0x9E3779B9) % 2**32)
    x = (x * multiply + add) % 2**32
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0xD35A2D97 % 2**32
    sign = x >> 31
    return x ^ (x >> 15 | (0xFFFE0000 if sign else 0))  # the shift copies the sign bit, which so cancels itself


def _mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0xD35A2D97 % 2**32
    return x ^ (x >> 15)


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
