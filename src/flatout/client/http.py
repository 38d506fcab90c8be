"""HTTP/1.1 over asyncio, as little as a load client needs: one exchange at a time on a kept connection, each piece of a body with its time.

Pieces are parsed as they come, without a task switch for each. All times are the event loop's. Knows no API. Called by load.py and doctor/.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SLOW_BUFFER = 4096  # bytes that the kernel may hold for a reader who is slow on purpose


class EndpointError(Exception):
    """An exchange that failed. `kind` is short, the same for like failures: "connect", "timeout", "cut", "not http", "http 429"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass
class Reply:
    """What came back. `pieces`: the body as it arrived, (loop time in s, bytes)."""

    sent: float  # loop time at which the request was written
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """None where the body is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def complaint(self) -> str:
        """What an error reply says, in the shapes that servers have; one line, cut at 200 characters."""
        said = self.json()
        for key in ("error", "message", "detail"):
            said = said.get(key, said) if isinstance(said, dict) else said
        text = said if isinstance(said, str) else json.dumps(said) if said is not None else self.text
        return " ".join(text.split())[:200]


@dataclass
class Reader:
    """How a body is read: `pause` seconds after each piece (a slow client), and whom to tell of each."""

    pause: float = 0.0
    on_piece: Callable[[bytes], None] | None = None


class Endpoint:
    """A server by its URL, with or without /v1 at its end; connections are kept and used again.

    ValueError: the URL can't be used. The key is sent with each request and shown nowhere.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query:
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.root}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._key = (api_key or "").encode()
        bearer = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\nUser-Agent: flatout\r\n{bearer}"
        self._idle: list[_Connection] = []

    async def get(self, path: str, timeout: float = 5.0) -> Reply:
        return await self.exchange("GET", path, None, timeout)

    async def post(self, path: str, body: Any, timeout: float = 300.0, reader: Reader | None = None) -> Reply:
        return await self.exchange("POST", path, body, timeout, reader)

    async def exchange(self, method: str, path: str, body: Any, timeout: float, reader: Reader | None = None) -> Reply:
        """Any status is a Reply. Raises EndpointError; cancelled, it hangs up."""
        payload = b"" if body is None else json.dumps(body).encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n" if body is not None else ""
        request = f"{method} {self.root}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + payload
        slow = reader is not None and reader.pause > 0
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._idle = [c for c in self._idle if c.usable]  # servers close what was idle for long
                    kept = not slow and bool(self._idle)
                    connection = self._idle.pop() if kept else await self._connect(slow)
                    try:
                        reply = await connection.exchange(request, reader or Reader())
                        break
                    except EndpointError as error:
                        if not (kept and error.kind == "closed"):  # a kept connection may have ended meanwhile; a new one says why
                            raise
                    finally:
                        if connection.usable and not slow:
                            self._idle.append(connection)
                        else:
                            connection.abort()
        except TimeoutError:
            raise EndpointError("timeout", f"{self.url}{path}: no answer within {timeout:g} s") from None
        if self._key and reply.status >= 400:  # some servers quote the key that they refuse
            reply.pieces = [(reply.sent, reply.body.replace(self._key, b"(the key)"))]
        return reply

    async def connect_seconds(self) -> float:
        """How long a new connection takes: about one round trip, more with TLS. Raises EndpointError."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        connection = await self._connect(False)
        connection.abort()
        return loop.time() - begin

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connect(self, slow: bool) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self.host, self.port, ssl=self._tls)
        except ssl.SSLError as error:
            raise EndpointError("connect", f"{self.url}: TLS failed ({error.reason or error}); is it a plain http:// server?") from None
        except socket.gaierror:
            raise EndpointError("connect", f"{self.url}: there is no host {self.host}") from None
        except OSError as error:
            raise EndpointError("connect", f"{self.url}: nobody answers ({error.strerror or error}); does a server run there?") from None
        if slow and (raw := connection.transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        return connection


class _Connection(asyncio.Protocol):
    """One connection: exchange() after exchange(), while `usable`."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] | None = None
        self.usable, self._pausing, self._lost = False, False, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def abort(self) -> None:
        self.usable = False
        self.transport.abort()

    async def exchange(self, request: bytes, reader: Reader) -> Reply:
        """Raises EndpointError: "closed" before anything came, "cut" later, "not http"."""
        self.usable = False
        self._buffer, self._reader = b"", reader
        self._parse: Callable[[], bool] = self._head
        self._left: int | None = 0  # bytes of the body, or of this chunk; None: until the connection ends
        self._done = self._loop.create_future()
        self.reply = reply = Reply(self._loop.time())
        self.transport.write(request)
        try:
            await self._done
        finally:
            self._done = None
        return reply

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.usable = False  # nobody asked for this
            return
        self._buffer += data
        if not self._pausing:
            self._go_on()

    def _go_on(self) -> None:
        """Parse what there is; a slow reader takes one piece, then pauses, and the sender has to wait."""
        pieces, paused, self._pausing = self.reply.pieces, self._pausing, False
        more = self._done is not None and not self._done.done()
        while more:
            before = len(pieces)
            try:
                more = self._parse()
            except (ValueError, IndexError):
                return self._fail("not http", "the reply is not HTTP; is the port a server's?")
            if len(pieces) > before:
                if self._reader.on_piece is not None:
                    self._reader.on_piece(pieces[-1][1])
                if self._reader.pause and self._done is not None and not self._done.done():
                    self._pausing = True
                    self.transport.pause_reading()
                    self._loop.call_later(self._reader.pause, self._go_on)
                    return None
        if self._lost:
            return self._ended()
        return self.transport.resume_reading() if paused else None

    def connection_lost(self, error: Exception | None) -> None:
        self.usable, self._lost = False, True
        if not self._pausing:
            self._ended()

    def _ended(self) -> None:
        if self._done is None or self._done.done():
            return
        if self.reply.status and self._left is None:
            self._done.set_result(None)
        elif self.reply.status:
            self._fail("cut", "the connection ended in the middle of the reply")
        else:
            self._fail("closed", "the connection was closed without a reply")

    def _fail(self, kind: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(EndpointError(kind, message))

    def _end(self) -> bool:
        assert self._done is not None
        self.usable = self.reply.headers.get("connection", "").lower() != "close" and not self._buffer
        self._done.set_result(None)
        return False

    # parsers: each takes what it can from the buffer and says whether to go on

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if not b"HTTP/".startswith(head[:5]):
                raise ValueError
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/1."):
            raise ValueError
        status = int(first.split()[1])
        self._buffer = rest
        if status < 200:  # 100 Continue: the reply is yet to come
            return True
        self.reply.status = status
        self.reply.headers = headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._parse = self._chunk_size
        elif status in (204, 304):
            return self._end()
        else:
            self._left = int(headers["content-length"]) if "content-length" in headers else None
            self._parse = self._plain
        return True

    def _plain(self) -> bool:
        if self._left is None:
            self._take(len(self._buffer))
            return False
        self._left -= self._take(min(self._left, len(self._buffer)))
        return self._end() if self._left == 0 else False

    def _chunk_size(self) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._left, self._buffer = int(line.split(b";")[0], 16), rest
        self._parse = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        assert self._left is not None
        if len(self._buffer) < self._left + 2:
            return False
        self._take(self._left)
        self._buffer = self._buffer[2:]
        self._parse = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        return self._end() if not line else True

    def _take(self, count: int) -> int:
        if count:
            self.reply.pieces.append((self._loop.time(), self._buffer[:count]))
            self._buffer = self._buffer[count:]
        return count
