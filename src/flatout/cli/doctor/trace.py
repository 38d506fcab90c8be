"""`flatout doctor trace [MODEL | --url URL]`: some steps as a file for Perfetto, and the largest costs in words; of a running flatout server the words alone.

What is recorded is doctor/trace.py's and the server's ledger's, the words are ledger/largest.py's. Called by cli/__init__.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.cli.endpoint import endpoint_of
from flatout.cli.flags import Parser, UsageError, add_config_flags, config_options, size
from flatout.cli.terminal import open_llm, say
from flatout.client.http import Endpoint
from flatout.config import DEFAULT_MODEL, Config
from flatout.doctor.gauges import ledgers
from flatout.hardware import detect
from flatout.ledger.largest import largest

FILE = "flatout-trace.json.gz"
MOST_STEPS = 1000
WINDOW, SECONDS = "10s", 10.0  # of a server's ledger


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("tracing")
    parser.flag(group, "--steps", type=int, metavar="N", default=16, help="decode steps, after those that read the prompts (default: 16)")
    parser.flag(group, "--batch", type=int, metavar="N", default=4, help="requests at one time (default: 4)")
    parser.flag(group, "--prompt", type=size, metavar="N", default=128, help="tokens of each prompt (default: 128)")
    parser.flag(group, "--output", metavar="FILE", default=FILE, help=f"Chrome trace, compressed, for ui.perfetto.dev (default: {FILE})")
    parser.flag(group, "--costs", common=False, type=int, metavar="N", default=5, help="how many of the largest are told (default: 5)")
    parser.flag(group, "--nvtx", action="store_true", default=False, help="no file: NVTX ranges, for nsys profile -c cudaProfilerApi")
    parser.flag(group, "--syncs", action="store_true", default=False, help="count the device syncs of each step, by line of code, too")
    parser.flag(group, "--json", action="store_true", default=False, help="the costs as JSON, in seconds")
    parser.flag(group, "--quiet", common=False, action="store_true", default=False, help="no report of what was loaded")
    group = parser.add_argument_group("a running flatout server instead: no file, what its ledger tells of ten seconds")
    parser.flag(group, "--url", metavar="URL", default=None, help="http://HOST:PORT")
    parser.flag(group, "--api-key", metavar="KEY", default=None, help="sent as Authorization: Bearer KEY, and never shown")
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    for name, most in (("steps", MOST_STEPS), ("batch", None), ("prompt", None), ("costs", None)):
        value = getattr(args, name)
        if value < 1 or (most is not None and value > most):
            raise UsageError(f"--{name}: must be at least 1{f' and at most {most}' if most else ''}, got {value}")
    if args.url is not None:
        if hasattr(args, "model"):
            raise UsageError(f"--url: asks a running server, {args.model} would be loaded here; leave one of them out")
        return _of_server(args)
    options = config_options(args)
    Config.make(**options)  # a wrong value is told before torch is loaded
    path = Path(args.output)
    if not args.nvtx and not path.parent.is_dir():
        raise UsageError(f"--output: there is no folder {path.parent}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read with torch's import: its profiler says on standard error when it begins and ends
    from flatout.doctor.facts import NotAvailable
    from flatout.doctor.predict import measured_roof
    from flatout.doctor.syncs import count_syncs
    from flatout.doctor.trace import trace

    hardware = detect(options.get("device", "auto"))
    if args.nvtx and hardware.device != "cuda":
        raise UsageError("--nvtx: its ranges are for Nsight Systems and a GPU, and none is used here; leave it out for a file")
    measured_roof(hardware)  # kept for the model's floors
    with open_llm(options, args.quiet) as llm:
        traced = trace(llm, args.steps, args.batch, args.prompt, outside=args.nvtx)
        syncs: dict[str, Any] = {}
        if args.syncs:
            try:
                counted = count_syncs(llm, args.steps, args.batch, args.prompt)
                syncs = {**counted.to_json(), "sentence": counted.sentence}
            except NotAvailable as lacking:
                syncs = {"sentence": f"device syncs: not available: needs {lacking}", "syncs_per_step": None}
    told = {"decode steps": traced.decodes.plain(), "steps that read prompts": traced.prompts.plain()}
    if traced.file is not None:
        traced.write(path)
    return _tell(args, told, syncs, None if args.nvtx else path)


def _tell(args: Namespace, accounts: Mapping[str, Mapping[str, Any]], syncs: Mapping[str, Any], path: Path | None) -> int:
    found = {what: largest(account, args.costs) for what, account in accounts.items()}
    if args.json:
        costs = {
            what.replace(" ", "_"): {"steps": accounts[what]["steps"], "costs": [cost.to_json() for cost in each]}
            for what, each in found.items()
        }
        print(json.dumps({**costs, **({"syncs": syncs} if syncs else {}), "file": None if path is None else str(path)}, indent=1))
        return 0
    for what, each in found.items():
        if each:
            print(f"{what}, {accounts[what]['steps']} of them; the largest costs:")
            print("\n".join(f"  {i}. {cost.sentence}" for i, cost in enumerate(each, 1)))
    if syncs:
        print(syncs["sentence"])
    if path is not None:
        print(f"{path}: open it at https://ui.perfetto.dev")
    return 0


# -- of a running server -----------------------------------------------------------------------------------------------


def _of_server(args: Namespace) -> int:
    with endpoint_of(args) as endpoint:
        models = asyncio.run(_watched(endpoint, args.steps))
    accounts = {f"steps of {name}": model["windows"][WINDOW] for name, model in models.items() if model["windows"][WINDOW]["steps"]}
    if not accounts:
        raise UsageError(f"--url: no step ran there in the last {SECONDS:.0f} s; trace it while it has work")
    return _tell(args, accounts, {}, None)


async def _watched(endpoint: Endpoint, deep: int) -> dict[str, Any]:
    """Each model's ledger, once `deep` steps, or those that came in SECONDS, told their ops apart. UsageError: the server has none."""
    try:
        if await ledgers(endpoint, deep) is None:
            raise UsageError("--url: no ledger there: only flatout's own servers keep one; flatout doctor --url probes any")
        say(f"watching {SECONDS:.0f} s of steps ...")
        await asyncio.sleep(SECONDS)
        return await ledgers(endpoint) or {}
    finally:
        endpoint.close()
