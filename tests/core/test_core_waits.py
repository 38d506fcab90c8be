"""For how long who waited for what: each second of the queue has one reason, and they sum to the time in it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flatout.core.scheduler import Scheduler
from flatout.request import NEXT_PLAN, PREEMPTED, Request, SamplingParams
from flatout.step import StepResult


def scheduler(**changes: int) -> Scheduler:
    settings = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 128, **changes}
    return Scheduler(**settings)


def request(name: str, prompt: int = 4, tokens: int = 2, arrival: float = 0.0) -> Request:
    return Request(name, [ord(name[0])] * prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), arrival=arrival)


def turn(core: Scheduler, now: float) -> None:
    plan = core.schedule(now)
    if plan is not None:
        core.commit(plan, StepResult(np.full(int(plan.samples.sum()), 7, np.int64)), now)


def test_slots() -> None:
    core = scheduler()
    requests = [request(name) for name in "abcd"]
    for each in requests:
        core.add([each])
    assert core.waiting == {NEXT_PLAN: 4}
    turn(core, 1.0)
    assert core.waiting == {"slots": 2}
    late = request("e", arrival=1.5)
    core.add([late])
    assert core.waiting == {"slots": 2, NEXT_PLAN: 1}
    turn(core, 2.0)  # a and b end
    turn(core, 4.0)
    turn(core, 5.0)
    turn(core, 6.0)
    assert [each.waited for each in requests] == [{NEXT_PLAN: 1.0}] * 2 + [{NEXT_PLAN: 1.0, "slots": 3.0}] * 2
    assert late.waited == {NEXT_PLAN: 0.5, "slots": 4.0} and core.waiting == {}


def test_blocks_of_the_head_are_policy_for_those_behind() -> None:
    core = scheduler(num_blocks=6, max_num_seqs=4)
    holder, head, behind = request("a", prompt=12, tokens=8), request("b", prompt=20, tokens=2), request("c")
    for each in (holder, head, behind):
        core.add([each])
    for now in range(1, 12):
        turn(core, float(now))
    assert set(head.waited) == {NEXT_PLAN, "blocks"} and {"policy"} < set(behind.waited)
    for each in (head, behind):
        assert sum(each.waited.values()) == pytest.approx(each.first_scheduled)


def test_budget() -> None:
    core = scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    first, second = request("a", prompt=20), request("b")
    core.add([first])
    core.add([second])
    for now in range(1, 8):
        turn(core, float(now))
    assert second.waited == {NEXT_PLAN: 1.0, "budget": second.first_scheduled - 1.0} and second.waited["budget"] >= 1
    assert first.chunks == 3


@pytest.mark.parametrize("seed", range(20))
def test_every_second_has_a_reason(seed: int) -> None:
    """Random loads with preemption: waited sums to first_scheduled - arrival, what came after a preemption aside."""
    rng = random.Random(seed)
    core = scheduler(num_blocks=rng.randint(8, 14), max_num_seqs=rng.randint(1, 4), max_num_batched_tokens=rng.choice((8, 32)))
    now, requests = 0.0, []
    for i in range(200):
        now += rng.random()
        if i < 100 and rng.random() < 0.4:
            requests.append(request(chr(97 + i % 26) + str(i), rng.randint(1, 16), rng.randint(1, 16), arrival=now - rng.random() * 0.1))
            core.add([requests[-1]])
        if requests and rng.random() < 0.05:
            core.abort(rng.choice(requests).id)
        assert sum(core.waiting.values()) == core.num_waiting
        turn(core, now)
    begun = [each for each in requests if each.first_scheduled]
    assert begun
    for each in begun:
        queued = sum(seconds for reason, seconds in each.waited.items() if reason != PREEMPTED)
        assert queued == pytest.approx(each.first_scheduled - each.arrival, abs=1e-9), each.waited
        assert PREEMPTED not in each.waited or each.preemptions
