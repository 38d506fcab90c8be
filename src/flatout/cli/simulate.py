"""`flatout simulate [MODEL]`: a load through the real scheduler on a virtual clock: throughput, TTFT, TPOT and preemptions, in seconds, on any machine.

Steps take what doctor/whatif.py predicts. Called by cli/__init__.py; its load flags serve `doctor whatif` too.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from flatout.cli.doctor.plan import paper_options
from flatout.cli.flags import Parser, UsageError, add_config_flags, size
from flatout.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from flatout.doctor.predict import OnPaper
    from flatout.plan.simulate import Load, Simulated


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, config.json, .gguf file or hub name (default: {DEFAULT_MODEL})")
    add_load_flags(parser)
    group = parser.add_argument_group("machine")
    parser.flag(
        group,
        "--gpu",
        metavar="GPU",
        default=None,
        help="by its data sheet, instead of this machine (flatout doctor plan --help names them)",
    )
    parser.flag(
        group,
        "--calibrate",
        action="store_true",
        default=False,
        help="measure this machine's ops for this model, where that was not done yet",
    )
    parser.flag(group, "--json", action="store_true", default=False, help="as JSON: seconds, tokens, shares of 1")
    add_config_flags(parser, skip=("model",))


def add_load_flags(parser: Parser, common: bool = True) -> None:
    """common: in the short help, too."""
    group = parser.add_argument_group("load")
    parser.flag(group, "--requests", type=size, metavar="N", default=64, help="how many in all (default: 64)", common=common)
    parser.flag(group, "--prompt", type=size, metavar="N", default=512, help="tokens of each prompt (default: 512)", common=common)
    parser.flag(group, "--output", type=size, metavar="N", default=128, help="tokens of each answer (default: 128)", common=common)
    parser.flag(group, "--shared", type=size, metavar="N", default=0, help="tokens that all prompts begin with (default: 0)", common=common)
    parser.flag(
        group,
        "--rate",
        type=float,
        metavar="X",
        default=0.0,
        help="arrivals a second, at random times (default: by --concurrency)",
        common=common,
    )
    parser.flag(group, "--concurrency", type=int, metavar="N", default=0, help="requests at any time (default: all at once)", common=common)


def load_of(args: Namespace) -> Load:
    from flatout.plan.simulate import Load

    least = {"requests": 1, "prompt": 1, "output": 1, "shared": 0, "concurrency": 0, "rate": 0}
    for name, most in least.items():
        if getattr(args, name) < most:
            raise UsageError(f"--{name}: must be at least {most}, got {getattr(args, name)}")
    if args.rate and args.concurrency:
        raise UsageError("--rate and --concurrency both say when requests come; give one of them")
    if args.shared > args.prompt:
        raise UsageError(f"--shared: {args.shared} of a prompt's {args.prompt} tokens; use at most --prompt")
    return Load(args.requests, args.prompt, args.output, args.rate, args.concurrency, args.shared)


def run(args: Namespace) -> int:
    from flatout.doctor.predict import on_paper
    from flatout.doctor.whatif import calibrated

    options, load = paper_options(args), load_of(args)
    if args.gpu and args.calibrate:
        raise UsageError("--calibrate: measures this machine, not a --gpu that is not here; give one of them")
    paper, origin = calibrated(on_paper(options, args.gpu), options, measure=args.calibrate)
    found = simulated(paper, load)
    if args.json:
        print(json.dumps({"model": paper.table.model, "machine": paper.table.roof.name, "origin": origin, **found.to_json()}, indent=1))
        return 0
    print(f"{paper.table.model} in {paper.config.model.dtype} on {paper.table.roof.name}, simulated; {origin}")
    print("\n".join(lines(found)))
    return 0


def simulated(paper: OnPaper, load: Load) -> Simulated:
    """ConfigError: the model does not fit there."""
    from flatout.config import ConfigError
    from flatout.plan.capacity import capacity
    from flatout.plan.simulate import simulate

    plan = capacity(paper)
    if plan.short:
        raise ConfigError(
            f"{plan.model} does not fit on {plan.machine}: {plan.short / (1 << 30):.2f} GiB are missing; see flatout doctor plan"
        )
    return simulate(paper.config, paper.table, plan.pool // paper.block_bytes, load)


def lines(found: Simulated) -> list[str]:
    waited = ", ".join(f"{reason} in {n / found.steps:.0%} of steps" for reason, n in sorted(found.waiting.items()))
    return [
        f"  output          {found.tokens_s:,.1f} tok/s over {found.seconds:,.2f} s",
        f"  TTFT            {found.ttft * 1e3:,.1f} ms, 99 % under {found.ttft_p99 * 1e3:,.1f}",
        f"  TPOT            {found.tpot * 1e3:,.2f} ms, 99 % under {found.tpot_p99 * 1e3:,.2f}",
        f"  a request       {found.e2e:,.2f} s",
        f"  steps           {found.steps:,} of {found.rows:.1f} rows, the device busy {found.busy:.0%}",
        f"  prompts cached  {found.cached_tokens / found.prompt_tokens:.0%}",
        f"  preemptions     {found.preemptions:,}",
        f"  waited for      {waited or 'nothing'}",
    ]
