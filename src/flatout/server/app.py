"""The HTTP routes: reading bodies within a limit, the key, and every error in OpenAI's shape. What a route answers is openai.py's.

Parsing, templating and tokenising run in a few threads, so that a huge body holds up nobody else; all the rest is on the event loop.
Made by launch.py.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flatout import __version__
from flatout.config import Config, ServerConfig
from flatout.ledger.account import Marks
from flatout.ledger.ledger import SECONDS_KEPT
from flatout.request import RequestError
from flatout.server import openai
from flatout.server.dashboard import PAGE_HEADERS, page
from flatout.server.diagnosis import WINDOW
from flatout.server.engines import ClientGone, ServedModel
from flatout.server.mailbox import Deep
from flatout.server.metrics import CONTENT_TYPE, exposition
from flatout.server.protocol import ApiError
from flatout.server.replies import Model, ModelList, encode

MOST_DEEP = 1000  # steps asked for at once: on a GPU they run op by op
LATEST = 1 << 53  # a second
TEXT_THREADS = 4  # prepare requests; a long prompt takes one for its whole tokenising
Models = Mapping[str, ServedModel]


def make_app(models: Models, config: Config, server: ServerConfig) -> ASGIApp:
    """The ASGI application over the table of served models."""
    pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    def route(order: Callable[[Models, Config, bytes], openai.Order]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            marks = Marks(time.monotonic())
            raw = await _body(request, server.max_body_bytes)

            def ordered() -> openai.Order:
                marks.parsing = time.monotonic()
                return order(models, config, raw)

            ready = await asyncio.get_running_loop().run_in_executor(pool, ordered)
            return await openai.answer(request, ready, marks)

        return endpoint

    async def health(request: Request) -> Response:
        """200 only while every engine is ready and alive."""
        trouble = next((m.trouble for m in models.values() if m.trouble is not None), None)
        return _json({"status": "ok"}) if trouble is None else _json({"status": "unavailable", "reason": trouble}, 503)

    async def metrics(request: Request) -> Response:
        served = [(m.name, m.metrics, m.ledger) for m in models.values()]
        return Response(exposition(served), media_type=CONTENT_TYPE)

    async def ledger(request: Request) -> Response:
        """Each model's account, what limits it and its cost table. ?deep=N: so many steps from now on tell their ops apart; ?seconds=N: verdicts
        over so many; ?since=SECOND: for viewers (engines.py:ServedModel.accounts)."""
        if deep := _number(request, "deep", MOST_DEEP):
            for model in models.values():
                model.send(Deep(deep))
        seconds, since = _number(request, "seconds", SECONDS_KEPT) or WINDOW, _number(request, "since", LATEST) or None
        return _json({"version": __version__, "models": {m.name: m.accounts(seconds, since) for m in models.values()}})

    async def dashboard(request: Request) -> Response:
        return Response(page(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def list_models(request: Request) -> Response:
        return _json(ModelList(data=[_model(m) for m in models.values()]))

    async def one_model(request: Request) -> Response:
        return _json(_model(openai.find(models, request.path_params["name"])))

    app = Starlette(
        routes=[
            Route("/", dashboard),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/ledger", ledger),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/completions", route(openai.completion_order), methods=["POST"]),
            Route("/v1/chat/completions", route(openai.chat_order), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_gone,
            ClientGone: _on_gone,
            Exception: _on_fault,
        },
    )
    return app if server.api_key is None else _Guard(app, server.api_key)


class _Guard:
    """Asks for the key on every route but /health and the dashboard's page, which holds no figures and asks for it too."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/", "/health"):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # the scheme in any case (RFC 7235, 2.1); comparing the key takes the same time however much of it is right
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.lstrip(b" "), self._key):
                error = ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key")
                await _error(error, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 as soon as it is over the limit."""
    declared = request.headers.get("content-length", "")
    pieces, size = [], int(declared) if declared.isdecimal() else 0
    too_large = ApiError(413, f"the body is over this server's limit of {limit} bytes (--max-body-bytes)", code="body_too_large")
    if size > limit:
        raise too_large
    size = 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise too_large
    return b"".join(pieces)


def _model(model: ServedModel) -> Model:
    """Raises ApiError 503 while the engine can't be used: a listed model is one that answers."""
    if model.trouble is not None or model.facts is None:
        raise ApiError.unavailable(model.trouble or "the model is loading")
    return Model(id=model.name, created=model.created, root=model.facts.model, max_model_len=model.facts.max_model_len)


def _number(request: Request, name: str, most: int) -> int:
    """Of the query; 0 where it is not given. Raises ApiError 400."""
    given = request.query_params.get(name)
    if given is None:
        return 0
    if not (given.isdecimal() and 0 < int(given) <= most):
        raise ApiError(400, f"{name}: must be a whole number from 1 to {most}, got {given!r}", param=name, code="invalid_value")
    return int(given)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def _error(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    # what is left of a refused body is not read: the connection can't be used again
    return _json(error.body(), error.status, {**(headers or {}), **({"connection": "close"} if error.status == 413 else {})})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(ApiError.refused(error.field, str(error)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    what = {404: f"no such route: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    api = ApiError(error.status_code, what.get(error.status_code, error.detail), code=codes.get(error.status_code))
    return _error(api, dict(error.headers or {}))


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # goes nowhere: the client hung up


async def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours; Starlette raises it again behind this reply, so the traceback is printed."""
    return _error(ApiError.internal(f"{type(error).__name__}: {error}"))
