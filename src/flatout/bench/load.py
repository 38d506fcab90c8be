"""`flatout bench load`: a load of your own on any OpenAI-compatible server, closed or open loop, and its latencies by percentile.

Flags, a table and JSON over client/load.py. Names of flags are those of vLLM's `bench serve` where it has them. Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from typing import TYPE_CHECKING

from flatout.cli.endpoint import add_endpoint_flags, endpoint_of
from flatout.cli.flags import Parser, UsageError, lengths
from flatout.cli.terminal import say, table
from flatout.client.completions import learn
from flatout.client.load import Figures, Load, Spread, run_load, sized
from flatout.doctor.gauges import chosen_model, identify

if TYPE_CHECKING:
    from flatout.client.http import Endpoint

FLAGS = {  # field of Load -> flag, how its value is written, what it is
    "clients": ("--max-concurrency", "N", "closed loop: so many clients, each asks again once it is answered"),
    "rate": ("--request-rate", "X", "open loop instead: arrivals per second, however long the queue"),
    "burstiness": ("--burstiness", "X", "of arrivals: 1 Poisson, 0 even, over 1 in clumps"),
    "requests": ("--num-prompts", "N", "requests in all (default: 100, or none with --seconds)"),
    "seconds": ("--seconds", "S", "start none after so long"),
    "prompt": ("--input-len", "N[:M]", "prompt tokens, evenly between the two"),
    "output": ("--output-len", "N[:M]", "tokens to write"),
    "shared": ("--prefix-len", "N", "of the prompt's tokens, at its head, the same for prompts of one group"),
    "groups": ("--num-prefixes", "N", "such groups"),
    "slow": ("--slow-readers", "SHARE", "share of clients who pause after each piece they read"),
    "pause": ("--pause", "S", "how long they do"),
    "timeout": ("--timeout", "S", "for one request"),
    "seed": ("--seed", "N", "the same seed sends the same prompts; by the clock, so that no cache has them, unless given"),
}
COMMON = {"clients", "rate", "requests", "seconds", "prompt", "output"}


READERS = {"clients": int, "requests": int, "shared": int, "groups": int, "seed": int, "prompt": lengths, "output": lengths}


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    add_endpoint_flags(parser, group)
    group = parser.add_argument_group("load")
    for name, (flag, metavar, text) in FLAGS.items():
        default = getattr(Load, name)
        if default is not None and name != "seed":
            text += f" (default: {default[0] if isinstance(default, tuple) else default})"
        parser.flag(group, flag, dest=name, type=READERS.get(name, float), metavar=metavar, help=text, common=name in COMMON)
    output = parser.add_argument_group("output")
    parser.flag(output, "--json", action="store_true", default=False, help="as JSON, times in seconds")


def run(args: Namespace) -> int:
    """0: every request was answered; 1: some were not."""
    if args.url is None:
        raise UsageError("bench load: --url http://HOST:PORT says whose server")
    given = {name: getattr(args, name) for name in FLAGS if hasattr(args, name)}
    if "requests" not in given and "seconds" not in given:
        given["requests"] = 100
    try:
        load = Load(**{"seed": time.time_ns(), **given})
    except ValueError as error:
        name, _, says = str(error).partition(": ")
        raise UsageError(f"{FLAGS[name][0] if name in FLAGS else name}: {says}") from None
    with endpoint_of(args) as endpoint:
        figures = asyncio.run(_measure(endpoint, args.model, load))
    print(json.dumps(figures.to_json(), indent=1) if args.json else "\n".join(report(figures)))
    return int(bool(figures.errors))


async def _measure(endpoint: Endpoint, model: str | None, load: Load) -> Figures:
    try:
        dialect, _ = await learn(endpoint, model or chosen_model(await identify(endpoint)), load.timeout)
        if (with_size := await sized(endpoint, dialect, load.seed)) is None:
            say("the server reports no usage in streams: a word is taken for a token")
        return Figures.of(await run_load(endpoint, with_size or dialect, load))
    finally:
        endpoint.close()


def report(figures: Figures) -> list[str]:
    counted = "" if figures.told else " (events: the server counts none)"
    cached = "" if figures.cached_tokens is None else f", {figures.cached_tokens:,} of them cached"
    good = figures.requests - sum(figures.errors.values())
    rows = [
        (name, *(f"{seconds * 1e3:,.1f}" for seconds in (spread.p50, spread.p90, spread.p99, spread.longest)))
        for name, spread in (("TTFT", figures.ttft), ("TPOT", figures.tpot), ("ITL", figures.itl), ("E2E", figures.e2e))
        if isinstance(spread, Spread)
    ]
    return [
        f"{good} of {figures.requests} requests answered in {figures.seconds:.2f} s, {good / max(figures.seconds, 1e-9):.2f} per second",
        f"{figures.tokens:,} tokens out{counted}, {figures.rate:,.1f} tok/s; {figures.prompt_tokens:,} in{cached}",
        *(f"{count} failed, {kind}: {figures.examples[kind]}" for kind, count in figures.errors.items()),
        *([f"this client sent a request {figures.late:.2f} s late: it is too slow for this load"] if figures.late > 0.1 else []),
        "",
        *table(("ms", "p50", "p90", "p99", "longest"), rows, (4, 10, 10, 10, 10), left=1),
    ]
