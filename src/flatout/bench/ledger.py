"""`flatout bench ledger`: what recording every step costs: the same decode with records and ledger on and off, in turns of some hundred steps.

A pair is four halves, on, off, off, on, and the next one the other way round, after some steps that count for nothing: so neither growing contexts nor
a drifting machine favours one. On, each record is also summed here, which in a server happens in another process. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
import math
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from flatout.cli.flags import Parser, add_config_flags, config_options
from flatout.cli.terminal import open_llm
from flatout.config import ConfigError
from flatout.ledger.ledger import Ledger
from flatout.request import SamplingParams
from flatout.text.prepare import prepare

if TYPE_CHECKING:
    from flatout.llm import LLM

PROMPT = 64  # tokens
LEAST = 0.985  # of the throughput must be left, at 95 % confidence
DRAWS = 4000
WARM = 10  # steps after the prompts'


@dataclass(frozen=True)
class Cost:
    batch: int
    pairs: int
    on: float  # median steps per second with the ledger
    off: float
    ratio: float  # median of the pairs' on / off
    bound: float  # that it is over with 95 % confidence


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("measuring")
    parser.flag(group, "--batch", nargs="+", type=int, metavar="N", default=[1, 8], help="sequences that decode together (default: 1 8)")
    parser.flag(group, "--pairs", type=int, metavar="N", default=24, help="turns of each kind (default: 24)")
    parser.flag(group, "--steps", type=int, metavar="N", default=200, help="steps of a turn (default: 200)")
    parser.flag(group, "--check", action="store_true", default=False, help=f"exit with 1 unless each bound is at least {LEAST}")
    parser.flag(group, "--json", action="store_true", default=False, help="print JSON instead of lines")
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser)


def run(args: Namespace) -> int:
    for name, least in (("pairs", 2), ("steps", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name}: must be at least {least}, got {getattr(args, name)}")
    if min(args.batch) < 1:
        raise ConfigError(f"--batch: must be at least 1, got {min(args.batch)}")
    with open_llm(config_options(args), args.quiet) as llm:
        costs = []
        for batch in args.batch:
            costs.append(measure(llm, batch, args.pairs, args.steps))
            if not args.json:
                print(line(costs[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=1))
    return int(args.check and any(cost.bound < LEAST for cost in costs))


def measure(llm: LLM, batch: int, pairs: int, steps: int) -> Cost:
    """RequestError where `batch` sequences of two turns do not fit."""
    rng, engine, ledger = random.Random(batch), llm.engine, Ledger(llm.engine.costs)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs + 1):  # the first warms up
        params = SamplingParams(temperature=0.0, max_tokens=2 * steps + WARM + 4, ignore_eos=True)
        ids = [[rng.randrange(10, llm.spec.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
        for i, prompt in enumerate(ids):
            engine.add(prepare(f"{pair} {i}", prompt, params, None, llm.facts, arrival=time.monotonic(), cache_salt=f"{pair} {i}"))
        while engine.scheduler.num_waiting or engine.scheduler.num_running < batch:
            engine.step()
        _seconds(llm, ledger, WARM, True)
        spent = {True: 0.0, False: 0.0}
        first = bool(pair % 2)
        for on in (first, not first, not first, first):
            spent[on] += _seconds(llm, ledger, -(-steps // 2), on)
        for on, seconds in spent.items():
            rates[on].append(2 * -(-steps // 2) / seconds)
        engine.recording = True
        while engine.has_work:
            engine.step()
    ratios = [on / off for on, off in list(zip(rates[True], rates[False]))[1:]]
    return Cost(batch, pairs, median(rates[True][1:]), median(rates[False][1:]), median(ratios), lower_bound(ratios))


def _seconds(llm: LLM, ledger: Ledger, steps: int, on: bool) -> float:
    engine = llm.engine
    engine.recording = on
    engine.records.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
        while engine.records:
            ledger.add(engine.records.popleft())
    return time.perf_counter() - begin


def lower_bound(ratios: Sequence[float], confidence: float = 0.95) -> float:
    """One-sided, of the median of the ratios, by drawing from them again and again; the same ratios give the same bound."""
    rng = random.Random(0)
    drawn = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return drawn[math.floor((1 - confidence) * DRAWS)]


def line(cost: Cost) -> str:
    return (
        f"batch {cost.batch}: {cost.on:.1f} steps/s with the ledger, {cost.off:.1f} without; on/off {cost.ratio:.4f}, "
        f"over {cost.bound:.4f} at 95 % ({cost.pairs} pairs)"
    )
