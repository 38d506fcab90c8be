"""`flatout doctor URL`, `flatout doctor MODEL`: what limits a server. One of flatout's says so itself, by its ledger; any other OpenAI-compatible one is
probed for a minute; a model is served here meanwhile, under a load.

What is measured is doctor/live.py's and doctor/probe.py's, what it means ledger/rules.py's and doctor/probe_rules.py's; here are flags, a progress bar,
tables and the plot. Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli.doctor.verdict import console, shown
from flatout.cli.endpoint import add_endpoint_flags, endpoint_of
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options, lengths
from flatout.cli.terminal import bar
from flatout.client.load import Load
from flatout.config import Config, ConfigError, flag_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from flatout.client.http import Endpoint
    from flatout.doctor.probe import Probe
    from flatout.ledger.verdict import Verdict

BAR = 30  # columns of the plot
LEAST_SECONDS, PROBE_SECONDS = 5, 60.0
LIVE_SECONDS, LOAD_SECONDS = 10, 20


def configure(parser: Parser) -> None:
    parser.add_argument("target", nargs="?", default=None, metavar="URL|MODEL", help="a server, or a model to serve here under a load")
    group = parser.add_argument_group("server")
    add_endpoint_flags(parser, group)
    parser.flag(group, "--probe", action="store_true", default=False, help="probe it from outside, also where its own ledger tells")
    parser.flag(
        group,
        "--seconds",
        type=float,
        metavar="S",
        default=None,
        help="of a probe, about (default: 60); or that a server's ledger is judged by (10), under a load of ours (20)",
    )
    parser.flag(
        group,
        "--max-streams",
        type=int,
        metavar="N",
        default=32,
        help="most requests at one time; a server that others use feels them (default: 32)",
    )
    group = parser.add_argument_group("load on MODEL")
    parser.flag(group, "--clients", common=False, type=int, metavar="N", default=8, help="each asks again once it is answered (default: 8)")
    parser.flag(
        group, "--rate", common=False, type=float, metavar="X", default=None, help="arrivals per second instead, however long the queue"
    )
    parser.flag(
        group, "--input-len", common=False, type=lengths, metavar="N[:M]", default=(64, 256), help="prompt tokens (default: 64:256)"
    )
    parser.flag(
        group, "--output-len", common=False, type=lengths, metavar="N[:M]", default=(32, 128), help="tokens to write (default: 32:128)"
    )
    parser.flag(
        group, "--prefix-len", common=False, type=int, metavar="N", default=0, help="of the prompt's tokens, the same in all (default: 0)"
    )
    add_config_flags(parser, skip=("model",))
    output = parser.add_argument_group("output")
    parser.flag(output, "--json", action="store_true", default=False, help="everything as JSON, with units in the names")


def run(args: Namespace) -> int:
    """0, whatever the verdict is."""
    if args.target is not None and args.url is not None:
        raise UsageError(f"doctor: {args.target} and --url {args.url}: one of them")
    if args.target is not None and "://" in args.target:
        args.url = args.target
    elif args.target is not None:
        return _model(args)
    if args.url is None:
        raise UsageError("doctor: say whose: http://HOST:PORT for a server, or a MODEL; or doctor hardware, doctor selfcheck")
    if extra := next((name for name in Config.owners() if hasattr(args, name) and name != "model"), None):
        raise UsageError(f"{flag_of(extra)}: is for a MODEL that is served here; a running server has its own settings")
    if not 1 <= args.max_streams <= 256:
        raise UsageError(f"--max-streams: {args.max_streams} is not between 1 and 256")
    if not args.probe and _live(args):
        return 0
    args.seconds = PROBE_SECONDS if args.seconds is None else args.seconds
    if not LEAST_SECONDS <= args.seconds <= 3600:
        raise UsageError(f"--seconds: {args.seconds:g} is not between {LEAST_SECONDS} and 3600")
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


def _live(args: Namespace) -> bool:
    """Show what a flatout server says of itself; False: it is none."""
    from flatout.doctor.live import live

    async def ask(endpoint: Endpoint) -> dict[str, list[Verdict]] | None:
        try:
            return await live(endpoint, _seconds(args, LIVE_SECONDS), args.model)
        finally:
            endpoint.close()

    with endpoint_of(args) as endpoint:
        found = asyncio.run(ask(endpoint))
    if found is None:
        return False
    if args.json:
        print(json.dumps({"url": args.url, "models": {name: [v.to_json() for v in each] for name, each in found.items()}}, indent=1))
        return True
    out = console("doctor")
    for name, verdicts in found.items():
        out.print(f"{name} at {args.url}, by its own ledger over the last {_seconds(args, LIVE_SECONDS)} s", "", shown(verdicts), sep="\n")
    return True


def _model(args: Namespace) -> int:
    """Serve it here, put a load on it, show what its ledger says."""
    from flatout.client.http import EndpointError
    from flatout.doctor.live import loaded, served

    seconds = _seconds(args, LOAD_SECONDS)
    try:
        lengths_of = {"prompt": args.input_len, "output": args.output_len, "shared": args.prefix_len}
        load = Load(clients=args.clients, rate=args.rate, seconds=3600, seed=time.time_ns(), **lengths_of)
    except ValueError as error:
        raise UsageError(f"load: {error}") from None
    out = None if args.json else console("doctor")
    with tempfile.TemporaryDirectory(prefix="flatout-doctor-") as folder:
        try:
            with served({**config_options(args), "model": args.target}, Path(folder) / "log") as url:
                verdicts, figures = asyncio.run(loaded(url, load, seconds))
        except EndpointError as error:
            raise ConfigError(str(error)) from None
    if out is None:
        print(json.dumps({"model": args.target, "load": figures.to_json(), "verdicts": [v.to_json() for v in verdicts]}, indent=1))
        return 0
    asked = f"{load.rate:g} requests per second" if load.rate else f"{load.clients} clients"
    out.print(f"{args.target} under {asked} for {seconds} s: {figures.rate:,.0f} tok/s to clients", "", shown(verdicts), sep="\n")
    return 0


def _seconds(args: Namespace, otherwise: int) -> int:
    """Of a ledger's window. UsageError: more than it keeps."""
    if args.seconds is None:
        return otherwise
    from flatout.ledger.ledger import SECONDS_KEPT

    if not 1 <= args.seconds <= SECONDS_KEPT:
        raise UsageError(f"--seconds: {args.seconds:g} is not between 1 and {SECONDS_KEPT}, what a ledger keeps; --probe takes longer")
    return round(args.seconds)


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
