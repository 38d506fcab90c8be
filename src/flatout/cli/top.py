"""`flatout top`: a running flatout server, live at the terminal: load, speed, latencies, blocks, where the time goes, what limits it.

Everything is the server's own, from /ledger; device counters are this machine's, shown where the server runs on it. Drawn by rich.
Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.cli.doctor.verdict import console, shown
from flatout.cli.endpoint import add_ours_flags, endpoint_of, ledger_of, one_model
from flatout.cli.flags import Parser, UsageError
from flatout.cli.terminal import bar
from flatout.ledger.verdict import verdict_from
from flatout.ledger.words import ALWAYS, PARTS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from flatout.client.http import Endpoint

LOCAL = ("localhost", "127.0.0.1", "::1")
BAR = 30  # columns
SPARKS = " ▁▂▃▄▅▆▇█"
HISTORY = 60  # seconds of tok/s
SETTLE = 0.3  # seconds between two looks at counters, of --once
COLOURS = {"floor_bandwidth": "cyan", "floor_compute": "blue", "kernels": "yellow", "launch": "bright_red", "idle": "bright_black"}
Counted = Callable[[], list[str]]


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add_ours_flags(parser, group)
    view = parser.add_argument_group("view")
    parser.flag(view, "--interval", type=float, metavar="S", default=1.0, help="seconds between two looks (default: 1)")
    parser.flag(view, "--once", action="store_true", default=False, help="print one view and end: for scripts")


def run(args: Namespace) -> int:
    """0 when it was ended by Ctrl-C, too."""
    if not 0.2 <= args.interval <= 60:
        raise UsageError(f"--interval: {args.interval:g} is not between 0.2 and 60")
    out = console("top")
    with endpoint_of(args) as endpoint:
        counted: Counted = list
        if endpoint.host in LOCAL:
            from flatout.doctor.counters import Counters

            counted = Counters().read
        try:
            asyncio.run(_once(endpoint, args, out, counted) if args.once else _live(endpoint, args, out, counted))
        except KeyboardInterrupt:
            return 0
    return 0


async def _once(endpoint: Endpoint, args: Namespace, out: Console, counted: Counted) -> None:
    try:
        told = await ledger_of(endpoint)
        await asyncio.sleep(SETTLE)
        out.print(screen(endpoint.url, *one_model(told, args.model), counted()))
    finally:
        endpoint.close()


async def _live(endpoint: Endpoint, args: Namespace, out: Console, counted: Counted) -> None:
    """Until Ctrl-C. A server that goes away later is waited for, its last figures with it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from flatout.client.http import EndpointError

    view: RenderableType = ""
    name, _ = one_model(await ledger_of(endpoint), args.model)  # what is wrong from the beginning ends it
    with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                try:
                    view = screen(endpoint.url, *one_model(await ledger_of(endpoint, "?since=1"), name), counted())
                    live.update(view, refresh=True)
                except EndpointError as error:
                    live.update(Group(Text(f"{error}; asking again", "bold red"), "", view), refresh=True)
                await asyncio.sleep(args.interval)
        finally:
            endpoint.close()


def screen(url: str, name: str, model: Mapping[str, Any], counters: Sequence[str] = ()) -> RenderableType:
    """The whole view. model: what /ledger says of it."""
    from rich.console import Group
    from rich.text import Text

    state, window = model["state"], model["windows"]["10s"]
    waits = sum(state["waiting"].values())
    head = Text.assemble((name, "bold"), f" at {url}   ", f"{state['running']} running, {waits} waiting, {state['in_flight']} in flight")
    parts: list[RenderableType] = [head, ""]
    if model["trouble"]:
        parts += [Text(f"can't be used: {model['trouble']}", "bold red"), ""]
    parts += [_figures(model), "", _parts(window)]
    if lines := _waiting(state["waiting"], window["waiting"]):
        parts += ["", *lines]
    if counters:
        parts += ["", *(Text(line, "dim") for line in counters)]
    if model["verdict"]:
        parts += ["", shown([verdict_from(plain) for plain in model["verdict"]])]
    return Group(*parts)


def _figures(model: Mapping[str, Any]) -> Table:
    """Speed, latencies, blocks, share of the roof."""
    from rich.table import Table

    state, window, points = model["state"], model["windows"]["10s"], model["series"]["points"]
    made = Table.grid(padding=(0, 2))
    last = points[-3:]

    def mean(key: str) -> float:
        return sum(point[key] for point in last) / max(1, len(last))

    speeds = [point["sampled"] for point in points[-HISTORY:]]
    made.add_row("output", f"{mean('sampled'):,.1f} tok/s", spark(speeds, BAR))
    made.add_row("prompts", f"{mean('prefill'):,.1f} tok/s", "")
    for key in ("ttft", "tpot"):
        each = model["latency"][key]
        more = (
            f"p90 {ms(each['p90'])}, p99 {ms(each['p99'])}, of {each['count']:,} in {model['latency']['seconds']} s"
            if each["count"]
            else ""
        )
        made.add_row(key.upper(), ms(each["p50"]), more)
    cached = f"{state['blocks_used']:,} of {state['blocks_total']:,} used, {state['blocks_cached']:,} cached"
    made.add_row("blocks", f"{state['blocks']:.0%}", f"{bar(state['blocks'], BAR):{BAR}}  {cached}")
    loaded = window["seconds"] - window["parts"]["idle"] - window["parts"]["underway"]
    if model["roofline"] is None:
        made.add_row("of the roof", "-", "no ceilings are known here: flatout doctor hardware measures them")
    elif loaded <= 0:
        made.add_row("of the roof", "-", "no load in 10 s")
    else:
        made.add_row("of the roof", f"{window['of_floor']:.0%}", f"{bar(window['of_floor'], BAR):{BAR}}  floor / loaded time, 10 s")
    return made


def _parts(window: Mapping[str, Any]) -> Table:
    """Where the time of the window went."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="dim")
    for title, side in (("last 10 s", "left"), ("", "left"), ("share", "right"), ("a step", "right")):
        made.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    whole, steps = window["seconds"] or 1.0, window["steps"]
    for part, (word, _) in PARTS.items():
        seconds = max(0.0, window["parts"][part])
        if seconds / whole < 0.0005 and part not in ALWAYS:
            continue
        step = ms(1e3 * seconds / steps) if steps and part not in ("idle", "underway") else ""
        made.add_row(word, Text(bar(seconds / whole, BAR), COLOURS.get(part, "magenta")), f"{seconds / whole:.1%}", step)
    return made


def _waiting(now: Mapping[str, float], mean: Mapping[str, float]) -> list[RenderableType]:
    reasons = [reason for reason in {**now, **mean} if now.get(reason) or mean.get(reason, 0.0) >= 0.05]
    return [f"waiting for {reason}: {now.get(reason, 0):.0f} now, {mean.get(reason, 0.0):.1f} in the mean of 10 s" for reason in reasons]


def spark(values: Sequence[float], width: int) -> str:
    """A line of columns, the latest at its end; each stands for several values in the mean where there are more than columns."""
    per = -(-len(values) // width) if values else 1
    cut = [values[max(0, end - per) : end] for end in range(len(values), 0, -per)][::-1]
    most = max(values, default=0.0)
    return "".join(SPARKS[round(sum(group) / len(group) / most * (len(SPARKS) - 1))] if most else " " for group in cut)


def ms(value: float | None) -> str:
    """Milliseconds, to read; "-": there is no value."""
    if value is None:
        return "-"
    return f"{value / 1e3:,.2f} s" if value >= 1000 else f"{value:.3g} ms" if value >= 1 else f"{1e3 * value:.3g} us"
