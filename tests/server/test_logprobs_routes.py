"""Log-probabilities over HTTP, in the three shapes, from a scripted engine whose values are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import BOS, END, USER, Served, error, joined, strict


def test_a43_alternatives_do_not_depend_on_filters(server: Served) -> None:
    asked = {"messages": USER, "logprobs": True, "top_logprobs": 3, "max_tokens": 1}
    replies = [server.post("chat/completions", **asked, top_p=p).json() for p in (0.5, 1.0)]
    first, second = (r["choices"][0]["logprobs"]["content"] for r in replies)
    assert first == second and len(first[0]["top_logprobs"]) == 3


def test_a44_each_position_has_its_own_alternatives(server: Served) -> None:
    asked = {"messages": USER, "logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    whole = server.post("chat/completions", **asked).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    streamed = [
        e
        for chunk in server.stream("chat/completions", **asked)
        for c in chunk["choices"]
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert entries == streamed and len(entries) == 12
    for entry, character in zip(entries, "abcdefghijkl"):
        assert entry["token"] == character and entry["bytes"] == [ord(character)]
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
    assert bytes(b for e in entries for b in e["bytes"]).decode() == whole["message"]["content"]


def test_a45_as_many_alternatives_as_asked(server: Served) -> None:
    outside = {"logit_bias": {"7": 100}}  # the sampled token is none of the best
    for count in (0, 1, 5, 20):
        entry = server.post("chat/completions", messages=USER, logprobs=True, top_logprobs=count, max_tokens=1, **outside).json()
        content = entry["choices"][0]["logprobs"]["content"]
        assert [len(e["top_logprobs"]) for e in content] == [count] and content[0]["logprob"] == -50
        old = server.complete(logprobs=count, max_tokens=1, **outside)["choices"][0]["logprobs"]
        assert len(old["top_logprobs"][0]) == count + 1 and old["top_logprobs"][0]["\x07"] == old["token_logprobs"][0] == -50
        old = server.complete(logprobs=count, max_tokens=1)["choices"][0]["logprobs"]
        assert len(old["top_logprobs"][0]) == max(count, 1)
    for count in (21, -1):
        assert error(server.post("chat/completions", messages=USER, logprobs=True, top_logprobs=count))["param"] == "top_logprobs"
        assert error(server.post("completions", prompt="x", logprobs=count))["param"] == "logprobs"


def test_a46_logprobs_without_alternatives(server: Served) -> None:
    reply = server.post("chat/completions", messages=USER, logprobs=True, max_tokens=3).json()
    assert [e["top_logprobs"] for e in reply["choices"][0]["logprobs"]["content"]] == [[], [], []]
    assert error(server.post("chat/completions", messages=USER, top_logprobs=2))["param"] == "top_logprobs"


def test_a47_no_infinity(server: Served) -> None:
    reply = server.post("chat/completions", messages=USER, logprobs=True, top_logprobs=20, max_tokens=2, logit_bias={"5": -100})
    values = [t["logprob"] for e in strict(reply.text)["choices"][0]["logprobs"]["content"] for t in e["top_logprobs"]]
    assert min(values) == -9999.0
    strict(json.dumps(server.complete(logprobs=20, echo=True, prompt_logprobs=20)))


@pytest.mark.parametrize("prompt", ["The cat sat on the mat", [*b"The cat sat on the mat"], [BOS, *b"The cat"]])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a48_echo_with_logprobs(server: Served, prompt: Any, max_tokens: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    reply = server.complete(**body)
    choice, usage = reply["choices"][0], reply["usage"]
    logprobs = choice["logprobs"]
    assert usage["completion_tokens"] == max_tokens
    ids = [BOS, *prompt.encode()] if isinstance(prompt, str) else prompt
    generated = [ids[-1] + 1] * max_tokens
    names = ["<s>" if i == BOS else chr(i) for i in ids + generated]
    assert logprobs["tokens"] == names
    assert all(len(column) == len(names) for column in logprobs.values())
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    if isinstance(prompt, str):
        assert choice["text"] == prompt + "u" * max_tokens
        assert logprobs["text_offset"] == [0, *range(len(prompt) + max_tokens)]
    else:
        assert choice["text"] == "".join(names)
        assert all(choice["text"][o:].startswith(name) for o, name in zip(logprobs["text_offset"], names))
    chunks = server.stream("completions", **body)
    assert joined(chunks) == choice["text"]
    for column in logprobs:
        assert [x for c in chunks for x in c["choices"][0]["logprobs"][column]] == logprobs[column]


def test_parts_of_characters_keep_their_bytes(server: Served) -> None:
    prompt = [*"é".encode()][:1]  # goes on with C4, C5: none of them a character
    logprobs = server.complete(prompt, max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc4", "bytes:\\xc5"]
    force = {"logit_bias": {"259": 100}}
    entry = server.post("chat/completions", messages=USER, logprobs=True, max_tokens=1, **force).json()["choices"][0]
    assert entry["logprobs"]["content"][0]["bytes"] == [*b"<added>"]
    force = {"logit_bias": {str(END): 100}}
    entry = server.post("chat/completions", messages=USER, logprobs=True, max_tokens=3, **force).json()["choices"][0]
    assert [(e["token"], e["bytes"]) for e in entry["logprobs"]["content"]] == [("<|im_end|>", None)]
    padding = server.complete(max_tokens=1, logprobs=0, logit_bias={"265": 100})["choices"][0]
    assert padding["logprobs"]["tokens"] == ["token_id:265"] and padding["text"] == ""


def test_vllm_extras(server: Served) -> None:
    reply = server.complete(max_tokens=2, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    assert reply["token_ids"] == [68, 69] and reply["prompt_token_ids"] == [BOS, 65, 66, 67]
    assert reply["prompt_logprobs"][0] is None
    assert reply["prompt_logprobs"][2] == {"66": {"logprob": -0.1, "rank": 1, "decoded_token": "B"}}
    assert set(reply["prompt_logprobs"][1]) == {"65", "1"}
    chunks = server.stream("completions", prompt="ABC", max_tokens=2, return_token_ids=True)
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [68, 69]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [BOS, 65, 66, 67]
    chat = server.post("chat/completions", messages=USER, max_tokens=2, return_token_ids=True, prompt_logprobs=0).json()
    assert chat["choices"][0]["token_ids"] == [97, 98] and len(chat["prompt_token_ids"]) == len(chat["prompt_logprobs"])
    chunks = server.stream("chat/completions", messages=USER, max_tokens=2, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    bare = server.complete(max_tokens=1, add_special_tokens=False, return_token_ids=True)["choices"][0]
    assert bare["prompt_token_ids"] == [65, 66, 67]
    begun = server.complete("<s>ABC", max_tokens=1, return_token_ids=True)["choices"][0]
    assert begun["prompt_token_ids"] == [BOS, 65, 66, 67]  # A29: one start token
    assert error(server.post("completions", prompt="x", priority=1))["param"] == "priority"
