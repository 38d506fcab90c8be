"""The parts of core/ by themselves: block pool, prefix cache and its miss reasons, stop rules, the sorted line."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_fakes import Loop, request, scheduler
from hypothesis import given
from hypothesis import strategies as st

from flatout.config import SchedulerConfig
from flatout.core import stop
from flatout.core.blocks import BlockPool
from flatout.core.policy import POLICIES, Line
from flatout.core.prefix import PrefixCache, root, tokens_of
from flatout.request import FinishReason, int32_bytes
from flatout.step import StepResult

# -- blocks --------------------------------------------------------------------------------------------------------------


def test_blocks_without_a_hash_are_reused_first_then_the_least_recently_used():
    pool = BlockPool(5)
    a, b, c = pool.take(1), pool.take(1), pool.take(1)
    pool.publish(a[0], b"a")
    pool.publish(b[0], b"b")
    for blocks in (a, b, c):
        pool.release(blocks)
    assert pool.num_cached == 2 and pool.num_free == 5
    assert pool.take(1) == c
    pool.share(a)  # a hit makes it the most recently used
    pool.release(a)
    assert pool.take(4) == [3, 4, *b, *a] and pool.evictions == 2
    assert pool.find(b"a") is None and pool.was_evicted(b"a") and not pool.was_evicted(b"c")


def test_a_tail_is_evicted_before_its_head():
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert pool.take(3) == blocks[::-1]


def test_of_two_blocks_with_one_hash_the_first_stays():
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.publish(one, b"h")
    pool.publish(two, b"h")
    assert pool.find(b"h") == one and pool.hashes == [b"h", None]
    pool.release([two])
    pool.share([one])
    assert pool.refs == [2, 0] and pool.num_idle([one]) == 0 and pool.num_idle([two]) == 1
    pool.release([one])
    pool.release([one])
    assert pool.take(1) == [two] and pool.find(b"h") == one


def test_an_unpublished_block_is_found_no_more_and_reused_first():
    pool = BlockPool(4)
    held, free, other = pool.take(1), pool.take(1), pool.take(1)
    for block, digest in ((held, b"h"), (free, b"f"), (other, b"o")):
        pool.publish(block[0], digest)
    pool.release(free)
    pool.release(other)
    for block in (*held, *free, 3):  # the last bears no hash
        pool.unpublish(block)
    assert pool.find(b"h") is pool.find(b"f") is None and pool.find(b"o") == other[0] and pool.num_cached == 1
    pool.release(held)
    assert pool.take(4) == [*held, *free, 3, *other] and pool.evictions == 1


# -- prefix: why a prompt missed -----------------------------------------------------------------------------------------


def ask(loop: Loop, id: str, prompt: list[int], **options):
    r = request(id, prompt, max_tokens=1, **options)
    loop.scheduler.add([r])
    loop.run(most=loop.steps + 1000)
    return r.cached_tokens, r.miss_reason


def test_E04_each_miss_has_its_reason():
    loop = Loop(scheduler(num_blocks=12, block_size=4, max_model_len=48))
    base = list(range(1, 20))
    assert ask(loop, "cold", base) == (0, "differs at token 0")
    assert ask(loop, "same", base) == (16, "")
    assert ask(loop, "short", base[:4]) == (0, "too short")
    assert ask(loop, "stamp", [30, *base]) == (0, "differs at token 0")
    assert ask(loop, "sixth", [*base[:6], 30, *base[7:]]) == (4, "differs at token 6")
    assert ask(loop, "salt", base, salt="s") == (0, "salted")
    assert ask(loop, "again", base, salt="s") == (16, "")
    assert ask(loop, "other", [*base[:2], 30, *base[3:]], salt="s") == (0, "differs at token 2")
    assert ask(loop, "probs", base, prompt_logprobs=0) == (0, "prompt_logprobs")
    assert ask(loop, "large", list(range(1, 31)) + [9] * 17) == (16, "differs at token 19")
    assert ask(loop, "gone", base, salt="s") == (0, "evicted")
    assert ask(Loop(scheduler(enable_prefix_caching=False)), "off", base) == (0, "off")


def test_E04_evicted_is_told_even_when_many_others_came_since():
    loop = Loop(scheduler(num_blocks=12, block_size=4, max_model_len=48))
    prompts = [[start, *range(1, 13)] for start in range(10)]
    for i, one in enumerate(prompts):
        ask(loop, f"r{i}", one)
    assert ask(loop, "first", prompts[0]) == (0, "evicted") and ask(loop, "last", prompts[9]) == (12, "")


def test_a_longer_prompt_parts_where_the_best_match_was_computed_to():
    """The next turn of a chat: the last sampled token of the turn before was never computed, so it is the first new one."""
    loop = Loop(scheduler())
    first = request("turn", list(range(1, 11)), max_tokens=5)
    loop.scheduler.add([first])
    loop.run()
    history = first.prompt_ids + first.output_ids
    assert ask(loop, "next", [*history, 1, 2, 3, 4, 5, 6]) == (12, "differs at token 14")


def test_of_two_prompts_at_once_the_second_differs_from_what_is_being_computed():
    loop = Loop(scheduler(), ahead=False)
    one, two = request("one", list(range(1, 12))), request("two", [*range(1, 11), 30, 31, 32])
    loop.scheduler.add([one])
    loop.scheduler.add([two])
    loop.run()
    assert (one.miss_reason, two.miss_reason) == ("differs at token 0", "differs at token 8")  # tails are compared once they are computed
    assert (one.cached_tokens, two.cached_tokens) == (0, 8)


def test_a_remembered_run_gives_the_hash_that_it_leads_to():
    core, made = scheduler(), []
    prompts = [[1, 2, 3, 4, *range(start, start + 5)] for start in range(10, 22)]  # more continuations than are remembered
    for turn in "01":
        hashes = []
        for i, prompt in enumerate(prompts):
            r = request(turn + str(i), prompt)
            core.prefix.match(r, b"top", 2)
            while len(r.hashes) < 2:
                core.prefix._extend(r, b"top")
            r.blocks = core.blocks.take(2)
            core.prefix.publish(r, b"top", 0, 2)
            hashes.append(tuple(r.hashes))
        made.append(hashes)
    assert made[0] == made[1] and len(set(made[0])) == len(prompts) and all(len(runs) <= 4 for runs in core.prefix._runs.values())


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([b"one", b"two"])), min_size=2, max_size=8), st.integers(1, 5))
def test_hashes_taken_over_from_the_prompt_before_are_those_it_would_have_made(prompts, block_size):
    """Prompts that part from a common one at any place, and end at any."""
    shared, alone = PrefixCache(BlockPool(64), block_size), PrefixCache(BlockPool(64), block_size)
    for i, (parts, top) in enumerate(prompts):
        made = []
        for cache in (shared, alone):
            if cache is alone:
                cache._model = (b"", b"", [])
            r = request(str(i), [*range(1, parts + 1), *range(100 + i, 140 + i)][: 30 + i])
            full = len(r.prompt_ids) // block_size
            found = len(cache.match(r, top, full))
            r.blocks = [i] * full
            cache.publish(r, top, found, full)
            made.append((found, r.hashes[:full]))
        assert made[0] == made[1] and len(made[0][1]) == full


def test_the_memory_of_recent_runs_is_bounded():
    loop, rng = Loop(scheduler(num_blocks=4, block_size=1, max_model_len=4), audit=False), random.Random(0)
    for i in range(700):
        ask(loop, f"r{i}", [rng.randrange(1000) for _ in range(3)])
    assert len(loop.scheduler.prefix._runs) == len(loop.scheduler.blocks._evicted) == 4 + 1024
    assert max(map(len, loop.scheduler.prefix._runs.values())) <= 4


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_A10_roots_are_equal_only_for_equal_parts(one, other):
    assert (root(*one) == root(*other)) == (one == other)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 9), max_size=9), st.integers(0, 18), st.integers(0, 18))
def test_tokens_of_is_a_slice_of_prompt_and_output(prompt, output, one, other):
    r = request("r", prompt)
    r.output_ids = output
    start, end = sorted((one, other))
    assert tokens_of(r, start, end) == int32_bytes((prompt + output)[start:end])


# -- stop ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([7, 0], {"ignore_eos": False}, (FinishReason.STOP, None)),
        ([7, 0], {"ignore_eos": True}, (None, None)),
        ([7, 5], {"stop_token_ids": [5]}, (FinishReason.STOP, 5)),
        ([7, 0], {"stop_token_ids": [0], "ignore_eos": True}, (FinishReason.STOP, 0)),
        ([7, 0], {"stop_token_ids": [0], "ignore_eos": False}, (FinishReason.STOP, None)),
        ([7, 0], {"ignore_eos": False, "min_tokens": 2}, (None, None)),
        ([7, 7, 0], {"ignore_eos": False, "min_tokens": 2}, (FinishReason.STOP, None)),
        ([7, 5], {"stop_token_ids": [5], "min_tokens": 2}, (None, None)),
        ([7, 7, 7], {"max_tokens": 3}, (FinishReason.LENGTH, None)),
        ([7, 7, 0], {"max_tokens": 3, "ignore_eos": False}, (FinishReason.STOP, None)),
        ([7, 0], {"max_tokens": 2, "min_tokens": 2, "ignore_eos": False}, (FinishReason.LENGTH, None)),
    ],
)
def test_stop_rules(outputs, params, expected):
    r = request("r", [1, 2, 3], **params)
    r.limit = stop.longest(r, max_model_len=100, num_blocks=10, block_size=10)
    r.output_ids = outputs
    assert stop.verdict(r) == expected
    if expected[0] is FinishReason.STOP:
        assert outputs[-1] in stop.ending_ids(r)


def test_end_id_before_min_tokens_does_not_end_even_if_sampled():
    """The sampler masks it; should one come all the same, the request goes on."""
    core = scheduler()
    r = request("r", [1, 2], ignore_eos=False, min_tokens=2, max_tokens=5)
    core.add([r])
    for token in (0, 0, 0):
        core.commit(core.schedule(0), StepResult(np.array([token])), 0)
    assert r.output_ids == [0, 0, 0] and r.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("asked", "context", "limit"), [(5, 100, 15), (None, 100, 80), (500, 100, 80), (None, 40, 40), (0, 100, 10)])
def test_A55_max_tokens_is_an_upper_bound(asked, context, limit):
    r = request("r", list(range(10)), max_tokens=asked)
    assert stop.longest(r, max_model_len=context, num_blocks=8, block_size=10) == limit


# -- policy --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), unique=True), st.randoms(use_true_random=False))
def test_a_line_stays_sorted(items, rng):
    line: Line[int] = Line(lambda x: -x)
    kept = set()
    for item in items:
        line.add(item)
        kept.add(item)
        if rng.random() < 0.3:
            gone = rng.choice(sorted(kept))
            line.remove(gone)
            kept.remove(gone)
        assert list(line) == sorted(kept, reverse=True) and len(line) == len(kept)
        if kept:
            assert (line.first, line.last) == (max(kept), min(kept))


def test_every_policy_of_the_config_exists():
    assert SchedulerConfig.__dataclass_fields__["scheduling_policy"].metadata["choices"] == tuple(POLICIES)
