"""Bodies: what is taken, and the 400 that names the field. No server runs here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flatout.request import SamplingParams
from flatout.server.protocol import SAMPLING_FIELDS, UNSUPPORTED, ApiError, ChatBody, CompletionBody, parse, prompts_of

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)


def refusal(kind: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind(**fields)
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    return caught.value


def test_sampling_fields_are_the_engines() -> None:
    assert set(SAMPLING_FIELDS) | {"max_tokens", "logprobs"} == set(SamplingParams.names())
    for kind in (CompletionBody, ChatBody):
        assert set(SamplingParams.names()) <= set(kind.__struct_fields__)
        assert not set(kind.__struct_fields__) & set(UNSUPPORTED)


def test_null_is_not_given() -> None:
    names = [n for n in CompletionBody.__struct_fields__ if n != "prompt"]
    assert completion(**dict.fromkeys([*names, *UNSUPPORTED, "best_of"])) == completion()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_token": 4}, "max_token", "did you mean 'max_tokens'"),
        ({"temperatur": 1}, "temperatur", "did you mean 'temperature'"),
        ({"foo": [1]}, "foo", "unknown field 'foo'"),
        ({"max_tokens": "4"}, "max_tokens", "expected int, got str"),
        ({"max_tokens": True}, "max_tokens", "expected int, got bool"),
        ({"max_tokens": 1.5}, "max_tokens", "expected int"),
        ({"temperature": "hot"}, "temperature", "expected float, got str"),
        ({"stop": 5}, "stop", "got int"),
        ({"stop": ["a", 5]}, "stop", "stop[1]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "got str"),
        ({"logit_bias": [1]}, "logit_bias", "got array"),
        ({"stream": "yes"}, "stream", "expected bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options", "include_usag"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"best_of": 3}, "best_of", "best_of = n"),
        ({"n": 2, "best_of": 5}, "best_of", "best_of = n"),
        ({"suffix": "the end"}, "suffix", "not supported"),
        ({"user": 5}, "user", "expected str"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(completion, **fields)
    assert error.param == param and says in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_known_fields_that_ask_for_something_are_refused(name: str) -> None:
    assert refusal(chat, **{name: {"type": "anything else"}}).param == name
    for harmless in UNSUPPORTED[name]:
        chat(**{name: harmless})


def test_not_a_request() -> None:
    for raw in (b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(ApiError) as caught:
            parse(raw, CompletionBody)
        assert caught.value.status == 400
    assert refusal(lambda: parse(b"{}", CompletionBody)).param == "prompt"
    assert refusal(lambda: parse(b"{}", ChatBody)).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "a number"),
        (None, "null"),
        ({"text": "x"}, "an object"),
        ([], "must not be empty"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, None], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1], [2, "x"]], "prompt[1][1]"),
        ([[[1]]], "prompt[0]"),
        ([None], "prompt[0]"),
        (["a"] * 3000, "2048"),
    ],
)
def test_bad_prompts(prompt: Any, says: str) -> None:
    error = refusal(prompts_of, prompt=prompt)
    assert error.param == "prompt" and says in error.message


def test_good_prompts() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of(["a", "b"]) == ["a", "b"]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1], [2, 3]]) == [[1], [2, 3]]
    assert prompts_of([""]) == [""] and prompts_of([[]]) == [[]]  # emptiness is judged where the tokenizer is known
