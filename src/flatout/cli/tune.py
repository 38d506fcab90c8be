"""`flatout tune [MODEL]`: which algorithms a model's large products take on this GPU, chosen once by whole steps; later starts find them.

The search is runner/tune.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import time
from argparse import Namespace

from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options
from flatout.cli.terminal import open_llm, table
from flatout.config import DEFAULT_MODEL
from flatout.hardware import detect

HEAD, WIDTHS = ("tokens of a step", "ms before", "ms now", "gain", "products changed"), (16, 10, 10, 7, 16)


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("tuning")
    parser.flag(
        group,
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        help="sizes of the steps to tune (default: the largest of each class that a step may have)",
    )
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    options = config_options(args)
    if detect(options.get("device", "auto")).device != "cuda":
        raise UsageError("tune: chooses among a GPU's matrix products, and none is used here; a CPU's are measured at the first start")
    with open_llm(options, args.quiet) as llm:
        from flatout.runner.tune import sizes, tune

        scheduler, longest = llm.config.scheduler, llm.config.model.max_model_len
        seqs, budget = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        assert longest and seqs and budget  # resolve() filled them
        possible = sizes(seqs, budget, longest)
        wanted = sorted(set(getattr(args, "tokens", None) or possible))
        if not possible or wanted[0] < 1 or wanted[-1] > possible[-1]:
            most = f"1 to {possible[-1]}" if possible else "none that need tuning: steps are small here"
            raise UsageError(f"--tokens: steps of this model have {most}, got {' '.join(map(str, wanted)) or 'nothing'}")
        begin = time.perf_counter()
        print(table(HEAD, [], WIDTHS)[0], flush=True)
        for t in tune(llm.engine.runner, llm.engine.scheduler.blocks.num_blocks, seqs, longest, wanted):
            row = (
                f"{t.tokens:,}",
                f"{t.before * 1e3:.3f}",
                f"{t.after * 1e3:.3f}",
                f"{1 - t.after / t.before:.1%}",
                f"{t.changed} of {t.tried}",
            )
            print(table(HEAD, [row], WIDTHS)[1], flush=True)
        print(f"{time.perf_counter() - begin:.0f} s; starts on this machine use it from now on")
    return 0
