"""`flatout doctor report`: what a running flatout server did, as one HTML file that needs nothing beside it, and as JSON.

The page is the dashboard's own (server/dashboard/), with the figures of this moment in it. Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.endpoint import add_ours_flags, endpoint_of, ledger_of, one_model
from flatout.cli.flags import Parser, UsageError
from flatout.cli.terminal import say

if TYPE_CHECKING:
    from flatout.client.http import Endpoint

MOST_DEEP = 1000  # as the server takes
PATIENCE = 60.0  # seconds for steps to tell their ops apart


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add_ours_flags(parser, group)
    report = parser.add_argument_group("report")
    report.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the HTML file (default: report.html)")
    parser.flag(
        report, "--json", metavar="FILE", nargs="?", const="", default=None, help="the figures too (default: FILE.json beside the HTML)"
    )
    parser.flag(
        report, "--deep", type=int, metavar="N", default=0, help="have the next N steps time their ops first; needs load (default: 0)"
    )


def run(args: Namespace) -> int:
    if not 0 <= args.deep <= MOST_DEEP:
        raise UsageError(f"--deep: {args.deep} is not between 0 and {MOST_DEEP}")
    page = Path(args.output)
    beside = page.with_suffix(".json") if args.json == "" else Path(args.json) if args.json else None
    if beside == page:
        raise UsageError(f"--json: {beside} is the page itself; give another file")
    from flatout.server.dashboard import report

    with endpoint_of(args) as endpoint:
        found = asyncio.run(_figures(endpoint, args))
    page.write_bytes(report(found))
    say(f"wrote {page}")
    if beside is not None:
        beside.write_text(json.dumps(found, indent=1))
        say(f"wrote {beside}")
    return 0


async def _figures(endpoint: Endpoint, args: Namespace) -> dict[str, Any]:
    """/ledger of one model, with the server's address and the date."""
    try:
        name, model = one_model(await ledger_of(endpoint), args.model)
        if args.deep:
            await ledger_of(endpoint, f"?deep={args.deep}")
            steps, end = model["state"]["steps"], time.monotonic() + PATIENCE
            while model["state"]["steps"] < steps + args.deep:
                if time.monotonic() > end:
                    say(f"--deep: fewer than {args.deep} steps in {PATIENCE:.0f} s; is there load?")
                    break
                await asyncio.sleep(0.25)
                _, model = one_model(await ledger_of(endpoint, "?since=1"), name)
            await asyncio.sleep(1.0)  # windows hold whole seconds
        told = await ledger_of(endpoint)
        _, model = one_model(told, name)
    finally:
        endpoint.close()
    return {"url": endpoint.url, "taken": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "version": told["version"], "models": {name: model}}
