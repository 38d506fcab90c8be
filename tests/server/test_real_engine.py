"""The server over the real engine and the default model, float32: the known ids, streams equal replies, nothing leaks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, children, cpu_seconds, wait_for

from flatout.ledger.table import table_from

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
POOL = 32 * 16  # tokens


@pytest.fixture(scope="module")
def real(start: Callable[..., Served], default_model: Path) -> Served:
    options = {"dtype": "float32", "threads": 1, "num_gpu_blocks_override": POOL // 16, "block_size": 16, "max_num_batched_tokens": 256}
    return start(engine=None, model="smollm2", load_format="auto", server={"served_model_name": None}, **options)


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]


@pytest.mark.parametrize("case", KNOWN[:2], ids=lambda c: c["messages"][-1]["content"][:20])
def test_known_ids(real: Served, case: dict[str, Any]) -> None:
    known = case["greedy_ids"][:8]
    body = {"model": "smollm2", "messages": case["messages"], "temperature": 0, "max_tokens": len(known), "return_token_ids": True}
    reply = real.post("chat/completions", **body).json()
    assert reply["prompt_token_ids"] == case["prompt_ids"]
    assert reply["choices"][0]["token_ids"] == known
    chunks = real.stream("chat/completions", **body)
    assert ids_of(chunks) == known
    text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
    assert text == reply["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if known == case["greedy_ids"] else "length")


def test_a18_no_part_of_a_stop_gets_out(real: Served) -> None:
    body = {"prompt": "Here is the English alphabet: A B C D E", "temperature": 0, "max_tokens": 8, "stop": [" F G H", " 6 7 8"]}
    whole = real.complete(**body)["choices"][0]
    chunks = real.stream("completions", **body)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["text"] == ""
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", " F G H")
    assert real.complete(**{**body, "stop": None, "max_tokens": 3})["choices"][0]["text"] == " F G H"


def test_cached_tokens_of_an_answer_that_a_stop_string_ends(real: Served) -> None:
    body = {"prompt": "1 2 3 4 5 6 7 8 9 10 11 12 13 14", "temperature": 0, "max_tokens": 12, "stop": [" 17"], "cache_salt": "stop"}
    first, second = (real.complete(**body) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == " 15 16"
    assert [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in (first, second)] == [0, 16]


def test_a48_echo_with_logprobs(real: Served) -> None:
    """Prompt values are the same whatever the cache holds, and those that generating gives."""
    prompt = "The quick brown fox jumps over the lazy dog. 😊“x” The quick brown fox jumps"
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
    first, second = (real.complete(**asked, max_tokens=0)["choices"][0] for _ in range(2))
    assert first == second and first["text"] == prompt
    tokens = first["logprobs"]["tokens"]
    data = b"".join(bytes.fromhex(t[6:].replace("\\x", "")) if t.startswith("bytes:") else t.encode() for t in tokens)
    assert data.decode() == prompt and any(t.startswith("bytes:") for t in tokens)
    longer = real.complete(**asked, max_tokens=3)["choices"][0]
    again = real.complete(longer["text"], echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    assert again["tokens"] == longer["logprobs"]["tokens"]
    for a, b in zip(again["token_logprobs"][1:], longer["logprobs"]["token_logprobs"][1:]):
        assert a == pytest.approx(b, abs=1e-4)


def test_a38_seeds(real: Served) -> None:
    body = {"prompt": "Once", "temperature": 1.5, "max_tokens": 4}
    with ThreadPoolExecutor(8) as pool:
        seeded = list(pool.map(lambda _: real.complete(**body, seed=42)["choices"][0]["text"], range(3)))
        free = list(pool.map(lambda _: real.complete(**body)["choices"][0]["text"], range(3)))
    assert len(set(seeded)) == 1 and len(set(free)) > 1
    samples = [c["text"] for c in real.complete(**body, seed=42, n=3)["choices"]]
    assert samples[0] == seeded[0] and len(set(samples)) > 1


def test_a_crowd_changes_nothing(real: Served) -> None:
    bodies = [{"prompt": f"{i} and {i + 1} and", "temperature": 0, "max_tokens": 4, "logprobs": i % 3} for i in range(4)]
    bodies[1] |= {"repetition_penalty": 1.5}
    bodies[2] |= {"logit_bias": {"2": 100}}
    alone = [real.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda body: real.complete(**body)["choices"], bodies))
    for a, b in zip(alone, crowd):
        assert a[0]["text"] == b[0]["text"] and a[0]["finish_reason"] == b[0]["finish_reason"]
    assert alone[2][0]["finish_reason"] == "stop" and alone[2][0]["text"] == ""


def test_ledger_and_timings(real: Served) -> None:
    """Parts of the device's time with ops by name; a request's parts with why its prompt was not cached."""
    body = {"temperature": 0, "cache_salt": "ledger", "timings": True}
    prompt = list(range(100, 160))
    first = real.complete(prompt, max_tokens=4, **body)["timings"]
    whole = real.complete(prompt, max_tokens=4, **body)["timings"]
    other = real.complete([*prompt[:37], *range(500, 530)], max_tokens=4, **body)["timings"]
    assert [t["cached_tokens"] for t in (first, whole, other)] == [0, 48, 32]
    assert [t["cache_miss"] for t in (first, whole, other)] == ["salted", "", "differs at token 37"]
    for timings in (first, whole, other):
        assert sum(timings["parts_ms"].values()) == pytest.approx(timings["total_ms"], abs=0.05)
        assert timings["prefill_chunks"] == 1 and timings["parts_ms"]["prefill"] > 0 < timings["parts_ms"]["decode"]
    assert real.http.get("/ledger?deep=3").status_code == 200
    real.complete(prompt, max_tokens=8, **body)
    wait_for(lambda: real.http.get("/ledger").json()["models"]["smollm2"]["state"]["running"] == 0, 5)
    found = real.http.get("/ledger").json()["models"]["smollm2"]
    start = found["windows"]["start"]
    assert sum(start["parts"].values()) == pytest.approx(start["seconds"])
    loaded = start["seconds"] - start["parts"]["idle"]
    assert abs(start["parts"]["residual"]) < 0.05 * loaded and 0 < start["of_floor"] < 1.5
    assert {"attn.qkv", "attn.o", "mlp.gate_up", "mlp.down", "head"} <= {
        op["label"].split()[1] for op in start["ops"] if " " in op["label"]
    }
    assert table_from(found["table"]).ops  # what top, dashboard and doctor make the same account from
    text = real.http.get("/metrics").text
    assert 'flatout:step_seconds_total{engine="0",model_name="smollm2",part="floor_bandwidth"}' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.0' in text


def test_b01_clients_that_leave_free_everything(real: Served) -> None:
    long = {"prompt": [5] * 150, "max_tokens": 350, "ignore_eos": True}
    raws = [real.connect({**long, "stream": i % 2 == 0, "n": 1 + i % 3}) for i in range(9)]
    time.sleep(0.5)
    for raw in raws:
        raw.close()
    whole = real.complete([7] * (POOL - 1), max_tokens=50)  # needs every block of the pool
    assert whole["usage"]["prompt_tokens"] == POOL - 1 and whole["choices"][0]["finish_reason"] == "length"
    cached = real.complete([7] * 100, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 96


def test_refusals(real: Served) -> None:
    """What the model can't do is a 400 with the numbers, and the next request works."""
    for prompt, says in (([49152], "49152"), ([9] * (POOL + 1), str(POOL)), ("word " * 9000, str(POOL)), ([], "empty"), ("", "empty")):
        reply = real.post("completions", prompt=prompt, max_tokens=2)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    reply = real.post("completions", prompt="x", logit_bias={"49152": 1})
    assert reply.status_code == 400 and "49152" in reply.json()["error"]["message"]
    assert real.complete("1 2 3 4", max_tokens=4, temperature=0)["choices"][0]["text"] == " 5 6"


def test_c09_idle_is_idle_and_wakes_at_once(real: Served) -> None:
    """Both processes together take under 1 % of a core each; a request after a pause waits no 20 ms more than one that follows another."""
    real.complete("1 2 3", max_tokens=4, temperature=0)
    time.sleep(0.5)
    pids = [real.process.pid, *children(real.process.pid)]
    assert len(pids) == 2
    before = sum(map(cpu_seconds, pids))
    time.sleep(3)
    assert sum(map(cpu_seconds, pids)) - before <= 0.06 + 0.01  # the clock has 10 ms

    def seconds(pause: float) -> float:
        time.sleep(pause)
        begin = time.monotonic()
        real.complete("1 2 3", max_tokens=1, temperature=0)
        return time.monotonic() - begin

    assert min(seconds(0.3) for _ in range(5)) - min(seconds(0) for _ in range(5)) < 0.02
