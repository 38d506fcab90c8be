"""A `tokenizers.Tokenizer` rebuilt from the metadata of a GGUF file: vocabulary, merges, splits, special tokens.

Two kinds, by tokenizer.ggml.model: "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE, whose merges follow from the scores). The file is read
by modelfile/gguf.py; here are only its keys. Called by tokenizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from flatout.modelfile.spec import ModelFileError
from flatout.text.spelling import CHARACTER_OF, spells_bytes
from flatout.text.splits import GPT2, SPLITS

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
MARK = "▁"  # a space, in SentencePiece


@dataclass
class Rebuilt:
    backend: tokenizers.Tokenizer
    special: dict[str, str]  # "bos_token" -> "<s>", as a tokenizer_config.json names them
    eos_ids: tuple[int, ...]
    notices: list[str] = field(default_factory=list)


def rebuild(metadata: Mapping[str, Any]) -> Rebuilt:
    """From the file's metadata (all keys, plain or numpy values). Raises ModelFileError naming the key."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFileError("the GGUF file has no tokenizer (tokenizer.ggml.model is missing); name one with --tokenizer")
    vocabulary = _Vocabulary(metadata)
    if kind == "gpt2":
        backend, adds_bos, notices = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos, notices = _sentencepiece(vocabulary), True, []
    else:
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}, which isn't supported; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    ids = vocabulary.special_ids(defaults={"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {})
    _add_tokens(backend, vocabulary, {id for name, id in ids.items() if name in ("bos", "eos")})
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    bos, eos = ids.get("bos"), ids.get("eos")
    add_ends(
        backend,
        vocabulary.tokens[bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        vocabulary.tokens[eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {names[name]: vocabulary.tokens[id] for name, id in ids.items() if name in names}
    return Rebuilt(backend, special, tuple(dict.fromkeys(ends)), notices)


class _Vocabulary:
    """The token lists, checked."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))
        self.tokens: list[str] = self._list("tokens")
        if "" in self.tokens:
            self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(self.tokens)]
        if not self.tokens:
            raise ModelFileError("tokenizer.ggml.tokens is missing or empty: this GGUF file holds no tokenizer; give one with --tokenizer")
        self.types: list[int] = self._list("token_type", same_length=True) or [1] * len(self.tokens)
        self.scores: list[float] = self._list("scores", same_length=True)
        self.merges: list[str] = self._list("merges")

    def _list(self, name: str, same_length: bool = False) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        value = self.metadata.get(key, [])
        values = value.tolist() if isinstance(value, np.ndarray) else value
        kinds = {str} if name in ("tokens", "merges") else {int, float}
        if not isinstance(values, list) or not set(map(type, values)) <= kinds:
            raise ModelFileError(f"{key} must be an array of {' or '.join(sorted(kind.__name__ for kind in kinds))}; the file is damaged")
        if values and same_length and len(values) != len(self.tokens):
            raise ModelFileError(f"{key} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def special_ids(self, defaults: dict[str, int]) -> dict[str, int]:
        """Role -> id for the tokens the file gives a role, over the kind's defaults. Bad ids are common, and harmless, for roles unused here."""
        ids = {role: id for role, id in defaults.items() if id < len(self.tokens)}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            key = f"tokenizer.ggml.{role}_token_id"
            if key in self.metadata:
                id = self.metadata[key]
                if not isinstance(id, int | np.integer) or not 0 <= id < len(self.tokens):
                    if role in ("unknown", "padding"):
                        continue
                    raise ModelFileError(f"{key} is {id!r}, not one of the {len(self.tokens)} token ids")
                ids[role] = int(id)
        return ids

    def bpe(self, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
        """The BPE model over these spellings of the tokens."""
        vocab = dict(zip(tokens, range(len(tokens))))
        if len(vocab) != len(tokens):
            twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
            raise ModelFileError(f"tokenizer.ggml.tokens holds {twice!r} twice")
        try:
            return models.BPE(vocab=vocab, merges=merges, **options)
        except Exception as error:  # the library raises nothing narrower
            raise ModelFileError(f"tokenizer.ggml.merges: {error}") from None


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool, list[str]]:
    if not vocabulary.merges:
        raise ModelFileError("tokenizer.ggml.merges is missing: a gpt2 tokenizer cannot be rebuilt without it; give one with --tokenizer")
    tag, notices = str(vocabulary.metadata.get("tokenizer.ggml.pre", "")), []
    split = SPLITS.get(tag)
    if split is None:
        said = f"tokenizer.ggml.pre {tag!r} is unknown" if tag else "tokenizer.ggml.pre is missing"
        notices.append(
            f"{said}: words are split as GPT-2 does, so token ids may differ from the original tokenizer's; --tokenizer can name that one"
        )
        split = GPT2
    tokens = [
        token if spells_bytes(token) or kind in (CONTROL, USER_DEFINED) else "".join(CHARACTER_OF[b] for b in token.encode())
        for token, kind in zip(vocabulary.tokens, vocabulary.types)
    ]
    backend = tokenizers.Tokenizer(vocabulary.bpe(tokens, _pairs(vocabulary.merges), ignore_merges=split.whole_words))
    backend.pre_tokenizer = split.build()
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos, notices


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    gemma = vocabulary.architecture.startswith("gemma")
    prefix = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    # Gemma's runs of spaces are user-defined tokens written with real spaces; its own tokenizer reaches them by merges
    tokens = vocabulary.tokens = [
        MARK * len(token) if gemma and token.isspace() and set(token) == {" "} else token for token in vocabulary.tokens
    ]
    if vocabulary.merges:
        merges = _pairs(vocabulary.merges)
    elif gemma:
        merges = _merges_from_scores(vocabulary, [-float(id) for id in range(len(tokens))])  # its merge order is that of its ids
    elif vocabulary.scores:
        merges = _merges_from_scores(vocabulary, vocabulary.scores)
    else:
        raise ModelFileError("tokenizer.ggml.scores and tokenizer.ggml.merges are both missing: a llama tokenizer needs one of them")
    has_bytes = "<0x00>" in tokens
    unknown = tokens[vocabulary.special_ids({"unknown": 0})["unknown"]]
    backend = tokenizers.Tokenizer(vocabulary.bpe(tokens, merges, fuse_unk=True, byte_fallback=has_bytes, unk_token=unknown))
    steps: list[Any] = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    # As SentencePiece and llama.cpp: the prefix goes before every stretch between special tokens, also where a space is there already
    marks = [normalizers.Prepend(MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", MARK)])
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first: SentencePiece merges any pair that is a token, by its score.

    Control and byte tokens are left out: text must never merge into one.
    """
    id_of = {token: id for id, token in enumerate(vocabulary.tokens)}
    merges = []
    for token, id in id_of.items():
        if vocabulary.types[id] in (UNKNOWN, CONTROL, BYTE):
            continue
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in id_of and token[cut:] in id_of]
        halves.sort(key=lambda half: (id_of[half[0]], id_of[half[1]]))
        merges += [(-scores[id], -len(left), -len(right), left, right) for left, right in halves]
    merges.sort(key=lambda merge: merge[:3])  # the order among equals, longer left half first, is that of Transformers' converter
    return [(left, right) for *_, left, right in merges]


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    """ "a b" -> ("a", "b"). A half may start with a space itself, so the cut is at the first space after the first character."""
    halves = [merge.partition(" ") for merge in merges]
    if all(left and right for left, _, right in halves):
        return [(left, right) for left, _, right in halves]
    cuts = [merge.find(" ", 1) for merge in merges]
    if -1 in cuts:
        raise ModelFileError(f"tokenizer.ggml.merges holds {merges[cuts.index(-1)]!r}, which isn't a pair")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts)]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, named: set[int]) -> None:
    """Control tokens and those with a role become special, user-defined ones plain added tokens; both are found whole in a text."""
    # Phi-3's own tokenizer lets its control tokens swallow the white space behind them; GGUF has no key for that
    swallows = vocabulary.architecture == "phi3" and vocabulary.metadata.get("tokenizer.ggml.model") == "llama"
    special, plain = [], []
    for id in [id for id, kind in enumerate(vocabulary.types) if kind in (CONTROL, UNKNOWN, USER_DEFINED) or id in named]:
        token, kind = vocabulary.tokens[id], vocabulary.types[id]
        if kind in (CONTROL, UNKNOWN) or id in named:
            rstrip = swallows and token not in ("<unk>", "<s>", "<|endoftext|>")
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == USER_DEFINED and set(token) != {MARK}:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encoding put these tokens around a text."""
    ends = [token for token in (bos, eos) if token is not None]
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
    )
