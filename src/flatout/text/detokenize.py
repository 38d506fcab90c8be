"""Detokenizer: the text of a sequence's ids as they come. Its pieces, joined, are the one-shot decode of all ids, whatever the ids.

Works on bytes (spelling.py), so each token is looked at once: no window of ids is decoded again. Called by sequence.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.text.spelling import BytesToText
from flatout.text.tokenizer import Tokenizer

LONGEST_CHARACTER = 4  # bytes, in UTF-8


class Detokenizer:
    """push(ids) as they come, finish() once.

    The text continues `prompt_ids`, as in vLLM: it is decode(prompt + output) without decode(prompt). So a first word keeps the space before it
    where SentencePiece drops one at the start of a text, and a character that the prompt began is completed. Without visible prompt tokens
    it is decode(output).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        tail = b""
        for id in reversed(prompt_ids):
            if len(tail) >= LONGEST_CHARACTER:
                break
            tail = tokenizer.bytes_of((id,), skip_special_tokens) + tail
        self._text = BytesToText(tokenizer.spelling)
        self._text.push(tail)  # the prompt's own text; what stays is an unfinished character, and that the text has begun

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain. An unfinished character waits for its other bytes."""
        return self._text.push(self._tokenizer.bytes_of(ids, self._skip))

    def finish(self) -> str:
        """What waits, as U+FFFD."""
        return self._text.finish()
