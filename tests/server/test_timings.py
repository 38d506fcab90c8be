"""Where a request's time went, as replies, the log and /metrics tell it: parts sum, counts are true to the last token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import USER, Served, error, strict, wait_for

from flatout.ledger.account import Marks, SequenceTimes, account_of
from flatout.server.sse import EventStream

Start = Callable[..., Served]


@pytest.fixture(scope="module")
def own(start: Start) -> Served:
    """Steps of 10 ms, two at a time; its counts are this file's alone."""
    return start(env={"SCRIPT_STEP_SECONDS": "0.01"}, max_num_seqs=2)


def metrics(served: Served) -> dict[str, float]:
    """Sample name and its labels but the model's -> value."""
    text = served.http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "script"
            found[sample.name + "".join(f" {v}" for v in labels.values())] = sample.value
    return found


def log_lines(served: Served) -> list[dict[str, Any]]:
    return [json.loads(line) for line in served.log.splitlines() if line.startswith('{"request"')]


def check(timings: dict[str, Any]) -> None:
    assert sum(timings["parts_ms"].values()) == pytest.approx(timings["total_ms"], abs=0.05)
    assert min(timings["parts_ms"].values()) >= 0


def test_timings_only_when_asked(own: Served) -> None:
    assert "timings" not in own.complete(max_tokens=2)
    assert "timings" not in own.complete(max_tokens=2, timings=False)
    assert not any("timings" in chunk for chunk in own.stream("completions", prompt="ABC", max_tokens=2))
    begin = time.monotonic()
    found = own.complete(max_tokens=5, timings=True)["timings"]
    seconds = time.monotonic() - begin
    check(found)
    assert found["total_ms"] <= seconds * 1e3 and found["parts_ms"]["decode"] >= 40 and found["ttft_ms"] >= 10 <= found["tpot_ms"]
    assert (found["prompt_tokens"], found["completion_tokens"], found["cached_tokens"], found["cache_miss"]) == (4, 5, 0, "too short")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_timings_of_both_routes(own: Served, route: str, n: int) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "n": n, "timings": True} | ({"messages": USER} if "chat" in route else {"prompt": "ABC"})
    whole = own.post(route, **body).json()
    check(whole["timings"])
    assert whole["timings"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 4 * n
    *rest, last = own.stream(route, **body)
    check(last["timings"])
    assert last["choices"] == [] and "usage" not in last and not any("timings" in chunk for chunk in rest)
    last = own.stream(route, **body, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens"] == last["timings"]["completion_tokens"] == 4 * n
    if n == 3:
        assert whole["timings"]["parts_ms"]["queue slots"] > 0  # two run at a time


def test_timings_by_header(own: Served) -> None:
    reply = own.http.post("/v1/completions", json={"prompt": "ABC", "max_tokens": 2}, headers={"x-flatout-timings": "1"})
    check(reply.json()["timings"])
    off = own.http.post("/v1/completions", json={"prompt": "ABC", "max_tokens": 2}, headers={"X-Flatout-Timings": "0"})
    assert "timings" not in off.json()
    wrong = own.http.post("/v1/completions", json={"prompt": "ABC", "max_tokens": 2}, headers={"x-flatout-timings": "yes please"})
    assert error(wrong)["param"] == "x-flatout-timings"
    assert error(own.post("completions", prompt="x", timings="yes"))["param"] == "timings"


def test_openai_client_reads_them(own: Served) -> None:
    stream = own.client.completions.create(model="script", prompt="ABC", max_tokens=3, stream=True, extra_body={"timings": True})
    assert [c.choices[0].text for c in stream if c.choices] != []
    reply = own.client.chat.completions.create(model="script", messages=USER, max_tokens=3, extra_body={"timings": True})  # type: ignore
    assert reply.model_extra and reply.model_extra["timings"]["completion_tokens"] == 3


def test_metrics_are_true_to_the_last_token(own: Served) -> None:
    wait_for(lambda: len(log_lines(own)) == metrics(own)["flatout:requests_total"], 5)
    before, lines = metrics(own), len(log_lines(own))
    bodies: list[dict[str, Any]] = [{"prompt": "ABC", "max_tokens": i % 7 + 1, "n": 1 + i % 3} for i in range(20)]
    bodies += [{"prompt": ["AB", "CDE"], "max_tokens": 3}, {"prompt": "ABC", "max_tokens": 30, "stop": ["HI"]}]
    with ThreadPoolExecutor(8) as pool:
        usages = [reply["usage"] for reply in pool.map(lambda body: own.complete(**body), bodies)]
    after = metrics(own)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for prefix in ("flatout", "vllm"):
        assert grown(f"{prefix}:generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
        assert grown(f"{prefix}:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
        choices = sum(body.get("n", 1) for body in bodies) + 1
        ends = [name for name in after if name.startswith(f"{prefix}:request_success_total")]
        assert sum(map(grown, ends)) == choices == grown(f"{prefix}:request_success_total length") + 1
        assert grown(f"{prefix}:time_to_first_token_seconds_count") == choices
        assert grown(f"{prefix}:inter_token_latency_seconds_count") == sum(u["completion_tokens"] for u in usages) - choices
    wait_for(lambda: len(log_lines(own)) == lines + len(bodies), 5)
    wait_for(lambda: metrics(own)["flatout:requests_in_flight"] == 0, 5)
    after = metrics(own)
    assert grown("vllm:e2e_request_latency_seconds_count") == grown("flatout:requests_total") == len(bodies)
    assert sum(line["completion_tokens"] for line in log_lines(own)[lines:]) == sum(u["completion_tokens"] for u in usages)
    wait_for(lambda: metrics(own)["vllm:num_requests_running"] == 0, 5)
    assert metrics(own)["vllm:num_requests_waiting"] == metrics(own)["vllm:kv_cache_usage_perc"] == 0
    assert grown("vllm:prefix_cache_queries_total") > 0 and grown("flatout:queue_seconds_total slots") > 0


def test_gauges_while_it_runs(own: Served) -> None:
    own.wait_idle()
    raws = [own.connect({"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True}) for _ in range(5)]
    wait_for(lambda: metrics(own)["vllm:num_requests_running"] == 2 and metrics(own).get("flatout:waiting_by_reason slots") == 3, 5)
    assert metrics(own)["flatout:requests_in_flight"] == 5
    ended = metrics(own).get("flatout:request_success_total abort", 0.0)
    for raw in raws:
        raw.close()
    own.wait_idle()
    wait_for(lambda: metrics(own)["flatout:requests_in_flight"] == metrics(own)["vllm:num_requests_running"] == 0, 5)
    assert metrics(own)["flatout:request_success_total abort"] == ended + 5
    wait_for(lambda: [line["end"] for line in log_lines(own)].count("abort") >= 5, 5)


def test_the_log_says_no_text(start: Start) -> None:
    served = start()
    served.complete("Confidential", max_tokens=9)
    served.stream("chat/completions", messages=[{"role": "user", "content": "Confidential"}], max_tokens=3)
    assert served.post("completions", prompt="x" * 1500, max_tokens=1).status_code == 400  # the engine's refusal
    wait_for(lambda: len(log_lines(served)) == 3, 5)
    lines = log_lines(served)
    for line in lines:
        check(line)
        assert line["model"] == "script" and line["choices"] == 1
    assert [line["end"] for line in lines] == ["length", "length", "error"] and "Confid" not in served.log and "jklm" not in served.log
    assert metrics(served)["flatout:requests_refused_total"] == 1
    silent = start(server={"enable_log_requests": False})
    silent.complete(max_tokens=1)
    assert silent.stop() == 0 and not log_lines(silent)


def test_a_client_that_does_not_read_is_told() -> None:
    """Sending blocks once the sockets' buffers are full: before the last token that is hidden behind the engine's work, after it a part."""
    marks = Marks(time.monotonic())
    marks.parsing = marks.sent = marks.accepted
    closed: list[float] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        marks.texted = time.monotonic()
        yield b"two"

    async def send(message: Any) -> None:
        if message.get("body"):
            await asyncio.sleep(0.2)

    async def receive() -> Any:
        raise AssertionError("nothing is to be received")

    asyncio.run(EventStream(events(), lambda: closed.append(time.monotonic()), marks)({}, receive, send))
    marks.ended = closed[0]
    found = account_of(marks, [SequenceTimes(tokens=1, texted=marks.texted)], 3, marks.ended)
    assert 0.2 <= found.parts["client"] == pytest.approx(0.2, abs=0.15) and found.client >= 0.4
    assert sum(found.parts.values()) == pytest.approx(found.total)


def test_ledger_route(own: Served) -> None:
    own.complete(max_tokens=20)

    def account() -> dict[str, Any]:
        return strict(own.http.get("/ledger").text)["models"]["script"]

    wait_for(lambda: account()["state"]["running"] == 0 and account()["state"]["in_flight"] == 0, 5)
    found = account()
    assert set(found["windows"]) == {"1s", "10s", "60s", "start"} and found["table"] is None  # a script has no costs
    start = found["windows"]["start"]
    assert start["steps"] >= 20 and sum(start["parts"].values()) == pytest.approx(start["seconds"])
    assert own.http.get("/ledger?deep=5").status_code == 200
    assert error(own.http.get("/ledger?deep=0"))["param"] == error(own.http.get("/ledger?deep=x"))["param"] == "deep"


def test_they_are_behind_the_key(start: Start) -> None:
    served = start(server={"api_key": "secret"})
    for path in ("/metrics", "/ledger"):
        assert served.http.get(path).status_code == 401
        assert httpx.get(f"http://127.0.0.1:{served.port}{path}", headers={"authorization": "Bearer secret"}).status_code == 200
