"""How the text of a token spells bytes, and how bytes become text: the exact inverse of a tokenizer's encoding, token by token.

Byte-level vocabularies write each byte as one printable character; SentencePiece ones write a space as a mark and rare bytes as <0xE4>.
Streaming and one-shot decoding both go through BytesToText, so they cannot differ. Called by tokenizer.py and detokenize.py.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from flatout.modelfile.spec import ModelFileError

EACH_BYTE = "flatout-each-byte"  # U+FFFD for every invalid byte, as the ByteFallback decoder of `tokenizers` gives
codecs.register_error(EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where Latin-1 has one, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(rest)}}


BYTE_OF = _byte_alphabet()
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
spells_bytes = frozenset(BYTE_OF).issuperset  # of a token: every character stands for a byte


@dataclass(frozen=True)
class Spelling:
    """What a tokenizer's decoder does, as rules on bytes."""

    byte_level: bool = False
    space: str = ""  # the mark that stands for a space
    byte_fallback: bool = False  # <0xE4> is the byte E4
    strip: int = 0  # most spaces dropped at the very start of a text (those that encoding puts there)

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Spelling:
        """Read off the decoder. Raises ModelFileError for a decoder whose tokens have no bytes of their own (WordPiece, CTC)."""
        state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        rules: dict[str, Any] = {}
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
                    rules["space"] = mark
                case {"type": "Metaspace", "replacement": mark, **rest}:
                    # the library drops every mark of a text's first token, real spaces too; one is what encoding put there
                    rules.update(space=mark, strip=int(rest.get("prepend_scheme") != "never"))
                case {"type": "ByteFallback"}:
                    rules["byte_fallback"] = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": count, "stop": 0}:
                    rules["strip"] = count
                case _:
                    raise ModelFileError(
                        f"tokenizer decoder {step['type']} ({step}) isn't supported; supported: ByteLevel, and Replace, ByteFallback, Fuse,"
                        " Strip or Metaspace as SentencePiece models have"
                    )
        return cls(**rules)

    def bytes_of(self, token: str) -> bytes:
        """What the token adds to a text, after the text's first token."""
        if self.byte_level:
            # an added token with any other character stands for itself, as in the library
            return bytes(map(BYTE_OF.__getitem__, token)) if spells_bytes(token) else token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass  # such as <0xZZ>: a text like others
        return (token.replace(self.space, " ") if self.space else token).encode()


class BytesToText:
    """UTF-8 to text, in pieces of any size; an unfinished character waits for its next byte.

    Invalid bytes become U+FFFD. Where a run of fallback bytes is invalid the library's decoder turns the whole run into U+FFFD, the valid
    characters in it too; no stream could take those back, so here only the invalid bytes do.
    """

    def __init__(self, spelling: Spelling):
        self._decode = codecs.getincrementaldecoder("utf-8")(EACH_BYTE if spelling.byte_fallback else "replace").decode
        self._strip = spelling.strip  # spaces still to be dropped, until the first other byte

    def push(self, data: bytes) -> str:
        if self._strip and data:
            kept = data.lstrip(b" ")
            spaces = min(len(data) - len(kept), self._strip)
            self._strip = 0 if kept else self._strip - spaces
            data = data[spaces:]
        return self._decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character."""
        return self._decode(b"", True)
