"""`flatout bench compare-cpu`: the same GGUF file, threads and prompts here and in llama.cpp, turn by turn; Transformers too if asked.

Decodes, a prefill and a busy neighbour in one process; starts and HTTP servers in processes of their own. Medians and ratios.
Also `python -m flatout.bench.compare_cpu`. Called by cli/__init__.py.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout import __version__
from flatout.bench.llamacpp import BEST, FLASH_ATTN, LlamaCpp, library
from flatout.bench.processes import FLATOUT, IMPORT, LLAMACPP, program, starts
from flatout.bench.served import ALONE, engine_alone, flatout_server, llama_server, lost, served
from flatout.bench.turns import OURS, Case, Row, lines, our_engine, peer_engine, take_turns
from flatout.bench.twin import Twin
from flatout.cli.flags import Parser, UsageError, add_config_flags, chosen, config_options
from flatout.cli.terminal import open_llm
from flatout.config import Config, ConfigError
from flatout.modelfile.sources import resolve_model

THEIRS, TRANSFORMERS = "llama.cpp", "Transformers"
TURNS = {  # work -> what both engines do in this process
    "batch1": Case("decode, batch 1, 128 in, 256 out", 1, 128, 256),
    "context1024": Case("decode, batch 1, 1,024 in, 64 out", 1, 1024, 64),
    "batch8": Case("decode, batch 8, 128 in, 128 out", 8, 128, 128),
    "prefill1024": Case("prefill, 1,024 in", 1, 1024, 1),
    "busy": Case("decode, batch 1 beside a busy process, 128 in, 64 out", 1, 128, 64, neighbour=True),
}
START = Case("start of the process to its first token, 128 in", 1, 128, 1)
SERVED = Case("served, 16 clients, 128 in, 128 out", 16, 128, 128)
NAMES = (*TURNS, "start", "served")


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("comparing")
    parser.choice(group, "--work", NAMES, "all; served where --llama-server is")
    parser.flag(group, "--repeats", type=int, metavar="N", default=3, help="turns of each engine; medians are shown (default: 3)")
    parser.flag(group, "--transformers", action="store_true", default=False, help="a turn for Transformers as well")
    parser.flag(
        group,
        "--gguf",
        metavar="FILE",
        default=None,
        help="the same model as a GGUF file, for llama.cpp, where --model names something else",
    )
    parser.flag(
        group,
        "--flash-attn",
        choices=(BEST, *FLASH_ATTN),
        default=BEST,
        help="llama.cpp's; best: on for a prefill alone, else off (default: best)",
    )
    parser.flag(
        group, "--llama-server", metavar="FILE", default=None, help="llama.cpp's HTTP server (default: llama-server, if it is on the path)"
    )
    parser.flag(group, "--check", action="store_true", default=False, help="exit with 1 unless every ratio is over 1")
    parser.flag(group, "--json", action="store_true", default=False, help="print JSON instead of a table")
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser, skip=("device",))


def run(args: Namespace) -> int:
    if args.repeats < 1:
        raise UsageError(f"--repeats: must be at least 1, got {args.repeats}")
    library()  # the likeliest to be missing, told before anything is loaded
    names = chosen(args, "work", NAMES)
    binary: str = args.llama_server or shutil.which("llama-server") or ""
    if not binary and "served" in names:
        raise UsageError(
            "--work: served needs llama.cpp's HTTP server, which no Python package holds; build it and give --llama-server FILE"
        )
    names = names or [name for name in NAMES if name != "served" or binary]
    options, file = _model(args)
    report = _Report((THEIRS, TRANSFORMERS) if args.transformers else (THEIRS,), quiet=args.json)
    vocab_size = _in_turns([TURNS[name] for name in names if name in TURNS], args, options, file, report)
    gc.collect()  # what follows has the memory to itself
    options["threads"] = threads = report.facts["threads"]
    llamacpp = (file, threads, args.flash_attn)
    if "start" in names:
        ids = list(range(10, 10 + START.prompt))
        commands = {OURS: program(FLATOUT, options, ids), THEIRS: program(LLAMACPP, *llamacpp, ids)}
        imports = {f"import {module}": program(IMPORT, module) for module in ("torch", "llama_cpp")}
        seconds = starts({**commands, **imports}, args.repeats)
        report.add(Row(START.name, {name: seconds[name] for name in commands}, seconds=True))
        report.facts |= {name: f"{seconds[name]:.2f} s" for name in imports}
    if "served" in names:
        servers = {OURS: flatout_server(options), THEIRS: llama_server(binary, *llamacpp, SERVED)}
        with open_llm(options, quiet=True) as llm:
            rates = served(SERVED, servers, args.repeats, vocab_size, engine_alone(llm))
        report.facts |= {ALONE: f"{rates[ALONE]:,.1f} tok/s", "of which HTTP, streams and a second process take": f"{lost(rates):.0%}"}
        report.add(Row(SERVED.name, {name: rates[name] for name in servers}))
    if args.json:
        print(json.dumps({**report.facts, "rows": [row.facts() for row in report.rows]}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in report.facts.items()))
    return int(args.check and any(ratio <= 1 for row in report.rows for ratio in row.ratios.values()))


@dataclass
class _Report:
    """What was measured so far: each row is printed as it comes, unless quiet."""

    peers: tuple[str, ...]
    quiet: bool
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if not self.quiet:
            works = (case.name for case in (*TURNS.values(), START, SERVED))
            print("\n".join(lines([row], self.peers, works)[bool(self.rows) :]), flush=True)
        self.rows.append(row)


def _in_turns(cases: Sequence[Case], args: Namespace, options: dict[str, Any], file: str, report: _Report) -> int:
    """What all engines do in this process. Returns the size of the vocabulary."""
    with open_llm(options, args.quiet) as llm:
        threads, vocab_size = llm.config.device.threads, llm.spec.vocab_size
        assert threads  # resolve() filled it
        twin = Twin(llm) if args.transformers else None
        peer = LlamaCpp(file, threads, args.flash_attn)
        engines = {OURS: our_engine(llm), THEIRS: peer_engine(peer), **({TRANSFORMERS: peer_engine(twin)} if twin else {})}
        for case in cases:
            report.add(take_turns(case, engines, args.repeats, vocab_size))
        report.facts |= {
            "model": llm.facts.model,
            "dtype": llm.config.model.dtype,
            "quantization": llm.config.model.quantization,
            "threads": threads,
            "flatout": __version__,
            **peer.versions,
            "flash-attn": peer.flash_attn,
            **(twin.versions if twin else {}),
            "cores busy between turns": max((row.at_rest for row in report.rows), default=0.0),
        }
        peer.close()
    return vocab_size


def _model(args: Namespace) -> tuple[dict[str, Any], str]:
    """Our options and llama.cpp's file: the same one where the model is a GGUF file, whose own weights are then ours too unless told
    otherwise. ConfigError: llama.cpp has none."""
    options = {**config_options(args, skip=("device",)), "device": "cpu"}
    source = resolve_model(Config.make(**options).model)
    if source.kind == "gguf":
        return {"quantization": "gguf", **options}, args.gguf or str(source.files[0])
    if args.gguf is None:
        raise ConfigError("--gguf: llama.cpp reads GGUF files alone; name one that holds the same model")
    return options, args.gguf


if __name__ == "__main__":
    from flatout.cli import main

    sys.exit(main(["bench", "compare-cpu", *sys.argv[1:]]))
