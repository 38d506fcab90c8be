"""`flatout doctor hardware`: what this machine is, what runs on it, and what it gives when measured; what can't be had says what it needs.

The facts are doctor/'s: cpu.py, gpu.py, versions.py, measure.py. Called by cli/__init__.py.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace

from flatout.cli.flags import Parser, UsageError
from flatout.cli.terminal import say
from flatout.hardware import detect, kept_rates


def configure(parser: Parser) -> None:
    group = parser.add_argument_group("measuring")
    parser.flag(group, "--device", choices=("auto", "cuda", "cpu"), default="auto", help="whose memory and products (default: auto)")
    parser.flag(group, "--measure", action="store_true", default=False, help="measure anew (seconds), though figures are kept")
    parser.flag(group, "--no-measure", action="store_true", default=False, help="only what can be read: nothing is measured")
    output = parser.add_argument_group("output")
    parser.flag(output, "--json", action="store_true", default=False, help="as JSON, with units in the names; null: not available")


def run(args: Namespace) -> int:
    if args.measure and args.no_measure:
        raise UsageError("--measure and --no-measure say opposite things; give one of them")
    import torch

    from flatout.doctor.cpu import cpu
    from flatout.doctor.gpu import gpus
    from flatout.doctor.versions import versions

    hardware = detect(args.device)
    if args.device == "cuda" and hardware.device != "cuda":
        raise UsageError("--device: cuda was asked for but torch sees no CUDA device; use --device cpu")
    sections = [cpu(), *gpus(torch), versions(torch)]
    if not args.no_measure:
        from flatout.doctor.measure import measured

        if args.measure or kept_rates(hardware, torch.__version__) is None:
            say("measuring, a few seconds ...")
        sections.append(measured(hardware, args.measure))
    if args.json:
        print(json.dumps({section.key: section.to_json() for section in sections}, indent=1))
        return 0
    width = shutil.get_terminal_size().columns
    print("\n\n".join("\n".join(section.lines(width)) for section in sections))
    return 0
