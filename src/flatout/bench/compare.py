"""`flatout bench compare`: the same model, threads and arithmetic here and in Transformers' generate, in one process, turn by turn.

Decode at batch 1 and 8 and one long prefill; medians and their ratios. Transformers is imported here only, and only when this runs.
Also `python -m flatout.bench.compare`. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from flatout.bench.twin import Twin
from flatout.cli.flags import Parser, add_config_flags, config_options
from flatout.cli.terminal import open_llm, table
from flatout.config import ConfigError
from flatout.request import SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM


PROMPT = 128  # tokens before a decode


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    prompt: int  # tokens
    new: int  # tokens


@dataclass(frozen=True)
class Run:
    """Of one engine on one case, in seconds; `tokens` are the first request's."""

    ttft: float  # until every request has its first token
    decode: float  # from the first token of any request to the end
    tokens: list[int]


@dataclass(frozen=True)
class Comparison:
    case: Case
    ours: float  # median tok/s: decoded tokens, or prompt tokens for a prefill
    theirs: float
    agree: int | None  # leading greedy tokens of the first request that both engines chose; None: their weights differ

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("comparing")
    parser.flag(group, "--new-tokens", type=int, metavar="N", default=64, help=f"tokens to decode after a prompt of {PROMPT} (default: 64)")
    parser.flag(group, "--prefill", type=int, metavar="N", default=1024, help="length of the long prompt (default: 1024)")
    parser.flag(group, "--repeats", type=int, metavar="N", default=3, help="turns of each engine; medians are shown (default: 3)")
    parser.flag(group, "--check", action="store_true", default=False, help="exit with 1 unless every ratio is over 1")
    parser.flag(group, "--json", action="store_true", default=False, help="print JSON instead of a table")
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser)


def run(args: Namespace) -> int:
    for name in ("new_tokens", "prefill", "repeats"):
        least = 2 if name == "new_tokens" else 1
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {least}, got {getattr(args, name)}")
    cases = [
        Case("decode, batch 1", 1, PROMPT, args.new_tokens),
        Case("decode, batch 8", 8, PROMPT, args.new_tokens),
        Case(f"prefill {args.prefill}", 1, args.prefill, 1),
    ]
    with open_llm(config_options(args), args.quiet) as llm:
        twin = Twin(llm)
        engines: tuple[Callable[[list[list[int]], int], Run], ...] = (lambda p, n: _ours(llm, p, n), lambda p, n: _theirs(twin, p, n))
        comparisons = [_compare(case, engines, args.repeats, llm.spec.vocab_size) for case in cases]
        if not twin.same_weights:
            comparisons = [replace(c, agree=None) for c in comparisons]
        model = llm.config.model
        facts = {
            "model": llm.facts.model,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "threads": llm.config.device.threads,
            **twin.versions,
        }
    if args.json:
        print(json.dumps({**facts, "cases": [{**asdict(c), "ratio": c.ratio} for c in comparisons]}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        rows = [
            (c.case.name, f"{c.ours:,.1f}", f"{c.theirs:,.1f}", f"{c.ratio:.2f}x", "-" if c.agree is None else f"{c.agree} of {c.case.new}")
            for c in comparisons
        ]
        columns = ("tok/s", "flatout", "Transformers", "ratio", "same greedy tokens")
        print("\n".join(table(columns, rows, widths=(18, 10, 12, 8, 18), left=1)))
    return int(args.check and any(c.ratio <= 1 for c in comparisons))


def _compare(case: Case, engines: tuple[Callable[[list[list[int]], int], Run], ...], repeats: int, vocab_size: int) -> Comparison:
    """Engines take turns, on new prompts each time so that no cache helps; the first turn warms up and does not count."""
    rng = random.Random(case.name)
    runs: tuple[list[Run], list[Run]] = ([], [])
    for _ in range(repeats + 1):
        prompts = [[rng.randrange(10, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
        for engine, side in zip(engines, runs):
            side.append(engine(prompts, case.new))
    ours, theirs = (median(_rate(case, run) for run in side[1:]) for side in runs)
    agree = min(_common(a.tokens, b.tokens) for a, b in zip(*runs))
    return Comparison(case, ours, theirs, agree)


def _rate(case: Case, run: Run) -> float:
    """Tokens per second: of the prompt for a prefill, else of all that was decoded after the first."""
    return case.prompt / run.ttft if case.new == 1 else case.batch * (case.new - 1) / run.decode


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _ours(llm: LLM, prompts: list[list[int]], new: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    timings = [o.timing for o in outputs if o.timing is not None]
    first = [t.first_token for t in timings]
    ttft = max(first) - min(t.arrival for t in timings)
    return Run(ttft, max(t.finished for t in timings) - min(first), outputs[0].outputs[0].token_ids)


def _theirs(twin: Twin, prompts: list[list[int]], new: int) -> Run:
    begin = time.perf_counter()
    tokens, times = twin.generate(prompts, new)
    return Run(times[0] - begin, times[-1] - times[0], tokens[0])


if __name__ == "__main__":
    from flatout.cli import main

    sys.exit(main(["bench", "compare", *sys.argv[1:]]))
