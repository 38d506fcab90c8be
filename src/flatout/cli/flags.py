"""Flags made from fields: those of Config (and of any dataclass of settings) and of SamplingParams; and a parser that speaks in one line.

A flag exists because a field does: its name, help, choices and kind come from there. Here is only what a terminal adds: which flags the
short help shows, and how a value is read. Called by the verbs.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_type_hints

from flatout.config import Config, flag_of
from flatout.request import SamplingParams

TITLES = {"model": "model", "cache": "KV cache", "scheduler": "scheduling", "device": "device"}
# what the short help shows; --help-all shows the rest
COMMON = {"model", "dtype", "max_model_len", "device", "threads", "gpu_memory_utilization", "kv_cache_memory_bytes"}

SAMPLING_HELP = {
    "max_tokens": "most tokens to write",
    "temperature": "0 always takes the likeliest token",
    "top_p": "sample among the likeliest tokens that hold this share",
    "top_k": "sample among this many tokens; 0: all",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "seed": "the same seed gives the same tokens",
    "stop": "end at this text (repeatable)",
    "repetition_penalty": "over 1 discourages tokens seen before",
    "presence_penalty": "discourages tokens already written",
    "frequency_penalty": "the same, by how often they were written",
    "min_tokens": "no end before this many tokens",
    "ignore_eos": "write on past the model's end token",
}
COMMON_SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"}


class UsageError(Exception):
    """A wrong verb, flag or value; the message is the whole story."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" where something known is close, else nothing."""
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are UsageErrors and whose short help hides the rare flags."""

    def __init__(self, prog: str, follows: str, description: str, everything: bool = False):
        width = min(shutil.get_terminal_size().columns, 100)
        super().__init__(
            prog,
            usage=" ".join(filter(None, (prog, follows, "[flags]"))),
            description=f"{description[0].upper()}{description[1:]}.",
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: _Formatter(prog, max_help_position=30, width=width),
        )
        self._positionals.title = "arguments"
        self.everything = everything
        self._hidden = 0

    def flag(self, group: argparse._ArgumentGroup, name: str, *, help: str, common: bool = True, **options: Any) -> None:
        """Add `--name` to the group; in the short help only if common."""
        self._hidden += not common
        shown = help.replace("%", "%%") if common or self.everything else argparse.SUPPRESS
        group.add_argument(name, help=shown, **options)

    def choice(self, group: argparse._ArgumentGroup, name: str, known: Iterable[str], default: str) -> None:
        """Add `--name`, which takes several of the known words; chosen() reads it. `default`: what to say of it."""
        says = f"{', '.join(known)}, or all; spaces or commas between them (default: {default})"
        self.flag(group, name, nargs="+", type=lambda text: text.split(","), metavar=name.removeprefix("--").upper(), help=says)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        group = self.add_argument_group("help")
        group.add_argument("-h", "--help", action="help", help="show this")
        rest = f"show the {self._hidden} rarer flags too" if self._hidden and not self.everything else "show every flag"
        group.add_argument("--help-all", action="help", help=rest)
        group.add_argument("--debug", action="store_true", help="full traceback of an error")
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = next((u for u in unknown if u.startswith("-")), unknown[0]).split("=")[0]
            flags = [f for f in self._option_string_actions if f.startswith("--")]
            if word.startswith("-"):
                raise UsageError(f"{word}: no such flag of {self.prog}{nearest(word, flags)}")
            raise UsageError(f"{word!r}: {self.prog} takes no further argument; quote a text with spaces")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


class _Formatter(argparse.HelpFormatter):
    """`--flag VALUE` once, `--[no-]flag` for switches."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0].removeprefix("--")
        return super()._format_action_invocation(action)


def add_config_flags(parser: Parser, skip: Iterable[str] = ()) -> None:
    """Every field of Config as a flag, in the config's own groups."""
    default = Config()
    for group in fields(Config):
        add_fields(parser, TITLES[group.name], type(getattr(default, group.name)), COMMON, skip)


def add_fields(parser: Parser, title: str, settings: type, common: Iterable[str], skip: Iterable[str] = ()) -> None:
    """One group of flags from a dataclass whose fields were made with config.setting()."""
    group, hints = parser.add_argument_group(title), get_type_hints(settings)
    for f in fields(settings):
        if f.name not in skip:
            parser.flag(group, flag_of(f.name), help=_help_of(f), common=f.name in common, **_reading(f, hints[f.name]))


def add_sampling_flags(parser: Parser, defaults: dict[str, str]) -> None:
    """SamplingParams' fields that make sense for one answer. `defaults`: what to say of the verb's own defaults."""
    group, hints = parser.add_argument_group("sampling"), get_type_hints(SamplingParams)
    for name, text in SAMPLING_HELP.items():
        kind = _plain(hints[name])
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": _READERS.get(kind, str)}
        if name == "stop":
            options = {"action": "append"}
        if kind is not bool:
            options["metavar"] = "TEXT" if name == "stop" else _METAVARS[kind]
        says = f"{text} (default: {defaults[name]})" if name in defaults else text
        parser.flag(group, flag_of(name), help=says, common=name in COMMON_SAMPLING, **options)


def chosen(args: argparse.Namespace, name: str, known: Iterable[str]) -> list[str]:
    """The words given to a Parser.choice(), each once; none where it was not given. UsageError: one is not known."""
    words = list(dict.fromkeys(word for several in getattr(args, name, ()) for word in several))
    if "all" in words:
        return list(known)
    for word in words:
        if word not in known:
            raise UsageError(f"{flag_of(name)}: {word!r} is not known{nearest(word, known)}; known: {', '.join(known)}, all")
    return words


def lengths(text: str) -> tuple[int, int]:
    """ "128" or "64:512", as (least, most)."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length; write 128 or 64:512") from None


def config_options(args: argparse.Namespace, skip: Iterable[str] = ()) -> dict[str, Any]:
    """The Config options that were given, by flat name."""
    return given(args, (name for name in Config.owners() if name not in skip))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return given(args, SAMPLING_HELP)


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Flags leave no attribute unless they were given, so that the fields' own defaults hold."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _help_of(f: Field[Any]) -> str:
    text = f.metadata["help"]
    if f.default is None or "default" in text or f.default == "auto":
        return text
    shown = {True: "on", False: "off"}.get(f.default, f.default) if isinstance(f.default, bool) else f.default
    return f"{text} (default: {shown})"


def _reading(f: Field[Any], hint: Any) -> dict[str, Any]:
    """argparse's options for the values of a field."""
    if f.metadata.get("choices"):
        allowed = tuple(map(str, f.metadata["choices"]))
        return {"type": _one_of(allowed), "metavar": "{" + ",".join(allowed) + "}"}
    kind = _plain(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if f.metadata.get("kind") == "size":
        return {"type": size, "metavar": "N"}
    return {"type": _READERS[kind], "metavar": _METAVARS[kind]}


def _plain(hint: Any) -> type:
    """int from `int | None`; the first member of any other union."""
    return next((t for t in get_args(hint) if t is not type(None)), hint) if get_args(hint) else hint


def _one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}{nearest(text, allowed)}")
        return text

    return read


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """4096, 32k (32,000), 32K (32,768), 1.5GB, 4GiB. As in vLLM, small k m g t are decimal and capital K M G T binary."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)(i?[bB])?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 32k, 32K or 4GiB")
    number, unit, suffix = match.groups()
    if suffix:
        unit = unit.upper() if suffix.startswith("i") else unit.lower()
    value = float(number) * _UNITS[unit]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_READERS: dict[type, Callable[[str], Any]] = {int: _integer, float: _number, str: str}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
