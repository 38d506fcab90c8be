"""Public bug reports about caches, chunks, preemption and n > 1, replayed on core/ with a fake device. Names carry the report's id."""

from __future__ import annotations

import random

import pytest
from core_fakes import VOCABULARY, Loop, request, samples, scheduler, solo

from flatout.core.prefix import root
from flatout.request import FinishReason, RequestError

MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def serve(loop: Loop, *requests) -> None:
    """All at once, to the end; each equals its solo run."""
    for r in requests:
        loop.scheduler.add([r])
    loop.run(most=loop.steps + 20_000)
    for r in requests:
        assert r.output_ids == solo(r, r.limit)[0] == loop.tokens(r.id)


@MODES
def test_A01_stop_string_then_same_head_equals_cache_off(ahead):
    head, results = words(1, 300), {}
    for caching in (True, False):
        loop = Loop(scheduler(num_blocks=256, block_size=16, max_model_len=512, enable_prefix_caching=caching), ahead)
        batch = [request(f"few{i}", head + words(10 + i, 20), max_tokens=64) for i in range(8)]
        for r in batch:
            loop.scheduler.add([r])
        while loop.busy:
            for output in loop.step():
                # the text side finds "\nQ:" after some tokens, each at another length
                if len(loop.tokens(output.id)) == 5 + int(output.id[3:]):
                    loop.scheduler.abort(output.id, 0, FinishReason.STOP, "\nQ:")
        again = request("again", head + words(99, 20), max_tokens=32)
        serve(loop, again)
        results[caching] = again.output_ids
        assert again.cached_tokens == (288 if caching else 0)
        assert loop.scheduler.counters.finished[FinishReason.STOP] == 8
    assert results[True] == results[False]


@MODES
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_A03_fully_cached_prompt_still_computes_a_token(ahead, length):
    loop = Loop(scheduler(block_size=4), ahead)
    first, second = (request(id, words(2, length)) for id in ("first", "second"))
    serve(loop, first)
    serve(loop, second)
    assert first.output_ids == second.output_ids and first.cached_tokens == 0
    assert second.cached_tokens == (length - 1) // 4 * 4 < length
    assert second.miss_reason == ("too short" if length <= 4 else "")


@MODES
def test_A05_recycled_blocks_never_answer_for_their_former_content(ahead):
    loop, rng = Loop(scheduler(num_blocks=12, block_size=4, max_model_len=48), ahead), random.Random(5)
    prompts = {name: words(ord(name), 12) for name in "ABCDE"}
    replies: dict[str, set[tuple[int, ...]]] = {name: set() for name in prompts}
    for turn in range(50):
        order = [*"ABCDE", "A"] if turn == 0 else rng.sample([*"ABCDEA"], 6)
        for i, name in enumerate(order):
            r = request(f"{name}{turn}.{i}", prompts[name], max_tokens=4)
            serve(loop, r)
            replies[name].add(tuple(r.output_ids))
            assert loop.scheduler.blocks.num_free == 12
    assert all(len(seen) == 1 for seen in replies.values())
    assert loop.scheduler.blocks.evictions > 0 and loop.scheduler.counters.prefix_hits > 0


@MODES
def test_A09_hits_and_misses_in_one_step(ahead):
    loop = Loop(scheduler(num_blocks=256, block_size=16, max_num_batched_tokens=2048, max_model_len=512), ahead)
    head = words(3, 256)
    serve(loop, request("warm", head + words(4, 2)))
    mixed = [request("a", head + words(5, 3)), request("b", words(6, 5)), request("c", head + words(7, 70)), request("d", words(8, 400))]
    serve(loop, *mixed)
    plan = next(p for p in loop.plans if len(p.admitted) == 4)
    assert plan.starts.tolist() == [256, 0, 256, 0] and plan.counts.tolist() == [3, 5, 70, 400]


def test_A10_salts_keep_prompts_apart_and_lookalikes_never_share():
    loop = Loop(scheduler(num_blocks=256, block_size=16, max_model_len=1024, max_num_batched_tokens=1024))
    prompt = words(9, 500)
    cached = []
    for i, salt in enumerate(["a", "b", "a", "", "a|b", "b"]):
        r = request(f"r{i}", prompt, salt=salt)
        serve(loop, r)
        cached.append((r.cached_tokens, r.miss_reason))
    # the reason never tells whether somebody else asked the same
    assert cached == [(0, "salted"), (0, "salted"), (496, ""), (0, "differs at token 0"), (0, "salted"), (496, "")]
    roots = [root("salt", s) for s in ("a", "b", "a|b", "")] + [
        root("salt", "a", "|b"),
        root("salt", "a|b", ""),
        root("salta"),
        root("samples", "a"),
    ]
    assert len(set(roots)) == len(roots)


@MODES
def test_A11_chunks_change_nothing(ahead):
    results = []
    for budget in (64, 4096):
        loop = Loop(scheduler(num_blocks=512, block_size=16, max_num_batched_tokens=budget, max_model_len=2048), ahead)
        lengths = [63, 64, 65, 127, 128, 129, 1000]
        alone = [request(f"alone{n}", words(n, n), max_tokens=32) for n in lengths]
        for r in alone:
            serve(loop, r)
        crowd = [request(f"crowd{i}", words(i, 130), max_tokens=32) for i in range(6)]
        serve(loop, *crowd)
        results.append([r.output_ids for r in alone + crowd])
        assert max(p.num_tokens for p in loop.plans) <= budget
    assert results[0] == results[1]


@MODES
@pytest.mark.parametrize("caching", [False, True])
def test_A15_preemption_loses_and_repeats_nothing(ahead, caching):
    blocks = 600 * 3 // 2 // 16  # a pool for one and a half sequences
    options = {"max_num_batched_tokens": 256, "max_model_len": 1024, "block_size": 16, "enable_prefix_caching": caching}
    loop = Loop(scheduler(num_blocks=blocks, **options), ahead)
    crowd = [request(f"r{i}", words(20 + i, 200), max_tokens=400) for i in range(4)]
    serve(loop, *crowd)
    assert loop.scheduler.counters.preemptions > 0 and max(r.preemptions for r in crowd) > 0
    assert all(len(r.output_ids) == 400 for r in crowd)
    assert [loop.outputs[r.key][-1].preemptions for r in crowd] == [r.preemptions for r in crowd]


@MODES
def test_A41_sampling_state_is_loaded_whole_after_a_hit_and_after_preemption(ahead):
    """Penalties need all prompt and output ids: each admission names the request again, and they are all there at launch."""
    loop = Loop(scheduler(num_blocks=7, block_size=4, max_model_len=28), ahead)
    launch, loads = loop.device.launch, []

    def recording(plan):
        launch(plan)
        loads.extend((slot, r.key, list(tokens)) for slot, r, tokens in loop.device.loads[-len(plan.admitted) :] if plan.admitted)

    loop.device.launch = recording
    prompt = words(30, 9)
    first, second = (request(id, prompt, max_tokens=6) for id in ("first", "second"))
    serve(loop, first)
    serve(loop, second)
    assert second.cached_tokens == 8 and [tokens for _, _, tokens in loads] == [prompt, prompt]
    assert first.output_ids == second.output_ids
    crowd = [request(f"r{i}", words(31 + i, 6), max_tokens=18) for i in range(2)]
    serve(loop, *crowd)
    victim = crowd[1]
    mine = [tokens for _, key, tokens in loads if key == victim.key]
    assert victim.preemptions == len(mine) - 1 > 0 and crowd[0].preemptions == 0
    assert all(tokens == (victim.prompt_ids + victim.output_ids)[: len(tokens)] and len(tokens) > 6 for tokens in mine[1:])


@MODES
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_A62_all_samples_come_back(ahead, caching, n):
    loop = Loop(scheduler(num_blocks=64, max_num_seqs=5, enable_prefix_caching=caching), ahead)
    for turn in range(10):
        group = samples(f"u{turn}", words(40 + turn, 13), n, seed=turn, ignore_eos=False, stop_token_ids=[3], max_tokens=20)
        loop.scheduler.add(group)
        loop.run(most=loop.steps + 400)
        assert [key for key in loop.outputs if key[0] == f"u{turn}"] != []
        for r in group:
            outputs, reason, stop_reason = solo(r, r.limit)
            assert loop.tokens(r.id, r.index) == outputs and (r.finish_reason, r.stop_reason) == (reason, stop_reason)
        # the prompt is computed once, in whole blocks, and shared without a copy, cache on or off
        assert [r.cached_tokens for r in group[1:]] == [12] * (n - 1)
        assert group[0].miss_reason.startswith("differs" if caching else "off") and group[1].miss_reason == ""
    assert sorted({index for _, index in loop.outputs}) == list(range(n))


def test_A62_samples_hold_the_same_blocks_and_nobody_else_gets_them_when_caching_is_off():
    loop = Loop(scheduler(enable_prefix_caching=False), ahead=False)
    prompt = words(50, 13)
    group = samples("u", prompt, 3, max_tokens=30)
    loop.scheduler.add(group)
    for _ in range(4):
        loop.step()
    assert group[0].blocks[:3] == group[1].blocks[:3] == group[2].blocks[:3] and len({r.blocks[3] for r in group}) == 3
    assert [loop.scheduler.blocks.refs[b] for b in group[0].blocks[:3]] == [3, 3, 3]
    other, twin = request("other", prompt), samples("twin", prompt, 2)
    loop.scheduler.add([other])
    loop.scheduler.add(twin)
    loop.run()
    assert (other.cached_tokens, other.miss_reason) == (0, "off") and (twin[0].cached_tokens, twin[0].miss_reason) == (0, "off")


@MODES
def test_B03_what_outgrows_the_pool_is_refused_or_ends_with_length(ahead):
    loop = Loop(scheduler(num_blocks=64, block_size=16, max_num_batched_tokens=512, max_model_len=4096, max_num_seqs=8), ahead)
    with pytest.raises(
        RequestError, match=r"prompt: has 2000 tokens, with one more to generate; the KV pool holds 1024 \(64 blocks of 16\).*--kv-cache"
    ):
        loop.scheduler.add([request("never", words(1, 2000))])
    with pytest.raises(RequestError, match=r"has 4096 tokens.*the context holds 4096.*--max-model-len"):
        loop.scheduler.add([request("never", words(1, 4096))])
    assert not loop.scheduler.has_work
    large, small = request("large", words(2, 900), max_tokens=2000), request("small", words(3, 20), max_tokens=8)
    serve(loop, large, small)
    assert large.finish_reason is FinishReason.LENGTH and large.num_tokens == large.limit == 1024
    assert small.finished < large.finished and len(small.output_ids) == 8


@pytest.mark.parametrize("length", [1023, 1024, 1025])
def test_B03_edges_of_the_pool(length):
    loop = Loop(scheduler(num_blocks=64, block_size=16, max_num_batched_tokens=512, max_model_len=4096))
    r = request("r", words(4, length), max_tokens=None)
    if length + 1 > 1024:
        with pytest.raises(RequestError):
            loop.scheduler.add([r])
    else:
        serve(loop, r)
        assert r.num_tokens == 1024 and r.finish_reason is FinishReason.LENGTH
