"""Verdicts at the terminal: the first in a frame with its numbers, the others in short, then what could not be seen. Drawn by rich.

Knows the form of a verdict and nothing of what it is about. Called by the doctor's verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.cli.flags import UsageError
from flatout.ledger.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MOST_COLUMNS = 100


def console(verb: str) -> Console:
    """For what a verb prints. UsageError: rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        raise UsageError(f"{verb}: tables and plots need rich: pip install 'flatout[term]'; --json works without") from None
    found = Console(highlight=False)
    found.width = min(found.width, MOST_COLUMNS)
    return found


def shown(verdicts: Sequence[Verdict]) -> RenderableType:
    """All of one diagnosis, the first being what matters most."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    first, *others = verdicts
    colour = "green" if first.healthy else "yellow"
    parts: list[RenderableType] = [
        Panel(
            Group(Text(first.sentence, "bold"), *_details(first, evidence=True)),
            title=f"verdict: {first.constraint}",
            title_align="left",
            border_style=colour,
            box=box.ROUNDED,
            padding=(0, 1),
        )
    ]
    for other in others:
        parts += ["", Text.assemble((f"{'and' if other.healthy else 'also'}: {other.constraint}. ", "bold"), other.sentence)]
        parts += [] if other.healthy else _details(other, evidence=False)
    if first.unseen:
        parts += ["", Text("not seen", "bold"), *(_item("", thing, "dim") for thing in first.unseen)]
    return Group(*parts)


def _details(verdict: Verdict, evidence: bool) -> list[RenderableType]:
    from rich.table import Table

    parts: list[RenderableType] = []
    if evidence and verdict.evidence:
        numbers = Table.grid(padding=(0, 2))
        numbers.add_column()
        numbers.add_column(justify="right")
        for each in verdict.evidence:
            numbers.add_row(f"  {each.what}", each.shown)
        parts += ["", numbers, ""]
    parts += [_item(name, text) for name, text in (("do", verdict.remedy), ("gain", verdict.gain), ("unless", verdict.unless)) if text]
    return parts


def _item(name: str, text: str, style: str = "") -> RenderableType:
    """A paragraph beside its name, all lines of it under each other."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1))
    row.add_column(width=6 if name else 1)
    row.add_column()
    row.add_row(Text(name or "-", "cyan" if name else "dim"), Text(text, style))
    return row
