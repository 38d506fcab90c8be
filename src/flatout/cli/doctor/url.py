"""`flatout doctor --url http://...`: probes any OpenAI-compatible server for a minute and says what limits it.

What is measured is doctor/probe.py's, what it means doctor/probe_rules.py's; here are flags, a progress bar, tables and the plot.
Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flatout.cli.doctor.verdict import console, shown
from flatout.cli.endpoint import add_endpoint_flags, endpoint_of
from flatout.cli.flags import Parser, UsageError
from flatout.cli.terminal import bar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from flatout.client.http import Endpoint
    from flatout.doctor.probe import Probe

BAR = 30  # columns of the plot
LEAST_SECONDS = 5


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("probing")
    add_endpoint_flags(parser, group)
    parser.flag(group, "--seconds", type=float, metavar="S", default=60.0, help="about how long it may take (default: 60)")
    parser.flag(
        group,
        "--max-streams",
        type=int,
        metavar="N",
        default=32,
        help="most requests at one time; a server that others use feels them (default: 32)",
    )
    output = parser.add_argument_group("output")
    parser.flag(output, "--json", action="store_true", default=False, help="everything as JSON, with units in the names")


def run(args: Namespace) -> int:
    """0, whatever the verdict is."""
    if args.url is None:
        raise UsageError("doctor: say whose: --url http://HOST:PORT for a server; or doctor hardware, doctor selfcheck")
    if not LEAST_SECONDS <= args.seconds <= 3600:
        raise UsageError(f"--seconds: {args.seconds:g} is not between {LEAST_SECONDS} and 3600")
    if not 1 <= args.max_streams <= 256:
        raise UsageError(f"--max-streams: {args.max_streams} is not between 1 and 256")
    out = None if args.json else console("doctor --url")
    from flatout.doctor.probe_rules import judge

    with endpoint_of(args) as endpoint, _progress(out is not None) as tell:
        found = asyncio.run(_probe(endpoint, args, tell))
    verdicts = judge(found)
    if out is None:
        print(json.dumps({**found.to_json(), "verdicts": [v.to_json() for v in verdicts]}, indent=1))
    else:
        out.print(*measured(found), "", shown(verdicts), sep="\n")
    return 0


async def _probe(endpoint: Endpoint, args: Namespace, tell: Callable[[str, float], None]) -> Probe:
    from flatout.doctor.probe import probe

    try:
        return await probe(endpoint, args.model, args.seconds, args.max_streams, tell)
    finally:
        endpoint.close()


@contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, of the seconds that are over at each experiment's beginning; nothing elsewhere."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)


def measured(found: Probe) -> list[RenderableType]:
    """What the probe saw, before anything is made of it."""
    server = "a server" if found.server.kind == "unknown" else found.server.kind
    model = found.dialect.model.rpartition("/")[2] if found.dialect.model.startswith("/") else found.dialect.model
    head = f"{server} at {found.url}, model {model}, by /v1/{found.dialect.route}, {found.seconds:.0f} s"
    parts: list[RenderableType] = [head, "", _concurrency(found)]
    if found.lengths:
        parts += ["", _prompts(found)]
    parts += ["", *_sentences(found)] if found.repeat or found.interference else []
    return parts


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    return made


def _concurrency(found: Probe) -> Table:
    """With the plot: output tokens per second over streams."""
    made, most = _table("streams", "tok/s", "", "per token", "TTFT", "worst", "refused"), max(p.rate for p in found.points)
    for p in found.points:
        failed = str(sum(p.errors.values())) if p.errors else ""
        made.add_row(
            str(p.streams), f"{p.rate:,.0f}", bar(p.rate / most if most else 0.0, BAR), _ms(p.tpot), _ms(p.ttft), _ms(p.ttft_worst), failed
        )
    return made


def _prompts(found: Probe) -> Table:
    made, longest = _table("prompt", "TTFT", "", "tok/s"), max(ttft for _, ttft in found.lengths)
    for tokens, ttft in found.lengths:
        made.add_row(f"{tokens:,}", _ms(ttft), bar(ttft / longest, BAR), f"{tokens / ttft:,.0f}")
    return made


def _sentences(found: Probe) -> list[RenderableType]:
    said = []
    if (r := found.repeat) is not None:
        cached = "the server does not say how much was cached" if r.cached is None else f"{r.cached:,} tokens cached"
        said.append(f"a prompt of {r.tokens:,} tokens: TTFT {_ms(r.cold)}, the same again {_ms(r.again)}, {cached}")
    if (i := found.interference) is not None and i.streams:
        said.append(f"beside a prompt of {i.tokens:,} tokens: longest gap of a neighbour {_ms(i.gap)}, usually {_ms(i.quiet)}")
    return list(said)


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
