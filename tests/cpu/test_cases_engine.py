"""Public bug reports (ids as in the tests' names) as black-box tests of LLM in float32 on the CPU, on a tiny random model."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from checkpoints import make

from flatout import LLM, SamplingParams
from flatout.request import FinishReason, RequestError

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
rng = np.random.default_rng(3)


def ids(n: int) -> list[int]:
    return rng.integers(5, 250, n).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def build(checkpoint):
    made = []

    def make_llm(**options) -> LLM:
        defaults = {
            "dtype": "float32",
            "block_size": BLOCK,
            "max_num_seqs": 32,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 512,
            "device": "cpu",
        }
        made.append(LLM(str(checkpoint), **{**defaults, **options}))
        return made[-1]

    yield make_llm
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def llm(build):
    return build()


@pytest.fixture(scope="module")
def plain(build):
    """The reference: no prefix cache, no step ahead."""
    return build(enable_prefix_caching=False, async_scheduling=False)


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("length", (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1))
def test_a03_fully_cached_prompt(llm, plain, length):
    prompt = ids(length)
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == tokens(plain, prompt)
    assert first.cached_tokens == 0
    assert second.cached_tokens == (length - 1) // BLOCK * BLOCK


def test_a05_recycled_blocks_never_serve_old_prompts(build, plain):
    small = build(num_gpu_blocks_override=12)
    prompts = [ids(3 * BLOCK) for _ in range(5)]
    expected = [tokens(plain, p) for p in prompts]
    order = rng.integers(0, 5, 50)
    for i in order:
        assert tokens(small, prompts[i]) == expected[i]
        assert small.engine.scheduler.blocks.num_used == 0


def test_a06_prompt_logprobs_do_not_depend_on_the_cache(build, plain):
    shared, params = ids(200), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    first, second = shared + ids(20), shared + ids(30)
    expected = {0: plain.generate([first], params)[0].prompt_logprobs, 1: plain.generate([second], params)[0].prompt_logprobs}
    for order in ((0, 1), (1, 0)):
        fresh = build(max_num_batched_tokens=64)
        for which in order:
            got = fresh.generate([(first, second)[which]], params)[0].prompt_logprobs
            assert got[0] is None and len(got) == len((first, second)[which])
            for a, b in zip(got[1:], expected[which][1:]):
                assert list(a) == list(b)
                assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


def test_a09_hits_and_misses_in_one_step(build, plain):
    llm = build()
    head = ids(256)
    llm.generate([head], GREEDY)
    prompts = [head + ids(3), head + ids(70), ids(5), ids(400)]
    results = llm.generate(prompts, GREEDY)
    assert [r.outputs[0].token_ids for r in results] == [tokens(plain, p) for p in prompts]
    assert [r.cached_tokens for r in results] == [256, 256, 0, 0]


@pytest.mark.parametrize("asynchronous", (True, False))
def test_requests_that_come_together_compute_their_prefix_once(build, plain, asynchronous):
    llm = build(async_scheduling=asynchronous, max_num_seqs=256, max_num_batched_tokens=1024)
    head = ids(32 * BLOCK)
    prompts = [[*head, 5 + i % 200, 5 + i // 200] for i in range(256)]
    results = llm.generate(prompts, GREEDY.but(max_tokens=3))
    assert [r.outputs[0].token_ids for r in results[::37]] == [tokens(plain, p, GREEDY.but(max_tokens=3)) for p in prompts[::37]]
    core = llm.engine.scheduler
    # the prefix, two tokens of each prompt, and two of three answers
    assert core.counters.computed_tokens == len(head) + 256 * (2 + 2)
    assert [r.cached_tokens for r in results] == [0] + [len(head)] * 255
    before = core.counters.computed_tokens
    llm.generate([head], SamplingParams(n=3, temperature=1, max_tokens=2, ignore_eos=True), cache_salt="n")
    # the last token is computed for each of them, so its whole block is
    assert core.counters.computed_tokens - before == len(head) + 2 * BLOCK + 3


def test_a10_salts_keep_tenants_apart(build):
    llm = build()
    prompt = ids(500)
    cached = [llm.generate([prompt], GREEDY, cache_salt=salt)[0].cached_tokens for salt in ("a", "b", "a", "a|b", "|b", "a|b")]
    assert cached == [0, 0, 496, 0, 0, 496]


def test_a11_budget_does_not_change_the_answer(build, plain):
    chunked = build(max_num_batched_tokens=64)
    prompts = [ids(n) for n in (63, 64, 65, 127, 128, 129, 1000)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    expected = [tokens(plain, p, params) for p in prompts]
    assert [tokens(chunked, p, params) for p in prompts] == expected
    assert [r.outputs[0].token_ids for r in chunked.generate(prompts[:6], params)] == expected[:6]


def test_a13_answers_do_not_depend_on_the_crowd(llm, plain):
    prompt, params = ids(40), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    expected = tokens(plain, prompt, params)
    for others in (1, 3, 7, 15, 31):
        crowd = [ids(int(n)) for n in rng.integers(1, 200, others)]
        assert llm.generate([prompt, *crowd], params)[0].outputs[0].token_ids == expected


def test_a15_preemption_loses_nothing(build, plain):
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    prompts = [ids(200) for _ in range(4)]
    small = build(num_gpu_blocks_override=56)  # 1.5 sequences of 600 tokens
    results = small.generate(prompts, params)
    assert sum(r.preemptions for r in results) > 0
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in plain.generate(prompts, params)]
    assert all(len(r.outputs[0].token_ids) == 400 for r in results)


def test_a36_ignore_eos_and_user_stop_ids(llm):
    end = llm.facts.eos_ids[0]
    forced = {"logit_bias": {end: 100.0}, "temperature": 0, "max_tokens": 20}
    assert tokens(llm, ids(4), SamplingParams(**forced)) == [end]
    assert tokens(llm, ids(4), SamplingParams(**forced, ignore_eos=True)) == [end] * 20
    (result,) = llm.generate([ids(4)], SamplingParams(**forced, ignore_eos=True, stop_token_ids=[end]))
    assert result.outputs[0].token_ids == [end] and result.outputs[0].finish_reason == "stop" and result.outputs[0].stop_reason == end


def test_a38_seeds(build):
    llm, again = build(), build()
    prompt = ids(12)
    seeded, free = SamplingParams(temperature=1, seed=42, max_tokens=32), SamplingParams(temperature=1, max_tokens=32)
    results = [r.outputs[0].token_ids for r in llm.generate([prompt] * 16, [seeded] * 8 + [free] * 8)]
    assert all(r == results[0] for r in results[:8])
    assert len({tuple(r) for r in results[8:]}) > 1
    assert tokens(again, prompt, seeded) == results[0]
    for seed in (0, -1, 2**63 - 1, 2**64 - 1):
        assert tokens(llm, prompt, seeded.but(seed=seed)) == tokens(llm, prompt, seeded.but(seed=seed))
    with pytest.raises(RequestError, match="seed"):
        seeded.but(seed=2**64)


def test_a39_penalties_in_a_mixed_batch(llm, plain):
    kinds = [
        (ids(20), SamplingParams(temperature=0, max_tokens=40, repetition_penalty=2.0)),
        (ids(9), SamplingParams(seed=99, top_k=1, max_tokens=40)),
        (ids(300), SamplingParams(temperature=0, max_tokens=40, frequency_penalty=1.05)),
    ]
    solo = [tokens(plain, p, s) for p, s in kinds]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        results = llm.generate([kinds[i][0] for i in order], [kinds[i][1] for i in order])
        assert [r.outputs[0].token_ids for r in results] == [solo[i] for i in order]


def test_a41_penalty_counts_cached_prompt_tokens(build):
    llm = build()
    prompt = ids(8) * 6
    params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5, ignore_eos=True)
    first, second = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert second.cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != tokens(llm, prompt, params.but(repetition_penalty=1.0))


def test_a44_a45_logprobs_head_their_own_list(llm):
    for top in (0, 1, 5, 20):
        (result,) = llm.generate([ids(10)], SamplingParams(temperature=0, max_tokens=30, logprobs=top, ignore_eos=True))
        out = result.outputs[0]
        assert len(out.logprobs) == len(out.token_ids) == 30
        for token, position in zip(out.token_ids, out.logprobs):
            assert next(iter(position)) == token and position[token].rank == 1
            assert len(position) == max(top, 1)
            values = [p.logprob for p in position.values()]
            assert values == sorted(values, reverse=True)
    with pytest.raises(RequestError, match="logprobs"):
        SamplingParams(logprobs=21)


def test_a48_prompt_logprobs_without_generation(llm):
    prompt = ids(100)
    (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1))
    assert result.outputs[0].token_ids == [] and result.outputs[0].finish_reason == "length"
    assert len(result.prompt_logprobs) == 100 and result.prompt_logprobs[0] is None
    assert all(token in position for token, position in zip(prompt[1:], result.prompt_logprobs[1:]))


@pytest.mark.parametrize("prompt", ([], [-1], [1, 999999], [1.5], [True], {"prompt_token_ids": []}, ""))
def test_a52_a54_bad_prompts_are_refused(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate([prompt], GREEDY)
    assert len(tokens(llm, ids(3))) == 8


def test_a50_a52_ids_outside_the_vocabulary(llm):
    for field in ({"logit_bias": {191222: -100.0}}, {"stop_token_ids": [99999]}, {"allowed_token_ids": [99999]}):
        with pytest.raises(RequestError, match=next(iter(field))):
            llm.generate([ids(3)], SamplingParams(**field))


def test_a55_max_tokens_is_an_upper_bound(build):
    llm = build(max_model_len=128)
    (result,) = llm.generate([ids(100)], SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 28 and result.outputs[0].finish_reason == "length"
    assert len(tokens(llm, ids(127), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))) == 1
    with pytest.raises(RequestError, match=r"128"):
        llm.generate([ids(128)], GREEDY)


def test_b03_a_prompt_that_cannot_fit_the_pool(build):
    llm = build(num_gpu_blocks_override=8)  # 128 tokens
    with pytest.raises(RequestError, match="128"):
        llm.generate([ids(200)], GREEDY)
    (result,) = llm.generate([ids(100)], SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True))
    assert result.outputs[0].finish_reason == "length" and len(result.outputs[0].token_ids) == 28


def test_a62_n_samples_with_indices(llm):
    for n in (2, 4, 8):
        (result,) = llm.generate([ids(30)], SamplingParams(n=n, temperature=1, seed=5, max_tokens=12))
        assert [o.index for o in result.outputs] == list(range(n))
        assert len({tuple(o.token_ids) for o in result.outputs}) > 1
    for n in (0, 1000):
        with pytest.raises(RequestError, match="n:"):
            SamplingParams(n=n)


def test_streams_interleave_and_close_early(llm, plain):
    prompts = [ids(10), ids(20)]
    first, second = (llm.stream(p, GREEDY.but(max_tokens=30)) for p in prompts)
    got = [next(first).token_ids, next(second).token_ids]
    first.close()
    rest = [t for d in second for t in d.token_ids]
    assert got[1] + rest == tokens(plain, prompts[1], GREEDY.but(max_tokens=30))
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.scheduler.blocks.num_used == 0


def failing(llm, monkeypatch, times: int) -> None:
    """The next `times` steps raise before their forward, whatever runs that."""
    run, left = llm.engine.runner._run, iter(range(times))

    def broken(plan, *rest):
        if next(left, None) is None:
            return run(plan, *rest)
        raise MemoryError("injected")

    monkeypatch.setattr(llm.engine.runner, "_run", broken)


@pytest.mark.parametrize("asynchronous", (True, False))
@pytest.mark.parametrize("times", (1, 2, 3, 7))
def test_an_llm_outlives_failing_steps(build, plain, monkeypatch, asynchronous, times):
    llm = build(async_scheduling=asynchronous)
    failing(llm, monkeypatch, times)
    prompt, failures = ids(5), 0
    while True:
        try:
            assert tokens(llm, prompt) == tokens(plain, prompt)
            break
        except RuntimeError as error:
            assert "injected" in str(error)
            failures += 1
    assert 1 <= failures <= times
    assert llm.engine.failure is None
    assert llm.engine.scheduler.blocks.num_used == 0


def test_a_request_that_shares_what_a_failing_step_computes_is_computed_anew(build, plain, monkeypatch):
    llm, prompt = build(), ids(3 * BLOCK + 2)
    failing(llm, monkeypatch, 1)
    (first,), (second,) = (llm._prepare(prompt, GREEDY) for _ in range(2))
    llm.engine.add([first])
    outputs = llm.engine.step()
    llm.engine.add([second])  # the next step is launched with it, then the failing one is committed
    while llm.engine.has_work:
        outputs += llm.engine.step()
    (error,) = [o for o in outputs if o.error]
    assert error.id == first.id and first.finish_reason is FinishReason.ERROR and first.output_ids == []
    assert [t for o in outputs if o.id == second.id for t in o.token_ids] == tokens(plain, prompt)
    assert (second.cached_tokens, second.preemptions) == (3 * BLOCK, 1)
    assert tokens(llm, prompt) == tokens(plain, prompt) and llm.engine.scheduler.blocks.num_used == 0


def test_a_failing_step_is_told_to_a_stream(build, monkeypatch):
    llm = build()
    stream = llm.stream(ids(5), GREEDY)
    next(stream)
    failing(llm, monkeypatch, 1)
    with pytest.raises(RuntimeError, match="injected"):
        list(stream)
    assert len(tokens(llm, ids(5))) == 8


def test_every_stream_hears_of_steps_that_keep_failing(build, monkeypatch):
    llm = build()
    streams = [llm.stream(ids(5), GREEDY) for _ in range(3)]
    for stream in streams:
        next(stream)
    failing(llm, monkeypatch, 9)
    for stream in streams:
        with pytest.raises(RuntimeError, match="injected"):
            list(stream)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected"):
            llm.generate([ids(5)], GREEDY)
    assert isinstance(llm.engine.failure, MemoryError)


@pytest.mark.parametrize("asynchronous", (True, False))
def test_ctrl_c_leaves_the_llm_usable(build, plain, asynchronous):
    llm, prompt = build(async_scheduling=asynchronous), ids(5)
    expected = tokens(plain, prompt)
    for delay in (0.02, 0.05, 0.1, 0.15):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([ids(3)] * 4, SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True))
        assert tokens(llm, prompt) == expected
        assert llm.engine.scheduler.blocks.num_used == 0 and not llm.engine.has_work


def test_a_closed_llm_says_so(build):
    llm = build()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([ids(3)], GREEDY)


@pytest.mark.parametrize("prompts", (None, 5, [None], [5.0], [[1.0]], {3, "a"}))
def test_prompts_of_other_kinds_are_refused(llm, prompts):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, GREEDY)


def test_options_that_would_do_nothing_are_refused(llm):
    with pytest.raises(RequestError, match="priority"):
        llm.generate([ids(3)], GREEDY, priority=[1])
    with pytest.raises(RequestError, match="tools"):
        llm.stream(ids(3), GREEDY, tools=[])
    for params in ({"max_tokens": 3}, [None], 5):
        with pytest.raises(RequestError, match="sampling_params"):
            llm.generate([ids(3)], params)


def test_what_the_engine_thread_does_meanwhile_does_not_reach_a_launched_step(build, plain):
    """A request may leave its slot between the plan and the compute thread's look at it."""
    llm = build()
    prompts = [ids(12), ids(9)]
    params = [SamplingParams(temperature=1, seed=3, max_tokens=20, repetition_penalty=1.3, ignore_eos=True), GREEDY]
    launch = llm.engine.runner.launch

    def late(plan):
        slots = [r.slot for r in plan.admitted]
        for request in plan.admitted:
            request.slot = -1
        handle = launch(plan)
        handle()
        for request, slot in zip(plan.admitted, slots):
            request.slot = slot
        return handle

    llm.engine.runner.launch = late
    expected = [r.outputs[0].token_ids for r in plain.generate(prompts, params)]
    assert [r.outputs[0].token_ids for r in llm.generate(prompts, params)] == expected


def test_a_preempted_request_keeps_its_prompt_logprobs(build, plain):
    prompts, params = [ids(100) for _ in range(3)], SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=2, ignore_eos=True)
    small = build(num_gpu_blocks_override=16, max_num_batched_tokens=48)
    results = small.generate(prompts, params)
    assert sum(r.preemptions for r in results) > 0
    for got, expected in zip(results, plain.generate(prompts, params)):
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
        for a, b in zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)
