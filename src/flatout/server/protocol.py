"""Request bodies and errors of the OpenAI routes: what a client may send, and the 400 that names the field when it may not.

Bodies are decoded into structs with types; ranges are SamplingParams' to judge. Every field is either used, or refused by name: none is
ignored. No engine and no text here. Called by openai.py; reply shapes are in replies.py.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

MAX_CHOICES = 2048  # prompts x n in one request

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An HTTP error in OpenAI's shape. `param` names the offending field."""

    def __init__(self, status: int, message: str, type: str = INVALID, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code

    @classmethod
    def refused(cls, field: str, message: str) -> ApiError:
        """A RequestError, which may name a place inside a field (messages[2].content); `param` is the body's field."""
        return cls(400, message, param=_field(field), code="invalid_value")

    @classmethod
    def unavailable(cls, reason: str) -> ApiError:
        return cls(503, reason, type="service_unavailable_error", code="engine_unavailable")

    @classmethod
    def internal(cls, reason: str) -> ApiError:
        return cls(500, reason, type="internal_server_error", code="internal_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both routes take. null means not given, everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings: bool | None = None  # ours: the reply says where its time went
    user: str | None = None  # names the caller's own user; nothing here depends on it
    # sampling: OpenAI's
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    # sampling: vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # the rest of vLLM's
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CompletionBody(Body, kw_only=True):
    prompt: Any  # str | list[str] | list[int] | list[list[int]]: prompts_of() judges
    logprobs: int | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# the fields of Body that are SamplingParams' own, by the same names
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

# Fields that clients of OpenAI or vLLM know and this server cannot do, with the values (besides null) that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

B = TypeVar("B", bound=Body)


def parse(raw: bytes, kind: type[B]) -> B:
    """A body of that kind. Raises ApiError 400 naming the field."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(fields)}", code="invalid_json")
    _refuse_foreign(fields, kind)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: allowed only with stream: true", param="stream_options", code="invalid_value")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: not available in a stream", param="prompt_logprobs", code="invalid_value")
    if body.cache_salt == "":
        raise ApiError(400, "cache_salt: must not be empty; leave it out", param="cache_salt", code="invalid_value")
    return body


def _refuse_foreign(fields: dict[str, Any], kind: type[Body]) -> None:
    """Unknown fields, and known ones that ask for something this server cannot do."""
    known = kind.__struct_fields__
    for name, value in fields.items():
        if name in known or (value is None and name in (*UNSUPPORTED, "best_of")):
            continue
        if name == "best_of":
            if value not in (1, fields.get("n") or 1) or isinstance(value, bool):
                raise ApiError(400, f"best_of: only best_of = n is supported, got {value!r}", param="best_of", code="unsupported_value")
        elif name not in UNSUPPORTED:
            near = get_close_matches(name, (*known, *UNSUPPORTED), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ApiError(400, f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")
        elif value not in UNSUPPORTED[name]:
            raise ApiError(400, f"{name}: not supported by this server; leave it out", param=name, code="unsupported_parameter")


_WHERE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _named(error: msgspec.ValidationError) -> ApiError:
    """msgspec says "Expected `int | null`, got `str` - at `$.max_tokens`"; say the field first."""
    text = str(error)
    if missing := _MISSING.match(text):
        return ApiError(400, f"{missing[1]}: required", param=missing[1], code="missing_required_parameter")
    where = _WHERE.search(text)
    what = _WHERE.sub("", text).replace(" | null", "").replace("`", "")
    what = what[0].lower() + what[1:]
    if where is None or not where[1]:
        return ApiError(400, what, code="invalid_type")
    return ApiError(400, f"{where[1]}: {what}", param=_field(where[1]), code="invalid_type")


def _field(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def prompts_of(prompt: Any, n: int = 1) -> list[str | list[int]]:
    """The prompts of a completions request with n samples each, in order: text or ids. Raises ApiError naming the position."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise _bad_prompt("prompt", f"must be a string, a list of strings, a list of token ids or a list of those, got {_kind(prompt)}")
    if not prompt:
        raise _bad_prompt("prompt", "must not be empty")
    if len(prompt) * n > MAX_CHOICES:
        raise _bad_prompt("prompt", f"at most {MAX_CHOICES} choices (prompts x n) in a request, got {len(prompt)} x {n}")
    one = len(prompt) == 1
    for i, item in enumerate(prompt):
        where = "prompt" if one else f"prompt[{i}]"
        if type(item) is not type(prompt[0]) or not isinstance(item, str | list):
            raise _bad_prompt(where, f"must be {_kind(prompt[0])} like the first, got {_kind(item)}")
        if isinstance(item, list):
            for j, token in enumerate(item):
                if isinstance(token, bool) or not isinstance(token, int):
                    raise _bad_prompt(f"{where}[{j}]", f"a token id must be an integer, got {msgspec.json.encode(token).decode():.40}")
    return prompt


def _bad_prompt(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where}: {what}", param="prompt", code="invalid_value")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
