"""Tokenizer: text to ids and back, from a Hugging Face folder or from a GGUF file's metadata, over the `tokenizers` library.

Nothing here knows of requests or chats. One object serves all threads: encoding releases the GIL and changes nothing.
Called by chat.py, detokenize.py, prepare.py, and by whoever shows tokens (logprobs, the tokenize route).
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import tokenizers
from tokenizers import AddedToken

from flatout.modelfile.gguf import GGUFFile
from flatout.modelfile.sources import ModelSource, read_json
from flatout.modelfile.spec import ModelFileError
from flatout.text.bound import Bound, bound_of
from flatout.text.from_gguf import add_ends, rebuild
from flatout.text.spelling import BytesToText, Spelling


class _TokenBytes(dict[int, bytes]):
    """id -> the bytes it adds to a text, made on first use. Ids without a token (padding rows of the embedding) add none."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling, silent: Iterable[int] = ()):
        super().__init__(dict.fromkeys(silent, b""))
        self._backend, self._spelling = backend, spelling

    def __missing__(self, id: int) -> bytes:
        token = self._backend.id_to_token(id)
        data = self[id] = b"" if token is None else self._spelling.bytes_of(token)
        return data


class Tokenizer:
    """Make one with from_folder, from_gguf or load_tokenizer.

    Special tokens are those that `skip_special_tokens` hides: the end of a turn, the start of a text. Other added tokens are text.
    Raises ModelFileError when it can't be built.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | dict[str, str] | None = None,
        notices: Sequence[str] = (),
    ):
        """`special`: role -> token, such as "bos_token" -> "<s>"; templates see them. `notices`: what the user should know, a line each."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.spelling = Spelling.of(backend)
        self.special_tokens_map = dict(special or {})
        self.chat_template = chat_template
        self.notices = list(notices)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.special_texts = {token.content: id for id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_texts.values())
        self.bos_id = self._id_of_role("bos_token")
        eos_id = self._id_of_role("eos_token")
        self.eos_ids = tuple(eos_ids) or (() if eos_id is None else (eos_id,))
        self._bytes = _TokenBytes(backend, self.spelling)
        self._bytes_but_special = _TokenBytes(backend, self.spelling, silent=self.special_ids)
        ends = backend.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and ends[:1] == [self.bos_id]
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        normalized = backend.normalizer is not None and any(token.special and token.normalized for token in added.values())
        self._normalizer = backend.normalizer if normalized else None
        self._secret = f"{secrets.randbelow(10**24):024d}"
        # Special tokens that plain text could turn into. One of a single character cannot be told from text, nor can the unknown token
        unknown = self._id_of_role("unk_token")
        in_model = range(backend.get_vocab_size(with_added_tokens=False))
        self._special_in_model = {id for text, id in self.special_texts.items() if id in in_model and len(text) > 1 and id != unknown}
        self._ordinary: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None
        self._lock = threading.Lock()

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self._backend.token_to_id(token)

    # -- made from --------------------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja.

        Start and end tokens are added as tokenizer.json's post-processor says. Only where it adds none do add_bos_token and add_eos_token of
        tokenizer_config.json count.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt") if (folder / name).is_file()]
            raise ModelFileError(
                f"{folder} has no tokenizer.json, only {' and '.join(others) or 'files of other kinds'}; convert with"
                " transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...), or name another folder with --tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ModelFileError(f"{file}: {error}") from None
        config = _read(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read(folder / "special_tokens_map.json")
        special = _add_configured_tokens(backend, config, _read(folder / "added_tokens.json"))
        if backend.num_special_tokens_to_add(False) == 0:
            ends = [special.get(role) if config.get(f"add_{role}") is True else None for role in ("bos_token", "eos_token")]
            if any(ends):
                add_ends(backend, *ends)
        return cls(backend, special=special, chat_template=_template_in(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's metadata: its keys with plain or numpy values, arrays whole."""
        rebuilt = rebuild(metadata)
        template: Any = metadata.get("tokenizer.chat_template")
        named = {str(name): metadata.get(f"tokenizer.chat_template.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
        if named:
            template = {**({"default": template} if template else {}), **{name: text for name, text in named.items() if text}}
        return cls(rebuilt.backend, special=rebuilt.special, eos_ids=rebuilt.eos_ids, chat_template=template, notices=rebuilt.notices)

    # -- text to ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text; special tokens written out in it become their ids.

        `add_special_tokens` adds what the model's post-processor adds. One start token (BOS) stays one: none is added to a text that begins with
        its own. So text prompts (completions) use the default, and a template's text, which has written what it wants, uses False.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """encode() of several texts, on the library's threads. Raises UnicodeError for text with half of a surrogate pair."""
        for text in texts:
            _check_unicode(text)
        # not encode(): that one holds the GIL, 1.2 s for 1.1 MB, and nothing else in the process would run
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        lists = [encoding.ids for encoding in encodings]
        if add_special_tokens and self.adds_bos:
            return [ids[1:] if ids[1:2] == [self.bos_id] else ids for ids in lists]
        return lists

    def must_exceed(self, text: str, tokens: int) -> bool:
        """Whether the text cannot fit in that many tokens, judged by its length alone; false says nothing. Far faster than encoding.

        Certain for byte-level BPE and BPE with byte fallback, as text.bound says; for others a text 16 times over the longest tokens.
        Raises UnicodeError as encode_batch does.
        """
        return len(text) > tokens and self._bound.exceeded(text, tokens)

    @cached_property
    def _bound(self) -> Bound:
        return bound_of(self._backend)  # 50 ms for 49,000 tokens: made when the first long text comes

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of the text, in which special tokens written out stay ordinary text. The same ids as encode(text, False) where there are none.

        The only way to write a special token here is spelled(id), which nobody outside can know.
        """
        _check_unicode(text)
        backend, ids_of = self._ordinary_backend()
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._special_in_model.isdisjoint(ids):
            return [ids_of.get(id, id) for id in ids] if ids_of else ids
        # Merges can put a special token together from plain text: cut the text inside it, so that they cannot
        encoding = backend.encode(text, add_special_tokens=False)
        begin, end = next(offsets for id, offsets in zip(encoding.ids, encoding.offsets) if id in self._special_in_model)
        cut = min(max((begin + end) // 2, 1), len(text) - 1)
        return self.encode_ordinary(text[:cut]) + self.encode_ordinary(text[cut:])

    def spelled(self, id: int) -> str:
        """The private spelling of a special token, for encode_ordinary. Digits only, so that no normalizer or filter changes it."""
        return f"{self._secret}{id:07d}"

    def has_special_text(self, text: str) -> bool:
        """Whether encode() might find a special token in the text."""
        if self.special_pattern.search(text):
            return True
        return self._normalizer is not None and self.special_pattern.search(self._normalizer.normalize_str(text)) is not None

    def _ordinary_backend(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same pipeline, in which special tokens bear their private spellings, and a map from its ids to the real ones.

        Shares the model with the plain one (no copy of the vocabulary). Made on first use: most texts never need it.
        """
        with self._lock:
            if self._ordinary is None:
                backend = tokenizers.Tokenizer(self._backend.model)
                if self._backend.normalizer is not None:
                    backend.normalizer = self._backend.normalizer
                if self._backend.pre_tokenizer is not None:
                    backend.pre_tokenizer = self._backend.pre_tokenizer
                ids_of: dict[int, int] = {}
                for id, token in sorted(self._backend.get_added_tokens_decoder().items()):
                    text = self.spelled(id) if token.special else token.content
                    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "normalized", "special")}
                    backend.add_tokens([AddedToken(text, single_word=token.single_word and not token.special, **flags)])
                    own = backend.token_to_id(text)
                    if own is not None and own != id:
                        ids_of[own] = id
                self._ordinary = backend, ids_of
        return self._ordinary

    # -- ids to text ------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids. Equal to the library's, but for runs of invalid fallback bytes (see spelling.BytesToText)."""
        text = BytesToText(self.spelling)
        return text.push(self.bytes_of(ids, skip_special_tokens)) + text.finish()

    def bytes_of(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes that these ids add to a text that has begun."""
        table = self._bytes_but_special if skip_special_tokens else self._bytes
        return b"".join(map(table.__getitem__, ids))

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of one token inside a text: part of a character, for some."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """token_bytes as text, U+FFFD where they are not whole characters."""
        return self._bytes[id].decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return id in self.special_ids


@overload
def load_tokenizer(source: str | Path) -> Tokenizer: ...
@overload
def load_tokenizer(source: ModelSource) -> Tokenizer | None: ...
def load_tokenizer(source: str | Path | ModelSource) -> Tokenizer | None:
    """From a folder, a tokenizer.json or a .gguf file; a model's own, which may have none."""
    if isinstance(source, ModelSource):
        if source.gguf is not None and source.tokenizer == source.gguf.path:
            return Tokenizer.from_gguf(source.gguf.metadata)  # read already
        return None if source.tokenizer is None else load_tokenizer(source.tokenizer)
    path = Path(source)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(GGUFFile(path).metadata)
    return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)


def _check_unicode(text: str) -> None:
    """The library would say no more than that it wants a str."""
    if not text.isascii():
        text.encode()


def is_broken(text: str) -> bool:
    """Whether encoding it raises UnicodeError."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _read(file: Path) -> dict[str, Any]:
    """An absent file says nothing."""
    return read_json(file) if file.is_file() else {}


def _added(token: str | dict[str, Any]) -> AddedToken:
    """A token of the config files: bare text, or with its flags."""
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], legacy: dict[str, int]) -> dict[str, str]:
    """Add what the config files name beside tokenizer.json, as Transformers does; returns role -> token."""
    known = backend.get_added_tokens_decoder()
    for id, token in sorted((int(id), token) for id, token in config.get("added_tokens_decoder", {}).items()):
        if repr(known.get(id)) != repr(_added(token)):
            backend.add_tokens([_added(token)])
    for text in sorted(legacy, key=legacy.__getitem__):
        if backend.token_to_id(text) is None:
            backend.add_tokens([AddedToken(text)])
    named = {role: token for role, token in config.items() if role.endswith("_token") and isinstance(token, str | dict)}
    extra = [config.get("additional_special_tokens") or (), config.get("extra_special_tokens") or ()]
    for tokens in extra:
        named |= tokens if isinstance(tokens, dict) else {f"extra {_added(token).content}": token for token in tokens}
    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in map(_added, named.values()):
        backend.add_special_tokens([flags.get(token.content, token)])
    return {role: _added(token).content for role, token in named.items() if not role.startswith("extra ")}


def _template_in(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name. A file of its own goes before the config's."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        template = texts["default"] if list(texts) == ["default"] else texts
    return template
