"""Blocks are shared from when they are planned: in one step, across steps in flight, when a request leaves, when a step fails."""

from __future__ import annotations

import numpy as np
import pytest
from core_fakes import GARBAGE, LOST, Loop, check, contents, logprob, request, samples, scheduler, solo

from flatout.core.prefix import root
from flatout.request import FinishReason, Status
from flatout.step import StepResult

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i) % 31 + 1 for i in range(length)]


def add(loop: Loop, *requests) -> None:
    for r in requests:
        loop.scheduler.add([r])


def sound(*requests) -> bool:
    return all(r.output_ids == solo(r, r.limit)[0] and r.finish_reason is FinishReason.LENGTH for r in requests)


# -- who shares ------------------------------------------------------------------------------------------------------------


@AHEAD
@pytest.mark.parametrize("budget", [64, 100, 5000])
def test_one_prefix_of_many_that_come_together_is_computed_once(ahead, budget):
    loop = Loop(
        scheduler(num_blocks=600, block_size=16, max_num_seqs=256, max_num_batched_tokens=budget, max_model_len=512), ahead, audit=False
    )
    everyone = [request(f"r{i}", [*prompt(320), i % 32, i // 32], max_tokens=1) for i in range(256)]
    add(loop, *everyone)
    loop.run()
    # their 320 tokens end with a block, which all share
    assert loop.scheduler.counters.computed_tokens == sum(p.num_tokens for p in loop.plans) == 320 + 2 * 256
    assert [r.cached_tokens for r in everyone] == [0] + [320] * 255 and {r.miss_reason for r in everyone[1:]} == {""}
    assert (loop.scheduler.counters.prefix_queries, loop.scheduler.counters.prefix_hits) == (322 * 256, 320 * 255)
    assert len(loop.plans) == -(-(320 + 2 * 256) // budget) and sound(*everyone)


def test_a_prompt_in_chunks_is_shared_in_the_step_that_computes_its_last():
    loop = Loop(scheduler(max_num_batched_tokens=16), ahead=False)
    first, second = request("first", prompt(38)), request("second", prompt(38))
    add(loop, first, second)
    for _ in range(3):
        loop.step()
    assert [p.counts.tolist() for p in loop.plans] == [[16], [16], [6, 2]] and second.cached_tokens == 36
    loop.run()
    assert sound(first, second)


def test_only_equal_salts_share_and_prompt_logprobs_are_computed_by_who_asks():
    loop = Loop(scheduler(), ahead=False)
    a, b, c, d = (request(f"r{i}", prompt(9), salt=salt) for i, salt in enumerate(["", "x", "", "x"]))
    asks = request("asks", prompt(9), prompt_logprobs=1)
    add(loop, asks, a, b, c, d)
    loop.run()
    assert loop.plans[0].counts.tolist() == [9, 1, 9, 1, 1]  # all may read what was computed for logprobs
    assert [r.miss_reason for r in (asks, a, b, c, d)] == ["prompt_logprobs", "", "salted", "", ""] and sound(asks, a, b, c, d)


def test_one_that_does_not_look_keeps_nobody_from_sharing_what_is_before_it():
    loop = Loop(scheduler(), ahead=False)
    first, asks, last = request("first", prompt(9)), request("asks", prompt(9, 4), prompt_logprobs=1), request("last", prompt(9))
    add(loop, first, asks, last)
    loop.run()
    assert loop.plans[0].counts.tolist() == [9, 9, 1] and sound(first, asks, last)


def test_without_caching_nobody_shares_but_samples():
    loop = Loop(scheduler(enable_prefix_caching=False), ahead=False)
    twice = [request(id, prompt(9)) for id in ("one", "two")]
    add(loop, *twice)
    loop.scheduler.add(samples("s", prompt(9), 2))
    loop.run()
    assert loop.plans[0].counts.tolist() == [9, 9, 9, 1]
    assert [r.miss_reason for r in twice] == ["off", "off"] and loop.scheduler.counters.prefix_queries == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_block_is_found_when_its_last_token_is_on_the_host_and_planned(ahead):
    """Of 7 prompt tokens and 2 outputs, the second block takes output 0: sampled by the first plan, computed by the second. Nobody was in
    line behind the first plan, so what it fills is published with the second."""
    core = scheduler(block_size=4)
    first, fork = request("first", prompt(7)), request("fork", [*prompt(7), 20, 21])
    core.add([first])

    def found() -> int:
        return len(core.prefix.match(request("probe", fork.prompt_ids), core._running.first.top, 2))

    one = core.schedule(0)
    assert found() == 0
    if ahead:
        two = core.schedule(0)
        assert found() == 1
        core.commit(one, StepResult(np.array([20])), 0)
        assert found() == 1  # it is published with the next plan, before anybody is admitted by it
    else:
        core.commit(one, StepResult(np.array([20])), 0)
        two = core.schedule(0)
        assert found() == 2
    core.add([fork])
    three = core.schedule(0)
    assert fork.cached_tokens == 8 and three.admitted == [fork] and fork.blocks[:2] == first.blocks[:2]
    assert two.num_tokens == 1


# -- who computes a shared block leaves --------------------------------------------------------------------------------------


@LATE
@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_was_planned_stays_shared_when_its_request_leaves(how, steps, late):
    """The request in the air leaves before the device has begun, or in the middle of its prompt: its planned blocks come all the same."""
    loop = Loop(scheduler(max_num_batched_tokens=16), ahead=True, late=late)
    leaving, after = request("leaving", prompt(38)), request("after", prompt(38))
    add(loop, leaving)
    for _ in range(steps):
        loop.step()
    if how == "abort":
        loop.scheduler.abort("leaving")
    else:
        loop.scheduler._preempt(loop.scheduler._running.first)
    check(loop.scheduler)
    add(loop, after)
    loop.run()
    planned = min(16 * steps, 36)
    assert loop.scheduler.counters.computed_tokens <= 38 - planned + 38 + 2 * 8 and sound(after)
    if how == "abort":
        assert after.cached_tokens == planned and leaving.finish_reason is FinishReason.ABORT
    else:
        assert after.cached_tokens == 36 and sound(leaving)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_block_filled_in_flight_is_found_when_its_request_leaves_if_its_last_token_is_known(known, fails):
    core = scheduler(block_size=4)
    r = request("r", prompt(7))
    core.add([r])

    def found() -> int:
        return len(core.prefix.match(request("probe", [*prompt(7), 20, 21]), root("salt", ""), 2))

    plans = [core.schedule(0), core.schedule(0)]  # the second computes output 0, the block's last token
    if known:
        core.commit(plans.pop(0), StepResult(np.array([20])), 0)
    core.abort("r")
    assert found() == 1 + known
    if fails:
        assert core.fail(plans[0]) == [] and found() == known  # what the committed plan computed stays
    else:
        for plan in plans:
            core.commit(plan, StepResult(np.array([20])), 0)
        assert found() == 1 + known


@AHEAD
def test_sharers_go_on_when_the_one_that_computed_for_them_is_aborted_in_the_same_step(ahead):
    loop = Loop(scheduler(), ahead)
    first, others = request("first", prompt(20)), [request(f"r{i}", prompt(21 + i)) for i in range(3)]
    add(loop, first, *others)
    plan = loop.scheduler.schedule(0.0)
    assert plan.counts.tolist() == [20, 1, 2, 3]
    loop.device.launch(plan)
    loop.scheduler.abort("first")
    loop.scheduler.commit(plan, loop.device.run(plan), 0.0)
    check(loop.scheduler)
    loop.check_findable()
    while loop.busy:
        loop.step()
    assert all(r.output_ids == solo(r, r.limit)[0] for r in others) and first.output_ids == []


def test_who_needs_a_block_preempts_the_one_that_computes_a_shared_one():
    """The pool is short: the last in line loses its blocks in mid prompt, and whoever shared them keeps them."""
    loop = Loop(scheduler(num_blocks=11, block_size=4, max_num_batched_tokens=24, max_model_len=44, policy="priority"), ahead=True)
    computing = request("computing", prompt(20, 9), priority=1, max_tokens=12)
    sharing = request("sharing", prompt(18, 9), priority=0, max_tokens=20)
    add(loop, computing)
    loop.step()
    add(loop, sharing)
    loop.run()
    assert sharing.cached_tokens == 16 and computing.preemptions > 0 and sharing.preemptions == 0 and sound(computing, sharing)


# -- a step fails ------------------------------------------------------------------------------------------------------------


def failing_at(loop: Loop, *steps: int) -> None:
    """These plans raise, counted from 0."""
    loop.fails = lambda: len(loop.plans) - 1 in steps


@LATE
def test_who_shared_what_a_failed_step_was_computing_starts_over(late):
    loop = Loop(scheduler(), ahead=True, late=late)
    failing_at(loop, 0)
    first, later = request("first", prompt(20)), [request(f"r{i}", prompt(20 + i)) for i in range(3)]
    add(loop, first)
    loop.step()
    add(loop, *later)
    loop.step()  # they are admitted onto the blocks of the plan that fails now
    assert loop.plans[1].starts.tolist()[1:] == [16, 20, 20] and loop.failed == [first] and first.output_ids == []
    assert [r.status for r in later] == [Status.PREEMPTED] * 3 and not loop.scheduler.blocks._by_hash
    loop.run()
    assert sound(*later) and loop.plans[2].counts.tolist() == [20, 1, 2] and loop.scheduler.counters.dropped_tokens == 4
    # counted once, as they were admitted first
    assert [r.cached_tokens for r in later] == [16, 20, 20] and [r.preemptions for r in later] == [1, 1, 1]


def test_a_block_half_of_which_failed_is_not_found_though_the_next_plan_filled_it():
    loop = Loop(scheduler(max_num_batched_tokens=6), ahead=True)
    failing_at(loop, 1)
    first, second, last = request("first", prompt(14)), request("second", prompt(14)), request("last", prompt(14), max_tokens=1)
    add(loop, first, second)
    for _ in range(3):
        loop.step()
    assert [p.counts.tolist() for p in loop.plans] == [[6], [6], [2, 2]] and loop.plans[2].starts.tolist() == [12, 12]
    loop.step()
    assert loop.failed == [first] and loop.plans[-1].requests == [second] and loop.plans[-1].starts.tolist() == [4]  # plan 0 stands
    add(loop, last)
    loop.run()
    assert sound(second, last) and last.cached_tokens == 12


def test_what_was_computed_from_a_lost_block_is_lost_too():
    """`long` shares the failing plan's blocks and computes more on top of them, which `longer` shares with it in the same step."""
    loop = Loop(scheduler(), ahead=True)
    failing_at(loop, 0)
    first, long, longer = request("first", prompt(8)), request("long", prompt(17)), request("longer", prompt(18), max_tokens=0)
    add(loop, first)
    loop.step()
    add(loop, long, longer)
    loop.step()
    assert loop.plans[1].starts.tolist() == [8, 8, 16]
    assert loop.land(loop.flight).token_ids.tolist()[1:] == [GARBAGE] and LOST in loop.device.kv[loop.plans[1].block_ids[-2]]
    loop.run()
    assert sound(long) and longer.finish_reason is FinishReason.LENGTH and loop.plans[2].starts.tolist() == [0, 16]
    again = request("again", prompt(18))
    add(loop, again)
    loop.run()
    assert sound(again) and again.cached_tokens == 16


def test_steps_that_fail_one_after_the_other_end_all_they_held():
    loop = Loop(scheduler(), ahead=True)
    failing_at(loop, 0, 1)
    first, second, third = (request(id, prompt(12)) for id in ("first", "second", "third"))
    add(loop, first)
    loop.step()
    add(loop, second)
    loop.step()
    add(loop, third)
    loop.run()
    assert loop.failed == [first, second] and sound(third) and third.preemptions == 1
    assert loop.scheduler.counters.finished == {FinishReason.ERROR: 2, FinishReason.LENGTH: 1}


def test_prompt_logprobs_of_a_request_that_starts_over_come_once_and_those_of_an_ended_one_not_at_all():
    loop = Loop(scheduler(max_num_batched_tokens=8), ahead=True)
    failing_at(loop, 0)
    ended, over = request("ended", prompt(10), prompt_logprobs=1), request("over", prompt(10, 5), prompt_logprobs=1)
    add(loop, ended, over)
    loop.run()
    assert loop.failed == [ended] and sound(over) and over.preemptions == 1 and ("ended", 0) not in loop.outputs
    chain, got = contents(over.prompt_ids), loop.outputs["over", 0][0].prompt_logprobs
    assert [p.chosen.logprob for p in got[1:]] == [logprob(chain[i], over.prompt_ids[i + 1]) for i in range(9)]


def test_in_the_plain_loop_a_failed_step_touches_nobody_else():
    loop = Loop(scheduler(max_num_batched_tokens=16), ahead=False)
    failing_at(loop, 1)
    first, same, late = request("first", prompt(20)), request("same", prompt(20)), request("late", prompt(40))
    add(loop, first, same)
    for _ in range(2):
        loop.step()
    assert loop.failed == [first, same] and len(loop.scheduler.blocks._by_hash) == 4  # those of the step before
    add(loop, late)
    loop.run()
    assert sound(late) and late.cached_tokens == 16 and late.preemptions == 0


def test_a_failed_plan_does_not_end_a_later_request_of_the_same_id():
    core = scheduler()
    old, new = request("r", prompt(4)), request("r", prompt(4, 9))
    core.add([old])
    first = core.schedule(0)
    core.abort("r")
    core.add([new])
    second = core.schedule(1)
    with pytest.raises(RuntimeError, match="not the oldest"):
        core.fail(second)
    assert core.fail(first) == [] and new.status is Status.PREEMPTED
    assert core.commit(second, StepResult(np.array([6])), 3) == [] and core.schedule(4).admitted == [new]
