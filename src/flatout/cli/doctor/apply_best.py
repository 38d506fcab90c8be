"""`flatout doctor --apply-best [MODEL]`: the setting that the rules name under a load, or that is predicted to help it the most, tried here beside the
present ones: confirmed or retracted.

Nothing stays changed: the last line is the command to start with. Predictions and turns are bench/remedy.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from flatout.cli.doctor.ceiling import add_turn_flags, check_turn_flags
from flatout.cli.doctor.whatif import changes_of
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options
from flatout.cli.terminal import say, table
from flatout.config import DEFAULT_MODEL, Config

if TYPE_CHECKING:
    from flatout.bench.remedy import Remedy
    from flatout.bench.turns import Case

SHOWN = 6  # predictions
LEAST_ROUNDS = 3  # for a spread to mean something


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("remedy")
    parser.flag(
        group, "--lossy", action="store_true", default=False, help="try settings that change the arithmetic, too (quantization, KV type)"
    )
    parser.flag(
        group, "--set", nargs="+", action="extend", metavar="NAME=VALUE", default=[], help="try this one instead of the best predicted"
    )
    parser.flag(
        group,
        "--look",
        type=float,
        metavar="S",
        default=12.0,
        help="seconds of the load under which the rules look first; 0: none (default: 12)",
    )
    add_turn_flags(parser, repeats=5)
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    """0, whatever comes of it."""
    check_turn_flags(args)
    if args.repeats < LEAST_ROUNDS:
        raise UsageError(f"--repeats: a gain is told with its spread, which takes at least {LEAST_ROUNDS}, got {args.repeats}")
    if args.look < 0:
        raise UsageError(f"--look: must be at least 0, got {args.look:g}")
    options, asked = config_options(args), changes_of(args.set)
    Config.make(**options)  # a wrong value is told before torch is loaded
    from flatout.bench.remedy import Remedy, tried
    from flatout.bench.turns import Case
    from flatout.doctor.predict import on_paper

    paper, case = on_paper(options), Case("remedy", args.batch, args.prompt, args.output)
    told: dict[str, Any] = {}
    best = Remedy(asked, None, "--set") if asked else _best(args, options, case, paper.spec.vocab_size, told)
    if best is None:
        print(json.dumps({"outcome": "nothing to try", **told}, indent=1) if args.json else _nothing(args.lossy))
        return 0
    say(f"{args.repeats + 1} rounds of two servers, as it is and with {best.flags} ...")
    found = tried(options, best, case, args.repeats, paper.hardware.device, paper.spec.vocab_size)
    if args.json:
        print(json.dumps({**found.to_json(), **told}, indent=1))
        return 0
    print(found.sentence)
    if found.outcome == "confirmed":
        print(f"start with it: flatout serve {paper.config.model.model} {best.flags}")
    return 0


def _best(args: Namespace, options: dict[str, Any], case: Case, vocab_size: int, told: dict[str, Any]) -> Remedy | None:
    """What the rules name, else what is predicted to be worth a try; None: nothing. Says why, or for JSON puts it into `told`."""
    from flatout.bench.remedy import WORTH, Forecast, looked, named
    from flatout.plan.simulate import Load

    verdicts = []
    if args.look:
        say(f"{args.look:g} s of the load on a server as it is ...")
        verdicts = looked(options, case, args.look, vocab_size)
    say("predicting; ops that were not measured on this machine yet are measured now ...")
    forecast = Forecast(options, Load(args.batch, args.prompt, args.output))
    told["verdicts"] = verdicts
    for verdict in verdicts:
        if changes := named(verdict, options, args.lossy, changes_of):
            if not args.json:
                print(f"{verdict['constraint']}: {verdict['sentence']}")
            return forecast.of(changes, f"verdict: {verdict['constraint']}")
    remedies = forecast.best(args.lossy, say)
    told["predictions"] = [{"changes": dict(remedy.changes), "predicted_factor": remedy.factor} for remedy in remedies]
    if not args.json:
        print("\n".join(lines(remedies)))
    return next((remedy for remedy in remedies[:1] if (remedy.factor or 0.0) >= WORTH), None)


def lines(remedies: list[Remedy]) -> list[str]:
    rows = [(remedy.flags, f"{(remedy.factor or 1.0) - 1:+.1%}") for remedy in remedies[:SHOWN]]
    return table(("setting", "predicted tok/s"), rows, (34, 15), left=1)


def _nothing(lossy: bool) -> str:
    said = "nothing to try: no setting is predicted to bring this load enough to be told from noise"
    return said if lossy else f"{said}; those that change the arithmetic were left out (--lossy)"
