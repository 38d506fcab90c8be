"""`flatout chat`: a conversation in the terminal, or line by line through a pipe.

Keeps the history and nothing of the engine; the prefix cache makes each turn read only what is new. Ctrl-C stops the answer and keeps
what was said, Ctrl-D leaves. Called by cli/__init__.py.
"""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flatout.cli.figures import Figures
from flatout.cli.flags import Parser, UsageError, add_config_flags, add_sampling_flags, config_options, nearest, sampling_options
from flatout.cli.generate import SHADOWED
from flatout.cli.terminal import answer_params, has_template, open_llm, say, show
from flatout.config import DEFAULT_MODEL, ConfigError
from flatout.request import RequestError, SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM

DEFAULTS = {"max_tokens": "as far as the context allows", "temperature": "the model's own, else 0"}
QUOTES = '"""'
HELP = f"""  /reset   forget the conversation
  /stats   tokens, speed and cache of the conversation
  /exit    leave (as Ctrl-D)
  /help    this
  {QUOTES}      begin and end a message of several lines
  Ctrl-C   stop the answer; what was said stays"""


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("conversation")
    parser.flag(group, "--system", metavar="TEXT", default=None, help="system message at its head")
    parser.flag(group, "--quiet", action="store_true", default=False, help="the answers alone: no report, no figures")
    add_sampling_flags(parser, DEFAULTS)
    add_config_flags(parser, skip=("model", *SHADOWED))


def run(args: Namespace) -> int:
    sampling = {"max_tokens": None, **sampling_options(args)}
    SamplingParams(**sampling)  # judged before a model is loaded
    if sys.stdin is None:  # Python's word for a closed one
        raise UsageError("flatout chat: standard input is closed, so nobody can say anything; use flatout generate PROMPT")
    with open_llm(config_options(args, SHADOWED), args.quiet) as llm:
        if not has_template(llm):
            raise ConfigError(f"--chat-template: {llm.facts.model} has no chat template; give one, or use flatout generate --raw")
        conversation = Conversation(llm, answer_params(llm, sampling), args.system, args.quiet)
        for message in _messages(sys.stdin.isatty()):
            if not conversation.take(message):
                break
    return 0


class Conversation:
    """The history, and one turn after the other."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, quiet: bool):
        self.llm, self.params, self.system, self.quiet = llm, params, system, quiet
        self.turns: list[Figures] = []
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []

    def take(self, message: str) -> bool:
        """A line of the user's: a command or a turn. False: leave."""
        if not message.strip():
            return True
        if not message.startswith("/"):
            self.answer(message)
            return True
        command = message.strip()
        if command in ("/exit", "/quit"):
            return False
        commands = {"/reset": self.forget, "/stats": self.stats, "/help": lambda: say(HELP)}
        if command in commands:
            commands[command]()
        else:
            say(f"{command}: no such command{nearest(command, [*commands, '/exit'])}; /help lists them")
        return True

    def forget(self) -> None:
        self.reset()
        say("the conversation is forgotten")

    def answer(self, message: str) -> None:
        """Stream one answer. A refused turn (too long for the context, say) leaves the history as it was."""
        history = [*self.messages, {"role": "user", "content": message}]
        try:
            ids = self.llm.chat_ids(history)
            stream = self.llm.stream(ids, self.params)
        except RequestError as error:
            say(f"{error}; /reset begins anew" if self.messages else str(error))
            return
        with _interrupts() as interrupted:
            text, tokens, delta = show(stream, interrupted)
        stream.close()  # aborts what still runs
        self.messages = [*history, {"role": "assistant", "content": text}]
        if delta is None or delta.timing is None:
            say("stopped; what was said stays in the conversation")
        else:
            self.turns.append(Figures(len(ids), delta.cached_tokens, tokens, delta.timing))
            if not self.quiet:
                say(self.turns[-1].line(self.llm))

    def stats(self) -> None:
        used = len(self.llm.chat_ids(self.messages)) if self.messages else 0
        say(f"{len(self.messages)} messages, {used} of {self.llm.facts.max_model_len} tokens of context")
        if self.turns:
            prompt, cached = sum(t.prompt_tokens for t in self.turns), sum(t.cached_tokens for t in self.turns)
            say(f"{len(self.turns)} answers, {sum(t.tokens for t in self.turns)} tokens; {cached} of {prompt} prompt tokens from the cache")
            say(f"last: {self.turns[-1].line(self.llm)}")


def _messages(interactive: bool) -> Iterator[str]:
    """What the user writes, message by message, until Ctrl-D or the end of the pipe."""
    if interactive:
        import readline  # noqa: F401  input() then has line editing and history

        say("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            line = _read(interactive, ">>> ")
            if line.startswith(QUOTES):
                lines = [line.removeprefix(QUOTES)]
                while not lines[-1].rstrip().endswith(QUOTES):
                    lines.append(_read(interactive, "... "))
                line = "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\nCtrl-D or /exit leaves")
            continue
        yield line


def _read(interactive: bool, prompt: str) -> str:
    if interactive:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C while an answer runs: raised inside the engine it would break off a step. A second one does raise."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
