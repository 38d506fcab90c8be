"""`flatout bench compare`: the same model, threads and arithmetic here and in Transformers' generate, in one process, turn by turn.

Decode at batch 1 and 8 and one long prefill; medians and their ratios. Transformers is imported by twin.py, and only when this runs.
Also `python -m flatout.bench.compare`. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace

from flatout.bench.turns import OURS, Case, lines, our_engine, peer_engine, take_turns
from flatout.bench.twin import Twin
from flatout.cli.flags import Parser, add_config_flags, config_options
from flatout.cli.terminal import open_llm
from flatout.config import ConfigError

THEIRS = "Transformers"
PROMPT = 128  # tokens before a decode


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
        engines = {OURS: our_engine(llm), THEIRS: peer_engine(twin)}
        rows = [take_turns(case, engines, args.repeats, llm.spec.vocab_size) for case in cases]
        if not twin.same_weights:
            rows = [replace(row, agree={}) for row in rows]
        model = llm.config.model
        facts = {
            "model": llm.facts.model,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "threads": llm.config.device.threads,
            **twin.versions,
        }
    if args.json:
        print(json.dumps({**facts, "rows": [row.facts() for row in rows]}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in facts.items()))
        print("\n".join(lines(rows, (THEIRS,))))
    return int(args.check and any(ratio <= 1 for row in rows for ratio in row.ratios.values()))


if __name__ == "__main__":
    from flatout.cli import main

    sys.exit(main(["bench", "compare", *sys.argv[1:]]))
