"""SequenceText: one sequence's ids become its text, as they come. Streamed or not, offline or served, this is the one way from ids to text.

Joins the Detokenizer and the StopChecker; ids and lengths have been judged by core/stop.py before. Called by llm.py and server/engines.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.request import FinishReason, SamplingParams
from flatout.text.detokenize import Detokenizer
from flatout.text.stop import StopChecker
from flatout.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What one push added. `token_ids` are those that count as output: an end id is among them, ids behind a stop string are not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None  # the stop string found here; a stop id is the engine's to tell


class SequenceText:
    """`params` and `prompt_ids` of the Request that prepare() made."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()):
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._checker = StopChecker(params.stop or (), params.include_stop_str_in_output)
        self._watches = bool(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, ids: Sequence[int], finish_reason: FinishReason | None = None) -> Delta:
        """Take newly sampled ids; `finish_reason` with the last of them. A stop string in their text ends the sequence first.

        Where the engine stopped by an end or stop id, that id's text isn't shown (unless include_stop_str_in_output). Ids pushed after the
        end, made while the stop was on its way to the engine, are dropped.
        """
        if self.finish_reason is not None:
            return Delta("", [])
        visible = ids[:-1] if finish_reason == FinishReason.STOP and not self._include_stop else ids
        count, text, stop = self._read(visible)
        if stop is None:
            count = len(ids)
            if finish_reason is not None:
                rest, stop = self._checker.push(self._detokenizer.finish())
                text += rest + self._checker.finish()
        if stop is not None:
            finish_reason = FinishReason.STOP
        delta = Delta(text, list(ids[:count]), finish_reason, stop)
        self.token_ids += delta.token_ids
        self._pieces.append(text)
        self.finish_reason, self.stop_reason = finish_reason, stop
        return delta

    def _read(self, ids: Sequence[int]) -> tuple[int, str, str | None]:
        """(ids read, text to show, stop string found): reading ends with the id that completed a stop string."""
        if not self._watches:
            return len(ids), self._detokenizer.push(ids), None
        shown = []
        for count, id in enumerate(ids, 1):
            armed = len(self.token_ids) + count > self._min_tokens  # as vLLM: the text of the first min_tokens tokens completes no stop
            text, stop = self._checker.push(self._detokenizer.push((id,)), armed)
            shown.append(text)
            if stop is not None:
                return count, "".join(shown), stop
        return len(ids), "".join(shown), None
