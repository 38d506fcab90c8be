"""Detokenizer: joined pieces equal the one-shot decode, for any ids in pieces of any size, on every kind of vocabulary."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import TRICKY, byte_level_backend, gguf_metadata, sentencepiece_model

from flatout.text.detokenize import Detokenizer
from flatout.text.tokenizer import Tokenizer, load_tokenizer

KINDS = ["default", "byte_level", "spm", "spm_no_prefix"]


@pytest.fixture(scope="module")
def tokenizers_by_kind(default_model):
    return {
        "default": load_tokenizer(default_model),
        "byte_level": Tokenizer(byte_level_backend(), special={"bos_token": "<|bos|>", "eos_token": "<|eos|>"}),
        "spm": Tokenizer.from_gguf(gguf_metadata(sentencepiece_model())),
        "spm_no_prefix": Tokenizer.from_gguf(gguf_metadata(sentencepiece_model(False), **{"tokenizer.ggml.add_space_prefix": False})),
    }


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The ids in pieces of 1 to 5, as steps bring them."""
    pieces = []
    while ids:
        size = data.draw(st.integers(1, 5))
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True, prompt: list[int] | None = None) -> str:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids(tokenizers_by_kind, kind, data):
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=16))
    skip = data.draw(st.booleans())
    assert streamed(tokenizer, cut(data, ids), skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_text(tokenizers_by_kind, kind, data):
    """Real text has no U+FFFD but its own, in no piece."""
    tokenizer = tokenizers_by_kind[kind]
    text = "".join(data.draw(st.lists(st.sampled_from([*TRICKY, "<think>", "<a tool>", "  <wide>  "]), max_size=4)))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(piece) for piece in cut(data, tokenizer.encode_ordinary(text))]
    assert "\ufffd" not in "".join(pieces) and detokenizer.finish() == ""
    expected = text.replace("▁", " ") if kind.startswith("spm") else text
    assert "".join(pieces) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a24_no_character_twice(tokenizers_by_kind, kind, size):
    tokenizer = tokenizers_by_kind[kind]
    text = "A 世界ab 👩‍👩‍👧 é \u200d x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)]) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_continues_the_prompt(tokenizers_by_kind, kind, data):
    """As vLLM: decode(prompt + output) less decode(prompt), where that is its beginning."""
    tokenizer = tokenizers_by_kind[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    before, both = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    if both.startswith(before) and not before.endswith("\ufffd"):
        assert streamed(tokenizer, cut(data, output), skip, prompt) == both[len(before) :]


def test_first_space(tokenizers_by_kind):
    spm = tokenizers_by_kind["spm"]
    (the, *_) = spm.encode("the", add_special_tokens=False)
    assert streamed(spm, [[the]]) == "the"  # encoding put the space there
    assert streamed(spm, [[the]], prompt=spm.encode("of")) == " the"
    assert streamed(spm, [[the]], prompt=[spm.bos_id]) == "the"  # no visible prompt
    assert streamed(spm, [[the]], prompt=[spm.bos_id], skip=False) == " the"


def test_prompt_ends_inside_a_character(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["default"]
    ids = tokenizer.encode("👩")
    assert len(ids) > 1 and streamed(tokenizer, [ids[1:]], prompt=ids[:1]) == "👩"


def test_unfinished_character_waits(tokenizers_by_kind):
    for tokenizer in tokenizers_by_kind.values():
        ids = tokenizer.encode("x𐍈", add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer)
        shown = "".join(detokenizer.push([id]) for id in ids[:-1])
        assert shown == "x"
        assert set(detokenizer.finish()) == {"\ufffd"}


def test_speed(tokenizers_by_kind):
    """1.7 us a token on the reference CPU; the bound is loose for shared machines."""
    tokenizer = tokenizers_by_kind["default"]
    ids = tokenizer.encode("The quick brown fox — déjà vu 世界 😀. " * 200)
    times = []
    for _ in range(3):
        detokenizer = Detokenizer(tokenizer)
        begin = time.process_time()
        for id in ids:
            detokenizer.push((id,))
        times.append((time.process_time() - begin) / len(ids))
    assert min(times) < 10e-6
