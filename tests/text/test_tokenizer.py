"""Tokenizer from a folder: ids and texts as Transformers' AutoTokenizer, start tokens, exact bytes, and text that must stay text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import TRICKY, byte_level_backend, gguf_metadata, save, sentencepiece_model

from flatout.modelfile.spec import ModelFileError
from flatout.text.tokenizer import Tokenizer, load_tokenizer

ROLES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
MIXED = ["<|bos|>x", "x<think>y <a tool> z", "a  <wide>  b", "<|im_start|>user\n hi<|im_end|>\n", "<|user|>  \n hi", "1<|eos|><|eos|>2 "]


def clone(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(backend.to_str())


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    return save(clone(byte_level_backend()), tmp_path_factory.mktemp("byte"), **ROLES)


@pytest.fixture(scope="module")
def byte_level(byte_folder):
    return Tokenizer.from_folder(byte_folder)


@pytest.fixture(scope="module")
def spm_folder(tmp_path_factory):
    """A SentencePiece pipeline as a Llama 2 folder holds it, with an added token in front of which no space must appear or vanish."""
    backend = clone(Tokenizer.from_gguf(gguf_metadata(sentencepiece_model()))._backend)
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])
    return save(backend, tmp_path_factory.mktemp("spm"), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def spm(spm_folder):
    return Tokenizer.from_folder(spm_folder)


@pytest.mark.parametrize("which", ["byte_folder", "spm_folder"])
def test_ids_and_text_as_transformers(which, request):
    from transformers import AutoTokenizer

    folder = request.getfixturevalue(which)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert ours.bos_id == theirs.bos_token_id and ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    assert ours.vocab_size == len(theirs)
    for text in TRICKY + MIXED + ["x<tool call>y <tool call> z", "<s>a</s>", "</s> b"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
        with_start = theirs.encode(text)
        doubled = with_start[:2] == [ours.bos_id] * 2  # A29: Transformers adds a start token to a text that has one
        assert ours.encode(text) == with_start[doubled:]
    assert ours.encode_batch(TRICKY) == [ours.encode(text) for text in TRICKY]


@pytest.mark.parametrize("which", ["byte_level", "spm"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_any_ids_as_the_library(which, request, data):
    ours = request.getfixturevalue(which)
    theirs = ours._backend
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
    if which == "spm" and any(run_is_half_valid(ours, ids, skip) for skip in (True, False)):
        return  # the library drops valid characters there: see test_invalid_byte_run
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def run_is_half_valid(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether some run of fallback bytes is invalid and holds a valid character."""
    pieces = [t for i in ids if not (skip and tokenizer.is_special(i)) and (t := tokenizer._backend.id_to_token(i)) is not None]
    for run in re.findall(r"(?:<0x[0-9A-F]{2}>)+", "|".join(pieces).replace(">|<0x", "><0x")):
        data = bytes.fromhex(run.replace("<0x", "").replace(">", ""))
        text = data.decode("utf-8", "replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return True
    return False


def test_invalid_byte_run(spm):
    byte = {b: spm._backend.token_to_id(f"<0x{b:02X}>") for b in (0xE4, 0xBD, 0xA0, 0xFF, 0x41)}
    a = spm.encode("a", False)
    assert spm.decode([byte[0xE4], byte[0xBD], byte[0xA0], *a]).startswith("你")
    assert spm.decode([byte[0xE4], byte[0xBD], *a]) == "\ufffd\ufffd a"
    assert spm.decode([byte[0xE4], byte[0xBD], byte[0xA0], byte[0xFF]]) == "你\ufffd"  # the library says four U+FFFD


def test_bytes_are_exact(byte_level, spm):
    for tokenizer in (byte_level, spm):
        for text in TRICKY:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids))
            expected = text.replace("▁", " ") if tokenizer is spm else text  # that mark is a space, for SentencePiece
            assert joined.decode() == ((" " if tokenizer is spm and text else "") + expected)
    part = byte_level.encode("😀", add_special_tokens=False)
    assert len(part) > 1 and byte_level.token_text(part[0]) == "\ufffd" and b"".join(map(byte_level.token_bytes, part)) == "😀".encode()
    word = spm.encode("the", add_special_tokens=False)[0]
    assert spm.token_bytes(word).startswith(b" ") and spm.token_text(word).startswith(" ")
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""  # a padding row of the embedding


def test_a27_spaces_around_added_tokens(byte_level, spm):
    for text in ("a    b\n\n  c\t d", "x<think>y", "x <think> y", "x<a tool>y", "x  <wide>  y"):
        assert byte_level.decode(byte_level.encode(text, False), skip_special_tokens=False) == text
    for text in ("a    b\n\n  c\t d",):
        assert spm.decode(spm.encode(text, False), skip_special_tokens=False) == text


def test_a29_one_start_token(byte_level, spm):
    for tokenizer, start in ((byte_level, "<|bos|>"), (spm, "<s>")):
        assert tokenizer.adds_bos
        for text in ("hello", start + "hello", ""):
            ids = tokenizer.encode(text)
            assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
        assert tokenizer.encode(start + start + "x").count(tokenizer.bos_id) == 2  # as written
        assert tokenizer.encode("hello", add_special_tokens=False).count(tokenizer.bos_id) == 0
        assert tokenizer.encode(start + "hello", add_special_tokens=False).count(tokenizer.bos_id) == 1


def test_end_token_as_the_post_processor_says(tmp_path):
    backend = clone(byte_level_backend())
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)])
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path, **ROLES))
    ids = tokenizer.encode("hi")
    assert ids[0] == 0 and ids[-1] == 1 and tokenizer.encode("hi", add_special_tokens=False) == ids[1:-1]


@pytest.mark.parametrize("flag, ends", [({}, []), ({"add_bos_token": True}, [0]), ({"add_bos_token": False, "add_eos_token": True}, [1])])
def test_flags_count_where_the_file_has_no_post_processor(tmp_path, flag, ends):
    backend = clone(byte_level_backend())
    backend.post_processor = processors.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**ROLES, **flag}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [i for i in tokenizer.encode("hi") if tokenizer.is_special(i)] == ends


def test_tokens_named_by_the_config_files(tmp_path):
    """Old folders: special tokens only in special_tokens_map.json and added_tokens.json; new ones: added_tokens_decoder."""
    backend = clone(byte_level_backend())
    size = backend.get_vocab_size()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|eos|>", "lstrip": False}, "pad_token": "<pad>"})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<later>": size + 1, "<soon>": size}))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eos_ids == (1,) and tokenizer.encode("<soon><later><pad>", False) == [size, size + 1, size + 2]
    assert tokenizer.is_special(size + 2) and not tokenizer.is_special(size)

    decoder = {
        str(size): {"content": "<new>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**ROLES, "added_tokens_decoder": decoder}))
    (tmp_path / "added_tokens.json").unlink()
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_texts["<new>"] == size


def test_chat_templates_found(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "from config"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}))
    assert Tokenizer.from_folder(tmp_path).chat_template == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "from file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_folder(tmp_path).chat_template == {"default": "from file", "tool_use": "tools"}


def test_refusals_name_the_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json, only tokenizer\.model; convert"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: Model missing"):
        Tokenizer.from_folder(tmp_path)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="decoder WordPiece"):
        Tokenizer(backend)


# -- text that must stay text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["byte_level", "spm"])
def test_ordinary_text_has_no_special_ids(which, request):
    tokenizer = request.getfixturevalue(which)
    for text in [*TRICKY, "<think> is text, so is <tool call>", "x <a tool> y"]:
        assert tokenizer.encode_ordinary(text) == tokenizer.encode(text, add_special_tokens=False)
    for special in tokenizer.special_texts:
        if special == "<unk>":
            continue
        for text in (special, f"a {special} b", f"{special}{special}", f" {special}\n"):
            assert tokenizer.has_special_text(text)
            ids = tokenizer.encode_ordinary(text)
            assert tokenizer.special_ids.isdisjoint(ids)
            assert tokenizer.decode(ids) == text
    assert not tokenizer.has_special_text("<|im_end| > <|bos >")


def test_private_spelling_is_the_token(byte_level, spm):
    for tokenizer in (byte_level, spm):
        for text in [*MIXED, "<s>[x] a</s> b</s>c"]:
            spelled = tokenizer.special_pattern.sub(lambda m, t=tokenizer: t.spelled(t.special_texts[m[0]]), text)
            assert tokenizer.encode_ordinary(spelled) == tokenizer.encode(text, add_special_tokens=False), text


def test_merges_cannot_make_a_special_token():
    """A vocabulary whose merges lead to </s>: plain text must not get there."""
    vocab = {c: i for i, c in enumerate(["<unk>", "</s>", "<", "/", "s", ">", "</", "s>", "x"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("<", "/"), ("s", ">"), ("</", "s>")], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(backend, special={"unk_token": "<unk>"})
    assert tokenizer.encode("x</s>x", False) == [8, 1, 8]
    for text in ("</s>", "x</s>x", "</s></s>", "<</s>s>"):
        ids = tokenizer.encode_ordinary(text)
        assert 1 not in ids and tokenizer.decode(ids) == text
    assert tokenizer.encode_ordinary("é") == [0]  # unknown text is the unknown token, which controls nothing


def test_special_text_after_normalising():
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
    tokenizer = Tokenizer(backend)
    wide = "\uff1cs\uff1e"  # <s> in full width
    assert tokenizer.encode(wide, False) == [1] and tokenizer.has_special_text(wide)
    assert tokenizer.encode_ordinary(wide) == []


def test_half_a_surrogate_pair(byte_level):
    for encode in (byte_level.encode, byte_level.encode_ordinary):
        with pytest.raises(UnicodeError):
            encode("a\ud800")


def test_threads_share_it(byte_level):
    texts = [*TRICKY, *MIXED]
    want = [byte_level.encode(t) for t in texts], [byte_level.encode_ordinary(t) for t in texts]
    fresh, wrong = Tokenizer(clone(byte_level_backend()), special={"bos_token": "<|bos|>"}), []

    def work():
        for _ in range(20):
            if ([fresh.encode(t) for t in texts], [fresh.encode_ordinary(t) for t in texts]) != want:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_imports_no_torch_and_no_transformers():
    code = "import sys, flatout.text.chat, flatout.text.prepare, flatout.text.sequence; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
