"""Flags that name somebody's server, and the words for what goes wrong with it: each failure is one line with the flag that mends it.

Called by the verbs that ask servers: doctor --url, doctor report, top and bench load.
"""

from __future__ import annotations

from argparse import Namespace, _ArgumentGroup
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flatout.cli.flags import Parser, UsageError, nearest

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


OURS = "http://127.0.0.1:8000"  # where `flatout serve` is unless it is told otherwise


def add_endpoint_flags(parser: Parser, group: _ArgumentGroup) -> None:
    parser.flag(group, "--url", metavar="URL", default=None, help="an OpenAI-compatible server, with or without /v1: http://HOST:PORT")
    _add_rest(parser, group)


def add_ours_flags(parser: Parser, group: _ArgumentGroup) -> None:
    """Of verbs that look at a flatout server."""
    parser.flag(group, "--url", metavar="URL", default=OURS, help=f"the flatout server (default: {OURS})")
    _add_rest(parser, group)


def _add_rest(parser: Parser, group: _ArgumentGroup) -> None:
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


async def ledger_of(endpoint: Endpoint, query: str = "") -> dict[str, Any]:
    """A flatout server's /ledger. Raises EndpointError; UsageError: the server is none of flatout's."""
    from flatout.client.http import EndpointError

    reply = await endpoint.get(f"/ledger{query}")
    told = reply.json()
    if reply.status in (401, 403, 503):
        raise EndpointError(f"http {reply.status}", reply.complaint)
    if reply.status != 200 or not isinstance(told, dict) or "models" not in told or "version" not in told:
        raise UsageError(f"--url: {endpoint.url} is no flatout server (it has no /ledger); doctor --url {endpoint.url} looks at anybody's")
    return told


def one_model(told: dict[str, Any], name: str | None) -> tuple[str, dict[str, Any]]:
    """Of those in /ledger: that name's, else the first. UsageError: there is none."""
    models = told["models"]
    if name is not None and name not in models:
        raise UsageError(f"--model: {name!r} is not served{nearest(name, models)}; served: {', '.join(models)}")
    name = next(iter(models)) if name is None else name
    return name, models[name]
