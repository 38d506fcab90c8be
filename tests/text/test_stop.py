"""StopChecker against a plain reading of its rule, one character at a time, in pieces of any size."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.text.stop import StopChecker


def by_the_rule(text: str, stops: list[str], include: bool, unarmed: int = 0) -> tuple[str, str | None]:
    """The first position at which a stop ends (behind the first `unarmed` characters); the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and end > unarmed:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool, unarmed: int = 0) -> tuple[str, str | None]:
    checker, shown, seen = StopChecker(stops, include), "", 0
    for piece in pieces:
        armed = seen >= unarmed
        seen += len(piece)
        text, stop = checker.push(piece, armed)
        shown += text
        if stop is not None:
            return shown, stop
        held = "".join(pieces)[:seen][len(shown) :]
        if armed:  # held back: a beginning of some stop, and no longer suffix is one
            assert not held or any(stop.startswith(held) for stop in stops)
            longest = max((k for stop in stops for k in range(len(stop)) if "".join(pieces)[:seen].endswith(stop[:k])), default=0)
            assert len(held) == longest
    return shown + checker.finish(), None


WORDS = st.text("ab\n", max_size=14)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(WORDS, max_size=6), stops=STOPS, include=st.booleans())
@example(pieces=["aab", "aa", "b"], stops=["aabaab"], include=False)
@example(pieces=["abc"], stops=["b", "abc"], include=False)
def test_any_pieces(pieces, stops, include):
    assert run(pieces, stops, include) == by_the_rule("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(first=WORDS, pieces=st.lists(WORDS, max_size=5), stops=STOPS, include=st.booleans())
def test_before_min_tokens_nothing_stops(first, pieces, stops, include):
    assert run([first, *pieces], stops, include, unarmed=len(first)) == by_the_rule("".join([first, *pieces]), stops, include, len(first))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("pieces", [["ABC", "DEF", "G", "HI", "J", "K"], ["ABCDEFGHIJK"], list("ABCDEFGHIJK")])
def test_a18_no_character_of_the_stop_is_shown(pieces, include):
    checker, shown = StopChecker(["DEFGHIJ"], include), []
    for piece in pieces:
        text, stop = checker.push(piece)
        shown.append(text)
        if stop:
            break
    assert stop == "DEFGHIJ" and "".join(shown) == ("ABCDEFGHIJ" if include else "ABC")
    assert shown[0] in ("ABC", "A", "".join(shown))  # nothing is held back without need


def test_only_what_may_be_a_stop_is_held():
    checker = StopChecker(["\n\nQ:", "###"])
    assert checker.push("text\n") == ("text", None)
    assert checker.push("more") == ("\nmore", None)
    assert checker.push("##") == ("", None)
    assert checker.push("\n") == ("##", None)
    assert checker.finish() == "\n" and checker.finish() == ""


def test_costs_do_not_grow_with_the_stop():
    """A text that is always one character short of a stop of 1,024: linear, 0.3 us a character on the reference CPU."""
    checker = StopChecker(["a" * 1023 + "b", "a" * 1024 + "c"])
    begin = time.process_time()
    for _ in range(20_000):
        checker.push("a")
    assert time.process_time() - begin < 1.0
