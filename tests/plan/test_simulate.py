"""Loads on a virtual clock: times by hand where a step takes a second, and the same steps as a real engine makes."""

import json
from dataclasses import replace

import pytest

from flatout import LLM, SamplingParams
from flatout.config import Config
from flatout.ledger.table import CostTable, Roof
from flatout.plan.simulate import Load, simulate
from flatout.request import RequestError

SECONDS = CostTable("toy", (), (), (None,), Roof("toy", ()), step_s=1.0, loose_s=1.0)  # any step takes one


def config(**changed) -> Config:
    plain = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4, "async_scheduling": False}
    return Config.make(**{**plain, **changed})


def test_one_request_by_hand():
    # 20 tokens of prompt by 8 a step: three steps to the first token, two more for the others
    found = simulate(config(), SECONDS, 32, Load(requests=1, prompt=20, output=3))
    assert (found.seconds, found.ttft, found.tpot, found.steps) == (5.0, 3.0, 1.0, 5)
    assert found.tokens_s == 3 / 5 and found.busy == 1.0 and found.e2e == 5.0


def test_a_step_ahead_adds_no_time():
    plain = simulate(config(), SECONDS, 32, Load(requests=3, prompt=5, output=4))
    ahead = simulate(config(async_scheduling=True), SECONDS, 32, Load(requests=3, prompt=5, output=4))
    assert ahead.output_tokens == plain.output_tokens == 12
    assert ahead.seconds == plain.seconds


def test_slots_make_requests_wait_and_say_so():
    few = simulate(config(max_num_seqs=1), SECONDS, 32, Load(requests=4, prompt=4, output=4))
    many = simulate(config(), SECONDS, 32, Load(requests=4, prompt=4, output=4))
    assert few.seconds == 16.0 and many.seconds < 8
    assert few.waiting.get("slots", 0) > 0 and "slots" not in many.waiting


def test_a_small_pool_preempts():
    found = simulate(config(max_num_batched_tokens=16), SECONDS, 8, Load(requests=4, prompt=4, output=20))
    assert found.preemptions > 0 and found.output_tokens == 80
    assert simulate(config(max_num_batched_tokens=16), SECONDS, 64, Load(requests=4, prompt=4, output=20)).preemptions == 0


def test_arrivals_far_below_capacity_leave_the_device_idle():
    found = simulate(config(), SECONDS, 32, Load(requests=50, prompt=4, output=2, rate=0.05))
    assert found.busy < 0.25
    assert 1.0 <= found.ttft < 2.0  # what it takes, and at most a step that runs


def test_arrivals_above_capacity_queue():
    found = simulate(config(), SECONDS, 32, Load(requests=60, prompt=4, output=8, rate=5.0))
    assert found.busy > 0.98 and found.ttft > 20


def test_a_closed_loop_keeps_so_many_requests():
    found = simulate(config(), SECONDS, 32, Load(requests=12, prompt=4, output=4, concurrency=2))
    assert found.rows <= 2.0 and found.output_tokens == 48
    assert found.ttft <= 2.0  # nobody stands in a queue


def test_a_shared_head_is_cached():
    found = simulate(config(max_num_batched_tokens=32), SECONDS, 64, Load(requests=4, prompt=24, output=2, shared=16, concurrency=1))
    assert found.cached_tokens == 3 * 16
    assert simulate(config(enable_prefix_caching=False), SECONDS, 64, Load(4, 24, 2, shared=16)).cached_tokens == 0


def test_longer_steps_take_longer():
    load = Load(requests=8, prompt=10, output=10)
    slow = simulate(config(), replace(SECONDS, step_s=2.0, loose_s=2.0), 32, load)
    assert slow.seconds == 2 * simulate(config(), SECONDS, 32, load).seconds


def test_the_host_hides_behind_the_device_only_where_it_is_faster():
    load = Load(requests=1, prompt=4, output=21)
    quick, slow = (replace(SECONDS, host_s=seconds) for seconds in (0.5, 3.0))
    assert simulate(config(async_scheduling=True), quick, 32, load).seconds == pytest.approx(21.5)  # but for the first
    assert simulate(config(async_scheduling=True), slow, 32, load).seconds == pytest.approx(21 * 3.0 + 1.0, abs=3.0)
    assert simulate(config(), quick, 32, load).seconds == pytest.approx(21 * 1.5)


def test_what_can_never_fit_is_refused():
    with pytest.raises(RequestError):
        simulate(config(), SECONDS, 32, Load(requests=1, prompt=100, output=3))


@pytest.mark.parametrize("changed", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 24}, {"num_gpu_blocks_override": 24}])
def test_the_steps_are_those_of_a_real_engine(tiny, changed):
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "num_gpu_blocks_override": 256,
        "block_size": 4,
        **changed,
    }
    load = Load(requests=10, prompt=21, output=9)
    with LLM(tiny, load_format="dummy", dtype="float32", async_scheduling=False, **options) as llm:
        requests = llm.generate(
            [r.prompt_ids for r in load.made()], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), use_tqdm=False
        )
        records = list(llm.engine.records)
        found = simulate(llm.config, SECONDS, llm.engine.scheduler.blocks.num_blocks, load)
    assert found.steps == len(records)
    assert found.rows == sum(r.rows for r in records) / len(records)
    assert found.preemptions == sum(r.preempted for r in records)
    assert found.output_tokens == sum(len(r.outputs[0].token_ids) for r in requests)
    assert json.loads(json.dumps(found.to_json()))["steps"] == found.steps
