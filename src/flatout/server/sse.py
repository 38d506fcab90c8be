"""Replies on the wire: server-sent events and how a chunk looks among them, and whole replies; both say when the client kept them waiting.

The response waits for its own client only: when that reads slowly, send() blocks here, and what arrives meanwhile merges in the flight.
Knows nothing of models. Used by openai.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flatout.ledger.account import Marks

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """`payload` is JSON without line breaks."""
    return b"data: " + payload + b"\n\n"


def _timed(send: Send, marks: Marks) -> Send:
    """Sending that adds the time it blocks to the marks."""

    async def timed(message: Message) -> None:
        marks.sending = begin = time.monotonic()
        try:
            await send(message)
        finally:
            now, marks.sending = time.monotonic(), 0.0
            marks.stalled_s += now - begin
            if marks.texted:
                marks.late_stall_s += now - max(begin, marks.texted)

    return timed


class EventStream(Response):
    """Sends each item of `events` as it comes. `close` is called at the end in any case, also when sending never began."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], marks: Marks):
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._close, self._marks = events, close, marks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _timed(send, self._marks)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for item in self._events:
                await send({"type": "http.response.body", "body": item, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()


class Whole(Response):
    """A reply of JSON in one piece; `close` is called once it is sent, or can't be."""

    def __init__(self, body: bytes, close: Callable[[], None], marks: Marks):
        super().__init__(body, media_type="application/json")
        self._close, self._marks = close, marks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, _timed(send, self._marks))
        finally:
            self._close()
