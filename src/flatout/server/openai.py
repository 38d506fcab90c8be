"""The OpenAI routes: a body becomes an Order of engine requests, a Flight's pieces become reply objects, whole or as a stream.

Orders are made in a worker thread (parsing, template, tokenising); answers on the event loop. Field rules are protocol.py's, shapes are
replies.py's. Called by app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from flatout import __version__
from flatout.config import Config
from flatout.ledger.account import Marks
from flatout.request import MAX_LOGPROBS, ModelFacts, PositionLogprobs, Request, RequestError, SamplingParams
from flatout.server.engines import ClientGone, Flight, Piece, ServedModel
from flatout.server.logprobs import CompletionLogprobsMaker, chat_logprobs, prompt_logprobs
from flatout.server.protocol import SAMPLING_FIELDS, ApiError, Body, ChatBody, CompletionBody, parse, prompts_of
from flatout.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    Message,
    PromptLogprobs,
    Usage,
    encode,
)
from flatout.server.sse import DONE, EventStream, Whole, event
from flatout.text.prepare import default_params, prepare
from flatout.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default on /v1/completions; a chat may use the whole context
TIMINGS_HEADER = "x-flatout-timings"  # as `timings: true` in the body, for clients that can't write into it
FINGERPRINT = f"flatout-{__version__}"


def find(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    """The model of that name; without a name, the only one. Raises ApiError 404."""
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is None or name not in models:
        message = f"model {name!r} does not exist; this server has {', '.join(models)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


# -- orders: in a worker thread -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Order:
    """A body, judged and tokenised."""

    model: ServedModel
    body: CompletionBody | ChatBody
    prompts: list[list[Request]] = field(default_factory=list)  # the n sequences of each
    shown: list[str] = field(default_factory=list)  # what echo puts before each prompt's choices
    times: bool = False  # the reply says where its time went


def completion_order(models: Mapping[str, ServedModel], config: Config, raw: bytes) -> Order:
    """Raises ApiError and RequestError naming the field; one bad prompt refuses the whole request."""
    body = parse(raw, CompletionBody)
    model, facts = _open(models, body.model)
    given: dict[str, Any] = {"logprobs": body.logprobs, "max_tokens": _max_tokens(facts, body.max_tokens, otherwise=COMPLETION_MAX_TOKENS)}
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = _params(body, facts, **given)
    order = Order(model, body)
    prompts = prompts_of(body.prompt, params.n)
    for i, prompt in enumerate(prompts):
        try:
            order.prompts.append(_sequences(order, facts, config, prompt, params, body.add_special_tokens is not False))
        except RequestError as error:
            if error.field != "prompt" or len(prompts) == 1:
                raise
            raise RequestError(f"prompt[{i}]", str(error).removeprefix("prompt: ")) from None
        if body.echo:
            order.shown.append(prompt if isinstance(prompt, str) else _decode(model.tokenizer, prompt))
    return order


def chat_order(models: Mapping[str, ServedModel], config: Config, raw: bytes) -> Order:
    """Raises ApiError and RequestError naming the field; the template's own words where it refuses the messages."""
    body = parse(raw, ChatBody)
    model, facts = _open(models, body.model)
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise RequestError("max_tokens", "is the older name of max_completion_tokens; give one of them")
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs", "needs logprobs: true")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError("top_logprobs", f"must be at least 0 and at most {MAX_LOGPROBS}, got {body.top_logprobs}")
    proceed = bool(body.continue_final_message)
    if body.echo and not proceed:
        raise RequestError("echo", "on this route shows the message that is continued: it needs continue_final_message: true")
    if proceed and body.add_generation_prompt:
        raise RequestError("add_generation_prompt", "can't be true together with continue_final_message")
    if model.tokenizer is None or model.template is None:
        raise RequestError("messages", f"{model.name} was loaded without a tokenizer: only /v1/completions with token ids works")
    params = _params(
        body,
        facts,
        max_tokens=_max_tokens(facts, body.max_completion_tokens, body.max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    ids = model.template.encode(
        body.messages,
        facts,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=proceed,
        **_template_arguments(body.chat_template_kwargs or {}),
    )
    order = Order(model, body, shown=[_text_of(body.messages[-1])] if body.echo else [])
    order.prompts.append(_sequences(order, facts, config, ids, params))
    return order


def _template_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in arguments:
            raise RequestError("chat_template_kwargs", f"{name!r} is no argument of the template's own; it has its field in the request")
    return arguments


def _open(models: Mapping[str, ServedModel], name: str | None) -> tuple[ServedModel, ModelFacts]:
    model = find(models, name)
    if model.trouble is not None or model.facts is None:
        raise ApiError.unavailable(model.trouble or "the model is loading")
    return model, model.facts


def _max_tokens(facts: ModelFacts, *asked: int | None, otherwise: int | None = None) -> int | None:
    """The first that says something: the request, the model's generation config, the route (None: as far as the context allows)."""
    for limit in (*asked, facts.sampling_defaults.get("max_tokens")):
        if limit is not None:
            return int(limit)
    return otherwise


def _params(body: Body, facts: ModelFacts, **given: Any) -> SamplingParams:
    """The body's fields over the model's own defaults."""
    fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return default_params(facts, **{**fields, **given})


def _sequences(
    order: Order, facts: ModelFacts, config: Config, prompt: str | list[int], params: SamplingParams, add_special_tokens: bool = True
) -> list[Request]:
    body = order.body
    if body.priority and config.scheduler.scheduling_policy != "priority":
        raise RequestError("priority", "has no effect unless the server runs with --scheduling-policy priority")
    return prepare(
        secrets.token_hex(12),
        prompt,
        params,
        order.model.tokenizer,
        facts,
        arrival=time.monotonic(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=add_special_tokens,
    )


def _decode(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else ""


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


# -- answers: on the event loop -------------------------------------------------------------------------------------------


async def answer(request: HttpRequest, order: Order, marks: Marks) -> Response:
    """Run the order; marks: of its way here. Errors before the first token are HTTP errors, in a stream too; later ones are an event in it."""
    order.times = bool(order.body.timings) or _asks(request.headers.get(TIMINGS_HEADER))
    flight = order.model.launch(order.prompts, marks)
    watch = asyncio.create_task(_watch(request, flight))

    def close() -> None:
        watch.cancel()
        flight.close()

    reply = ChatReply(order) if isinstance(order.body, ChatBody) else CompletionReply(order)
    try:
        pieces = await flight.take(whole=not order.body.stream)
        if order.body.stream:
            return EventStream(_events(reply, flight, pieces), close, flight.marks)
    except BaseException:
        close()
        raise
    try:
        body = encode(reply.whole(pieces, flight.usage(), reply.timings(flight)))
    except BaseException:
        close()
        raise
    watch.cancel()  # all is there: who leaves now has not been waited for
    return Whole(body, close, flight.marks)


def _asks(header: str | None) -> bool:
    """Raises ApiError 400 for a value that says neither."""
    if header is not None and header.lower() not in ("1", "true", "0", "false"):
        raise ApiError(400, f"{TIMINGS_HEADER}: must be 1 or 0, got {header!r}", param=TIMINGS_HEADER, code="invalid_value")
    return header is not None and header.lower() in ("1", "true")


async def _watch(request: HttpRequest, flight: Flight) -> None:
    """End the flight when its client hangs up, whatever it waits for."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    flight.hang_up()


async def _events(reply: Reply, flight: Flight, pieces: list[Piece]) -> AsyncIterator[bytes]:
    with contextlib.suppress(ClientGone):
        try:
            while True:
                if chunks := b"".join(event(encode(chunk)) for piece in pieces for chunk in reply.chunks(piece)):
                    yield chunks
                if flight.spent:
                    break
                pieces = await flight.take()
        except ApiError as error:
            yield event(encode(error.body()))
            return
        if reply.includes_usage or reply.order.times:
            yield event(encode(reply.last_chunk(flight)))
        yield DONE


class Reply:
    """What both routes' replies share: the head of each object, and what was asked to be in it."""

    prefix = ""

    def __init__(self, order: Order):
        self.order = order
        self.tokenizer = order.model.tokenizer
        self.n = len(order.prompts[0])
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": order.model.name,
            "system_fingerprint": FINGERPRINT,
        }
        options = order.body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.no_usage = None if self.includes_usage else UNSET  # of the chunks before the last
        self._begun: set[int] = set()

    def timings(self, flight: Flight) -> dict[str, Any] | UnsetType:
        return flight.account().plain() if self.order.times else UNSET

    def whole(self, pieces: list[Piece], usage: Usage, timings: dict[str, Any] | UnsetType) -> Struct:
        """The reply to a request without stream."""
        raise NotImplementedError

    def chunks(self, piece: Piece) -> list[Struct]:
        """The stream's chunks for a piece; none when nothing in it shows."""
        raise NotImplementedError

    def last_chunk(self, flight: Flight) -> Struct:
        """A stream's last: no choice, but the usage or the timings that were asked for."""
        raise NotImplementedError

    def request_of(self, piece: Piece) -> Request:
        return self.order.prompts[piece.choice // self.n][piece.choice % self.n]

    def ids(self, ids: list[int], shown: bool = True) -> list[int] | UnsetType:
        return ids if self.order.body.return_token_ids and shown else UNSET

    def prompt_logprobs(self, positions: list[PositionLogprobs | None] | None) -> PromptLogprobs | UnsetType:
        count = self.order.body.prompt_logprobs
        return UNSET if count is None or positions is None else prompt_logprobs(self.tokenizer, count, positions)

    def begins(self, piece: Piece) -> bool:
        """Whether it is its choice's first."""
        first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        return first


class CompletionReply(Reply):
    prefix = "cmpl"

    def __init__(self, order: Order):
        super().__init__(order)
        self._logprobs: dict[int, CompletionLogprobsMaker] = {}  # by choice
        self._of_prompt: dict[int, list[PositionLogprobs | None]] = {}  # by prompt; they come with its first sample

    def whole(self, pieces: list[Piece], usage: Usage, timings: dict[str, Any] | UnsetType) -> Completion:
        return self._object([self._choice(piece) for piece in pieces], usage, timings)

    def chunks(self, piece: Piece) -> list[Struct]:
        choice = self._choice(piece)
        shows = choice.text or choice.finish_reason or choice.logprobs or choice.token_ids
        return [self._object([choice], self.no_usage)] if shows else []

    def last_chunk(self, flight: Flight) -> Completion:
        return self._object([], flight.usage() if self.includes_usage else UNSET, self.timings(flight))

    def _object(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, timings: dict[str, Any] | UnsetType = UNSET
    ) -> Completion:
        return Completion(object="text_completion", choices=choices, usage=usage, timings=timings, **self.head)

    def _choice(self, piece: Piece) -> CompletionChoice:
        body, request, number = self.order.body, self.request_of(piece), piece.choice // self.n
        first = self.begins(piece)
        if piece.prompt_logprobs is not None:
            self._of_prompt[number] = piece.prompt_logprobs
        shown = self.order.shown[number] if body.echo and first else ""
        logprobs = None
        if body.logprobs is not None:
            if first:
                self._logprobs[piece.choice] = CompletionLogprobsMaker(self.tokenizer, request, shown, body.logprobs)
            maker = self._logprobs[piece.choice]
            if body.echo and first:
                maker.add_prompt(self._of_prompt[number])
            maker.add(piece.logprobs)
            logprobs = maker.take()
        return CompletionChoice(
            index=piece.choice,
            text=shown + piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self.ids(piece.token_ids),
            prompt_token_ids=self.ids(request.prompt_ids, first),
            prompt_logprobs=self.prompt_logprobs(self._of_prompt.get(number)),
        )


class ChatReply(Reply):
    prefix = "chatcmpl"

    def whole(self, pieces: list[Piece], usage: Usage, timings: dict[str, Any] | UnsetType) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=piece.choice,
                message=Message(content=self._shown + piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=self.ids(piece.token_ids),
            )
            for piece in pieces
        ]
        return ChatCompletion(
            object="chat.completion",
            choices=choices,
            usage=usage,
            timings=timings,
            prompt_token_ids=self.ids(self.request_of(pieces[0]).prompt_ids),
            prompt_logprobs=self.prompt_logprobs(pieces[0].prompt_logprobs),
            **self.head,
        )

    def chunks(self, piece: Piece) -> list[Struct]:
        chunks: list[Struct] = []
        if self.begins(piece):
            role = ChatChunkChoice(piece.choice, ChatDelta(role="assistant", content=self._shown), None, None)
            chunks.append(self._chunk([role], self.no_usage, self.ids(self.request_of(piece).prompt_ids)))
        logprobs, ids = self._logprobs(piece), self.ids(piece.token_ids)
        if piece.text or piece.finish_reason or logprobs or ids:
            delta = ChatDelta(content=piece.text) if piece.text else ChatDelta()
            stop_reason = piece.stop_reason if piece.finish_reason else UNSET
            chunks.append(
                self._chunk([ChatChunkChoice(piece.choice, delta, logprobs, piece.finish_reason, stop_reason, ids)], self.no_usage)
            )
        return chunks

    def last_chunk(self, flight: Flight) -> ChatChunk:
        chunk = self._chunk([], flight.usage() if self.includes_usage else UNSET)
        chunk.timings = self.timings(flight)
        return chunk

    @property
    def _shown(self) -> str:
        return self.order.shown[0] if self.order.shown else ""

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(self.tokenizer, self.request_of(piece), piece) if self.order.body.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=choices, usage=usage, prompt_token_ids=ids, **self.head)
