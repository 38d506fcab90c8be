"""Scheduler, one rule at a time: order, budget, slots, one step ahead, abort at any moment, waiting reasons, logprobs, n > 1."""

from __future__ import annotations

import numpy as np
import pytest
from core_fakes import EOS, TOP, Loop, check, contents, logprob, request, samples, scheduler, solo

from flatout.request import FinishReason, RequestError, Status
from flatout.step import FROM_DEVICE, StepResult


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i) % 31 + 1 for i in range(length)]


def add(loop: Loop, *requests) -> None:
    for r in requests:
        loop.scheduler.add([r])


# -- budget, slots, blocks: one less, even, one more ---------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_A11_edges_of_the_budget(ahead, length):
    loop = Loop(scheduler(max_num_batched_tokens=16), ahead)
    r = request("r", prompt(length), max_tokens=5)
    add(loop, r)
    loop.run()
    chunks = [int(p.counts[0]) for p in loop.plans if not p.samples.any()]
    assert chunks == [16] * ((length - 1) // 16) and loop.tokens("r") == solo(r, r.limit)[0]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_edges_of_the_slots(count):
    loop = Loop(scheduler(max_num_seqs=4), ahead=False)
    everyone = [request(f"r{i}", prompt(3, i)) for i in range(count)]
    add(loop, *everyone)
    loop.step()
    assert [r.slot for r in everyone] == [0, 1, 2, 3, -1][:count]
    assert loop.plans[0].waiting == ({"slots": 1} if count == 5 else {})
    loop.run()


def test_the_lowest_slot_is_reused_first():
    loop = Loop(scheduler(max_num_seqs=4), ahead=False)
    add(loop, *[request(f"r{i}", prompt(3, i)) for i in range(4)])
    loop.step()
    loop.scheduler.abort("r2")
    loop.scheduler.abort("r1")
    late = [request(f"late{i}", prompt(3, 7)) for i in range(2)]
    add(loop, *late)
    loop.step()
    assert [r.slot for r in late] == [1, 2]


@pytest.mark.parametrize("blocks", [5, 6, 7])
def test_edges_of_the_pool_with_two_requests(blocks):
    """Two prompts of three blocks: both fit in seven blocks only, as one is spared for the running one."""
    loop = Loop(scheduler(num_blocks=blocks, block_size=4, max_model_len=20), ahead=False)
    one, two = request("one", prompt(11), max_tokens=4), request("two", prompt(11, 5), max_tokens=4)
    add(loop, one, two)
    loop.step()
    assert (two.slot >= 0) == (blocks == 7) and loop.plans[0].waiting == ({} if blocks == 7 else {"blocks": 1})
    loop.run()
    assert one.output_ids == solo(one, one.limit)[0] and two.output_ids == solo(two, two.limit)[0]


def test_a_budget_below_the_slots_starves_nobody():
    loop = Loop(scheduler(max_num_batched_tokens=2, max_num_seqs=6))
    everyone = [request(f"r{i}", prompt(5, i)) for i in range(6)]
    add(loop, *everyone)
    loop.run(most=200)
    assert all(r.output_ids == solo(r, r.limit)[0] for r in everyone)


def test_C01_a_decode_never_stalls_behind_a_long_prompt():
    """A prompt of higher priority comes in: the running decode, behind it in order, still gets its token in every step."""
    loop = Loop(scheduler(num_blocks=128, max_num_batched_tokens=16, policy="priority", max_model_len=512), ahead=False)
    slow = request("slow", prompt(4), priority=5, max_tokens=40)
    add(loop, slow)
    loop.step()
    add(loop, request("long", prompt(160, 3), priority=0))
    for _ in range(8):
        before = len(slow.output_ids)
        loop.step()
        assert len(slow.output_ids) == before + 1
    assert loop.plans[-1].counts.tolist() == [15, 1]
    loop.run()


# -- order ---------------------------------------------------------------------------------------------------------------


def test_fcfs_nobody_overtakes_a_blocked_head():
    loop = Loop(scheduler(num_blocks=8, block_size=4), ahead=False)
    running, head, small = request("running", prompt(17)), request("head", prompt(17, 4)), request("small", prompt(2, 9))
    add(loop, running, head, small)
    loop.step()
    assert loop.plans[0].waiting == {"blocks": 1, "policy": 1} and small.slot == head.slot == -1
    loop.run()
    assert running.first_scheduled < head.first_scheduled <= small.first_scheduled


def test_a_blocked_head_is_admitted_as_soon_as_blocks_come_free():
    loop = Loop(scheduler(num_blocks=12, block_size=4), ahead=False)
    short, long, head = request("short", prompt(17), max_tokens=3), request("long", prompt(7, 4)), request("head", prompt(17, 9))
    add(loop, short, long, head)
    loop.run()
    assert head.first_scheduled == 4.0 and [p.waiting for p in loop.plans[:3]] == [{"blocks": 1}] * 3


def test_priority_admits_lower_first_then_by_arrival_and_preempts_the_last():
    loop = Loop(scheduler(max_num_seqs=1, policy="priority"), ahead=False)
    everyone = [request(f"r{i}", prompt(3, i), priority=p) for i, p in enumerate([1, 0, 2, 0])]
    add(loop, *everyone)
    loop.run()
    assert [r.id for r in sorted(everyone, key=lambda r: r.first_scheduled)] == ["r1", "r3", "r0", "r2"]
    loop = Loop(scheduler(num_blocks=6, block_size=4, policy="priority", max_model_len=24), ahead=False)
    low, high = request("low", prompt(7), priority=1, max_tokens=12), request("high", prompt(7, 5), priority=0, max_tokens=12)
    add(loop, low)
    loop.step()
    add(loop, high)
    loop.run()
    assert (low.preemptions, high.preemptions) == (1, 0) and low.output_ids == solo(low, low.limit)[0]


def test_a_preempted_request_resumes_before_others_of_its_class():
    """Its stream stands still, theirs has not begun."""
    loop = Loop(scheduler(num_blocks=9, block_size=4, max_num_seqs=2, max_model_len=36), ahead=False)
    first, other = request("first", prompt(9), max_tokens=14), request("other", prompt(9, 6), max_tokens=14)
    late = samples("late", prompt(5, 3), 2)
    add(loop, first, other)
    loop.scheduler.add(late)
    loop.run()
    assert other.preemptions > 0 and first.preemptions == 0
    back = [p.step for p in loop.plans if other in p.admitted][-1]
    assert min(r.first_scheduled for r in late) > back and other.output_ids == solo(other, other.limit)[0]


def test_nobody_is_admitted_in_a_step_that_preempted():
    loop = Loop(scheduler(num_blocks=6, block_size=4, max_model_len=24), ahead=False)
    add(loop, request("one", prompt(8), max_tokens=12), request("two", prompt(7, 5), max_tokens=12))
    while not loop.scheduler.counters.preemptions:
        loop.step()
    add(loop, request("tiny", prompt(1)))
    assert loop.plans[-1].admitted == [] and loop.plans[-1].waiting == {"blocks": 1}
    loop.run()


@pytest.mark.parametrize("ahead", [False, True])
def test_chunked_prefill_off_admits_prompts_whole(ahead):
    loop = Loop(scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64), ahead)
    everyone = [request(f"r{i}", prompt(40, i), max_tokens=6) for i in range(3)]
    add(loop, *everyone)
    loop.run()
    assert [p.counts.tolist() for p in loop.plans if p.admitted] == [[40], [1, 40], [1, 1, 40]]
    assert loop.plans[0].waiting == {"budget": 1, "policy": 1}
    with pytest.raises(ValueError, match="--max-num-batched-tokens: 63 cannot hold every prompt whole"):
        scheduler(enable_chunked_prefill=False, max_num_batched_tokens=63, max_model_len=64)


def test_waiting_reasons_name_what_is_missing():
    loop = Loop(scheduler(max_num_batched_tokens=8, max_num_seqs=3), ahead=False)
    loop.scheduler.add(samples("group", prompt(10), 3))
    add(loop, request("b", prompt(6, 2)), request("c", prompt(5, 3)))
    for _ in range(3):
        loop.step()
    # the samples come in when the first of them has computed the prompt that they share
    assert [p.waiting for p in loop.plans] == [{"budget": 4}, {"slots": 2}, {"slots": 2}]
    assert [p.counts.tolist() for p in loop.plans] == [[8], [2, 2, 2], [1, 1, 1]]
    loop.run()


# -- one step ahead ------------------------------------------------------------------------------------------------------


def test_one_step_ahead_the_unknown_token_stays_on_the_device():
    loop = Loop(scheduler(), ahead=True)
    r = request("r", prompt(6), max_tokens=3)
    add(loop, r)
    loop.step()
    assert loop.plans[0].token_ids.tolist() == r.prompt_ids and r.output_ids == []
    loop.step()
    assert loop.plans[1].token_ids.tolist() == [FROM_DEVICE] and len(r.output_ids) == 1
    loop.run()
    # the end by length is foreseen: three tokens take three steps, nothing is dropped
    assert [p.out_positions.tolist() for p in loop.plans] == [[0], [1], [2]] and loop.scheduler.counters.dropped_tokens == 0


def test_in_the_plain_loop_every_id_is_known():
    loop = Loop(scheduler(), ahead=False)
    add(loop, request("r", prompt(6), max_tokens=4))
    loop.run()
    assert all(FROM_DEVICE not in p.token_ids for p in loop.plans)


def test_an_end_id_wastes_the_row_in_flight_and_nothing_else():
    loop = Loop(scheduler(), ahead=True)
    seed = next(s for s in range(200) if 2 <= len(solo(request("r", prompt(6), seed=s, ignore_eos=False, max_tokens=50), 56)[0]) <= 6)
    r = request("r", prompt(6), seed=seed, ignore_eos=False, max_tokens=50)
    add(loop, r)
    loop.run()
    assert r.output_ids[-1] == EOS and loop.outputs["r", 0][-1].finish_reason is FinishReason.STOP
    assert loop.scheduler.counters.dropped_tokens == 1 and loop.scheduler.counters.output_tokens == len(r.output_ids)


def test_a_result_in_flight_is_not_credited_to_the_slots_next_owner():
    core = scheduler(max_num_seqs=1)
    old, new = request("r", prompt(4)), request("r", prompt(4, 9))
    core.add([old])
    first = core.schedule(0)
    core.abort("r")
    core.add([new])  # the id is free again at once
    second = core.schedule(1)
    assert old.slot == -1 and new.slot == 0 and second.requests == [new]
    assert core.commit(first, StepResult(np.array([5])), 2) == [] and old.output_ids == new.output_ids == []
    (output,) = core.commit(second, StepResult(np.array([6])), 3)
    assert output.token_ids == new.output_ids == [6] and core.counters.dropped_tokens == 1


def test_a_request_preempted_in_flight_gets_its_token_and_is_not_resumed_without_it():
    core = scheduler(num_blocks=4, block_size=4, max_model_len=16)
    one, two = request("one", prompt(4), max_tokens=2), request("two", prompt(7, 7), max_tokens=8)
    core.add([one])
    core.add([two])
    first, second = core.schedule(0), core.schedule(0)
    core.commit(first, StepResult(np.array([3, 4])), 0)
    # "one" has its last token in flight; "two" needs a third block and none is free
    assert core.schedule(0) is None and two.preemptions == 1 and len(second.slots) == 2
    core.abort("one")
    assert core.blocks.num_free == 4 and core.schedule(0) is None and two.output_ids == [4]
    core.commit(second, StepResult(np.array([5, 6])), 0)
    plan = core.schedule(0)
    assert two.output_ids == [4, 6] and one.output_ids == [3] and plan.admitted == [two]
    # both its full blocks are found again, though the second was in flight; the rest is recomputed, then comes output 2
    assert plan.starts.tolist() == [8]
    assert plan.token_ids.tolist() == (two.prompt_ids + two.output_ids)[int(plan.starts[0]) :] and plan.out_positions.tolist() == [2]


def test_plans_are_committed_in_order_and_at_most_two_wait():
    core = scheduler()
    core.add([request("r", prompt(4))])
    first, second = core.schedule(0), core.schedule(0)
    with pytest.raises(RuntimeError, match="two plans are uncommitted"):
        core.schedule(0)
    with pytest.raises(RuntimeError, match="not the oldest"):
        core.commit(second, StepResult(np.array([1])), 0)
    with pytest.raises(ValueError, match="0 tokens came for the 1 sampled rows"):
        core.commit(first, StepResult(np.empty(0, np.int64)), 0)


# -- abort ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("ahead", [False, True])
def test_B01_E06_abort_at_any_moment_frees_all_at_once(ahead, steps):
    loop = Loop(scheduler(num_blocks=12, block_size=4, max_num_batched_tokens=7), ahead)
    loop.scheduler.add(samples("group", prompt(9), 4, max_tokens=20))
    add(loop, request("b", prompt(20, 3)), request("c", prompt(20, 4)))
    for _ in range(steps):
        loop.step()
    ended = [r for id in ("group", "b", "c") for r in loop.scheduler.abort(id)]
    check(loop.scheduler)
    assert len(ended) == loop.scheduler.counters.finished[FinishReason.ABORT] and all(r.status is Status.FINISHED for r in ended)
    assert loop.scheduler.num_running == loop.scheduler.num_waiting == loop.scheduler.blocks.num_used == 0
    assert loop.scheduler.abort("group") == loop.scheduler.abort("nobody") == []
    late = request("late", prompt(6))
    add(loop, late)
    loop.run()
    assert late.output_ids == solo(late, late.limit)[0]


def test_B11_an_id_in_use_is_refused_and_the_first_goes_on():
    loop = Loop(scheduler())
    first = request("id", prompt(5))
    add(loop, first)
    with pytest.raises(RequestError, match="request_id: 'id' is still being served"):
        loop.scheduler.add([request("id", prompt(5, 9))])
    loop.run()
    assert first.output_ids == solo(first, first.limit)[0]


def test_add_refuses_what_it_cannot_serve():
    core = scheduler()
    with pytest.raises(RequestError, match="prompt: is empty"):
        core.add([request("r", [])])
    with pytest.raises(ValueError, match="index 0 to n-1"):
        core.add([request("r", prompt(3), index=1)])
    embed = request("r", prompt(3))
    embed.kind = "embed"
    with pytest.raises(RequestError, match="kind"):
        core.add([embed])
    done = request("r", prompt(3), max_tokens=2)
    done.output_ids = [1, 2]
    with pytest.raises(RequestError, match="max_tokens: 2 are asked and the request brings 2 already"):
        core.add([done])
    with pytest.raises(ValueError, match="--scheduling-policy: 'fair'"):
        scheduler(policy="fair")
    assert not core.has_work


def test_a_request_that_brings_outputs_goes_on_where_it_was():
    """As after an engine crash: the front adds it again with what was sent already."""
    loop = Loop(scheduler())
    r = request("r", prompt(9), max_tokens=10)
    expected = solo(r, 19)[0]
    r.output_ids = expected[:4]
    add(loop, r)
    loop.run()
    assert r.output_ids == expected and loop.tokens("r") == expected[4:]


# -- ends, logprobs, no output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 40])
def test_max_tokens_0_computes_the_prompt_only(ahead, length):
    loop = Loop(scheduler(max_num_batched_tokens=16), ahead)
    r = request("r", prompt(length), max_tokens=0, prompt_logprobs=2)
    add(loop, r)
    loop.run()
    (output,) = loop.outputs["r", 0]
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH) and len(output.prompt_logprobs) == length
    assert sum(p.num_tokens for p in loop.plans) == length and not any(p.samples.any() for p in loop.plans)
    exact = scheduler(num_blocks=2, block_size=4, max_model_len=8)
    exact.add([request("fits", prompt(8), max_tokens=0)])  # no token to generate, so the prompt may fill it all
    with pytest.raises(RequestError):
        exact.add([request("not", prompt(8), max_tokens=1)])


def test_A06_prompt_logprobs_never_come_from_the_cache():
    values = []
    for order in ("yz", "zy"):
        loop = Loop(scheduler(num_blocks=128, max_num_batched_tokens=50))
        for tail in order:
            r = request(tail, prompt(200) + prompt(7, ord(tail)), max_tokens=1, prompt_logprobs=TOP)
            add(loop, r)
            loop.run()
            assert (r.cached_tokens, r.miss_reason) == (0, "prompt_logprobs")
        values.append({tail: [p.chosen.logprob for p in loop.outputs[tail, 0][0].prompt_logprobs[1:]] for tail in "yz"})
    assert values[0] == values[1]
    plain = request("plain", prompt(200), max_tokens=1)  # others may read what it computed
    add(loop, plain)
    loop.run()
    assert plain.cached_tokens == 196 and loop.scheduler.counters.prefix_queries == 200


@pytest.mark.parametrize("ahead", [False, True])
def test_prompt_logprobs_survive_preemption_once_each(ahead):
    loop = Loop(scheduler(num_blocks=15, block_size=2, max_num_batched_tokens=3, policy="priority"), ahead)
    r = request("r", prompt(25), max_tokens=4, prompt_logprobs=1, priority=1)
    add(loop, r)
    loop.step()
    loop.step()
    add(loop, request("first", prompt(1, 5), max_tokens=20, priority=0))
    loop.run()
    assert r.preemptions > 0 and sum(p.num_tokens for p in loop.plans if r in p.requests) > 30
    chain, got = contents(r.prompt_ids), loop.outputs["r", 0][0].prompt_logprobs
    assert [p.chosen.logprob for p in got[1:]] == [logprob(chain[i], r.prompt_ids[i + 1]) for i in range(24)]


def test_logprobs_are_cut_to_what_each_request_asked():
    loop = Loop(scheduler(), ahead=False)
    asked = {"none": None, "zero": 0, "two": 2, "three": 3}
    add(loop, *[request(id, prompt(5, i), logprobs=k, max_tokens=2) for i, (id, k) in enumerate(asked.items())])
    loop.run()
    for id, k in asked.items():
        for output in loop.outputs[id, 0]:
            assert (output.logprobs is None) == (k is None)
            if k is not None:
                assert [t.rank for t in output.logprobs[0].top] == list(range(1, k + 1))
                assert output.logprobs[0].chosen.token_id == output.token_ids[0]


# -- n > 1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_A62_siblings_go_on_when_the_leader_is_gone(steps, caching):
    loop = Loop(scheduler(max_num_batched_tokens=8, enable_prefix_caching=caching))
    group = samples("u", prompt(18), 3, max_tokens=6)
    loop.scheduler.add(group)
    for _ in range(steps):
        loop.step()
    assert loop.scheduler.abort("u", 0, FinishReason.STOP, "x") == [group[0]] and group[0].stop_reason == "x"
    loop.run()
    for r in group[1:]:
        assert loop.tokens("u", r.index) == solo(r, r.limit)[0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("length", "counts"), [(4, [4, 4, 4]), (9, [9, 1, 1]), (12, [12, 4, 4])])
def test_siblings_share_the_prompt_in_the_step_that_computes_it(length, counts, caching):
    loop = Loop(scheduler(block_size=4, enable_prefix_caching=caching), ahead=False)
    group = samples("u", prompt(length), 3, prompt_logprobs=1)  # the first alone computes these
    loop.scheduler.add(group)
    loop.step()
    assert loop.plans[0].counts.tolist() == counts and [r.cached_tokens for r in group] == [length - n for n in counts]
    loop.run()
    assert [len(loop.outputs["u", i][0].prompt_logprobs or ()) for i in range(3)] == [length, 0, 0]


def test_one_sample_of_many_may_end_alone():
    loop = Loop(scheduler())
    group = samples("u", prompt(9), 3, max_tokens=10)
    loop.scheduler.add(group)
    for _ in range(6):
        loop.step()
    assert [r.index for r in loop.scheduler.abort("u", 1)] == [1]
    loop.run()
    assert [len(r.output_ids) for r in group][::2] == [10, 10] and len(group[1].output_ids) < 10
    assert loop.scheduler.counters.finished == {FinishReason.LENGTH: 2, FinishReason.ABORT: 1}
