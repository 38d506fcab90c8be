"""The door: a prompt and its parameters become Requests, or a RequestError that names the field and the limit with its numbers.

Everything that could fail later for what the user asked fails here; what depends on the moment (queue, free blocks) is core/'s.
Called by llm.py and server/.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from operator import countOf
from typing import Any

import numpy as np

from flatout.request import ModelFacts, Request, RequestError, SamplingParams, int32_bytes
from flatout.text.tokenizer import Tokenizer

POOL_FLAGS = "--kv-cache-memory-bytes (--gpu-memory-utilization on a GPU, --num-gpu-blocks-override where that is set)"
NOT_TEXT = "isn't valid text: a character of it is half of a surrogate pair (U+D800 to U+DFFF), which stands for nothing alone"
Prompt = str | list[int] | dict[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}


def prepare(
    id: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    facts: ModelFacts,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    cache_salt: str = "",
    add_special_tokens: bool = True,
) -> list[Request]:
    """The params.n Requests of one prompt, index 0 to n-1, which share prompt, seed and params. Text is encoded as Tokenizer.encode does;
    a list of ids is taken as it is, and stays as it is while they live.

    max_tokens is an upper bound and never an error; min_tokens must fit. Stop strings that are a special token stop at its id too, since
    their text is never shown. Raises RequestError.
    """
    ids = prompt_ids(prompt, tokenizer, facts, add_special_tokens)
    data = _checked_bytes(ids, facts)
    _check_room(len(ids), params, facts)
    params.check_vocabulary(facts.vocab_size)
    params = _with_special_stops(params, tokenizer, facts)
    bad_words = _bad_words_ids(params.bad_words, tokenizer, facts) if params.bad_words else []
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError("priority", f"must be an integer, got {priority!r}")
    if not isinstance(cache_salt, str):
        raise RequestError("cache_salt", f"must be a string, got {cache_salt!r}")
    seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
    return [
        Request(
            id,
            ids,
            params,
            index=index,
            seed=seed,
            eos_ids=frozenset(facts.eos_ids),
            bad_words_ids=bad_words,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            prompt_bytes=data,
        )
        for index in range(params.n)
    ]


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, facts: ModelFacts, add_special_tokens: bool = True) -> list[int]:
    """The prompt as ids, at least one. Raises RequestError."""
    if isinstance(prompt, dict):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"}, key=str)
        if unknown or len(prompt) != 1:
            said = f"has the unknown key {unknown[0]!r}" if unknown else f"has {len(prompt)} of them"
            raise RequestError("prompt", f'an object must have one key, "prompt" or "prompt_token_ids"; this {said}')
        prompt = prompt["prompt"] if "prompt" in prompt else _ids(prompt["prompt_token_ids"])
    if not isinstance(prompt, str):
        return _ids(prompt)
    if tokenizer is None:
        raise RequestError("prompt", f"text needs a tokenizer and {facts.model} was loaded without one; give token ids, or --tokenizer")
    try:
        check_length("prompt", prompt, tokenizer, facts)
        ids = tokenizer.encode(prompt, add_special_tokens)
    except UnicodeError:
        raise RequestError("prompt", NOT_TEXT) from None
    if not ids:
        raise RequestError("prompt", "is empty, and this model has no start token to begin from; give at least one character or token")
    return ids


def check_length(field: str, text: str, tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """Refuse, before it is encoded, a text that is too long whatever its tokens (Tokenizer.must_exceed): encoding 6 MB takes seconds.

    Most texts that don't fit pass here and are refused by their token count. Raises RequestError, and UnicodeError as encoding does.
    """
    limit, what, flags = facts.max_model_len, "context", "--max-model-len"
    if facts.pool_tokens < limit:
        limit, what, flags = facts.pool_tokens, "KV pool", POOL_FLAGS
    if tokenizer.must_exceed(text, limit):
        size = f"{len(text.encode())} bytes ({len(text)} characters) of text"
        raise RequestError(
            field, f"has {size}, which no {limit} tokens can hold; that is what the {what} holds: shorten it or raise {flags}"
        )


def default_params(facts: ModelFacts, **fields: Any) -> SamplingParams:
    """SamplingParams from, in this order: the fields given, the model's generation config (facts.sampling_defaults), vLLM's defaults.

    A field given as None counts as given. Raises RequestError, for unknown names too.
    """
    names = SamplingParams.names()
    for name in fields:
        if name not in names:
            near = get_close_matches(name, names, 1)
            raise RequestError(name, "unknown sampling parameter" + (f"; did you mean {near[0]}?" if near else ""))
    return SamplingParams(**{**facts.sampling_defaults, **fields})


def _ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list | tuple):
        raise RequestError("prompt", f"must be text or a list of token ids, got {type(prompt).__name__}")
    if not prompt:
        raise RequestError("prompt", "is empty; give at least one token")
    return prompt if isinstance(prompt, list) else list(prompt)


def _checked_bytes(ids: list[int], facts: ModelFacts) -> bytes:
    """The ids as int32, each one that the model has: a tokenizer with more tokens than the embedding has rows is caught here too.
    Raises RequestError naming position and id."""
    with suppress(struct.error, TypeError, OverflowError):  # no integer, one beyond int32, or numpy's beyond its own
        data = int32_bytes(ids)
        array = np.frombuffer(data, np.int32)
        least = array.min()
        # numpy's integers add up as numpy's; True and False are written as 1 and 0, so only among these is every type looked at (20 ns an id)
        plain = (least > 1 and type(sum(ids)) is int) or countOf(map(type, ids), int) == len(ids)
        if plain and least >= 0 and array.max() < facts.vocab_size:
            return data
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError("prompt", f"position {position} must be a token id, got {token!r}")
        if not 0 <= token < facts.vocab_size:
            raise RequestError("prompt", f"token id {token} at position {position} is outside the vocabulary of {facts.vocab_size}")
    return int32_bytes(ids)


def _check_room(length: int, params: SamplingParams, facts: ModelFacts) -> None:
    least = length + (params.max_tokens != 0)
    need = f"has {length} tokens" + (", with one more to generate" if params.max_tokens != 0 else "")
    if least > facts.max_model_len:
        raise RequestError("prompt", f"{need}; the context holds {facts.max_model_len}: shorten it or raise --max-model-len")
    if least > facts.pool_tokens:
        raise RequestError("prompt", f"{need}; the KV pool holds {facts.pool_tokens}: shorten it or raise {POOL_FLAGS}")
    room = min(facts.max_model_len, facts.pool_tokens) - length
    if params.min_tokens > room:
        raise RequestError("min_tokens", f"{params.min_tokens} tokens do not fit: after a prompt of {length} there is room for {room}")


def _with_special_stops(params: SamplingParams, tokenizer: Tokenizer | None, facts: ModelFacts) -> SamplingParams:
    if not params.stop:
        return params
    if tokenizer is None:
        raise RequestError(
            "stop", f"stop strings need a tokenizer and {facts.model} was loaded without one; use stop_token_ids, or --tokenizer"
        )
    ids = [tokenizer.special_texts[stop] for stop in params.stop if stop in tokenizer.special_texts]
    known = list(params.stop_token_ids or ())
    new = [id for id in ids if id not in known]
    return params.but(stop_token_ids=known + new) if new else params


def _bad_words_ids(words: Sequence[str], tokenizer: Tokenizer | None, facts: ModelFacts) -> list[list[int]]:
    """Each word as at the start of a text and, where that is another token sequence of the same length, behind a space: vLLM's rule."""
    if tokenizer is None:
        raise RequestError("bad_words", f"words need a tokenizer and {facts.model} was loaded without one; use logit_bias, or --tokenizer")
    sequences: list[list[int]] = []
    for position, word in enumerate(words):
        field = f"bad_words[{position}]"
        try:
            check_length(field, word, tokenizer, facts)
            bare, spaced = tokenizer.encode_batch([word.lstrip(), " " + word.lstrip()], add_special_tokens=False)
        except UnicodeError:
            raise RequestError(field, NOT_TEXT) from None
        if not bare:
            raise RequestError(field, f"{word!r} has no tokens of its own")
        sequences.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    for sequence in sequences:
        if max(sequence) >= facts.vocab_size:
            raise RequestError("bad_words", f"token id {max(sequence)} is outside the vocabulary of {facts.vocab_size}")
    return sequences
