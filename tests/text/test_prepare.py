"""The door: what is admitted and how it is completed; what is refused, by field, with its numbers."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
from vocabularies import byte_level_backend, gguf_metadata, sentencepiece_model

from flatout.request import ModelFacts, RequestError, SamplingParams
from flatout.text.prepare import default_params, prepare
from flatout.text.tokenizer import Tokenizer


class Kind(IntEnum):
    BOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(byte_level_backend(), special={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


@pytest.fixture(scope="module")
def without_start():
    """No start token, like GPT-2."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    backend = Backend.from_str(byte_level_backend().to_str())
    backend.post_processor = processors.ByteLevel()
    return Tokenizer(backend)


def facts(**changes) -> ModelFacts:
    return ModelFacts(
        **{"model": "m", "vocab_size": 600, "max_model_len": 2048, "pool_tokens": 4096, "block_size": 16, "eos_ids": (1, 3), **changes}
    )


def refusal(*args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as error:
        prepare("r", *args, **kwargs)
    return error.value


def test_text_ids_and_objects(tokenizer):
    ids = tokenizer.encode("the fox")
    for prompt in ("the fox", ids, tuple(ids), {"prompt": "the fox"}, {"prompt_token_ids": ids}):
        (request,) = prepare("r", prompt, SamplingParams(), tokenizer, facts(), arrival=1.5, priority=-2, cache_salt="s")
        assert request.prompt_ids == ids and ids[0] == 0
        assert (request.id, request.index, request.arrival, request.priority, request.cache_salt) == ("r", 0, 1.5, -2, "s")
        assert request.eos_ids == {1, 3}  # A34: each of them ends it; A36: core/ looks at none of them under ignore_eos
    assert prepare("r", "<|bos|>the fox", SamplingParams(), tokenizer, facts())[0].prompt_ids == ids  # A29: one start token


@pytest.mark.parametrize(
    "prompt, said",
    [
        ([1, 2, 999999], "token id 999999 at position 2 is outside the vocabulary of 600"),
        ([-1], "token id -1 at position 0"),
        ([], "is empty"),
        ({"prompt_token_ids": []}, "is empty"),
        ([[1, 2], [3, -5]], "position 0 must be a token id, got [1, 2]"),
        ([5, 1.5], "position 1 must be a token id, got 1.5"),
        ([True], "position 0 must be a token id, got True"),
        ([5, "a"], "position 1 must be a token id, got 'a'"),
        ([5, False, 7], "position 1 must be a token id, got False"),
        ([5, np.True_], "position 1 must be a token id, got np.True_"),
        ([5, np.float32(6)], "position 1 must be a token id, got np.float32(6.0)"),
        ([5, np.int64(6)], "position 1 must be a token id, got np.int64(6)"),
        ([300, np.uint8(3)], "position 1 must be a token id, got np.uint8(3)"),
        ([5, np.array([7])], "position 1 must be a token id, got array([7])"),
        ([5, 2**40], "token id 1099511627776 at position 1 is outside the vocabulary of 600"),
        ([600], "token id 600 at position 0"),
        (5, "must be text or a list of token ids, got int"),
        (None, "got NoneType"),
        ({}, "must have one key"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "has 2 of them"),
        ({"prompts": "x"}, "unknown key 'prompts'"),
        ("a\ud800", "isn't valid text"),
    ],
)
def test_a52_bad_prompts(tokenizer, prompt, said):
    error = refusal(prompt, SamplingParams(), tokenizer, facts())
    assert error.field == "prompt" and said in str(error)


@pytest.mark.parametrize("ids", [[0], [1, 0, 1], [599, 0], [Kind.BOS, 7], (5, 6)])
def test_ids_are_packed_as_they_are_checked(tokenizer, ids):
    one, two = prepare("r", ids, SamplingParams(n=2), tokenizer, facts())
    assert one.prompt_ids == list(ids) and one.prompt_bytes == np.array(ids, np.int32).tobytes() and two.prompt_bytes is one.prompt_bytes


def test_a54_empty_prompts(tokenizer, without_start):
    assert prepare("r", "", SamplingParams(), tokenizer, facts())[0].prompt_ids == [0]  # a start token is something to begin from
    assert "no start token" in str(refusal("", SamplingParams(), without_start, facts()))
    assert len(prepare("r", "\x00", SamplingParams(), without_start, facts())[0].prompt_ids) == 1


@pytest.mark.parametrize("max_tokens", [4096, 10**9, None, 1])
def test_a55_max_tokens_is_an_upper_bound(tokenizer, max_tokens):
    for length in (1000, 2047):
        (request,) = prepare("r", [5] * length, SamplingParams(max_tokens=max_tokens), tokenizer, facts())
        assert request.params.max_tokens == max_tokens
    error = refusal([5] * 2048, SamplingParams(max_tokens=max_tokens), tokenizer, facts())
    assert error.field == "prompt" and "2048 tokens, with one more to generate" in str(error) and "--max-model-len" in str(error)


def test_room(tokenizer):
    assert prepare("r", [5] * 2048, SamplingParams(max_tokens=0), tokenizer, facts())  # prompt logprobs of a whole context
    for length in (2049, 5000):
        assert f"has {length} tokens; the context holds 2048" in str(
            refusal([5] * length, SamplingParams(max_tokens=0), tokenizer, facts())
        )
    small = facts(pool_tokens=1024)
    assert prepare("r", [5] * 1023, SamplingParams(max_tokens=2000), tokenizer, small)  # ends with "length" at the pool
    for length in (1024, 2000):
        said = str(refusal([5] * length, SamplingParams(), tokenizer, small))
        assert f"{length} tokens, with one more to generate; the KV pool holds 1024" in said and "--kv-cache-memory-bytes" in said
    error = refusal([5] * 2000, SamplingParams(min_tokens=49, max_tokens=None), tokenizer, facts())
    assert error.field == "min_tokens" and "49" in str(error) and "2000" in str(error) and "room for 48" in str(error)
    assert prepare("r", [5] * 2000, SamplingParams(min_tokens=48, max_tokens=None), tokenizer, facts())


@pytest.mark.parametrize(
    "params, field",
    [
        ({"logit_bias": {"191222": -100, "5": 5}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"allowed_token_ids": [5, 600]}, "allowed_token_ids"),
        ({"stop_token_ids": [601]}, "stop_token_ids"),
    ],
)
def test_a50_ids_outside_the_vocabulary(tokenizer, params, field):
    error = refusal("x", SamplingParams(**params), tokenizer, facts())
    assert error.field == field and "outside the vocabulary of 600" in str(error)


def test_a50_bad_keys_and_values():
    for bias in ({"abc": 1}, {"5": 1e9}, {"5": float("nan")}, {"5": True}):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("stop, kept", [(None, None), ([], None), ("x", ["x"]), (["a", "b"], ["a", "b"])])
def test_a22_stops(tokenizer, stop, kept):
    assert prepare("r", "x", SamplingParams(stop=stop), tokenizer, facts())[0].params.stop == kept


@pytest.mark.parametrize("stop", ["", [""], ["a"] * 17, ["x" * 20_000], 5, [5]])
def test_a22_bad_stops(stop):
    with pytest.raises(RequestError, match=r"^stop: "):
        SamplingParams(stop=stop)


def test_a36_a_stop_id_that_is_an_end_id(tokenizer):
    (request,) = prepare("r", "x", SamplingParams(ignore_eos=True, stop_token_ids=[3]), tokenizer, facts())
    assert request.params.stop_token_ids == [3] and request.params.ignore_eos and 3 in request.eos_ids


def test_a23_special_stop_strings(tokenizer):
    params = SamplingParams(stop=["<|im_end|>", "x", "<|eos|>"], stop_token_ids=[3, 7])
    (request,) = prepare("r", "x", params, tokenizer, facts())
    assert request.params.stop_token_ids == [3, 7, 1] and request.params.stop == params.stop
    assert params.stop_token_ids == [3, 7]  # the caller's own stay as they were


def test_samples_and_seeds(tokenizer):
    requests = prepare("r", "x", SamplingParams(n=3, seed=42), tokenizer, facts())
    assert [r.key for r in requests] == [("r", 0), ("r", 1), ("r", 2)]
    assert {r.seed for r in requests} == {42} and len({id(r.output_ids) for r in requests}) == 3
    for seed, want in [(0, 0), (-1, 2**64 - 1), (2**63 - 1, 2**63 - 1), (2**64 - 1, 2**64 - 1)]:
        assert prepare("r", "x", SamplingParams(seed=seed), tokenizer, facts())[0].seed == want
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=2**64)
    seeds = [prepare("r", "x", SamplingParams(n=2), tokenizer, facts()) for _ in range(3)]
    assert all(a.seed == b.seed for a, b in seeds) and len({a.seed for a, _ in seeds}) == 3


def test_bad_words_as_vllm(tokenizer):
    """With and without the space before, where both are as many tokens."""
    (request,) = prepare("r", "x", SamplingParams(bad_words=["the", " fox", "<|im_end|>"]), tokenizer, facts())
    sequences = request.bad_words_ids
    assert tokenizer.encode("the", False) in sequences and tokenizer.encode("fox", False) in sequences and [3] in sequences
    for word in ("the", "fox"):
        bare, spaced = tokenizer.encode(word, False), tokenizer.encode(" " + word, False)
        assert (spaced in sequences) == (len(bare) == len(spaced) and bare[0] != spaced[0])
    spm = Tokenizer.from_gguf(gguf_metadata(sentencepiece_model()))
    (request,) = prepare("r", "x", SamplingParams(bad_words=["the"]), spm, facts())
    assert request.bad_words_ids == [spm.encode("the", False)]
    error = refusal("x", SamplingParams(bad_words=["fox", " "]), tokenizer, facts())
    assert error.field == "bad_words[1]"


def test_without_a_tokenizer():
    """--load-format dummy: ids only."""
    assert prepare("r", [5], SamplingParams(), None, facts())
    for prompt, params, field in [("x", {}, "prompt"), ([5], {"stop": ["x"]}, "stop"), ([5], {"bad_words": ["x"]}, "bad_words")]:
        error = refusal(prompt, SamplingParams(**params), None, facts())
        assert error.field == field and "m was loaded without one" in str(error) and "--tokenizer" in str(error)


def test_tokenizer_larger_than_the_embedding(tokenizer):
    (last,) = [tokenizer.special_texts["<|user|>"]]
    error = refusal("<|user|>x", SamplingParams(), tokenizer, facts(vocab_size=last))
    assert f"token id {last} at position 1 is outside" in str(error)


def test_other_fields(tokenizer):
    assert refusal("x", SamplingParams(), tokenizer, facts(), priority="high").field == "priority"
    assert refusal("x", SamplingParams(), tokenizer, facts(), cache_salt=5).field == "cache_salt"


def test_a58_the_users_fields_win():
    model = facts(sampling_defaults={"temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05})
    assert default_params(model, temperature=10.0) == SamplingParams(temperature=10.0, top_k=1, top_p=0.001, repetition_penalty=1.05)
    assert default_params(model) == SamplingParams(temperature=0.1, top_k=1, top_p=0.001, repetition_penalty=1.05)
    assert default_params(model, top_k=-1).top_k == 0
    assert default_params(facts(), temperature=0.5) == SamplingParams(temperature=0.5)
    assert default_params(model, max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match=r"^temperatur: unknown sampling parameter; did you mean temperature\?"):
        default_params(model, temperatur=1)
    with pytest.raises(RequestError, match=r"^top_p"):
        default_params(model, top_p=2)
