"""`flatout generate PROMPT`: one answer, streamed to standard output; what was loaded and how fast it went goes to standard error.

A chat turn where the model has a template, the bare text with --raw or without one. Holds no engine logic. Called by cli/__init__.py.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from flatout.cli.figures import Figures
from flatout.cli.flags import Parser, UsageError, add_config_flags, add_sampling_flags, config_options, sampling_options
from flatout.cli.terminal import answer_params, has_template, open_llm, say, show
from flatout.request import FinishReason, SamplingParams

MAX_TOKENS = 256
SHADOWED = ("seed",)  # --seed is the request's; the config's own, for dummy weights, matters to benchmarks alone
DEFAULTS = {"max_tokens": str(MAX_TOKENS), "temperature": "the model's own, else 0"}


def configure(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question; - reads it from standard input", default=None)
    group = parser.add_argument_group("prompt")
    parser.flag(group, "--raw", action="store_true", default=False, help="continue the text as it is: no chat template")
    parser.flag(group, "--system", metavar="TEXT", default=None, help="system message before the prompt")
    parser.flag(group, "--quiet", action="store_true", default=False, help="the answer alone: no report, no figures")
    add_sampling_flags(parser, DEFAULTS)
    add_config_flags(parser, skip=SHADOWED)


def run(args: Namespace) -> int:
    prompt, sampling = _prompt(args.prompt), {"max_tokens": MAX_TOKENS, **sampling_options(args)}
    SamplingParams(**sampling)  # judged before a model is loaded
    if args.raw and args.system:
        raise UsageError("--system: there is no system message with --raw; put it into the prompt")
    options = config_options(args, SHADOWED)
    if args.raw and "chat_template" in options:
        raise UsageError("--chat-template: no template is used with --raw; leave out one of them")
    with open_llm(options, args.quiet) as llm:
        chat = not args.raw and has_template(llm)
        if args.system and not chat:
            raise UsageError("--system: this model has no chat template; put the message into the prompt")
        ids = llm.chat_ids(_messages(prompt, args.system)) if chat else llm.tokenize(prompt)
        _, tokens, delta = show(llm.stream(ids, answer_params(llm, sampling)))
        if not args.quiet and delta is not None and delta.timing is not None:
            cut = (
                f" · cut by --max-tokens {tokens}"
                if delta.finish_reason == FinishReason.LENGTH and tokens == sampling["max_tokens"]
                else ""
            )
            say(Figures(len(ids), delta.cached_tokens, tokens, delta.timing).line(llm) + cut)
    return 0


def _prompt(given: str | None) -> str:
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError('PROMPT: missing; write flatout generate "a question", or - to read it from standard input')
    prompt = _piped() if given in (None, "-") else given
    if not prompt:
        raise UsageError("PROMPT: empty; there is nothing to answer")
    return prompt


def _piped() -> str:
    if sys.stdin is None:  # Python's word for a closed one
        raise UsageError('PROMPT: standard input is closed; write flatout generate "a question"')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"PROMPT: standard input is not text in {error.encoding}: {error.reason} at byte {error.start}") from None


def _messages(prompt: str, system: str | None) -> list[dict[str, Any]]:
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
