"""What LLM does beside the device: whose lists it keeps, what it leaves behind, when Python's garbage collector may run."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import make

from flatout import LLM, SamplingParams
from flatout.llm import _no_full_collection
from flatout.request import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
rng = np.random.default_rng(5)


def ids(n: int) -> list[int]:
    return rng.integers(5, 250, n).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    checkpoint = make("llama", tmp_path_factory.mktemp("host"))
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=8, max_model_len=256, num_gpu_blocks_override=64, device="cpu") as llm:
        yield llm


def test_results_hold_lists_of_their_own(llm):
    prompt = ids(9)
    kept = list(prompt)
    one, two = llm.generate([prompt, prompt], GREEDY)
    one.prompt_token_ids += one.outputs[0].token_ids
    assert prompt == two.prompt_token_ids == kept and two.prompt_token_ids is not prompt


def test_a_stream_does_not_follow_changes_of_the_list_it_was_given(llm):
    prompt = ids(20)
    expected = llm.generate([list(prompt)], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream(prompt, GREEDY)
    got = list(next(stream).token_ids)
    (live,) = llm._live.values()
    prompt[:] = []
    got += [token for delta in stream for token in delta.token_ids]
    assert got == expected and len(live.request.prompt_ids) == 20


def test_streams_go_on_while_generate_runs_and_nothing_is_left(llm):
    first, second = ids(12), ids(7)
    alone = [o.outputs[0].token_ids for o in llm.generate([first, second], GREEDY)]
    stream = llm.stream(first, GREEDY)
    got = list(next(stream).token_ids)
    (result,) = llm.generate([second], GREEDY)
    got += [token for delta in stream for token in delta.token_ids]
    assert [got, result.outputs[0].token_ids] == alone
    assert not llm._live and not llm.engine.scheduler.has_work


def test_no_full_collection_while_the_device_works(llm, monkeypatch):
    before, seen, step = gc.get_threshold(), [], llm.engine.step

    def looking():
        seen.append(gc.get_threshold())
        return step()

    monkeypatch.setattr(llm.engine, "step", looking)
    llm.generate([ids(9)], GREEDY)
    list(llm.stream(ids(9), GREEDY))
    assert seen and {each[:2] for each in seen} == {before[:2]} and min(each[2] for each in seen) > 10**6
    assert gc.get_threshold() == before
    with pytest.raises(RequestError):
        llm.generate([ids(9), [-1]], GREEDY)
    assert gc.get_threshold() == before and not llm._live


def test_full_collections_come_back_when_the_last_of_several_threads_is_done():
    """Two LLMs in two threads: the one that began first ends first."""
    before, both, one_left = gc.get_threshold(), threading.Event(), threading.Event()

    def second() -> None:
        with _no_full_collection:
            both.set()
            one_left.wait()
            assert gc.get_threshold()[2] > 10**6

    with ThreadPoolExecutor(1) as pool:
        with _no_full_collection:
            other = pool.submit(second)
            both.wait()
        one_left.set()
        other.result()
    assert gc.get_threshold() == before


def test_an_llm_that_is_dropped_is_gone_without_the_collector(llm):
    """Its weights with it: nothing that it holds leads back to it."""
    import weakref

    other = LLM(llm.config.model.model, dtype="float32", max_num_seqs=4, max_model_len=64, num_gpu_blocks_override=16, device="cpu")
    other.generate([ids(5)], GREEDY)
    gc.disable()
    try:
        traces = [weakref.ref(each) for each in (other, other.engine, other.engine.runner, other.engine.runner.decoder)]
        other.close()
        del other
        assert [trace() for trace in traces] == [None] * 4
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    checkpoint = make("llama", tmp_path_factory.mktemp("early"))
    return lambda **options: LLM(
        str(checkpoint), dtype="float32", max_num_seqs=8, max_model_len=1024, num_gpu_blocks_override=512, device="cpu", **options
    )


@pytest.mark.parametrize("options, early", [({}, True), ({"async_scheduling": False}, False), ({"scheduling_policy": "priority"}, False)])
def test_the_device_begins_before_all_are_admitted(roomy, monkeypatch, options, early):
    """By priority it may not, as whoever is admitted last may be the first to go; a step that is waited for hides nothing."""
    prompts = [ids(900) for _ in range(7)]
    with roomy(**options) as llm:
        (alone,) = llm.generate([prompts[0]], GREEDY, cache_salt="alone")
        admitted, begun = [], []
        add, step = llm.engine.add, llm.engine.step
        monkeypatch.setattr(llm.engine, "add", lambda requests: (admitted.append(1), add(requests))[1])
        monkeypatch.setattr(llm.engine, "step", lambda: (begun.append(len(admitted)), step())[1])
        results = llm.generate(prompts, GREEDY)
        assert begun[:2] == ([5, 7] if early else [7, 7]), "of the prompts that were admitted, at the first two steps"
        assert results[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert all(len(r.outputs[0].token_ids) == 6 for r in results)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("error", [RequestError("prompt", "is not wanted"), KeyboardInterrupt()], ids=["refusal", "interrupt"])
def test_what_ends_the_admission_after_the_device_began_leaves_nothing(roomy, monkeypatch, error, added):
    prompts = [ids(900) for _ in range(7)]
    with roomy() as llm:
        add, admitted = llm.engine.add, []

        def end(requests):
            admitted.append(1)
            if len(admitted) < 7 or added:
                add(requests)
            if len(admitted) == 7:
                raise error

        monkeypatch.setattr(llm.engine, "add", end)
        with pytest.raises(type(error)):
            llm.generate(prompts, GREEDY)
        monkeypatch.setattr(llm.engine, "add", add)
        assert not llm._live
        assert len(llm.generate([prompts[0]], GREEDY)[0].outputs[0].token_ids) == 6
        assert not llm.engine.has_work and not llm.engine.scheduler.num_running
