"""Fact: one thing known about a machine, or what would be needed to know it. Data, and how it looks as lines and as JSON.

Nothing here finds anything out: cpu.py, gpu.py, versions.py and measure.py do. Called by them and by cli/doctor/hardware.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

LABEL = 24  # columns of a label


class NotAvailable(Exception):
    """A fact can't be had; the message says what it would need: "root", "a newer driver"."""


@dataclass(frozen=True)
class Fact:
    """`value` as JSON has it, its unit in `key`; `shown` as a terminal has it. needs: why there is no value. warning: what is wrong with it."""

    key: str
    label: str
    value: Any = None
    shown: str = ""
    needs: str = ""
    warning: str = ""

    @property
    def texts(self) -> list[str]:
        """What to show, one after the other."""
        said = f"not available: needs {self.needs}" if self.needs else self.shown
        return [said, f"! {self.warning}"] if self.warning else [said]


def fact(key: str, label: str, read: Callable[[], tuple[Any, str] | tuple[Any, str, str]]) -> Fact:
    """From what read() returns, (value, shown) or those and a warning; or from the NotAvailable that it raises."""
    try:
        return Fact(key, label, *_with_warning(*read()))
    except NotAvailable as lacking:
        return Fact(key, label, needs=str(lacking))


def _with_warning(value: Any, shown: str, warning: str = "") -> tuple[Any, str, str, str]:
    return value, shown, "", warning


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    facts: Sequence[Fact] = field(default_factory=tuple)

    def lines(self, width: int) -> list[str]:
        """The title, then a line a fact, long ones folded at `width` columns."""
        made = [self.title]
        for f in self.facts:
            room = max(20, width - LABEL - 4)
            first, *rest = [line for text in f.texts for line in wrap(text, room, break_on_hyphens=False)] or [""]
            made.append(f"  {f.label:{LABEL}}  {first}".rstrip())
            made += [" " * (LABEL + 4) + line for line in rest]
        return made

    def to_json(self) -> dict[str, Any]:
        """By key; what is not available is null, and "not_available" says what it needs."""
        made: dict[str, Any] = {f.key: f.value for f in self.facts}
        if lacking := {f.key: f"needs {f.needs}" for f in self.facts if f.needs}:
            made["not_available"] = lacking
        if warnings := {f.key: f.warning for f in self.facts if f.warning}:
            made["warnings"] = warnings
        return made


def spread(middle: float, low: float, high: float, unit: str) -> str:
    """Three digits of each and one decimal prefix: "26.1 GB/s   24 to 27.3"."""
    scales = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")]
    scale, prefix = next(((s, p) for s, p in scales if middle >= s), scales[-1])
    shown = [f"{value / scale:.3g}" if value < 1000 * scale else f"{value / scale:.0f}" for value in (middle, low, high)]
    return f"{f'{shown[0]} {prefix}{unit}':13} {shown[1]} to {shown[2]}"


def bytes_shown(number: int) -> str:
    """23.4 GiB, 48 KiB."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{number / (1 << power):.4g} {name}"
    return f"{number} B"
