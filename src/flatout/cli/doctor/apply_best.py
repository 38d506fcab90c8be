"""`flatout doctor --apply-best [MODEL]`: the setting that is predicted to help a load the most, tried here beside the present ones: confirmed or retracted.

Nothing stays changed: the last line is the command to start with. Predictions and turns are bench/remedy.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from flatout.cli.doctor.ceiling import add_turn_flags, check_turn_flags
from flatout.cli.doctor.whatif import changes_of
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options
from flatout.cli.terminal import say, table
from flatout.config import DEFAULT_MODEL, Config

if TYPE_CHECKING:
    from flatout.bench.remedy import Remedy

SHOWN = 6  # predictions
LEAST_ROUNDS = 3  # for a spread to mean something


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("remedy")
    parser.flag(group, "--lossy", action="store_true", default=False, help="try settings that change the arithmetic, too (quantization, KV type)")
    parser.flag(
        group, "--set", nargs="+", action="extend", metavar="NAME=VALUE", default=[], help="try this one instead of the best predicted"
    )
    add_turn_flags(parser)
    parser.set_defaults(repeats=5)
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    """0, whatever comes of it."""
    check_turn_flags(args)
    if args.repeats < LEAST_ROUNDS:
        raise UsageError(f"--repeats: a gain is told with its spread, which takes at least {LEAST_ROUNDS}, got {args.repeats}")
    options = config_options(args)
    Config.make(**options)  # a wrong value is told before torch is loaded
    from flatout.bench.remedy import WORTH, Remedy, predicted, tried
    from flatout.bench.turns import Case
    from flatout.doctor.predict import on_paper
    from flatout.plan.simulate import Load

    paper, remedies = on_paper(options), []
    if args.set:
        best = Remedy(changes_of(args.set), None, "--set")
    else:
        say("predicting; ops that were not measured on this machine yet are measured now ...")
        remedies = predicted(options, Load(args.batch, args.prompt, args.output), args.lossy, tell=say)
        if not args.json:
            print("\n".join(lines(remedies)))
        best = remedies[0] if remedies else Remedy({}, None, "")
        if (best.factor or 0.0) < WORTH:
            print(json.dumps({"outcome": "nothing to try", "predictions": facts(remedies)}, indent=1) if args.json else _nothing(args.lossy))
            return 0
    say(f"{args.repeats + 1} rounds of two servers, as it is and with {best.flags} ...")
    case = Case("remedy", args.batch, args.prompt, args.output)
    found = tried(options, best, case, args.repeats, paper.hardware.device, paper.spec.vocab_size)
    if args.json:
        print(json.dumps({**found.to_json(), "predictions": facts(remedies)}, indent=1))
        return 0
    print(found.sentence)
    if found.outcome == "confirmed":
        print(f"start with it: flatout serve {paper.config.model.model} {best.flags}")
    return 0


def lines(remedies: list[Remedy]) -> list[str]:
    rows = [(remedy.flags, f"{(remedy.factor or 1.0) - 1:+.1%}") for remedy in remedies[:SHOWN]]
    return table(("setting", "predicted tok/s"), rows, (34, 15), left=1)


def facts(remedies: list[Remedy]) -> list[dict[str, object]]:
    return [{"changes": dict(remedy.changes), "predicted_factor": remedy.factor} for remedy in remedies]


def _nothing(lossy: bool) -> str:
    said = "nothing to try: no setting is predicted to bring this load enough to be told from noise"
    return said if lossy else f"{said}; those that change the arithmetic were left out (--lossy)"
