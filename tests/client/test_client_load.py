"""Answers and loads against an endpoint whose times are known, on a clock that only timers move."""

from dataclasses import replace
from itertools import pairwise

import pytest
import virtual_time
from fake_endpoint import Fake

from flatout.client.completions import CHAT, COMPLETIONS, Answer, Dialect, complete, events, learn
from flatout.client.http import Endpoint, EndpointError, Reader, Reply
from flatout.client.load import Figures, Load, Spread, run_load, words

PLAIN = Dialect("fake")


def at(fake: Fake, work):
    """work(endpoint) while the fake is served."""

    async def all_of_it():
        async with fake.served():
            endpoint = Endpoint(fake.url, fake.key)
            try:
                return await work(endpoint)
            finally:
                endpoint.close()

    return virtual_time.run(all_of_it())


def one(fake: Fake, dialect=PLAIN, prompt="a b c d", tokens=5, **how) -> Answer:
    return at(fake, lambda endpoint: complete(endpoint, dialect, prompt, tokens, **how))


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_an_answer_is_timed(route):
    fake = Fake(fixed=0.01, per_row=0.002, prefill=1000.0)
    answer = one(fake, Dialect("fake", route))
    assert answer.error == ""
    assert answer.ttft == pytest.approx(0.012 + 4 / 1000), "the first chunk of a chat, a role without text, is no token"
    assert answer.tpot == pytest.approx(0.012)
    assert answer.gaps == pytest.approx([0.012] * 4)
    assert answer.e2e == pytest.approx(answer.ttft + 4 * 0.012)
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens, answer.told) == (5, 4, 0, True)
    (body,) = fake.bodies
    assert body["ignore_eos"] and body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 5


def test_without_usage_events_are_counted():
    answer = one(Fake(usage=False))
    assert (answer.tokens, answer.told, answer.prompt_tokens, answer.cached_tokens) == (5, False, 0, None)


@pytest.mark.parametrize(
    ("fake", "kind", "says"),
    [
        (Fake(cut=2), "cut", "in the middle"),
        (Fake(broken="out of memory"), "stream error", "out of memory"),
        (Fake(streams=False), "no stream", "application/json"),
        (Fake(refuse_over=0), "http 429", "too many requests"),
        (Fake(model="other"), "http 404", "does not exist"),
        (Fake(fixed=100.0), "timeout", "within 9 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failures_are_answers(fake, kind, says):
    answer = one(fake, timeout=9.0)
    assert answer.error == kind
    assert says in answer.message


def test_events_of_a_stream_however_it_is_cut():
    whole = b': hi\n\nevent: x\ndata: {"a": 1}\r\n\r\ndata:2\ndata: 3\n\ndata: [DONE]'
    for size in (1, 3, 100):
        pieces = [(float(i), whole[i : i + size]) for i in range(0, len(whole), size)]
        assert [data for _, data in events(Reply(0.0, pieces=pieces))] == ['{"a": 1}', "2\n3", "[DONE]"]
    assert next(iter(events(Reply(0.0, pieces=[(1.0, b"data: x"), (2.0, b"\n\n")])))) == (2.0, "x")


@pytest.mark.parametrize(
    ("fake", "found"),
    [
        (Fake(), Dialect("fake")),
        (Fake(known=("stream_options",)), Dialect("fake", ignore_eos=False)),
        (Fake(known=()), Dialect("fake", ignore_eos=False, usage=False)),
        (Fake(routes=("chat/completions",)), Dialect("fake", CHAT)),
        (Fake(routes=("chat/completions",), known=()), Dialect("fake", CHAT, ignore_eos=False, usage=False)),
    ],
    ids=["all", "no ignore_eos", "no extras", "chat alone", "chat alone, no extras"],
)
def test_the_dialect_is_found_out(fake, found):
    dialect, answer = at(fake, lambda endpoint: learn(endpoint, "fake"))
    assert dialect == found
    assert answer.tokens == 8


@pytest.mark.parametrize(
    ("fake", "kind"),
    [
        (Fake(model="other"), "http 404"),
        (Fake(key="k", routes=()), "http 404"),
        (Fake(streams=False), "no stream"),
        (Fake(refuse_over=0), "http 429"),
    ],
)
def test_no_dialect_is_an_error_that_says_why(fake, kind):
    with pytest.raises(EndpointError) as caught:
        at(fake, lambda endpoint: learn(endpoint, "fake"))
    assert caught.value.kind == kind


SLOW = Fake(fixed=1.0, per_row=0.0, prefill=1e9)


def test_a_closed_loop_keeps_its_clients_busy():
    fake = replace(SLOW, slots=2)
    load = Load(clients=4, requests=8, prompt=(4, 8), output=(3, 3))
    answers = at(fake, lambda endpoint: run_load(endpoint, Dialect("fake"), load))
    figures = Figures.of(answers)
    assert (figures.requests, figures.errors, figures.tokens) == (8, {}, 24)
    assert figures.seconds == pytest.approx(12.0, rel=0.01), "8 requests of 3 s, two at a time"
    assert figures.rate == pytest.approx(2.0, rel=0.01)
    assert figures.ttft and figures.ttft.longest == pytest.approx(4.0, rel=0.01), "two wait for two"
    assert figures.itl and figures.itl.p50 == pytest.approx(1.0)
    assert all(4 <= len(body["prompt"].split()) <= 8 for body in fake.bodies)


def test_an_open_loop_does_not_wait_for_answers():
    load = Load(rate=2.0, burstiness=0.0, seconds=5.0, output=(8, 8))
    seen = []
    answers = at(replace(SLOW), lambda endpoint: run_load(endpoint, Dialect("fake"), load, seen.append))
    arrivals = sorted(a.arrival for a in answers)
    assert [b - a for a, b in pairwise(arrivals)] == pytest.approx([0.5] * 9)
    assert len(seen) == len(answers) == 10
    assert Figures.of(answers).late < 0.01


def test_arrivals_have_the_rate_and_the_spread_that_was_asked_for():
    def taken(burstiness):
        delays = Load(rate=10.0, burstiness=burstiness, requests=1).delays()
        return [next(delays) for _ in range(20_000)]

    for burstiness in (0.0, 1.0, 4.0):
        delays = taken(burstiness)
        mean = sum(delays) / len(delays)
        assert mean == pytest.approx(0.1, rel=0.1)
        assert sum((d - mean) ** 2 for d in delays) / len(delays) == pytest.approx(burstiness * mean**2, rel=0.2, abs=1e-9)


def test_prompts_share_heads_by_group_and_nothing_else():
    asks = Load(requests=1, prompt=(40, 60), shared=20, groups=3).asks(tokens_per_word=0.5)
    prompts = [next(asks)[0].split() for _ in range(60)]
    assert {len(p) for p in prompts} <= set(range(80, 121))
    assert len({tuple(p[:40]) for p in prompts}) == 3
    assert len({tuple(p[40:50]) for p in prompts}) == 60
    again = Load(requests=1, prompt=(40, 60), shared=20, groups=3).asks(tokens_per_word=0.5)
    assert next(again)[0].split() == prompts[0]
    other = Load(requests=1, prompt=(40, 60), seed=1).asks(tokens_per_word=0.5)
    assert next(other)[0].split()[:10] != prompts[0][:10]
    assert words(10, 1.0, "a") == words(10, 1.0, "a") != words(10, 1.0, "b")


def test_slow_readers_are_the_share_that_was_asked_for():
    asks = Load(requests=1, slow=0.25, pause=0.3).asks(1.0)
    readers = [next(asks)[2] for _ in range(2000)]
    assert {r.pause for r in readers} == {0.0, 0.3}
    assert sum(r.pause > 0 for r in readers) == pytest.approx(500, rel=0.15)


def test_a_slow_reader_takes_longer_than_the_server():
    fast = one(Fake(), tokens=20)
    slow = one(Fake(), tokens=20, reader=Reader(pause=1.0))
    assert slow.e2e == pytest.approx(fast.ttft + 19.0)
    assert slow.tokens == fast.tokens == 20


def test_errors_are_counted_by_kind():
    load = Load(clients=6, requests=6, output=(4, 4))
    figures = Figures.of(at(Fake(refuse_over=4), lambda endpoint: run_load(endpoint, Dialect("fake"), load)))
    assert figures.errors == {"http 429": 2}
    assert figures.examples == {"http 429": "too many requests"}
    assert figures.tokens == 16
    assert figures.to_json()["tokens_per_second"] == figures.rate


def test_figures_of_nothing():
    figures = Figures.of([])
    assert (figures.requests, figures.rate, figures.ttft) == (0, 0.0, None)


def test_quantiles():
    spread = Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert spread is not None
    assert (spread.p50, spread.longest) == (3.0, 5.0)
    assert spread.p90 == pytest.approx(4.6)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"clients": 0}, "clients"),
        ({"rate": 0.0}, "rate"),
        ({"prompt": (5, 4)}, "prompt"),
        ({"output": (0, 4)}, "output"),
        ({"shared": 128}, "shared"),
        ({"slow": 1.1}, "slow"),
        ({"requests": None}, "requests, seconds"),
    ],
)
def test_a_load_that_makes_no_sense(wrong, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        Load(**{"requests": 1, **wrong})
