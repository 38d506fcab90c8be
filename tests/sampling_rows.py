"""Random requests and logits for the sampler's tests, and the comparison of what it chose with the reference."""

from __future__ import annotations

import numpy as np
import torch

from flatout.request import Request, SamplingParams
from flatout.runner import sampling_reference as reference
from flatout.runner.sampler import Sampled, Sampler

CPU = torch.device("cpu")
SCORE_TIE = 1e-4  # best and second perturbed score closer than this may swap
FILTER_TIE = 1e-5  # a probability mass or score this close to a filter's limit may fall on either side
ROUNDING = 1e-5  # of a logit near 20 that was edited in float32


def request(params: SamplingParams | None = None, **changes) -> Request:
    """A request with some prompt; `changes` are fields of Request, or of SamplingParams where it has them."""
    names = set(SamplingParams.names()) - {"seed"}
    params = (params or SamplingParams()).but(**{k: v for k, v in changes.items() if k in names})
    fields = {"id": "r", "prompt_ids": [1, 2, 3], "eos_ids": frozenset({0})} | {k: v for k, v in changes.items() if k not in names}
    return Request(params=params, **fields)


def random_request(rng: np.random.Generator, vocab: int, name: str) -> Request:
    """Each feature is on in about a third of the rows; every tenth row has none."""

    def maybe(value, off, chance=0.35):
        return value if rng.random() < chance * busy else off

    def tokens(count):
        return rng.integers(0, vocab, count).tolist()

    busy = float(rng.random() > 0.1)
    prompt, output = tokens(rng.integers(1, 40)), tokens(rng.integers(0, 12))
    heads = output[-3:] if len(output) >= 3 else output
    words = [[*heads[i:], token] for i, token in zip(range(len(heads) + 1), tokens(4))] + [
        tokens(1),
        [*tokens(2), heads[0] if heads else 5],
    ]
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 10.0])),
        top_p=maybe(float(rng.choice([0.05, 0.5, 0.9, 0.95, 0.999, 1.0])), 1.0),
        top_k=maybe(int(rng.choice([1, 2, 5, 40, vocab - 1, vocab, vocab + 50, -1])), 0),
        min_p=maybe(float(rng.choice([0.01, 0.1, 0.5, 1.0])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.5, 1.1, 1.5, 2.0])), 1.0),
        presence_penalty=maybe(float(rng.choice([-2.0, 0.5, 2.0])), 0.0),
        frequency_penalty=maybe(float(rng.choice([-0.5, 0.25, 2.0])), 0.0),
        min_tokens=maybe(int(rng.integers(1, 15)), 0),
        max_tokens=None,
        stop_token_ids=maybe(tokens(2), None),
        logit_bias=maybe({t: float(rng.choice([-100.0, -1.5, 3.0, 100.0])) for t in tokens(5)}, None),
        allowed_token_ids=maybe(tokens(rng.integers(1, vocab)), None, 0.2),
        logprobs=maybe(int(rng.integers(0, 8)), None),
        ignore_eos=maybe(True, False),
    )
    return Request(
        id=name,
        prompt_ids=prompt,
        params=params,
        index=int(rng.integers(0, 4)),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        eos_ids=frozenset(tokens(2)),
        bad_words_ids=maybe(words, []),
        output_ids=output,
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Rows as models make them, some flat, some peaked, some on a coarse grid so that values tie, some with -inf and NaN."""
    logits = rng.normal(0, 1, (rows, vocab)) * rng.choice([0.1, 1.0, 3.0, 8.0], (rows, 1)) + rng.choice([-5.0, 0.0, 10.0], (rows, 1))
    coarse = rng.random(rows) < 0.3
    logits[coarse] = np.round(logits[coarse] * 8) / 8
    holed = rng.random(rows) < 0.15
    logits[holed] = np.where(rng.random((holed.sum(), vocab)) < 0.2, -np.inf, logits[holed])
    broken = rng.random(rows) < 0.1
    logits[broken] = np.where(rng.random((broken.sum(), vocab)) < 0.05, np.nan, logits[broken])
    return torch.from_numpy(logits.astype(np.float32))


def sample(sampler: Sampler, logits: torch.Tensor, slots, positions) -> Sampled:
    """sample() on a copy, since it may overwrite its logits."""
    return sampler.sample(logits.clone().to(sampler.device), np.asarray(slots, np.int32), np.asarray(positions, np.int32))


def one(request: Request, logits: torch.Tensor, device: torch.device = CPU) -> int:
    """The next token of a request alone in a new sampler, after its output_ids."""
    sampler = Sampler(logits.shape[-1], 1, device)
    sampler.admit(0, request)
    return int(sample(sampler, logits.view(1, -1), [0], [len(request.output_ids)]).ids[0])


def agrees(choice: reference.Choice, token: int, temperature: float) -> bool | None:
    """Whether the sampler's token is the reference's; None when they differ and the reference calls it a tie."""
    if token == choice.token_id:
        return True
    tie = (
        choice.margin < SCORE_TIE or choice.filter_margin < FILTER_TIE or min(choice.margin, choice.filter_margin) * temperature < ROUNDING
    )
    return None if tie else False
