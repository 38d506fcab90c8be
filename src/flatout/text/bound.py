"""How much text a token can stand for: what is far too long for the context is refused by its length, before seconds of tokenising.

Read off a tokenizer's pipeline and vocabulary; knows no limits. Called by tokenizer.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from flatout.text.spelling import CHARACTER_OF

IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # the bytes that a text can have
NFC = 3  # composing shortens a text to no less than a third (Hangul: three letters of 3 bytes each become one)
UNSURE = 16  # where no bound is certain: what is this many times over it is taken for too long


@dataclass(frozen=True)
class Bound:
    bytes_per_token: int
    lost: bytes = b""  # bytes without a token, which encoding drops

    def exceeded(self, text: str, tokens: int) -> bool:
        """Whether the text must become more than that many tokens. Raises UnicodeError for text with half of a surrogate pair."""
        if len(text) * 4 <= tokens * self.bytes_per_token:
            return False
        return len(text.encode().translate(None, self.lost)) > tokens * self.bytes_per_token


def bound_of(backend: tokenizers.Tokenizer) -> Bound:
    """The most bytes (UTF-8) of a text that one token stands for.

    That is the longest token's, where nothing shortens the text before it is cut into tokens and every byte ends up in one: byte-level BPE and
    BPE with byte fallback, whose normalizers only lengthen (a space that becomes a mark), and whose added tokens swallow no white space
    around them. NFC costs a factor of three. Everything else (Unigram, which fuses what it doesn't know; normalizers that strip or collapse;
    pre-tokenizers that remove) has no certain bound: there it is UNSURE times the longest token.
    """
    vocabulary = backend.get_vocab(with_added_tokens=False)
    cuts, normalizers = _steps(backend.pre_tokenizer, "pretokenizers"), _steps(backend.normalizer, "normalizers")
    added = backend.get_added_tokens_decoder().values()
    byte_level = any(step["type"] == "ByteLevel" for step in cuts)
    lost = b""
    if byte_level:  # a character of a token is a byte of the text
        longest = max(map(len, vocabulary), default=1)
        lost = bytes(byte for byte, character in CHARACTER_OF.items() if character not in vocabulary)
    else:
        longest = max((len(token.encode()) for token in vocabulary), default=1)
    for token in added:
        forms = [token.content] if backend.normalizer is None else [token.content, backend.normalizer.normalize_str(token.content)]
        longest = max(longest, *(len(form.encode()) for form in forms))
    model = backend.model
    whole = isinstance(model, models.BPE) and (
        byte_level or (model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in IN_UTF8))
    )
    factors = [_shortens(step) for step in normalizers]
    if not whole or None in factors or not all(map(_keeps, cuts)) or any(token.lstrip or token.rstrip for token in added):
        return Bound(longest * UNSURE)
    for factor in factors:
        longest *= factor or 1
    return Bound(longest, lost)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the library writes it, sequences flattened."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    steps = []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step[name] + pending
        else:
            steps.append(step)
    return steps


def _shortens(normalizer: dict[str, Any]) -> int | None:
    """By what factor at most; None: nobody knows."""
    match normalizer:
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": before}, "content": after} if len(after.encode()) >= len(before.encode()):
            return 1
        case {"type": "NFC"}:
            return NFC
    return None


def _keeps(cut: dict[str, Any]) -> bool:
    """Whether the pre-tokenizer leaves every character in a word."""
    match cut:
        case {"type": "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False
