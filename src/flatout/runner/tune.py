"""Tuning a GPU for a model: each large product's algorithm, chosen by what whole steps take while the chip runs into its power limit.

A start chooses by timing products alone, for milliseconds. On a chip at its limit that misleads: what counts there is the energy an algorithm
takes, as the clock of the whole step follows from it (H200, 256 rows of 7B: one that won alone by 2 us cost a layer 20 us in the step, one that
lost by 6 us won 8). So here each is tried in the step itself, long enough for the clock to follow. Choices are kept where a start looks for them
(kernels/op.py:choices). Called by cli/tune.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from flatout.kernels.op import choices, shape_class
from flatout.runner.inputs import build_inputs
from flatout.runner.runner import Runner
from flatout.step import StepPlan

LEAST_ROWS = 193  # below, steps wait for memory, and our own kernels multiply the most
KEYS = 512  # before each row that decodes
FIRST, AGAIN = 0.12, 0.2  # seconds of steps in a turn: with all algorithms, then with the best
FINALISTS, ROUNDS = 2, 2  # beside the algorithm in use
GAIN = 0.995  # of the step's time: less may be noise


@dataclass(frozen=True)
class Tuned:
    """What became of steps of so many tokens."""

    tokens: int
    before: float  # seconds of a step
    after: float
    changed: int  # products
    tried: int


def sizes(max_num_seqs: int, budget: int, longest: int) -> list[int]:
    """The most tokens of a step in each class from LEAST_ROWS on: decodes up to max_num_seqs, beyond that one chunk, which contexts must hold."""
    most = max(min(max_num_seqs, budget), min(budget, longest - 1))
    return sorted({min(shape_class(n), most) for n in range(LEAST_ROWS, most + 1)})


def tune(runner: Runner, num_blocks: int, max_num_seqs: int, longest: int, tokens: Sequence[int]) -> Iterator[Tuned]:
    """Steps of each of these sizes in turn. For a runner on CUDA that serves nothing: the KV pool is written over, and steps that were captured
    keep what they have."""
    from flatout.kernels.gpu import blaslt

    for n in tokens:
        with torch.inference_mode():
            run = _step(runner, num_blocks, min(KEYS, longest - 1) if n <= max_num_seqs else 0, n)
            run()  # each of its products has an algorithm now
            tuned = settle(n, blaslt.in_use(n), blaslt.keep, partial(_spent, run))
        choices.save()
        yield tuned


def settle(tokens: int, products: Sequence[Any], keep: Callable[[Any, Any], None], seconds: Callable[[float], float]) -> Tuned:
    """One product (kernels/gpu/blaslt.py) after the other takes the algorithm with which steps are fastest, if clearly faster than with its own.

    keep(product, algorithm) makes it last. seconds(least): of a step as the products stand, from `least` seconds of steps in a row.
    """
    for _ in range(4):
        before = after = seconds(FIRST)  # the chip is hot then
    changed = 0
    for product in products:

        def turn(algorithm: Any, least: float, product: Any = product) -> float:
            product.chosen = algorithm
            seconds(least / 4)  # the clock follows
            return seconds(least)

        own = product.chosen
        others = [offer for offer in product.offers() if bytes(offer) != bytes(own)]
        best = [own, *sorted(others, key=lambda other: turn(other, FIRST))[:FINALISTS]]
        rounds = [[turn(algorithm, AGAIN) for algorithm in best] for _ in range(ROUNDS)]
        medians = [statistics.median(each) for each in zip(*rounds)]
        fastest = min(range(len(best)), key=medians.__getitem__)
        product.chosen, after = own, medians[0]
        if medians[fastest] < GAIN * medians[0]:
            keep(product, best[fastest])
            changed, after = changed + 1, medians[fastest]
    return Tuned(tokens, before, after, changed, len(products))


def _step(runner: Runner, num_blocks: int, keys: int, n: int) -> Callable[[], None]:
    """Forward and logits of n rows that decode behind so many keys, or, behind none, of a chunk of n tokens."""
    rows = n if keys else 1
    width = (keys or n - 1) // runner.block_size + 1
    table = (np.arange(rows * width, dtype=np.int32) % num_blocks).reshape(rows, width)
    runner.slots.host_tables[:rows, :width] = table
    runner.slots.tables[:rows, :width] = torch.from_numpy(table).to(runner.device)
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, keys, np.int32),
        counts=np.full(rows, n // rows, np.int32),
        token_ids=np.random.default_rng(0).integers(0, runner.decoder.spec.vocab_size, n, dtype=np.int32),
        samples=np.ones(rows, bool),
        out_positions=np.zeros(rows, np.int32),
        requests=[],
    )
    inputs = build_inputs(plan, runner.slots, runner.block_size, runner.groups, narrow=True)

    def run() -> None:
        hidden = runner.executor.forward(inputs.batch, inputs.host)
        runner.decoder.logits(hidden, (inputs.batch.last or inputs.batch).sample_rows)

    return run


def _spent(run: Callable[[], None], least: float) -> float:
    """Seconds of one of as many runs as take `least` seconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    done, spent = 0, 0.0
    while spent < least:
        more = min(64, max(1, round((least - spent) * done / spent))) if done else 2
        start.record()
        for _ in range(more):
            run()
        end.record()
        end.synchronize()
        done, spent = done + more, spent + start.elapsed_time(end) / 1e3
    return spent / done
