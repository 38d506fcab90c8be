"""Reply objects of the OpenAI routes, exactly as its clients expect them, and the usage account.

Data only: no engine, no text, no HTTP. A field that is UNSET is left out of the JSON; None is null. Filled by openai.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from flatout.request import FinishReason

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Each prompt counts once, every sample's tokens count; the end id is a completion token, what lies behind a stop string is not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ledger/account.py:RequestAccount.plain(), where it was asked for; in a stream with its last chunk
Timings = dict[str, Any] | UnsetType

# -- log-probabilities ----------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in each list. The first prompt token (echo) has no value: null, null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]  # the best N, and the chosen token where it isn't among them
    text_offset: list[int]  # in characters of the choice's text


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None  # null: the token is no part of the text (an end id)


class TokenLogprobs(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]  # exactly as many as were asked for


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobs]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """vLLM's prompt_logprobs: per position a map from token id to this."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]

# -- completions ----------------------------------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct):
    """Whole or, in a stream, a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None  # stop or length; the others are errors
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings = UNSET


# -- chat -----------------------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None  # stop or length; the others are errors
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None  # stop or length; the others are errors
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# -- models ---------------------------------------------------------------------------------------------------------------


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "flatout"
    root: str  # what the server was given as the model
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
