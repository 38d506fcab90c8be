"""SequenceText: stop strings, stop ids, end ids and lengths on one pipeline, streamed or whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level_backend

from flatout.request import FinishReason, ModelFacts, SamplingParams
from flatout.text.prepare import prepare
from flatout.text.sequence import Delta, SequenceText
from flatout.text.tokenizer import Tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(byte_level_backend(), special={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


@pytest.fixture(scope="module")
def facts(tokenizer):
    return ModelFacts("test", tokenizer.vocab_size, 1024, 4096, 16, eos_ids=(1,))


def feed(sequence: SequenceText, ids: list[int], size: int, reason: FinishReason = LENGTH) -> list[Delta]:
    """The ids in steps of `size`, the reason with the last, until the sequence ends."""
    deltas = []
    for i in range(0, len(ids), size):
        last = i + size >= len(ids)
        deltas.append(sequence.push(ids[i : i + size], reason if last else None))
        if sequence.finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_a18_stop_over_token_borders(tokenizer, size, include):
    ids = tokenizer.encode("ABC DEFGHIJ KLMNOP, the fox", False)
    sequence = SequenceText(tokenizer, SamplingParams(stop=["DEFGHIJ"], include_stop_str_in_output=include, max_tokens=None))
    deltas = feed(sequence, ids, size)
    assert sequence.text == "".join(d.text for d in deltas) == ("ABC DEFGHIJ" if include else "ABC ")
    assert (sequence.finish_reason, sequence.stop_reason) == (STOP, "DEFGHIJ") == (deltas[-1].finish_reason, deltas[-1].stop_reason)
    count = next(n for n in range(1, len(ids)) if "DEFGHIJ" in tokenizer.decode(ids[:n]))
    assert sequence.token_ids == ids[:count] == [i for d in deltas for i in d.token_ids]  # they end with the token that completed it
    assert sequence.push([5, 6], LENGTH) == Delta("", [])  # made while the stop was on its way
    assert sequence.token_ids == ids[:count]


def test_engine_stops(tokenizer):
    ids = tokenizer.encode("the fox", False)
    for reason in (STOP, LENGTH):
        sequence = SequenceText(tokenizer, SamplingParams())
        sequence.push(ids)
        assert sequence.push([1], reason) == Delta("", [1], reason)
        assert sequence.text == "the fox" and sequence.token_ids == [*ids, 1]
    # a stop id's text is not shown, unless asked for; skipping special tokens has no part in it
    comma = tokenizer.encode(",", False)
    for include, skip in [(False, True), (True, True), (False, False), (True, False)]:
        params = SamplingParams(stop_token_ids=comma, include_stop_str_in_output=include, skip_special_tokens=skip)
        sequence = SequenceText(tokenizer, params)
        assert sequence.push([*ids, *comma], STOP).token_ids == [*ids, *comma]
        assert sequence.text == ("the fox," if include else "the fox")
        assert sequence.stop_reason is None  # the engine tells which id it was
    # an end id is shown when nothing hides it
    sequence = SequenceText(tokenizer, SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True))
    sequence.push([*ids, 1], STOP)
    assert sequence.text == "the fox<|eos|>"


def test_held_text_comes_at_the_end(tokenizer):
    ids = tokenizer.encode("ABC DEFG", False)
    for reason in (LENGTH, FinishReason.ABORT):
        sequence = SequenceText(tokenizer, SamplingParams(stop=["DEFGHIJ"]))
        assert sequence.push(ids).text == "ABC "
        assert sequence.push([], reason) == Delta("DEFG", [], reason)
    sequence = SequenceText(tokenizer, SamplingParams(stop=["DEFGHIJ"]))
    assert sequence.push([*ids, 1], STOP).text == "ABC DEFG"
    sequence = SequenceText(tokenizer, SamplingParams())
    cut = tokenizer.encode("x😀", False)[:-1]
    assert sequence.push(cut).text == "x" and sequence.push([], LENGTH).text == "\ufffd"


def test_stop_string_comes_before_the_engines_end(tokenizer):
    ids = tokenizer.encode("one. two", False)
    sequence = SequenceText(tokenizer, SamplingParams(stop=["."]))
    delta = sequence.push([*ids, 1], STOP)
    assert (delta.finish_reason, delta.stop_reason, sequence.text) == (STOP, ".", "one")
    assert sequence.token_ids == ids[: len(sequence.token_ids)] and 1 not in sequence.token_ids
    sequence = SequenceText(tokenizer, SamplingParams(stop=["two"]))
    assert sequence.push(ids, LENGTH).finish_reason == STOP  # completed by the last token that max_tokens allowed


def test_min_tokens(tokenizer):
    """The text of the first min_tokens tokens completes no stop; one that begins in it and ends behind it does."""
    ids = [i for character in "a.b.c" for i in tokenizer.encode(character, False)]
    assert len(ids) == 5
    for minimum, text in [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")]:
        sequence = SequenceText(tokenizer, SamplingParams(stop=["."], min_tokens=minimum))
        feed(sequence, ids, 2)
        assert sequence.text == text
    sequence = SequenceText(tokenizer, SamplingParams(stop=[".b."], min_tokens=2))
    feed(sequence, ids, 1)
    assert (sequence.text, sequence.stop_reason) == ("a", ".b.")


@pytest.mark.parametrize("skip", [True, False])
def test_a23_stop_string_that_is_a_special_token(tokenizer, facts, skip):
    """The engine stops at its id, which prepare() adds; its text is in no reply."""
    params = SamplingParams(stop=["<|im_end|>", "Q:"], skip_special_tokens=skip, ignore_eos=True)
    (request,) = prepare("r", "the", params, tokenizer, facts)
    end = tokenizer.special_texts["<|im_end|>"]
    assert request.params.stop_token_ids == [end] and params.stop_token_ids is None
    sequence = SequenceText(tokenizer, request.params, request.prompt_ids)
    sequence.push(tokenizer.encode(" fox", False))
    sequence.push([end], STOP)
    assert sequence.text == " fox" and sequence.token_ids[-1] == end
    # spelled out by ordinary tokens, it stops as text
    sequence = SequenceText(tokenizer, request.params, request.prompt_ids)
    feed(sequence, tokenizer.encode_ordinary(" fox<|im_end|> x"), 1)
    assert (sequence.text, sequence.stop_reason) == (" fox", "<|im_end|>")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_equals_whole(tokenizer, data):
    """Any ids, stops and sizes of steps: the same text, ids, reasons; deltas join to the whole."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    text = tokenizer.decode(ids)
    some = [
        text[i : i + n] for i, n in data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=3)) if text[i : i + n]
    ]
    params = SamplingParams(
        stop=some or None,
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 4)),
    )
    reason = data.draw(st.sampled_from([STOP, LENGTH]))
    whole = SequenceText(tokenizer, params)
    whole.push(ids, reason)
    sequence = SequenceText(tokenizer, params)
    deltas = feed(sequence, ids, data.draw(st.integers(1, 5)), reason)
    assert (sequence.text, sequence.token_ids, sequence.finish_reason, sequence.stop_reason) == (
        whole.text,
        whole.token_ids,
        whole.finish_reason,
        whole.stop_reason,
    )
    assert "".join(d.text for d in deltas) == whole.text
    if whole.stop_reason is None and reason == LENGTH:
        assert whole.text == tokenizer.decode(ids, params.skip_special_tokens)
