"""`flatout doctor ceiling [MODEL]`: what the engine does with a load alone, what a server of ours does with it, and where the difference lies.

Measured by bench/ceiling.py. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from flatout.cli.doctor.verdict import console
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options, size
from flatout.cli.terminal import say
from flatout.config import DEFAULT_MODEL, Config

if TYPE_CHECKING:
    from rich.table import Table

    from flatout.bench.ceiling import Ceiling


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    add_turn_flags(parser, repeats=3)
    add_config_flags(parser, skip=("model",))


def add_turn_flags(parser: Parser, repeats: int) -> None:
    group = parser.add_argument_group("load")
    parser.flag(group, "--batch", type=int, metavar="N", default=16, help="requests, all at once (default: 16)")
    parser.flag(group, "--prompt", type=size, metavar="N", default=128, help="tokens of each prompt (default: 128)")
    parser.flag(group, "--output", type=size, metavar="N", default=128, help="tokens of each answer (default: 128)")
    parser.flag(group, "--repeats", type=int, metavar="N", default=repeats, help=f"turns of each side that count (default: {repeats})")
    parser.flag(group, "--json", action="store_true", default=False, help="as JSON, with units in the names")
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")


def check_turn_flags(args: Namespace) -> None:
    for name, least in (("batch", 1), ("prompt", 1), ("output", 2), ("repeats", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name}: must be at least {least}, got {getattr(args, name)}")


def run(args: Namespace) -> int:
    check_turn_flags(args)
    options = config_options(args)
    Config.make(**options)  # a wrong value is told before torch is loaded
    out = None if args.json else console("doctor ceiling")
    from flatout.bench.ceiling import ceiling
    from flatout.bench.turns import Case

    say(f"{args.repeats + 1} turns each of the engine alone and of a server ...")
    found = ceiling(options, Case("ceiling", args.batch, args.prompt, args.output), args.repeats, args.quiet)
    if out is None:
        print(json.dumps(found.to_json(), indent=1))
    else:
        out.print(told(found))
        out.print(*sentences(found), sep="\n")
    return 0


def sentences(found: Ceiling) -> list[str]:
    """The number, where it lies, and what could not be measured."""
    from flatout.bench.ceiling import PARTS

    low, high = min(found.ratios), max(found.ratios)
    said = f"ceiling over served: {found.ratio:.3f}, {low:.3f} to {high:.3f} over {len(found.ratios)} turns: "
    if low <= 1 <= high:
        made = [said + "front and host take less than these turns differ by"]
    else:
        most = max(PARTS, key=found.lost)
        made = [said + f"front and host take {found.loss:.1%} of what the engine can do, most of it by: {most}"]
    return [*made, *([f"joules a token: not available: needs {found.no_joules}"] if found.no_joules else [])]


def told(found: Ceiling) -> Table:
    from rich import box
    from rich.table import Table

    from flatout.bench.ceiling import PARTS

    case, alone, served = found.case, found.alone, found.served
    title = f"{found.model} on {found.machine}: {case.batch} requests, {case.prompt} tokens in, {case.new} out"
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    made.add_column("")
    for column in ("engine alone", "served", "lost"):
        made.add_column(column, justify="right")
    made.add_row("output tok/s", f"{alone.rate:,.1f}", f"{served.rate:,.1f}", f"{found.loss:.1%}")
    made.add_row("tokens a step", f"{alone.rows:.1f}", f"{served.rows:.1f}")
    if alone.joules is not None and served.joules is not None:
        made.add_row("joules a token", f"{alone.joules:.3g}", f"{served.joules:.3g}", f"{served.joules - alone.joules:.3g}")
    for name, label in (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms")):
        if (seconds := found.latency(name)) is not None:
            made.add_row(label, "", f"{seconds * 1e3:,.2f}")
    made.add_section()
    made.add_row("ms for each output token")
    for part in PARTS:
        each = (alone.each(part), served.each(part), found.lost(part))
        if any(each):
            made.add_row(f"  {part}", *(f"{seconds * 1e3:.3f}" for seconds in each))
    return made
