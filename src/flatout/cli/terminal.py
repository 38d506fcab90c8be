"""What the verbs share at the terminal: loading a model with its report shown, streaming an answer, dim text, plain tables, bars.

No arithmetic, no flags. Called by the verbs and bench/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flatout.config import Config, ModelConfig
from flatout.request import SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM, StreamDelta


def open_llm(options: dict[str, Any], quiet: bool) -> LLM:
    """The model, loaded; what the load decided goes to standard error unless quiet."""
    config = Config.make(**options).model  # a wrong value is told before torch is loaded
    if config.chat_template is not None:
        _check_template(config)
    from flatout.llm import LLM

    llm = LLM(**options)
    if not quiet:
        for line in llm.start_lines:
            say(line)
    return llm


def _check_template(config: ModelConfig) -> None:
    """A broken --chat-template is told before the weights are read; its tokenizer is loaded for that, tenths of a second."""
    from flatout.modelfile.sources import resolve_model
    from flatout.text.chat import ChatTemplate
    from flatout.text.tokenizer import load_tokenizer

    if (tokenizer := load_tokenizer(resolve_model(config))) is not None:
        ChatTemplate.for_model(tokenizer, config.chat_template)


def has_template(llm: LLM) -> bool:
    return llm.config.model.chat_template is not None or (llm.tokenizer is not None and llm.tokenizer.chat_template is not None)


def answer_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """The given sampling over the model's own. Where its makers recommend no temperature the terminal answers greedily: the same each time."""
    greedy = {} if "temperature" in llm.facts.sampling_defaults else {"temperature": 0.0}
    return llm.default_params(**{**greedy, **given})


def show(deltas: Iterable[StreamDelta], interrupted: Sequence[object] = ()) -> tuple[str, int, StreamDelta | None]:
    """Print an answer as it comes, until its end or until something is in `interrupted`. Returns its text, its tokens and the last delta."""
    text, tokens, delta = "", 0, None
    for delta in deltas:
        text += delta.text
        tokens += len(delta.token_ids)
        print(delta.text, end="", flush=True)
        if interrupted:
            break
    print(flush=True)
    return text, tokens, delta


def say(text: str) -> None:
    """The program's own words: on standard error, so that a pipe holds the answers alone; grey on a terminal (not under NO_COLOR)."""
    grey = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[2m{text}\x1b[0m" if grey else text, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: int = 2) -> list[str]:
    """The head and one line a row; the first `left` columns to the left, numbers to the right."""
    return ["  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))) for r in (columns, *rows)]


def bar(share: float, width: int) -> str:
    """A bar of eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
