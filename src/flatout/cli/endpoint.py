"""Flags that name somebody's server, and the words for what goes wrong with it: each failure is one line with the flag that mends it.

Called by the verbs that ask servers: doctor --url and bench load.
"""

from __future__ import annotations

from argparse import Namespace, _ArgumentGroup
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flatout.cli.flags import Parser, UsageError

if TYPE_CHECKING:
    from flatout.client.http import Endpoint

MENDS = {  # kind of failure -> what to do about it
    "http 401": "--api-key: the server wants one, or another one",
    "http 403": "--api-key: this one may not do that",
    "http 404": "--url, --model: no such route or model there",
    "http 503": "--url: the server is not ready",
    "no model": "--model: say which",
    "no stream": "--url: the server does not stream, and streams are what is timed",
    "not http": "--url: what answers there is no HTTP server",
    "connect": "--url",
    "timeout": "--seconds: more of them",
}


def add_endpoint_flags(parser: Parser, group: _ArgumentGroup) -> None:
    parser.flag(group, "--url", metavar="URL", default=None, help="an OpenAI-compatible server, with or without /v1: http://HOST:PORT")
    parser.flag(group, "--model", metavar="NAME", default=None, help="as the server calls it (default: the first that it lists)")
    parser.flag(group, "--api-key", metavar="KEY", default=None, help="sent as Authorization: Bearer KEY, and never shown")


@contextmanager
def endpoint_of(args: Namespace) -> Iterator[Endpoint]:
    """The server that --url names. Its failures, EndpointError, become UsageErrors that say which flag mends them."""
    from flatout.client.http import Endpoint, EndpointError

    try:
        endpoint = Endpoint(args.url, args.api_key)
    except ValueError as error:
        raise UsageError(f"--url: {error}") from None
    try:
        yield endpoint
    except EndpointError as error:
        mend = MENDS.get(error.kind)
        raise UsageError(f"{mend}: {error}" if mend else f"--url: {endpoint.url}: {error.kind}: {error}") from None
