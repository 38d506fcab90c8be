"""The HTTP client against replies written by hand: every way in which a body ends, pieces with their times, and each kind of failure."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import virtual_time

from flatout.client.http import Endpoint, EndpointError, Reader, Reply

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def scripted(*replies):
    """A server whose n-th exchange writes the pieces of replies[n], each a number of seconds to wait, bytes, or None: hang up. Yields its Endpoint
    and the requests' heads."""
    left, heads = list(replies), []

    async def serve(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head.decode())
                for piece in left.pop(0):
                    if piece is None:
                        return writer.close()
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                    else:
                        await asyncio.sleep(piece)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 8000)
    endpoint = Endpoint("http://127.0.0.1:8000", "secret")
    try:
        yield endpoint, heads
    finally:
        endpoint.close()
        server.close()


def exchange(*pieces, **options) -> Reply:
    async def work():
        async with scripted(pieces) as (endpoint, _):
            return await endpoint.exchange("GET", "/x", None, **{"timeout": 60, **options})

    return virtual_time.run(work())


@pytest.mark.parametrize(
    "pieces",
    [
        (OK + b"Content-Length: 5\r\n\r\nhello",),
        (OK + b"Content-Length: 5\r\n", 1, b"\r\nhe", 1, b"llo"),
        (OK + b"transfer-encoding: Chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhe", 1, b"llo\r", 1, b"\n0\r\nX-Trailer: a\r\n", 1, b"\r\n"),
        (OK + b"Connection: close\r\n\r\nhe", 1, b"llo", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello",),
    ],
    ids=["length", "length in pieces", "chunks", "chunks in pieces", "until it closes", "continue"],
)
def test_a_body_is_whole(pieces):
    reply = exchange(*pieces)
    assert (reply.status, reply.body) == (200, b"hello")


def test_no_body():
    assert exchange(b"HTTP/1.1 204 No Content\r\n\r\n").body == b""
    assert exchange(OK + b"Content-Length: 0\r\n\r\n").body == b""


def test_pieces_have_the_times_at_which_they_came():
    seen = []
    reply = exchange(
        0.5, OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n", 2, b"1\r\nb\r\n0\r\n\r\n", reader=Reader(on_piece=seen.append)
    )
    assert [piece for _, piece in reply.pieces] == seen == [b"a", b"b"]
    assert [time - reply.sent for time, _ in reply.pieces] == pytest.approx([0.5, 2.5])


def test_a_slow_reader_takes_its_pause_after_each_piece():
    chunks = [b"1\r\nx\r\n"] * 3
    reply = exchange(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", *(p for c in chunks for p in (0.1, c)), b"0\r\n\r\n", reader=Reader(pause=5)
    )
    assert reply.body == b"xxx"
    assert reply.pieces[-1][0] - reply.pieces[0][0] == pytest.approx(10), "the second and third piece waited in the socket"


def test_a_slow_reader_gets_all_of_what_came_before_the_end():
    reply = exchange(OK + b"Connection: close\r\n\r\n", b"x", 1, b"y", None, reader=Reader(pause=5))
    assert reply.body == b"xy"


def test_connections_are_kept_and_a_dead_one_is_replaced():
    body = OK + b"Content-Length: 2\r\n\r\nok"

    async def work():
        async with scripted([body], [body, None], [body]) as (endpoint, heads):
            first = await endpoint.get("/a")
            await endpoint.get("/b")  # the same connection, which the server then closes
            await asyncio.sleep(1)
            last = await endpoint.get("/c")
            return first.text, last.text, heads

    first, last, heads = virtual_time.run(work())
    assert first == last == "ok"
    assert [head.split()[1] for head in heads] == ["/a", "/b", "/c"]
    assert all("Authorization: Bearer secret\r\n" in head for head in heads)


def test_a_server_that_quotes_the_key_is_not_quoted():
    body = b'{"error": {"message": "wrong key: secret"}}'
    reply = exchange(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:35], 1, body[35:])
    assert reply.complaint == "wrong key: (the key)"


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((None,), "closed"),
        ((OK + b"Content-Length: 5\r\n\r\nhe", None), "cut"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhe", None), "cut"),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), "not http"),
        ((OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",), "not http"),
        ((OK + b"Content-Length: 5\r\n\r\n", 100), "timeout"),
    ],
)
def test_failures_have_a_kind(pieces, kind):
    with pytest.raises(EndpointError) as caught:
        exchange(*pieces)
    assert caught.value.kind == kind
    assert "secret" not in str(caught.value)


def test_nobody_there():
    with pytest.raises(EndpointError, match="nobody answers") as caught:
        asyncio.run(Endpoint("http://127.0.0.1:1").get("/"))
    assert caught.value.kind == "connect"


def test_over_real_sockets():
    async def work():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 3 + b"0\r\n\r\n")
            await writer.drain()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        replies = [await endpoint.post("/", {}, reader=Reader(pause=pause)) for pause in (0.0, 0.001)]
        seconds = await endpoint.connect_seconds()
        endpoint.close()
        server.close()
        return replies, seconds

    replies, seconds = asyncio.run(work())
    assert [reply.text for reply in replies] == ["xxx", "xxx"]
    assert seconds > 0


@pytest.mark.parametrize(
    ("url", "root", "port"),
    [
        ("http://host:8000", "http://host:8000", 8000),
        ("http://host:8000/v1/", "http://host:8000", 8000),
        ("https://host/api/v1", "https://host/api", 443),
        ("host:9", "http://host:9", 9),
        ("http://user:word@host", "http://host", 80),
    ],
)
def test_urls(url, root, port):
    endpoint = Endpoint(url)
    assert (endpoint.url, endpoint.port) == (root, port)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:no", "http://host?x=1"])
def test_what_is_no_url(url):
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        Endpoint(url)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "no\\n such model", "code": 1}}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "busy"}', "busy"),
        (b"<html>\n bad gateway", "<html> bad gateway"),
        (b"", ""),
    ],
)
def test_what_an_error_reply_says(body, says):
    assert Reply(0.0, 500, {}, [(0.0, body)]).complaint == says
