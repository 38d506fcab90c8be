"""Tokenizers rebuilt from GGUF metadata: ids as the source tokenizer's (D20), refusals by name."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA
from tokenizers import Regex, pre_tokenizers
from vocabularies import TRICKY, byte_level_backend, byte_level_metadata, gguf_metadata, sentencepiece_model

from flatout.modelfile.spec import ModelFileError
from flatout.text.from_gguf import _merges_from_scores, _Vocabulary
from flatout.text.splits import SPLITS
from flatout.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def default(default_model):
    return load_tokenizer(default_model)


def test_default_model(default):
    """Expected ids were computed once by Transformers: tests/data/make_smollm2_tokens.py."""
    known = json.loads((DATA / "smollm2_tokens.json").read_text())
    for case in known["texts"]:
        assert default.encode(case["text"]) == case["ids"], case["text"]
        assert default.encode_ordinary(case["text"]) == case["ids"] or default.has_special_text(case["text"])
        assert default.decode(case["ids"], skip_special_tokens=False) == case["text"]
    for case in known["decoded"]:
        assert default.decode(case["ids"], skip_special_tokens=False) == case["text"]
        assert default.decode(case["ids"]) == case["shown"]
    assert (default.bos_id, default.eos_ids, default.vocab_size, default.adds_bos) == (1, (2,), 49152, False)
    assert default.special_ids == frozenset(range(17)) and default.notices == []


def test_builds_fast(default_model):
    from flatout.modelfile.gguf import GGUFFile

    metadata = GGUFFile(default_model).metadata
    times = []
    for _ in range(3):
        begin = time.process_time()
        Tokenizer.from_gguf(metadata)
        times.append(time.process_time() - begin)
    assert min(times) < 0.5  # 0.09 s on the reference CPU; loose for shared machines


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("the fox dog.\n\t  1234AB'éß世界你好😀👩\u200d▁<>|"), max_size=40))
def test_sentencepiece_ids_are_its_own(prefix, text):
    model = sentencepiece_model(prefix)
    ours = spm_tokenizer(prefix)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == model.encode(text)
    assert ours.decode(ids) == model.decode(ids)


def spm_tokenizer(prefix: bool, cache: dict[bool, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    if prefix not in cache:
        cache[prefix] = Tokenizer.from_gguf(gguf_metadata(sentencepiece_model(prefix), **{"tokenizer.ggml.add_space_prefix": prefix}))
    return cache[prefix]


def test_sentencepiece_start_token_and_prefix():
    tokenizer = spm_tokenizer(True)
    assert tokenizer.adds_bos and tokenizer.encode("the") == [1, *sentencepiece_model().encode("the")]
    # each stretch between special tokens gets its prefix, as in llama.cpp and in the tokenizers these models were trained with
    assert tokenizer.encode("<|im_start|>the<|im_end|>", add_special_tokens=False)[1:-1] == sentencepiece_model().encode("the")
    silent = Tokenizer.from_gguf(
        gguf_metadata(sentencepiece_model(), **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    )
    assert silent.encode("the") == [*sentencepiece_model().encode("the"), 2]


def test_merges_as_transformers_makes_them():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    from transformers.tokenization_utils_base import generate_merges

    metadata = gguf_metadata(sentencepiece_model())
    theirs, _ = convert_gguf_tokenizer(
        "llama", {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()} | {"tokenizer_type": "llama"}
    )
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]))
    scores = {token: round(score, -1) for token, score in scores.items()}  # many equals, so that their order shows
    rounded = {**metadata, "tokenizer.ggml.scores": list(scores.values())}
    merges = _merges_from_scores(_Vocabulary(rounded), list(scores.values()))
    assert merges == generate_merges({token: id for id, token in enumerate(scores)}, scores)
    ours = Tokenizer.from_gguf(metadata)
    for text in TRICKY:
        if not text.startswith((" ", "▁")):  # Transformers' has no prefix there; SentencePiece has
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    gemma = {**metadata, "general.architecture": "gemma2", "tokenizer.ggml.add_space_prefix": False}
    theirs, _ = convert_gguf_tokenizer(
        "gemma2", {k.removeprefix("tokenizer.ggml."): v for k, v in gemma.items()} | {"tokenizer_type": "llama"}
    )
    ours = Tokenizer.from_gguf(gemma)
    for text in TRICKY:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text.replace("▁", " ")


def test_text_never_merges_into_a_control_or_byte_token():
    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "</", "s>", "<0", "x4", "x41>", "x41", *"</s>0x41A▁"]
    types = [2, 3, 3, 6, *[1] * (len(pieces) - 4)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [pieces[i] for i in tokenizer.encode_ordinary("</s>")] == ["</", "s>"]
    assert [pieces[i] for i in tokenizer.encode("<0x41>", False)] == ["<0", "x41>"]


def test_gemma_spaces():
    """Runs of spaces are stored as spaces and reached by merges."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "    ", "▁", "a", "▁a", *(f"<0x{b:02X}>" for b in range(256))]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.array([-1000.0] * len(pieces), np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, 4, 4, 1, 1, 1] + [6] * 256, np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(2),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.unknown_token_id": np.uint32(3),
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a    a  a a", add_special_tokens=False) == [7, 5, 7, 4, 7, 8]
    assert tokenizer.decode([5, 7, 4]) == "    a  "
    assert tokenizer.encode("a")[0] == 2 and tokenizer.adds_bos


def test_phi3_control_tokens_swallow_spaces():
    metadata = gguf_metadata(sentencepiece_model(), **{"general.architecture": "phi3"})
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<|im_start|> \n the", False) == tokenizer.encode("<|im_start|>the", False)
    assert tokenizer.encode("<s> the", False) != tokenizer.encode("<s>the", False)


# -- byte level ---------------------------------------------------------------------------------------------------------


def test_byte_level_is_the_source_again():
    """A GGUF of the byte-level test vocabulary gives that tokenizer's ids, added tokens included."""
    source, ours = byte_level_backend(), Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    for text in [*TRICKY, "x<think>y<a tool>z  <wide>  <|im_start|>u<|im_end|> q"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == source.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == source.decode(ids, skip_special_tokens=skip)
    assert ours.eos_ids == (1, 3) and not ours.adds_bos
    assert Tokenizer.from_gguf(byte_level_metadata("llama-bpe")).adds_bos  # those files often lack the flag


@pytest.mark.parametrize("tag", ["llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx"])
def test_splits_as_transformers(tag):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[tag]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = SPLITS[tag].build()
    for text in TRICKY:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    "tag, theirs",
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
    ],
)
def test_splits_as_the_library(tag, theirs):
    for text in TRICKY:
        words = [word for word, _ in SPLITS[tag].build().pre_tokenize_str(text)]
        assert words == [word for word, _ in theirs.pre_tokenize_str(text)]


@pytest.mark.parametrize("tag", sorted(SPLITS))
def test_every_split_loses_nothing(tag):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tag))
    assert tokenizer.notices == []
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_deepseek_splits():
    words = [word for word, _ in SPLITS["deepseek-v3"].build().pre_tokenize_str("ab12345 (foo)\n")]
    assert words == ["ab", "123", "45", "Ġ(", "foo", ")Ċ"]
    words = [word for word, _ in SPLITS["deepseek-coder"].build().pre_tokenize_str("x = 12;\n")]
    assert words == ["x", "Ġ=Ġ", "1", "2", ";", "Ċ"]  # = is no punctuation, for \p{P}


@pytest.mark.parametrize("tag", ["wonder-bpe", None])
def test_d20_unknown_split_is_said(tag):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tag))
    (notice,) = tokenizer.notices
    assert "tokenizer.ggml.pre" in notice and ("unknown" in notice if tag else "missing" in notice) and "--tokenizer" in notice
    assert tokenizer.encode("it's 12", False) == Tokenizer.from_gguf(byte_level_metadata("gpt-2")).encode("it's 12", False)


def test_chat_templates():
    assert Tokenizer.from_gguf(byte_level_metadata("gpt-2", **{"tokenizer.chat_template": "a"})).chat_template == "a"
    named = {"tokenizer.chat_template": "a", "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "b"}
    assert Tokenizer.from_gguf(byte_level_metadata("gpt-2", **named)).chat_template == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model is 't5'.*supported: gpt2"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": None}, r"the GGUF file has no tokenizer \(tokenizer\.ggml\.model is missing\)"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.tokens": "abc"}, r"tokens must be an array of str"),
        ({"tokenizer.ggml.merges": []}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', which isn't a pair"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "out of vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(byte_level_metadata("gpt-2", **changes))


def test_refuses_a_token_twice():
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][-2]
    with pytest.raises(ModelFileError, match="twice"):
        Tokenizer.from_gguf(metadata)
    metadata = gguf_metadata(sentencepiece_model())
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match="both missing"):
        Tokenizer.from_gguf(metadata)
