"""`flatout doctor whatif [MODEL] --set NAME=VALUE`: step times, memory and a load's throughput, as predicted now and with the change; --check runs both.

The predictions are doctor/whatif.py's and plan/simulate.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flatout.cli.doctor.plan import paper_options
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options, nearest, size
from flatout.cli.simulate import add_load_flags, load_of, simulated
from flatout.cli.terminal import say, table
from flatout.config import DEFAULT_MODEL, Config, flag_of

if TYPE_CHECKING:
    from flatout.doctor.whatif import Step
    from flatout.plan.capacity import Capacity
    from flatout.plan.simulate import Load, Simulated


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, config.json, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("what if")
    parser.flag(
        group,
        "--set",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        default=[],
        help="settings to change: max_num_seqs=32 dtype=float32 ...",
    )
    parser.flag(
        group, "--gpu", metavar="GPU", default=None, help="move to this GPU, by its data sheet (flatout doctor plan --help names them)"
    )
    parser.flag(group, "--batches", nargs="+", type=int, metavar="N", help="of decode steps to show (default: 1 8 32)")
    parser.flag(group, "--contexts", nargs="+", type=size, metavar="N", help="of their requests (default: 128 1k)")
    parser.flag(
        group,
        "--calibrate",
        action="store_true",
        default=False,
        help="measure this machine's ops for both forms, where that was not done yet",
    )
    parser.flag(
        group, "--check", action="store_true", default=False, help="run the load for real too, now and changed, and print the error"
    )
    parser.flag(group, "--json", action="store_true", default=False, help="as JSON: bytes and seconds")
    add_load_flags(parser, common=False)
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    from flatout.doctor.predict import on_paper
    from flatout.doctor.whatif import BATCHES, CONTEXTS, calibrated, changed, steps
    from flatout.plan.capacity import capacity

    changes = changes_of(args.set)
    if not changes and args.gpu is None:
        raise UsageError("what is to change? say --set NAME=VALUE (max_num_seqs=32) or --gpu GPU")
    if args.check and args.gpu is not None:
        raise UsageError("--check: runs on this machine, where no --gpu is to be had; leave one of them out")
    options, load = paper_options(args), load_of(args)
    if args.check and (load.rate or load.concurrency):
        raise UsageError("--check: runs all requests at once; leave --rate and --concurrency out")
    now, origin = calibrated(on_paper(options), options, args.calibrate)
    then, its_origin = changed(options, changes, args.gpu), origin
    if args.gpu is None:
        then, its_origin = calibrated(then, {**options, **changes}, args.calibrate)
    batches, contexts = getattr(args, "batches", None) or BATCHES, getattr(args, "contexts", None) or CONTEXTS
    pairs = list(steps(now, then, batches, contexts))
    loads, plans = [simulated(paper, load) for paper in (now, then)], [capacity(paper) for paper in (now, then)]
    measured = [run_load(each, load) for each in (options, {**options, **changes})] if args.check else []
    if args.json:
        print(json.dumps(_json(pairs, loads, plans, [origin, its_origin], measured), indent=1))
        return 0
    what = " ".join([*(f"{name}={value}" for name, value in changes.items()), *([f"on {args.gpu}"] if args.gpu else [])])
    print(f"{now.table.model} on {now.table.roof.name}; then: {what}")
    print("\n".join(_lines(pairs, loads, plans)))
    for line in dict.fromkeys((f"now: {origin}", f"then: {its_origin}", *(f"then: {note}" for note in then.notes))):
        print(line)
    for name, tokens_s, predicted in zip(("now", "then"), measured, loads):
        print(f"measured {name}: {tokens_s:,.1f} tok/s, the prediction is {predicted.tokens_s / tokens_s - 1:+.1%} off")
    if len(measured) == 2:
        print(f"measured change: {measured[1] / measured[0] - 1:+.1%}, predicted {loads[1].tokens_s / loads[0].tokens_s - 1:+.1%}")
    return 0


def changes_of(given: Iterable[str]) -> dict[str, Any]:
    """Config options by flat name, read as the flags of their names are. UsageError: an unknown name, or a value that is none."""
    from flatout.doctor.predict import PAPER_KV

    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in Config.owners():
            known = nearest(name, Config.owners())
            raise UsageError(f"--set: {text!r}" + (f": no setting is called {name!r}{known}" if equals else " is not NAME=VALUE"))
        if name == "kv_cache_dtype" and value in PAPER_KV:
            found[name] = value
            continue
        parser = Parser("flatout doctor whatif --set", "", "settings")
        add_config_flags(parser)
        switch = {"true": flag_of(name), "false": "--no-" + flag_of(name).removeprefix("--")}.get(value.lower())
        found |= config_options(parser.parse_args([switch] if switch else [flag_of(name), value]))
    return found


def run_load(options: Mapping[str, Any], load: Load) -> float:
    """Output tokens per second of the load here, after a first step of everything."""
    import time

    from flatout.llm import LLM
    from flatout.request import SamplingParams

    with LLM(**options) as llm:
        prompts = [request.prompt_ids for request in load.made()]
        prompts = [[i % llm.spec.vocab_size for i in prompt] for prompt in prompts]
        greedy = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
        say(f"running {load.requests} requests ...")
        for salt, work in (("warm", prompts[:2]), ("timed", prompts)):
            begin = time.perf_counter()
            llm.generate(work, greedy, use_tqdm=False, cache_salt=salt)
            seconds = time.perf_counter() - begin
    return load.requests * load.output / seconds


def _lines(pairs: list[Step], loads: list[Simulated], plans: list[Capacity]) -> list[str]:
    def row(name: str, now: float, then: float, shown: str) -> tuple[str, ...]:
        change = f"{then / now - 1:+.1%}" if now else "-"
        return (name, format(now, shown), format(then, shown), change)

    gib = 1 << 30
    rows = [row(f"step of {p.batch} x {p.context:,}, ms", p.now * 1e3, p.then * 1e3, ",.2f") for p in pairs]
    now, then = loads
    rows += [
        row("load: output tok/s", now.tokens_s, then.tokens_s, ",.1f"),
        row("load: TTFT, ms", now.ttft * 1e3, then.ttft * 1e3, ",.1f"),
        row("load: TPOT, ms", now.tpot * 1e3, then.tpot * 1e3, ",.2f"),
        row("load: preemptions", now.preemptions, then.preemptions, ",.0f"),
        row("weights, GiB", plans[0].weights / gib, plans[1].weights / gib, ",.2f"),
        row("KV of a token, KiB", plans[0].kv_token / 1024, plans[1].kv_token / 1024, ",.1f"),
        row("KV pool, tokens", plans[0].pool_tokens, plans[1].pool_tokens, ",.0f"),
        row("largest batch", plans[0].fits[0].running, plans[1].fits[0].running, ",.0f"),
    ]
    return table(("predicted", "now", "then", "change"), rows, (26, 14, 14, 10), 1)


def _json(pairs: list[Step], loads: list[Simulated], plans: list[Capacity], origins: list[str], measured: list[float]) -> dict[str, Any]:
    sides = [
        {"origin": origin, "load": load.to_json(), "plan": plan.to_json(), **({"measured_tokens_s": measured[i]} if measured else {})}
        for i, (origin, load, plan) in enumerate(zip(origins, loads, plans))
    ]
    steps = [{"batch": p.batch, "context": p.context, "now_s": p.now, "then_s": p.then} for p in pairs]
    return {"steps": steps, "now": sides[0], "then": sides[1]}
