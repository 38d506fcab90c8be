"""Log-probabilities as JSON shows them: the old shape of /v1/completions, the chat shape, and vLLM's prompt_logprobs.

Values are the engine's raw ones. JSON has no infinity: -inf is written as FLOOR. A token that is part of a character is written as
bytes:\\xf0\\x9f, so no name is lost or made up. Called by openai.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.request import FinishReason, PositionLogprobs, Request
from flatout.server.engines import Piece
from flatout.server.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprobs, TopLogprob
from flatout.text.detokenize import Detokenizer
from flatout.text.tokenizer import Tokenizer

FLOOR = -9999.0  # as in vLLM


def _value(logprob: float) -> float:
    return max(logprob, FLOOR)


def name_of(tokenizer: Tokenizer | None, id: int) -> str:
    """The token's text; its bytes where they are not whole characters; its id where it has none."""
    data = b"" if tokenizer is None else tokenizer.token_bytes(id)
    if not data:
        return f"token_id:{id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobsMaker:
    """Gathers one choice's positions; take() after each piece. Offsets count the characters of the choice's text, echoed prompt included."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request, shown: str, count: int):
        """`shown`: the echoed prompt. `count`: alternatives a position."""
        self._tokenizer, self._request, self._count = tokenizer, request, count
        self._shown, self._offset = shown, len(shown)
        self._text = Detokenizer(tokenizer, request.prompt_ids, request.params.skip_special_tokens) if tokenizer else None
        self._gathered = CompletionLogprobs([], [], [], [])

    def take(self) -> CompletionLogprobs:
        gathered, self._gathered = self._gathered, CompletionLogprobs([], [], [], [])
        return gathered

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for position in positions:
            self._append(position.chosen.token_id, position, self._offset)
            if self._text is not None:
                self._offset += len(self._text.push((position.chosen.token_id,)))

    def add_prompt(self, positions: Sequence[PositionLogprobs | None]) -> None:
        ids = self._request.prompt_ids
        ends = [0]
        if self._tokenizer is not None:
            text = Detokenizer(self._tokenizer, skip_special_tokens=False)
            for id in ids:
                ends.append(ends[-1] + len(text.push((id,))))
            ends[-1] += len(text.finish())
        # the ids may say more than the prompt as given: a start token that encoding put before it
        extra = ends[-1] - len(self._shown)
        for id, position, begin in zip(ids, positions, ends if len(ends) > 1 else [0] * len(ids)):
            self._append(id, position, max(begin - extra, 0))

    def _append(self, id: int, position: PositionLogprobs | None, offset: int) -> None:
        gathered = self._gathered
        gathered.tokens.append(name_of(self._tokenizer, id))
        gathered.text_offset.append(offset)
        if position is None:
            gathered.token_logprobs.append(None)
            gathered.top_logprobs.append(None)
            return
        gathered.token_logprobs.append(_value(position.chosen.logprob))
        top: dict[str, float] = {}
        alternatives = position.top[: self._count]
        if all(t.token_id != id for t in alternatives):
            alternatives = [*alternatives, position.chosen]
        for token in alternatives:
            name = name_of(self._tokenizer, token.token_id)
            top[name if name not in top else f"token_id:{token.token_id}"] = _value(token.logprob)
        gathered.top_logprobs.append(top)


def chat_logprobs(tokenizer: Tokenizer | None, request: Request, piece: Piece) -> ChatLogprobs:
    """An entry a token. `bytes` of all entries make the message's text: those of a token that is not shown are null."""
    params = request.params
    ended_by_id = piece.finish_reason == FinishReason.STOP and not isinstance(piece.stop_reason, str)
    hidden_at = len(piece.logprobs) - 1 if ended_by_id and not params.include_stop_str_in_output else -1
    entries = []
    for i, position in enumerate(piece.logprobs):
        top = [
            TopLogprob(name_of(tokenizer, t.token_id), _value(t.logprob), _bytes(tokenizer, request, t.token_id))
            for t in position.top[: params.logprobs or 0]
        ]
        id = position.chosen.token_id
        data = None if i == hidden_at else _bytes(tokenizer, request, id)
        entries.append(TokenLogprobs(name_of(tokenizer, id), _value(position.chosen.logprob), data, top))
    return ChatLogprobs(entries)


def _bytes(tokenizer: Tokenizer | None, request: Request, id: int) -> list[int] | None:
    if tokenizer is None or (request.params.skip_special_tokens and tokenizer.is_special(id)):
        return None
    return list(tokenizer.token_bytes(id))


def prompt_logprobs(tokenizer: Tokenizer | None, count: int, positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """vLLM's: per position a map from id to value, the prompt's own token first, then `count` alternatives; null for the first."""
    return [
        None
        if position is None
        else {
            t.token_id: PromptLogprob(_value(t.logprob), t.rank, None if tokenizer is None else tokenizer.token_text(t.token_id))
            for t in (position.chosen, *position.top[:count])
        }
        for position in positions
    ]
