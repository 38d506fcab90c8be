"""Two thousand random lives of a scheduler: add, abort, stop string, preempt, finish, fail, in every mix of settings, on a fake device.

After each step the books add up, the budget holds, nobody starves, and every row reads its own prefix; at the end all blocks are free
and each sequence has the tokens it would have had alone. A request that a failed step ended has the first of them.
"""

from __future__ import annotations

import random
from collections import Counter

from core_fakes import TOP, VOCABULARY, Loop, check_empty, contents, logprob, request, scheduler, solo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.request import FinishReason, RequestError

SEEN: Counter[str] = Counter()  # what the traces met, so that they cannot become vacuous unnoticed

shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([2, 5, 9, 12, 16, 24]),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "max_num_seqs": st.sampled_from([1, 2, 3, 5, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 17, 64, 200]),
        "max_model_len": st.integers(4, 96),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
    }
)


def draw_samples(rng: random.Random, id: str, stems: list[list[int]], longest: int):
    """A request whose prompt often begins like others' do."""
    stem = rng.choice(stems)
    prompt = stem[: rng.choice([2, 7, 12, 19, 40])] + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 3, 9]))]
    prompt = prompt[: rng.randint(1, longest)] if rng.random() < 0.2 else prompt[:longest]
    n = rng.choice([1, 1, 1, 1, 1, 2, 4])
    most = rng.choice([0, 1, 2, 5, 20, 40, None])
    params = {
        "max_tokens": most,
        "min_tokens": rng.choice([0, 0, 2]) if most is None or most >= 2 else 0,
        "ignore_eos": rng.random() < 0.7,
        "stop_token_ids": rng.choice([None, None, None, [5, 9]]),
        "logprobs": rng.choice([None, None, 0, TOP]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
    }
    options = {"seed": rng.randrange(4), "salt": rng.choice(["", "", "a"]), "priority": rng.randrange(3)}
    return [request(id, list(prompt), i, n=n, **options, **params) for i in range(n)]


def check_outputs(loop: Loop, r, aborted: bool) -> None:
    outputs = loop.outputs.get(r.key, [])
    tokens = [t for o in outputs for t in o.token_ids]
    expected, reason, stop_reason = solo(r, r.limit)
    assert tokens == r.output_ids
    if aborted:
        assert tokens == expected[: len(tokens)] and not any(o.finish_reason for o in outputs)
    else:
        assert (tokens, outputs[-1].finish_reason, outputs[-1].stop_reason) == (expected, reason, stop_reason)
        assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        last = outputs[-1]
        assert last.timing.arrival <= last.timing.first_scheduled < last.timing.first_token <= last.timing.finished
        assert (last.prompt_tokens, last.preemptions) == (len(r.prompt_ids), r.preemptions)
        assert last.cached_tokens < len(r.prompt_ids)
    chain = contents(r.prompt_ids + tokens)
    prompt = len(r.prompt_ids)
    for i, output in enumerate(outputs):
        if r.params.logprobs is not None and output.token_ids:
            (position,) = output.logprobs
            assert position.chosen.token_id == tokens[i] and position.chosen.logprob == logprob(chain[prompt + i - 1], tokens[i])
            assert len(position.top) == r.params.logprobs
        else:
            assert output.logprobs is None
        if i == 0 and r.params.prompt_logprobs is not None and r.index == 0:
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == prompt
            for p, position in enumerate(output.prompt_logprobs[1:]):
                assert position.chosen.logprob == logprob(chain[p], r.prompt_ids[p + 1])
        else:
            assert output.prompt_logprobs is None


@settings(
    max_examples=2000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(shapes, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def one_trace(shape, ahead, late, seed):
    rng = random.Random(seed)
    pool = shape["num_blocks"] * shape["block_size"]
    if not shape["enable_chunked_prefill"]:
        shape["max_num_batched_tokens"] = max(shape["max_num_batched_tokens"], min(shape["max_model_len"], pool))
    loop = Loop(scheduler(**shape), ahead, late)
    core, failures = loop.scheduler, iter([True] * rng.choice([0, 0, 1, 4]))
    loop.fails = lambda: rng.random() < 0.2 and next(failures, False)
    stems = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(2)]
    everyone, aborted, work = [], set(), 0
    for number in range(rng.randint(1, 9)):
        group = draw_samples(rng, f"r{number}", stems, longest=min(pool, shape["max_model_len"]) + 1)
        try:
            core.add(group)
        except RequestError as error:
            SEEN["refused"] += 1
            assert len(group[0].prompt_ids) + (group[0].params.max_tokens != 0) > min(pool, shape["max_model_len"]), error
            continue
        everyone += group
        work += sum(r.limit + 2 for r in group)
        for _ in range(rng.choice([0, 0, 0, 1, 2, 7])):
            loop.step()
            if everyone and rng.random() < 0.12:
                victim = rng.choice(everyone)
                reason, why = rng.choice([(FinishReason.ABORT, None), (FinishReason.STOP, "\nQ:")])
                for r in core.abort(victim.id, rng.choice([None, victim.index]), reason, why):
                    aborted.add(r.key)
                    assert (r.finish_reason, r.stop_reason) == (reason, why)
    # The first in order advances by at least a token in every step and is never preempted by those behind it.
    loop.run(most=loop.steps + 2 * work + 20)
    assert all(r.finish_reason is FinishReason.ERROR for r in loop.failed)
    SEEN.update(failed=len(loop.failed), restarted=loop.restarted)
    SEEN.update({"shared at once": loop.device.shared_at_once})
    aborted |= {r.key for r in loop.failed}
    for r in everyone:
        check_outputs(loop, r, r.key in aborted)
    count = core.counters
    assert sum(count.finished.values()) == len(everyone)
    assert count.output_tokens == sum(len(r.output_ids) for r in everyone) and count.preemptions == sum(r.preemptions for r in everyone)
    check_empty(core)
    SEEN.update(preempted=count.preemptions, hit=count.prefix_hits, dropped=count.dropped_tokens, aborted=len(aborted))
    SEEN.update(
        evicted=core.blocks.evictions,
        **{f"waits for {k}": v for k, v in loop.waits.items()},
        ahead=ahead,
        twice=any(r.preemptions > 1 for r in everyone),
    )
    SEEN.update(r.miss_reason.rstrip("0123456789 ") or "hit" for r in everyone)


def test_2000_random_traces_keep_every_promise():
    one_trace()
    kinds = ["refused", "preempted", "twice", "hit", "dropped", "aborted", "evicted", "differs at token", "too short", "salted", "off"]
    kinds += ["failed", "restarted", "shared at once", *(f"waits for {reason}" for reason in ("blocks", "slots", "budget", "policy"))]
    assert {kind: SEEN[kind] for kind in kinds if SEEN[kind] < 10} == {}, SEEN
    print(SEEN)
