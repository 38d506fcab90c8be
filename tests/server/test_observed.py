"""What a server tells of its requests, kind by kind: timings in replies, cached tokens, gauges after a mass abort, a line for each end (rows E of the cases)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import USER, Served, wait_for
from test_timings import check, log_lines, metrics

from flatout.cli import main
from flatout.cli.doctor import trace

Start = Callable[..., Served]
POOL = 12 * 16  # tokens
SLACK = 0.05  # seconds of a request that a client sees beyond the server's own, on a busy machine
STEP = 0.01


@pytest.fixture(scope="module")
def small(start: Start, default_model: Path) -> Served:
    """The real engine with a pool that four requests outgrow."""
    options = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": POOL // 16, "max_num_batched_tokens": 64}
    served = start(engine=None, model="smollm2", load_format="auto", server={"served_model_name": "script"}, **options)
    served.http.timeout = 120  # a crowded machine computes slowly
    return served


@pytest.fixture(scope="module")
def queue(start: Start) -> Served:
    """Steps of 10 ms, two at a time."""
    return start(env={"SCRIPT_STEP_SECONDS": str(STEP)}, max_num_seqs=2)


def timed(served: Served, stream: bool, route: str = "completions", **body: Any) -> dict[str, Any]:
    """A request's timings, whose parts sum to what the client saw within 5 %."""
    begin = time.monotonic()
    if stream:
        found = served.stream(route, **body, timings=True)[-1]["timings"]
    else:
        found = served.post(route, **body, timings=True).json()["timings"]
    seconds = time.monotonic() - begin
    check(found)
    assert 0.95 * seconds - SLACK <= found["total_ms"] / 1e3 <= seconds
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_e01_cold_cached_several_and_preempted(small: Served, stream: bool) -> None:
    salt = {"cache_salt": f"e01 {stream}", "temperature": 0, "ignore_eos": True}
    prompt = list(range(100, 170))
    cold = timed(small, stream, prompt=prompt, max_tokens=4, **salt)
    assert cold["cached_tokens"] == 0 and cold["prefill_chunks"] == 2 and cold["parts_ms"]["prefill"] > 0 < cold["parts_ms"]["decode"]
    cached = timed(small, stream, prompt=prompt, max_tokens=4, **salt)
    assert cached["cached_tokens"] == 64 and cached["prefill_chunks"] == 1
    both = timed(small, stream, prompt="One two three", max_tokens=4, n=2, **salt)
    assert both["completion_tokens"] == 8
    several = timed(small, stream, prompt=["One two", "Three four five"], max_tokens=3, **salt)
    assert several["completion_tokens"] == 6 and several["parts_ms"]["tokenise"] >= 0
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(timed, small, stream, prompt=[9 + i] * 40, max_tokens=40, **salt) for i in range(4)]
        crowd = [call.result() for call in calls]
    assert sum(t["preemptions"] for t in crowd) > 0
    for t in crowd:
        assert (t["preemptions"] > 0) == (t["parts_ms"]["preempted"] > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_e01_queued_and_aborted(queue: Served, stream: bool) -> None:
    queue.wait_idle(30)
    lines = len(log_lines(queue))
    running = [queue.connect({"prompt": "ABC", "max_tokens": 200, "ignore_eos": True, "stream": True}) for _ in range(2)]
    wait_for(lambda: queue.gauges()["running"] == 2, 10)
    waited = timed(queue, stream, prompt="ABC", max_tokens=3)
    assert waited["parts_ms"]["queue slots"] > 500 * 200 * STEP and waited["parts_ms"]["queue slots"] > 0.8 * waited["total_ms"]
    for raw in running:
        raw.close()
    gone = queue.connect({"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True, "stream": stream})
    wait_for(lambda: queue.gauges()["running"] == 1, 10)
    time.sleep(0.2)
    gone.close()
    wait_for(lambda: len(log_lines(queue)) == lines + 4, 10)
    (last,) = [line for line in log_lines(queue)[lines:] if line["end"] == "abort" and line["total_ms"] >= 200][-1:]
    check(last)
    assert last["completion_tokens"] > 0 and last["parts_ms"]["decode"] > 0


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_e03_cached_tokens_are_there_by_default(small: Served, route: str) -> None:
    text = f"{route} and a long head that is the same for all of the requests " * 4
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}
    body: dict[str, Any] = {**asked, "max_tokens": 1}

    def cached(usage: dict[str, Any]) -> int:
        return usage["prompt_tokens_details"]["cached_tokens"]

    first = small.post(route, **body).json()["usage"]
    whole = (first["prompt_tokens"] - 1) // 16 * 16  # the last token is always computed
    assert cached(first) == 0 < whole
    assert cached(small.post(route, **body).json()["usage"]) == whole
    assert cached(small.post(route, **body, n=2).json()["usage"]) == whole
    assert cached(small.stream(route, **body, stream_options={"include_usage": True})[-1]["usage"]) == whole
    assert cached(small.post(route, **body, cache_salt="another").json()["usage"]) == 0


def test_e06_gauges_after_all_leave_at_once(small: Served) -> None:
    """No step runs after that, and nobody asks again: the gauges are true all the same."""
    raws = [small.connect({"prompt": [20 + i] * 40, "max_tokens": 120, "ignore_eos": True, "stream": i % 2 == 0}) for i in range(100)]
    wait_for(lambda: metrics(small)["vllm:num_requests_running"] > 1 and metrics(small)["flatout:requests_in_flight"] == 100, 20)
    assert metrics(small)["vllm:kv_cache_usage_perc"] > 0 < metrics(small)["vllm:num_requests_waiting"]
    for raw in raws:
        raw.close()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "flatout:requests_in_flight")
    begin = time.monotonic()
    wait_for(lambda: not any(metrics(small)[name] for name in names), 10)
    if (seconds := time.monotonic() - begin) > 1:  # the machine's own doing only if an idle server is as slow
        again = time.monotonic()
        metrics(small)
        assert seconds < 1 + 20 * (time.monotonic() - again)


def test_e09_one_line_for_each_end(start: Start) -> None:
    served = start(env={"SCRIPT_STEP_SECONDS": str(STEP)})
    served.complete("ABC", max_tokens=30, stop=["H"])
    served.complete("ABC", max_tokens=3)
    gone = served.connect({"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    wait_for(lambda: served.gauges()["running"] == 1, 10)
    gone.close()
    served.wait_idle(10)
    assert served.post("completions", prompt="ABC", max_tokens=3, seed=667).status_code == 500  # a step that fails
    assert served.post("chat/completions", messages=USER, max_tokens=2, n=2).status_code == 200
    wait_for(lambda: len(log_lines(served)) == 5, 10)
    last = served.connect({"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    wait_for(lambda: served.gauges()["running"] == 1, 10)
    served.stop()
    last.close()
    lines = log_lines(served)
    assert [line["end"] for line in lines[:5]] == ["stop", "length", "abort", "error", "length"]
    assert len(lines) == 6 and lines[5]["end"] in ("abort", "error")
    assert len({line["request"] for line in lines}) == 6
    for line in lines:
        check(line)
        assert line["prompt_tokens"] > 0 and line["completion_tokens"] >= 0 and "ABC" not in json.dumps(line)
    assert [line["choices"] for line in lines] == [1, 1, 1, 1, 2, 1]


def test_the_largest_costs_of_a_running_server(small: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trace, "SECONDS", 3.0)
    url = f"http://127.0.0.1:{small.port}"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(small.complete, [9] * 20, max_tokens=100, ignore_eos=True)
        assert main(["doctor", "trace", "--url", url, "--steps", "20", "--json"]) == 0
        answer.result()
    told = json.loads(capsys.readouterr().out)
    costs = told["steps_of_script"]["costs"]
    assert told["file"] is None and len(costs) == 5 and costs == sorted(costs, key=lambda cost: -cost["seconds"])
    assert any("mlp" in cost["name"] for cost in costs) and 0 < sum(cost["share"] for cost in costs) < 1.01
