"""Texts refused by their length alone: never one that fits, always one that is far too long."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from vocabularies import TRICKY, byte_level_backend, byte_level_metadata, gguf_metadata, sentencepiece_model

from flatout.request import ModelFacts, RequestError, SamplingParams
from flatout.text.bound import NFC, UNSURE, bound_of
from flatout.text.chat import ChatTemplate
from flatout.text.prepare import prepare
from flatout.text.tokenizer import Tokenizer

EOS = "<|im_end|>"


def byte_level(**parts) -> Backend:
    """Nothing but bytes and one added token, which is the longest."""
    vocabulary = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, normalized=False, special=True)])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def swallowing() -> Backend:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|user|>", normalized=False, special=True, rstrip=True)])
    return backend


def lossy() -> Backend:
    """Without a token for the byte 4, as SmolLM2."""
    vocabulary = {c: id for id, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())) if c != chr(0x104)}
    return byte_level(model=models.BPE(vocab=vocabulary, merges=[]))


SURE = {
    "bytes": (byte_level, len(EOS)),
    "a byte without a token": (lossy, len(EOS)),
    "nfc": (lambda: byte_level(normalizer=normalizers.NFC()), len(EOS) * NFC),
    "gguf byte level": (lambda: Tokenizer.from_gguf(byte_level_metadata("qwen2"))._backend, None),
    "gguf sentencepiece": (lambda: Tokenizer.from_gguf(gguf_metadata(sentencepiece_model()))._backend, None),
}
UNSURE_ONES = {
    "swallows spaces": swallowing,
    "collapses": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" +"), " ")])),
    "shortens": lambda: byte_level(normalizer=normalizers.Replace("▁", " ")),
    "strips": lambda: byte_level(normalizer=normalizers.Strip()),
    "removes": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "splits off": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "fuses": lambda: byte_level(model=models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
    "no fallback": lambda: byte_level(model=models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True), pre_tokenizer=pre_tokenizers.Digits()),
}  # fmt: skip


@pytest.fixture(scope="module")
def sure():
    return {name: make() for name, (make, _) in SURE.items()}


@pytest.mark.parametrize("name", SURE)
def test_sure_bounds(sure, name):
    found = bound_of(sure[name]).bytes_per_token
    longest = max(len(token.encode()) for token in sure[name].get_vocab())
    assert found == SURE[name][1] if SURE[name][1] else found <= longest


@pytest.mark.parametrize("name", UNSURE_ONES)
def test_where_text_may_shrink_the_bound_is_generous(name):
    assert bound_of(UNSURE_ONES[name]()).bytes_per_token >= len(EOS) * UNSURE


PIECES = st.sampled_from([*TRICKY, EOS, " ", "▁", "<0x41>", "\x04", "\u1100\u1161\u11a8", "α\u0313\u0300\u0345", "the quick", "\n"])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join), st.integers(1, 20))
def test_what_fits_is_never_refused(sure, text, times):
    for name, backend in sure.items():
        ids = backend.encode(text * times, add_special_tokens=False).ids
        assert not bound_of(backend).exceeded(text * times, len(ids)), name


def test_nfc_leaves_a_third():
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code <= 0xDFFF and unicodedata.normalize("NFC", chr(code)) == chr(code):
            assert len(unicodedata.normalize("NFD", chr(code)).encode()) <= NFC * len(chr(code).encode())


def facts(**changes) -> ModelFacts:
    return ModelFacts(**{"model": "m", "vocab_size": 600, "max_model_len": 100, "pool_tokens": 4096, "block_size": 16, **changes})


def test_right_at_the_bound():
    tokenizer, params = Tokenizer(byte_level()), SamplingParams(max_tokens=0)
    assert len(prepare("r", EOS * 100, params, tokenizer, facts())[0].prompt_ids) == 100
    with pytest.raises(RequestError) as error:
        prepare("r", EOS * 100 + "é", params, tokenizer, facts())
    assert error.value.field == "prompt"
    for part in ("1002 bytes (1001 characters)", "no 100 tokens can hold", "the context", "--max-model-len"):
        assert part in str(error.value)
    with pytest.raises(RequestError, match=r"^prompt: has 510 bytes .*no 50 tokens .*the KV pool .*--kv-cache-memory-bytes"):
        prepare("r", EOS * 51, params, tokenizer, facts(pool_tokens=50))
    lost = Tokenizer(lossy())
    assert prepare("r", "\x04" * 5000 + "x", params, lost, facts())[0].prompt_ids  # dropped by the tokenizer: it fits


def test_a_huge_text_is_not_encoded(monkeypatch):
    tokenizer, text = Tokenizer(byte_level_backend()), "x" * 6_000_000
    template = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", tokenizer)

    def never(*args):
        raise AssertionError("encoded")

    for name in ("encode", "encode_batch", "encode_ordinary"):
        monkeypatch.setattr(tokenizer, name, never)
    for prompt in (text, {"prompt": text}):
        with pytest.raises(RequestError, match=r"^prompt: has 6000000 bytes"):
            prepare("r", prompt, SamplingParams(), tokenizer, facts())
    for content in (text, EOS + text):  # plain, and with a special token spelled out
        with pytest.raises(RequestError, match=r"^messages: has 60000"):
            template.encode([{"role": "user", "content": content}], facts())
    with pytest.raises(RequestError, match=r"^bad_words\[0\]: has 6000000 bytes"):
        prepare("r", [5], SamplingParams(bad_words=[text]), tokenizer, facts())


def test_a_chat_right_at_the_bound():
    tokenizer = Tokenizer(byte_level())
    # the user's own stays text, ten tokens; the template's is one
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}" + EOS * 90, tokenizer)
    chat = [{"role": "user", "content": EOS}]
    ids = template.encode(chat, facts())
    assert len(ids) == 100 and ids == template.encode(chat)
