"""From a body to engine requests: whose value counts, field by field. No process runs here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import BOS, END, VOCAB

from flatout.config import Config
from flatout.request import ModelFacts, Request, RequestError
from flatout.server.engines import ServedModel
from flatout.server.mailbox import FrontMailbox
from flatout.server.openai import Order, chat_order, completion_order
from flatout.server.protocol import ApiError
from flatout.text.chat import ChatTemplate
from flatout.text.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "hi"}]
Make = Callable[..., Order]


@pytest.fixture
def model(model_folder: Path) -> Iterator[ServedModel]:
    mailbox = FrontMailbox()
    model = ServedModel("m", "k", mailbox)
    model.tokenizer = load_tokenizer(model_folder)
    model.template = ChatTemplate.for_model(model.tokenizer)
    model.facts = facts()
    model.open()
    yield model
    mailbox.close()


def facts(**defaults: Any) -> ModelFacts:
    return ModelFacts("m", VOCAB, 2048, 4096, 16, (END,), defaults)


@pytest.fixture
def complete(model: ServedModel) -> Make:
    return lambda config=None, **body: completion_order({"m": model}, config or Config(), json.dumps({"prompt": "AB", **body}).encode())


@pytest.fixture
def chat(model: ServedModel) -> Make:
    return lambda config=None, **body: chat_order({"m": model}, config or Config(), json.dumps({"messages": USER, **body}).encode())


def first(order: Order) -> Request:
    return order.prompts[0][0]


def test_a58_the_request_wins_over_the_models_defaults(model: ServedModel, complete: Make, chat: Make) -> None:
    model.facts = facts(temperature=0.1, top_k=1, top_p=0.001, repetition_penalty=1.05)
    for make in (complete, chat):
        params = first(make()).params
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.1, 1, 0.001, 1.05)
        params = first(make(temperature=10, top_k=-1, top_p=None)).params
        assert (params.temperature, params.top_k, params.top_p) == (10, 0, 0.001)
    model.facts = facts()
    assert first(complete()).params.temperature == 1.0


def test_max_tokens(model: ServedModel, complete: Make, chat: Make) -> None:
    assert first(complete()).params.max_tokens == 16 and first(chat()).params.max_tokens is None
    assert first(chat(max_completion_tokens=3)).params.max_tokens == first(chat(max_tokens=3)).params.max_tokens == 3
    assert first(chat(max_completion_tokens=0)).params.max_tokens == 0
    model.facts = facts(max_tokens=99)
    assert first(complete()).params.max_tokens == first(chat()).params.max_tokens == 99
    assert first(complete(max_tokens=7)).params.max_tokens == 7


def test_logprobs(complete: Make, chat: Make) -> None:
    assert (first(complete()).params.logprobs, first(chat()).params.logprobs) == (None, None)
    assert first(complete(logprobs=3)).params.prompt_logprobs is None
    assert first(complete(logprobs=3, echo=True)).params.prompt_logprobs == 3
    assert first(complete(logprobs=3, echo=True, prompt_logprobs=5)).params.prompt_logprobs == 5
    assert first(complete(echo=True)).params.prompt_logprobs is None
    assert first(chat(logprobs=True)).params.logprobs == 0
    assert first(chat(logprobs=True, top_logprobs=4)).params.logprobs == 4
    assert first(chat(logprobs=False)).params.logprobs is None


def test_requests(complete: Make, chat: Make) -> None:
    order = complete(prompt=[[65], [66, 67]], n=2, cache_salt="s", seed=5, bad_words=["zz"], ignore_eos=True)
    assert [[r.prompt_ids for r in rs] for rs in order.prompts] == [[[65]] * 2, [[66, 67]] * 2]
    assert [[r.index for r in rs] for rs in order.prompts] == [[0, 1]] * 2
    requests = [r for rs in order.prompts for r in rs]
    assert len({r.id for r in requests}) == 2 and all(r.seed == 5 and r.cache_salt == "s" for r in requests)
    assert all(r.eos_ids == {END} and r.params.ignore_eos and r.bad_words_ids for r in requests)
    assert first(complete()).prompt_ids == [BOS, 65, 66]
    assert first(complete(add_special_tokens=False)).prompt_ids == [65, 66]
    assert first(chat()).prompt_ids[0] == 257  # what the template wrote and nothing before it
    assert first(complete()).seed != first(complete()).seed
    assert complete(echo=True, prompt=[[65], [66, END]]).shown == ["A", "B<|im_end|>"]


def test_priority_needs_the_policy(complete: Make) -> None:
    with pytest.raises(RequestError, match="scheduling-policy"):
        complete(priority=1)
    assert first(complete(priority=0)).priority == 0
    assert first(complete(Config.make(scheduling_policy="priority"), priority=-3)).priority == -3


def test_which_prompt_is_bad(complete: Make) -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]: .*-5 at position 1"):
        complete(prompt=[[1, 2], [3, -5]])
    with pytest.raises(RequestError, match=r"^prompt: .*-5"):
        complete(prompt=[3, -5])


def test_names(model: ServedModel, complete: Make) -> None:
    assert complete(model="m").model is model
    for name in ("", "M", "gpt-4"):
        with pytest.raises(ApiError) as caught:
            complete(model=name)
        assert caught.value.status == 404
    model.down("gone")
    with pytest.raises(ApiError) as caught:
        complete()
    assert caught.value.status == 503 and caught.value.message == "gone"
