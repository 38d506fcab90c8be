"""StopChecker: ends a text at a stop string, holding back no more than what may still become one. Text only, no ids.

Which tokens made the text, and stopping by ids, are sequence.py's and core/stop.py's business. Called by sequence.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """Finds one string in a text that comes in pieces (Knuth, Morris, Pratt): `matched` is how much of it the text so far ends with."""

    __slots__ = ("fallback", "matched", "string")

    def __init__(self, string: str):
        self.string = string
        self.matched = 0
        self.fallback = [0]  # per matched prefix, less one: the longest shorter prefix that it ends with
        k = 0
        for character in string[1:]:
            while k and character != string[k]:
                k = self.fallback[k - 1]
            k += character == string[k]
            self.fallback.append(k)

    def advance(self, text: str) -> int:
        """Reads on to the string's first end and returns that position in `text`, or 0 when all is read without one."""
        string, fallback, k = self.string, self.fallback, self.matched
        at, size = 0, len(text)
        while at < size:
            if k == 0:  # most text: the next possible beginning is found at C speed
                at = text.find(string[0], at)
                if at < 0:
                    break
            character = text[at]
            while k and character != string[k]:
                k = fallback[k - 1]
            k += character == string[k]
            at += 1
            if k == len(string):
                self.matched = fallback[k - 1]
                return at
        self.matched = k
        return 0


class StopChecker:
    """The first stop string to be completed ends the text; among those completed by one character, the longest.

    That rule needs no look-ahead, so the result is the same however the text is cut into pieces. Costs O(new characters) a stop.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        """`include`: the stop string itself stays in the text."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text to show, stop string that ended it or None). After a stop the rest of the text is gone; push no more.

        Stops completed while not `armed` (before min_tokens) do not count.
        """
        if not armed:
            for automaton in self._automata:
                rest = text
                while end := automaton.advance(rest):
                    rest = rest[end:]
            return self._show(text), None
        ends = [(end, -len(a.string), a.string) for a in self._automata if (end := a.advance(text))]
        if not ends:
            return self._show(text), None
        end, _, stop = min(ends)
        shown = (self._held + text)[: len(self._held) + end - (0 if self._include else len(stop))]
        self._held = ""
        return shown, stop

    def finish(self) -> str:
        """What was held back: the text ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _show(self, text: str) -> str:
        text = self._held + text
        shown = len(text) - max((a.matched for a in self._automata), default=0)
        self._held = text[shown:]
        return text[:shown]
