"""Server-sent events: how a chunk looks on the wire, and the response that sends them as they come.

The response waits for its own client only: when that reads slowly, send() blocks here, and what arrives meanwhile merges in the flight.
Knows nothing of models. Used by openai.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """`payload` is JSON without line breaks."""
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Sends each item of `events` as it comes. `close` is called at the end in any case, also when sending never began."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for item in self._events:
                await send({"type": "http.response.body", "body": item, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
