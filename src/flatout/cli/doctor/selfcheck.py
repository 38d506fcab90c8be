"""`flatout doctor selfcheck [MODEL]`: does the arithmetic that would serve the model say what float32 says? A table, a verdict, the exit code.

The check is doctor/selfcheck.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from textwrap import wrap
from typing import TYPE_CHECKING

from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options
from flatout.cli.terminal import say, table
from flatout.config import DEFAULT_MODEL, Config

if TYPE_CHECKING:
    from flatout.doctor.compare import Figures
    from flatout.doctor.selfcheck import Selfcheck

HEAD, WIDTHS = ("prompt", "tokens", "error", "largest", "KL mean", "KL max", "same", "flipped"), (17, 6, 6, 7, 7, 7, 6, 9)
WIDTH = 80
LEGEND = (
    "error, largest: the logits', rms and worst, as shares of the exact ones' spread",
    "KL: of the next token's distribution from the exact one, in nats",
    "same: positions whose likeliest token is the exact one",
    "flipped: the exact logits' lead where it is another, least and most",
)


def configure(parser: Parser) -> None:
    from flatout.doctor.prompts import PROMPTS

    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("checking")
    parser.flag(
        group,
        "--max-error",
        type=_share,
        metavar="X",
        default=None,
        help="largest rms error that passes, a share of the logits' spread (default: 0.0001 in float32, else 0.15)",
    )
    parser.flag(
        group,
        "--prompts",
        type=int,
        metavar="N",
        default=len(PROMPTS),
        help=f"only the first N of the {len(PROMPTS)} prompts, for a large model on a slow machine",
    )
    parser.flag(
        group, "--json", action="store_true", default=False, help="everything as JSON, with units in the names and no prompt's text"
    )
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    """0: passed; 1: it did not."""
    from flatout.doctor.prompts import PROMPTS

    if not 1 <= args.prompts <= len(PROMPTS):
        raise UsageError(f"--prompts: there are {len(PROMPTS)}, so 1 to {len(PROMPTS)}; got {args.prompts}")
    options = config_options(args)
    Config.make(**options)  # a wrong value is told before torch is loaded
    from flatout.doctor.selfcheck import selfcheck

    check = selfcheck(options, max_error=args.max_error, most=args.prompts)
    if not args.quiet:
        for line in check.served.lines:
            say(line)
    print(json.dumps(check.to_json(), indent=1) if args.json else "\n".join(report(check)))
    return int(bool(check.failures))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(f"--max-error: {text!r} is not a number over 0 and up to 1")
    return value


def report(check: Selfcheck) -> list[str]:
    """For a terminal of 80 columns or more."""
    from flatout.doctor.selfcheck import KINDS, arithmetic

    served = check.served
    rows = [_row(p.name, len(p.ids), check.figures(p.name)) for p in served.prompts]
    tokens = sum(len(p.ids) for p in served.prompts)
    totals = [_row("all", tokens, check.figures())]
    totals += [_row(f"  {kind}", None, figures) for kind in KINDS if (figures := check.figures(kind=kind))]
    head, *lines = (line.rstrip() for line in table(HEAD, [*rows, *totals], WIDTHS, left=1))
    runs = table(("", "", ""), [(run.name, f"{run.same} of {run.of}", run.first or "") for run in served.runs], (15, 6, 0), left=1)[1:]
    promised = "promised in this arithmetic" if served.promised else "not promised in this arithmetic"
    verdict = [f"failed: {failure}" for failure in check.failures] or [_passed(check)]
    return [
        *wrap(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in arithmetic(served.config).items()), WIDTH),
        f"against float32 by torch alone on the same weights ({check.twin_device})",
        "",
        head,
        *lines[: len(rows)],
        "",
        *lines[len(rows) :],
        "",
        *LEGEND,
        "",
        f"greedy tokens, against each prompt by itself ({promised})",
        *(line for run in runs for line in _folded(f"  {run.rstrip()}", " " * 27)),
        "",
        *(line for said in verdict for line in _folded(said, "  ")),
    ]


def _folded(text: str, indent: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _row(name: str, tokens: int | None, figures: Figures | None) -> tuple[str, ...]:
    assert figures is not None
    closest, widest = figures.closest_flip, figures.widest_flip
    flipped = "" if closest is None else f"{closest:.2f}" if closest == widest else f"{closest:.2f}-{widest:.2f}"
    return (
        name,
        "" if tokens is None else str(tokens),
        _percent(figures.rms),
        _percent(figures.largest),
        f"{figures.kl_mean:.1e}" if figures.kl_mean < 1e-4 else f"{figures.kl_mean:.4f}",
        f"{figures.kl_max:.1e}" if figures.kl_max < 1e-4 else f"{figures.kl_max:.4f}",
        f"{figures.agreement:.1%}",
        flipped,
    )


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "inf"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else f"{100 * share:.0e}%"


def _passed(check: Selfcheck) -> str:
    from flatout.doctor.selfcheck import KINDS

    worst = max(figures.rms for kind in KINDS if (figures := check.figures(kind=kind)))
    total = check.figures()
    assert total is not None
    flips = f"no choice that leads by more than {check.limits.margin:g} is another" if total.flips else "every choice is the same"
    same = ", greedy tokens are the same" if check.served.promised else ""
    return f"passed: off by {_percent(worst)} of the logits' spread at most ({_percent(check.limits.error)} passes), {flips}{same}"
