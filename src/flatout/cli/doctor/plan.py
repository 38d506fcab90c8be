"""`flatout doctor plan [MODEL]`: before anything is loaded, what a model takes here or on a named GPU, how many requests fit, how fast it would be.

The arithmetic is plan/capacity.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options, size
from flatout.cli.terminal import table
from flatout.config import DEFAULT_MODEL, flag_of

if TYPE_CHECKING:
    from flatout.plan.capacity import Capacity


def configure(parser: Parser) -> None:
    from flatout.ledger.roofs import DATA_SHEETS

    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, config.json, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("planning")
    names = ", ".join(sheet.name for sheet in DATA_SHEETS)
    parser.flag(group, "--gpu", nargs="+", metavar="GPU", help=f"by data sheet instead of this machine, several to compare: {names}")
    parser.flag(group, "--lengths", nargs="+", type=size, metavar="N", help="of requests, prompt and output (default: 1k 4k 16k 64k)")
    parser.flag(group, "--batches", nargs="+", type=int, metavar="N", help="of decoding requests (default: 1 8 64 256)")
    parser.flag(group, "--prompts", nargs="+", type=size, metavar="N", help="whose TTFT is told (default: 512 2k 8k)")
    parser.flag(group, "--memory", type=size, metavar="SIZE", default=None, help="of the machine or GPU, instead of what it has: 16GiB")
    parser.flag(
        group, "--fit", type=int, metavar="N", default=None, help="what to change so that N requests of the first length run at once"
    )
    parser.flag(group, "--json", action="store_true", default=False, help="as JSON: bytes and seconds")
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    from flatout.doctor.predict import on_paper
    from flatout.plan.capacity import BATCHES, LENGTHS, PROMPTS, capacity

    options = paper_options(args)
    wanted = {
        name: tuple(getattr(args, name, default)) for name, default in (("lengths", LENGTHS), ("batches", BATCHES), ("prompts", PROMPTS))
    }
    for name, values in wanted.items():
        if min(values) < 1:
            raise UsageError(f"--{name}: must be at least 1, got {min(values)}")
    for name in ("memory", "fit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name}: must be at least 1, got {getattr(args, name)}")
    gpus = getattr(args, "gpu", None) or [None]
    plans = [capacity(on_paper(options, gpu, args.memory), **wanted) for gpu in gpus]
    fits = [_fit(args, options, gpu, plan.fits[0].length) for gpu, plan in zip(gpus, plans)] if args.fit else [None] * len(plans)
    if args.json:
        print(json.dumps([{**plan.to_json(), **({"to_fit": fit} if fit else {})} for plan, fit in zip(plans, fits)], indent=1))
    else:
        print("\n\n".join("\n".join([*lines(plan), *(["", fit["sentence"]] if fit else [])]) for plan, fit in zip(plans, fits)))
    return 0 if all(not plan.short for plan in plans) else 1


def _fit(args: Namespace, options: dict[str, Any], gpu: str | None, length: int) -> dict[str, Any]:
    """Whether --fit requests of the length run at once, and what would have to change."""
    from flatout.plan.fit import ways

    found = ways(options, gpu, args.memory, length, args.fit)
    what = f"{args.fit:,} requests of {length:,} tokens"
    if not found:
        said = f"{what} run at once as it is"
    elif found[0].running < args.fit:
        most = f"{found[0].running:,}, with {flags(found[0].changes)}" if found[0].changes else f"{found[0].running:,}"
        said = f"{what} can't be made to fit by any setting that is known; the most is {most}: it takes more memory, or shorter requests"
    else:
        said = f"so that {what} run at once: {', or '.join(flags(way.changes) for way in found)}"
    ways_found = [{"changes": dict(way.changes), "running": way.running} for way in found]
    return {"requests": args.fit, "length": length, "sentence": said, "ways": ways_found}


def flags(changes: Mapping[str, Any]) -> str:
    """As a command line has them."""

    def shown(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return flag_of(name) if value else "--no-" + flag_of(name).removeprefix("--")
        return f"{flag_of(name)} {value}"

    return " ".join(shown(*change) for change in changes.items())


def paper_options(args: Namespace) -> dict[str, Any]:
    """Config's options, for a model that needs no weights: a config.json alone will do."""
    options = config_options(args)
    if str(options.get("model", "")).endswith(".json"):
        options["load_format"] = "dummy"
    return options


def lines(plan: Capacity) -> list[str]:
    """What a terminal shows."""
    gib = 1 << 30

    def part(name: str, count: int, said: str = "") -> str:
        return f"  {name:22}{count / gib:9.2f} GiB" + (f"   {said}" if said else "")

    roof = "ceilings measured" if plan.measured else "by its data sheet, and what an H200 gives of its own"
    made = [f"{plan.model} in {plan.dtype} on {plan.machine} ({roof})", ""]
    made += [part("weights", plan.weights), part("buffers of a step", plan.buffers)]
    if plan.worst_step:
        made += [part("a worst step", plan.worst_step), part("CUDA itself", plan.outside)]
    made.append(part("KV pool", plan.pool, f"{plan.pool_tokens:,} tokens of {plan.kv_token / 1024:,.1f} KiB"))
    made.append(
        part("in all", plan.held + plan.worst_step + plan.outside, f"of {plan.memory / gib:.1f} GiB, {plan.usable / gib:.1f} usable")
    )
    if plan.short:
        made += [
            "",
            f"it does not fit: {plan.short / gib:.2f} GiB are missing; fewer --max-num-seqs, a smaller --max-num-batched-tokens or model,",
        ]
        made += ["or a larger GPU"]
        return made + [f"note: {note}" for note in plan.notes]
    made.append("")
    rows = [(f"{f.length:,}", f"{f.requests:,}", f"{f.running:,}") for f in plan.fits]
    made += table(("request, tokens", "fit whole", "run at once"), rows, (16, 10, 11), 0)
    made.append("")
    rates = [
        (f"{r.batch:,}", f"{r.context:,}", f"{r.tokens_s:,.0f}", f"{r.step_s * 1e3:.2f}", f"{r.floor_s * 1e3:.2f}") for r in plan.rates
    ]
    made += table(("batch", "context", "tok/s", "step ms", "floor ms"), rates, (16, 10, 11, 9, 9), 0)
    made.append("")
    made += table(("prompt, tokens", "TTFT ms"), [(f"{f.prompt:,}", f"{f.seconds * 1e3:,.1f}") for f in plan.firsts], (16, 10), 0)
    return made + [f"note: {note}" for note in plan.notes]
