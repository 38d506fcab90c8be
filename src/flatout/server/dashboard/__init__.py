"""The dashboard: one HTML page that holds its own style and scripts, asks nobody but the server it came from, and draws what `/ledger` says.

page.html has the frame, style.css the looks, plot.js the drawing, panels.js and requests.js what is drawn of which figures, live.js where they come from. No build
step: page() puts them together. Called by app.py; with figures in it, the same page is `flatout doctor report`'s.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from flatout.ledger.words import ALWAYS, PARTS

FOLDER = Path(__file__).parent
SCRIPTS = ("plot.js", "panels.js", "requests.js", "live.js")
# nothing but what is in the page runs, and it may ask its own server alone
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@cache
def page() -> bytes:
    """The live page."""
    return _assembled("null")


def report(figures: dict[str, Any]) -> bytes:
    """The page of these figures alone, `/ledger`'s JSON with `url` and `taken` (a date to read) beside it: it asks nobody for anything."""
    return _assembled(json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"))  # "</script>" in a string would end it


def _assembled(figures: str) -> bytes:
    html = (FOLDER / "page.html").read_text("utf-8")
    script = "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS)
    words = json.dumps({"parts": PARTS, "always": ALWAYS})
    style = (FOLDER / "style.css").read_text("utf-8")
    for mark, text in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*WORDS*/", words), ("/*FIGURES*/", figures)):
        html = html.replace(mark, text, 1)
    return html.encode()
