"""schedule() + commit() for 256 decoding requests. `python tests/core/test_core_speed.py` prints the figures."""

from __future__ import annotations

import time

import numpy as np
import pytest
from core_fakes import request

from flatout.core.scheduler import Scheduler
from flatout.request import Output
from flatout.step import StepResult

ROWS = 256


def step_us(ahead: bool, caching: bool, steps: int = 400) -> tuple[float, float]:
    """Microseconds of CPU time of schedule + commit in steady state (a block for every sixteenth row, no arrivals, no ends): the median
    step, and the mean step of the best 16 in a row, which is what it costs while nobody else uses the core's other thread."""
    core = Scheduler(
        num_blocks=16384,
        block_size=16,
        max_num_seqs=ROWS,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        enable_prefix_caching=caching,
    )
    rng = np.random.default_rng(0)
    for i in range(ROWS):
        core.add(
            [request(f"r{i}", rng.integers(1, 30000, 32 + i % 16).tolist(), max_tokens=None, ignore_eos=False, stop_token_ids=[40000])]
        )
    tokens = [rng.integers(1, 30000, ROWS) for _ in range(64)]

    def result(plan, k):
        return StepResult(tokens[k % 64][: int(plan.samples.sum())])

    flight, times = None, []
    for k in range(steps + 20):
        begin = time.thread_time()
        plan = core.schedule(0.0)
        middle = time.thread_time()
        done, flight = (flight, plan) if ahead else (plan, None)
        if done is None:
            continue
        answer = result(done, k)
        outputs = None  # let go of the last ones before the clock runs
        again = time.thread_time()
        outputs = core.commit(done, answer, 0.0)
        times.append(middle - begin + time.thread_time() - again)
        assert len(outputs) in (0, ROWS) or k < 20
    steady = np.array(times[20:]) * 1e6
    return float(np.median(steady)), float(steady[: len(steady) // 16 * 16].reshape(-1, 16).mean(1).min())


def yardstick_us() -> float:
    """Microseconds to make the 256 Outputs of a step: 65 to 80 where the step takes 210 to 290, and slow when this machine is slow."""
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        made = [Output("r", i, [i]) for i in range(10 * ROWS)]
        best = min(best, (time.thread_time() - begin) * 1e5)
        del made
    return best


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_step_of_256_decodes_costs_under_300_us(ahead, caching):
    """On a quiet machine (run this file for the figures). A shared one runs at half its speed for minutes, so here the step is held against
    something that slows down with it, in up to 10 tries."""
    ratios: list[float] = []
    while min(ratios, default=9.0) > 4.5 and len(ratios) < 10:
        before = yardstick_us()
        best = step_us(ahead, caching, 150)[1]
        ratios.append(best / max(before, yardstick_us()))
    assert min(ratios) <= 4.5, ratios


if __name__ == "__main__":
    for ahead in (False, True):
        for caching in (False, True):
            median, best = np.min([step_us(ahead, caching) for _ in range(5)], axis=0)
            print(f"ahead={ahead!s:5} caching={caching!s:5} median {median:4.0f} us, best 16 steps in a row {best:4.0f} us")
