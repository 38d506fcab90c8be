"""The OpenAI routes over a scripted engine: shapes, streams, stops, logprobs, usage, errors. Whatever is asked twice, streamed and not, must agree."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from served import END, USER, VOCAB, Served, error, joined

GOING_ON = {
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is ABC"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


# -- the official client ------------------------------------------------------------------------------------------------------


def test_client_completions(server: Served) -> None:
    whole = server.client.completions.create(model="script", prompt="ABC", max_tokens=4)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-") and whole.model == "script"
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in whole.choices] == [(0, "DEFG", "length", None)]
    assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (4, 4, 8)
    assert whole.usage.prompt_tokens_details and whole.usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(server.client.completions.create(model="script", prompt="ABC", max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "DEFG"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)


def test_client_chat(server: Served) -> None:
    whole = server.client.chat.completions.create(model="script", messages=USER, max_completion_tokens=4)
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-")
    message = whole.choices[0].message
    assert (message.role, message.content, message.refusal, message.tool_calls) == ("assistant", "abcd", None, None)
    assert whole.choices[0].finish_reason == "length" and whole.choices[0].logprobs is None
    stream = server.client.chat.completions.create(model="script", messages=USER, max_tokens=4, stream=True)
    chunks = list(stream)
    assert chunks[0].object == "chat.completion.chunk"
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "abcd"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_client_models(server: Served) -> None:
    models = server.client.models.list().data
    assert [(m.id, m.object, m.owned_by) for m in models] == [("script", "model", "flatout")]
    assert server.client.models.retrieve("script").model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has script"):
        server.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        server.client.completions.create(model="script", prompt="x", temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"


def test_without_a_model_name(server: Served) -> None:
    assert server.complete(max_tokens=2)["choices"][0]["text"] == "DE"


# -- ends ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a18_stop_string(server: Served, stream: bool, include: bool) -> None:
    body = {"prompt": "alphabet: ABC", "stop": ["HIJKL", "GHIJ"], "max_tokens": 30, "include_stop_str_in_output": include}
    shown = "DEFGHIJ" if include else "DEF"
    if stream:
        chunks = server.stream("completions", **body, stream_options={"include_usage": True})
        pieces = [c["text"] for chunk in chunks for c in chunk["choices"]]
        assert "".join(pieces) == shown
        ends = [(c["finish_reason"], c["stop_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert ends == [("stop", "GHIJ")]
        usage = chunks[-1]["usage"]
    else:
        reply = server.complete(**body)
        choice = reply["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", "GHIJ")
        usage = reply["usage"]
    assert usage["completion_tokens"] == 7
    server.wait_idle()


def test_what_could_be_a_stop_is_held_back_and_given_back(server: Served) -> None:
    chunks = server.stream("completions", prompt="ABC", stop=["DEFX", "HIX"], max_tokens=6)
    assert joined(chunks) == "DEFGHI"
    assert server.complete(stop=["DEFX"], max_tokens=3)["choices"][0]["text"] == "DEF"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a22_odd_stops(server: Served, route: str) -> None:
    start = {"prompt": "ABC"} if route == "completions" else {"messages": USER}
    for fine in ([], None, "zz", ["x"] * 16):
        assert server.post(route, **start, stop=fine, max_tokens=3).status_code == 200
    for bad in ("", [""], ["a", ""], ["x"] * 17, "y" * 20_000, [5]):
        assert error(server.post(route, **start, stop=bad, max_tokens=3))["param"] == "stop"


def test_end_ids_and_stop_ids(server: Served) -> None:
    force = {"logit_bias": {str(END): 100}}
    reply = server.complete(max_tokens=5, **force)
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in reply["choices"]] == [("", "stop", None)]
    assert reply["usage"]["completion_tokens"] == 1
    reply = server.complete(max_tokens=5, ignore_eos=True, **force)
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 5
    reply = server.complete(max_tokens=9, stop_token_ids=[ord("F")])
    assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in reply["choices"]] == [("DE", "stop", ord("F"))]
    reply = server.complete(max_tokens=9, stop="<|im_end|>", ignore_eos=True, **force)  # A23
    assert reply["choices"][0]["text"] == "" and reply["choices"][0]["finish_reason"] == "stop"
    reply = server.complete(max_tokens=2, ignore_eos=True, skip_special_tokens=False, **force)
    assert reply["choices"][0]["text"] == "<|im_end|>" * 2


def test_a55_max_tokens_is_an_upper_bound(server: Served) -> None:
    ids = [65] * 1000
    reply = server.complete(ids, max_tokens=4096)
    assert reply["usage"]["completion_tokens"] == 1048 and reply["choices"][0]["finish_reason"] == "length"
    assert server.complete(max_tokens=None)["usage"]["completion_tokens"] == 16
    zero = server.complete(max_tokens=0)
    assert zero["usage"]["completion_tokens"] == 0 and zero["choices"][0]["text"] == ""
    full = error(server.post("completions", prompt=[65] * 2048, max_tokens=5))
    assert full["param"] == "prompt" and "2048" in full["message"]
    both = {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}
    assert error(server.post("chat/completions", **both))["param"] == "max_tokens"
    both["max_tokens"] = 4
    assert server.post("chat/completions", **both).json()["usage"]["completion_tokens"] == 4
    chat = server.post("chat/completions", messages=USER, stop="de").json()  # no bound: the context
    assert chat["choices"][0]["message"]["content"] == "abc"


def test_a56_long_prompts_are_refused_with_both_numbers(server: Served) -> None:
    for route, body in (
        ("completions", {"prompt": "nonce " + "x" * 6000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 6000}]}),
    ):
        for stream in (False, True):
            said = error(server.post(route, **body, stream=stream))["message"]
            assert "60" in said and "2048" in said
    # the engine's own refusal, which the door could not foresee
    for stream in (False, True):
        said = error(server.post("completions", prompt=[65] * 1500, stream=stream))
        assert said["param"] == "prompt" and "1500" in said["message"] and "1024" in said["message"]
    server.wait_idle()


# -- several choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a62_always_n_choices(server: Served, n: int) -> None:
    for fields in ({"max_tokens": 5}, {"max_tokens": 9, "stop": "GH"}):
        whole = server.complete(n=n, **fields)
        assert [c["index"] for c in whole["choices"]] == list(range(n))
        chunks = server.stream("completions", prompt="ABC", n=n, stream_options={"include_usage": True}, **fields)
        for choice in whole["choices"]:
            assert joined(chunks, choice["index"]) == choice["text"] == ("DEFGH" if "stop" not in fields else "DEF")
        tokens = 5 * n
        for usage in (whole["usage"], chunks[-1]["usage"]):
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, tokens)
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert sorted(ends) == list(range(n))
    chat = server.stream("chat/completions", messages=USER, n=n, max_tokens=3)
    roles = [c["index"] for chunk in chat for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == list(range(n)) and all(joined(chat, i) == "abc" for i in range(n))


def test_a62_n_out_of_range(server: Served) -> None:
    for n in (0, -1, 1000, "2", 1.5):
        assert error(server.post("completions", prompt="x", n=n))["param"] == "n"
    assert error(server.post("completions", prompt="x", n=3, best_of=2))["param"] == "best_of"
    assert "100 x 100" in error(server.post("completions", prompt=["x"] * 100, n=100))["message"]


def test_a63_prompts_times_samples(server: Served) -> None:
    body = {"prompt": ["a", "f", "k"], "n": 2, "max_tokens": 4, "echo": True}
    expected = ["abcde", "abcde", "fghij", "fghij", "klmno", "klmno"]
    whole = server.complete(**body)
    assert [c["text"] for c in whole["choices"]] == expected and [c["index"] for c in whole["choices"]] == list(range(6))
    chunks = server.stream("completions", **body)
    assert [joined(chunks, i) for i in range(6)] == expected
    assert whole["usage"]["prompt_tokens"] == 6 and whole["usage"]["completion_tokens"] == 24
    # one bad prompt refuses all, whoever finds it
    for bad in ("x" * 3000, [65] * 1500):
        prompts = [bad, "a"] if isinstance(bad, str) else [[65], bad]
        assert error(server.post("completions", **{**body, "prompt": prompts}))["param"] == "prompt"
    server.wait_idle()
    ids = server.complete([[65, 66], [70]], max_tokens=2)
    assert [c["text"] for c in ids["choices"]] == ["CD", "GH"]


# -- usage --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 2}, {"n": 2, "stop": "ef"}])
def test_a76_usage_in_a_stream(server: Served, route: str, fields: dict[str, Any]) -> None:
    body = {**({"prompt": "ab"} if route == "completions" else {"messages": USER}), "max_tokens": 7, **fields}
    whole = server.post(route, **body).json()["usage"]
    chunks = server.stream(route, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    last = chunks[-1]["usage"]
    whole["prompt_tokens_details"] = last["prompt_tokens_details"] = None  # the second finds the first one's blocks
    assert last == whole
    for options in (None, {}, {"include_usage": False}):
        plain = server.stream(route, **body, stream_options=options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain)


def test_cached_tokens(server: Served) -> None:
    prompt = [1, 2, 3, 4] * 20
    salt = {"cache_salt": "cached"}
    counts = [server.complete(prompt, max_tokens=1, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts == [0, 64]
    chunks = server.stream("completions", prompt=prompt, max_tokens=1, n=2, stream_options={"include_usage": True}, **salt)
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert server.complete(prompt, cache_salt="other")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# -- chat ---------------------------------------------------------------------------------------------------------------------


def test_chat_contents(server: Served) -> None:
    ids = {"max_tokens": 1, "return_token_ids": True}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]  # A30
    same = [
        server.post("chat/completions", messages=[{"role": "user", "content": c}], **ids).json()["prompt_token_ids"] for c in ("hi", parts)
    ]
    assert same[0] == same[1]
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    assert "text" in error(server.post("chat/completions", messages=[{"role": "user", "content": image}]))["message"]
    twice = [*USER, *USER]
    assert "Conversation roles must alternate" in error(server.post("chat/completions", messages=twice))["message"]  # A32
    for bad in (
        [],
        "hi",
        [5],
        [{"content": "x"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
    ):
        assert error(server.post("chat/completions", messages=bad))["param"].startswith("messages")
    assert server.post("chat/completions", messages=[{"role": "user", "content": ""}], max_tokens=1).status_code == 200
    for name in ("messages", "self", "tools", "add_generation_prompt"):
        assert error(server.post("chat/completions", messages=USER, chat_template_kwargs={name: 1}))["param"] == "chat_template_kwargs"


def test_a33_going_on(server: Served) -> None:
    reply = server.post("chat/completions", **GOING_ON, max_tokens=3).json()
    assert reply["choices"][0]["message"]["content"] == "DEF"
    assert (
        server.post("chat/completions", **GOING_ON, max_tokens=3, echo=True).json()["choices"][0]["message"]["content"]
        == "The answer is ABCDEF"
    )
    assert joined(server.stream("chat/completions", **GOING_ON, max_tokens=3, echo=True)) == "The answer is ABCDEF"
    both = {**GOING_ON, "add_generation_prompt": True}
    assert error(server.post("chat/completions", **both))["param"] == "add_generation_prompt"
    assert error(server.post("chat/completions", messages=USER, echo=True))["param"] == "echo"


# -- refusals -----------------------------------------------------------------------------------------------------------------


def test_a50_logit_bias(server: Served) -> None:
    for bias, says in (({"191222": -100, "99999": 5}, "191222"), ({"abc": 1}, "abc"), ({"5": 1e9}, "logit_bias[5]"), ({"-1": 1}, "-1")):
        said = error(server.post("chat/completions", messages=USER, max_tokens=8, logit_bias=bias))
        assert said["param"].startswith("logit_bias") and says in said["message"]
    raw = server.http.post("/v1/completions", content=b'{"prompt":"x","logit_bias":{"5":NaN}}')
    assert error(raw)["code"] == "invalid_json"


def test_a52_prompt_ids(server: Served) -> None:
    for prompt, says in (
        ([1, 2, 999999], "999999"),
        ([-1], "-1"),
        ([], "empty"),
        ([[1, 2], [3, -5]], "-5"),
        ([1.5], "1.5"),
        ([True], "true"),
        ([VOCAB], str(VOCAB)),
    ):
        said = error(server.post("completions", prompt=prompt))
        assert said["param"] == "prompt" and says in said["message"]


def test_a54_empty_prompts(server: Served) -> None:
    for prompt in ("", [""], "\u0000"):
        assert server.post("completions", prompt=prompt, max_tokens=2).status_code == 200  # this model has a start token
        if prompt != "\u0000":
            assert error(server.post("completions", prompt=prompt, add_special_tokens=False))["param"] == "prompt"
    for prompt in ([], [[]]):
        assert error(server.post("completions", prompt=prompt))["param"] == "prompt"
    assert error(server.http.post("/v1/completions", content=b'{"prompt":"\\ud800"}'))


def test_a57_unknown_fields(server: Served) -> None:
    said = error(server.post("chat/completions", messages=USER, max_token=4))
    assert said["param"] == "max_token" and "max_tokens" in said["message"] and said["code"] == "unknown_parameter"
    said = error(server.post("chat/completions", messages=USER, response_format={"type": "not_a_real_format"}))
    assert said["param"] == "response_format"
    assert server.post("chat/completions", messages=USER, response_format={"type": "text"}, max_tokens=1).status_code == 200
    assert error(server.post("chat/completions", messages=USER, tools=[{"type": "function"}]))["param"] == "tools"


def test_ranges(server: Served) -> None:
    bad: dict[str, Any] = {
        "temperature": -0.1,
        "top_p": 0,
        "top_k": -2,
        "min_p": 2,
        "repetition_penalty": 0,
        "presence_penalty": 3,
        "seed": 2**64,
    }
    bad |= {
        "frequency_penalty": -3,
        "max_tokens": -1,
        "min_tokens": -1,
        "stop_token_ids": [VOCAB],
        "allowed_token_ids": [],
        "bad_words": [""],
    }
    for name, value in bad.items():
        param = error(server.post("completions", prompt="x", **{name: value}))["param"]
        assert param.split("[")[0] == name, (name, param)
    for seed in (0, -1, 2**63 - 1):
        assert server.post("completions", prompt="x", seed=seed, max_tokens=1).status_code == 200


def test_errors_of_http(server: Served) -> None:
    assert error(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    reply = server.http.get("/v1/completions")
    assert error(reply, 405)["code"] == "method_not_allowed" and "POST" in reply.headers["allow"]
    assert error(server.http.post("/v1/completions", content=b"{"))["code"] == "invalid_json"
    assert error(server.http.post("/v1/completions", content=b"[]"))["code"] == "invalid_json"


def test_413(start: Callable[..., Served]) -> None:
    small = start(server={"max_body_bytes": 1000, "api_key": "secret"})
    key = {"authorization": "Bearer secret"}
    big = json.dumps({"prompt": "x" * 2000}).encode()
    assert error(small.http.post("/v1/completions", content=big, headers=key), 413)["code"] == "body_too_large"
    chunked = small.http.post("/v1/completions", content=(big[i : i + 100] for i in range(0, len(big), 100)), headers=key)
    assert error(chunked, 413)
    # and the key
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Basic secret"}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")):
            assert error(small.http.request(method, path, headers=headers), 401)["code"] == "invalid_api_key"
    assert small.http.get("/health").status_code == 200
    for scheme in ("Bearer", "bearer", "BEARER "):
        assert small.http.get("/v1/models", headers={"authorization": f"{scheme} secret"}).status_code == 200
    assert small.stop() == 0


def test_a_failed_step_ends_its_request_alone(server: Served) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(server.complete, max_tokens=50)
        said = error(server.post("completions", prompt="ABC", seed=667), 500)
        assert "hiccup" in said["message"] and said["type"] == "internal_server_error"
        assert other.result()["usage"]["completion_tokens"] == 50
    assert error(server.post("completions", prompt="ABC", seed=667, stream=True), 500)


def test_32_streams_at_once(server: Served) -> None:
    def one(i: int) -> None:
        first = 65 + i % 26
        text = joined(server.stream("completions", prompt=[first], max_tokens=100))
        expected, last = "", first
        for _ in range(100):
            last = 32 if last == 126 else last + 1
            expected += chr(last)
        assert text == expected

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(32)))
    server.wait_idle()


def test_bodies_broken_at_random(server: Served) -> None:
    """200 mutations of good bodies: each is answered in shape, and the server is as before."""
    rng = random.Random(5)
    good = [
        {"prompt": "ABC", "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1}, "n": 2, "logprobs": 1, "stream": True},
        {"prompt": [[65, 66], [67]], "max_tokens": 3, "stop_token_ids": [5], "stream_options": {"include_usage": True}, "stream": True},
    ]
    chat = {"messages": [{"role": "system", "content": "s"}, *USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "seed": 5}
    values: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x", [], {}, [None], {"": None}, [[[]]], "\x00", [{"role": 5}], -0.0]

    def mutate(value: Any) -> Any:
        if rng.random() < 0.25:
            return rng.choice(values)
        if isinstance(value, dict) and value:
            name = rng.choice(list(value))
            return {**value, (name if rng.random() < 0.9 else name[1:]): mutate(value[name])}
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            return [*value[:at], mutate(value[at]), *value[at + 1 :]]
        return rng.choice(values)

    statuses = []
    for i in range(200):
        route, body = ("chat/completions", chat) if i % 3 == 0 else ("completions", rng.choice(good))
        raw = json.dumps(mutate(body)).encode()
        if i % 2:
            at = rng.randrange(len(raw))
            raw = raw[:at] + bytes([rng.randrange(256)]) * rng.randrange(3) + raw[at + rng.randrange(3) :]
        reply = server.http.post(f"/v1/{route}", content=raw)
        statuses.append(reply.status_code)
        assert reply.status_code in (200, 400, 404), (raw, reply.text)
        if reply.status_code != 200:
            error(reply, reply.status_code)
    assert statuses.count(400) > 50
    assert server.complete(max_tokens=2)["choices"][0]["text"] == "DE"
    server.wait_idle()


def test_without_a_tokenizer(start: Callable[..., Served], model_folder: Path, tmp_path: Path) -> None:
    """Random weights from a config alone: ids in, ids out; whatever needs text says so."""
    for name in ("config.json", "generation_config.json"):
        shutil.copy(model_folder / name, tmp_path)
    bare = start(model=str(tmp_path))
    asked = {"max_tokens": 3, "return_token_ids": True, "logprobs": 1, "echo": True}
    choice = bare.complete([65, 66], **asked)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [67, 68, 69])
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in range(65, 70)] and choice["logprobs"]["text_offset"] == [0] * 5
    chunks = bare.stream("completions", prompt=[65, 66], max_tokens=3, return_token_ids=True)
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [67, 68, 69]
    assert "tokenizer" in error(bare.post("completions", prompt="text"))["message"]
    assert "tokenizer" in error(bare.post("completions", prompt=[65], stop="x"))["message"]
    assert error(bare.post("chat/completions", messages=USER))["param"] == "messages"
    assert bare.stop() == 0
