"""`flatout bench offline`: the fixed workloads on LLM, timed; a table, or JSON. Also `python -m flatout.bench.offline`.

Needs torch and numpy alone, so it runs on a bare GPU machine. Greedy, full output length, every repeat under a cache salt of its own so
that none profits from the one before. Called by cli/__init__.py.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flatout.bench.kernels import KernelTime, kernel_lines, kernel_times
from flatout.bench.workloads import NAMES, Work, fold, workload
from flatout.cli.figures import ELEMENT_BYTES, kv_head_bytes, kv_read, weights_read
from flatout.cli.flags import Parser, UsageError, add_config_flags, chosen, config_options
from flatout.cli.terminal import open_llm, table
from flatout.config import DEFAULT_MODEL
from flatout.hardware import Hardware, ceilings, detect
from flatout.ledger.ledger import HOST, Account, Sums, account
from flatout.request import SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM
    from flatout.step import StepRecord

SHAPES = Path(__file__).parent / "models"  # configs without weights
PROFILED = 16
CPU_WORK, CUDA_WORK = ("batch1", "batch8"), ("batch1", "batch8", "batch64", "batch256")


@dataclass(frozen=True)
class Result:
    """One workload on one model; the run with the median time. Seconds, milliseconds and tokens per second."""

    model: str
    work: str
    requests: int
    seconds: float
    out_tok_s: float
    total_tok_s: float
    ttft_ms: float  # median over requests, waiting included
    tpot_ms: float  # median over requests that got more than one token
    of_floor: float | None  # floor of a decode step / TPOT, where all requests decode together (batchN)
    account: Account  # of the same run
    kernels: list[KernelTime] | None = None  # of a shorter run, where they were asked for


def configure(parser: Parser) -> None:
    shapes = ", ".join(sorted(p.stem for p in SHAPES.glob("*.json")))
    group = parser.add_argument_group("measuring")
    parser.choice(group, "--work", NAMES, "batch1 and batch8; on a GPU to batch256")
    parser.flag(
        group, "--models", nargs="+", metavar="MODEL", help=f"models, or shapes with random weights: {shapes} (default: {DEFAULT_MODEL})"
    )
    parser.flag(group, "--repeats", type=int, metavar="N", default=1, help="runs of each workload; the median one is shown (default: 1)")
    parser.flag(group, "--json", action="store_true", default=False, help="print JSON instead of a table")
    parser.flag(group, "--output", metavar="FILE", default=None, help="write the JSON into a file too, result by result")
    parser.flag(
        group,
        "--kernels",
        action="store_true",
        default=False,
        help=f"on a GPU: show the kernels of each work, outputs cut to {PROFILED} tokens",
    )
    parser.flag(group, "--quiet", action="store_true", default=False, help="no report of what was loaded")
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    asked = chosen(args, "work", NAMES)
    if args.repeats < 1:
        raise UsageError(f"--repeats: must be at least 1, got {args.repeats}")
    options = config_options(args)
    machine = detect(options.get("device", "auto"))
    if args.kernels and machine.device != "cuda":
        raise UsageError("--kernels: needs a CUDA device, whose profiler tells them apart")
    report = _Report(machine, Path(args.output) if args.output else None)
    report.write()  # a path that cannot be written is told before anything is measured
    ceilings(machine)  # measured before a KV pool takes the memory
    for model in getattr(args, "models", None) or [DEFAULT_MODEL]:
        with open_llm({**options, **_model_options(model)}, args.quiet) as llm:
            report.starts[model] = llm.engine.seconds
            default = CUDA_WORK if llm.config.device.device == "cuda" else CPU_WORK
            for result in _measure(llm, Path(model).name, asked or default, args.repeats):
                if args.kernels:
                    work = [(prompt, min(n, PROFILED)) for prompt, n in fold(workload(result.work), llm.spec.vocab_size)]
                    result = replace(result, kernels=kernel_times(partial(_generate, llm, work, "kernels")))
                if not args.json:
                    print("\n".join(_lines([result], head=not report.results)), flush=True)
                report.results.append(result)
                report.write()
        del llm
        gc.collect()
        if machine.device == "cuda":
            import torch

            torch.cuda.empty_cache()
    if args.json:
        print(report.json())
    return 0


@dataclass
class _Report:
    """What was measured so far, kept in a file as it grows."""

    machine: Hardware
    file: Path | None
    starts: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> seconds of each phase of its start
    results: list[Result] = field(default_factory=list)

    def json(self) -> str:
        roof = ceilings(self.machine)
        facts = {
            "device": self.machine.name,
            "cores": self.machine.cpu_count,
            "read_bytes_s": roof.read[-1].median,
            "matrix_flop_s": roof.matrix,
        }
        return json.dumps({"machine": facts, "start_seconds": self.starts, "results": [asdict(r) for r in self.results]}, indent=1)

    def write(self) -> None:
        """The file whole or as it was: an interruption leaves no half. UsageError: it cannot be written."""
        if self.file is None:
            return
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            temporary.write_text(self.json())
            temporary.replace(self.file)
        except OSError as error:
            raise UsageError(f"--output: {self.file}: {error.strerror}") from None


def _model_options(model: str) -> dict[str, Any]:
    """A name from SHAPES stands for its config with random weights."""
    shape = SHAPES / f"{model}.json"
    return {"model": str(shape), "load_format": "dummy"} if shape.is_file() else {"model": model}


def _measure(llm: LLM, model: str, names: Sequence[str], repeats: int) -> Iterator[Result]:
    warm = fold(workload("batch1"), llm.spec.vocab_size)
    _generate(llm, [(prompt, 8) for prompt, _ in warm], "warm-up")
    for name in names:
        work = fold(workload(name), llm.spec.vocab_size)
        runs = sorted((_generate(llm, work, f"{name} {i}") for i in range(repeats)), key=lambda run: run[0])
        seconds, ttfts, tpots, records = runs[len(runs) // 2]
        tokens_in, tokens_out = sum(len(p) for p, _ in work), sum(n for _, n in work)
        tpot = median(tpots) if tpots else 0.0
        yield Result(
            model=model,
            work=name,
            requests=len(work),
            seconds=seconds,
            out_tok_s=tokens_out / seconds,
            total_tok_s=(tokens_in + tokens_out) / seconds,
            ttft_ms=median(ttfts) * 1e3,
            tpot_ms=tpot * 1e3,
            of_floor=_step_floor(llm, work) / tpot if name.startswith("batch") and tpot else None,
            account=_account(llm, records, seconds),
        )


def _account(llm: LLM, records: Sequence[StepRecord], seconds: float) -> Account:
    """Of a run of so many seconds, whose steps these are."""
    sums = Sums()
    for record in records:
        sums.add(record)
    return account(sums, llm.engine.costs, seconds)


def _account_line(account: Account) -> str:
    """Shares of the run's time, and what the host's stages take of a step whether the device hides them or not."""
    bandwidth, compute, kernels, padding, launch, idle = (
        account.parts[name] / account.seconds for name in ("floor_bandwidth", "floor_compute", "kernels", "padding", "launch", "idle")
    )
    exposed = sum(seconds for name, seconds in account.parts.items() if name.startswith(HOST)) / account.seconds
    floor = f"floor {bandwidth + compute:.0%}" + (f" ({bandwidth:.0%} bandwidth, {compute:.0%} compute)" if bandwidth and compute else "")
    host = ", ".join(f"{stage} {1e6 * account.host[stage] / account.steps:.0f}" for stage in ("schedule", "inputs", "launch", "commit"))
    return (
        f"{account.steps} steps: {floor}, kernels over it {kernels:.0%}, padding {padding:.0%}, launch {launch:.0%}, "
        f"host {exposed:.0%}, idle {idle:.0%}; host us a step: {host}"
    )


def _generate(llm: LLM, work: Work, salt: str) -> tuple[float, list[float], list[float], list[StepRecord]]:
    """Seconds in all, TTFT and TPOT of each request, and the run's steps."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in work]
    kept, llm.engine.records = llm.engine.records, deque()  # every step, however many
    begin = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False, cache_salt=salt)
    seconds = time.perf_counter() - begin
    ttfts, tpots = [], []
    for output, (_, wanted) in zip(outputs, work):
        got, timing = len(output.outputs[0].token_ids), output.timing
        if got != wanted or timing is None:
            raise RuntimeError(f"request {output.request_id} gave {got} of {wanted} tokens; figures of it would not be comparable")
        ttfts.append(timing.first_token - timing.arrival)
        if got > 1:
            tpots.append((timing.finished - timing.first_token) / (got - 1))
    records, llm.engine.records = list(llm.engine.records), kept
    return seconds, ttfts, tpots, records


def _step_floor(llm: LLM, work: Work) -> float:
    """Least seconds of a step in which every request decodes: weights once, and each context's KV, at half of the output."""
    element = ELEMENT_BYTES[llm.config.model.dtype]
    needed = weights_read(llm.spec, llm.engine.weight_bytes, element)
    needed += sum(kv_read(llm.spec, len(prompt) + n // 2, kv_head_bytes(llm)) for prompt, n in work)
    return needed / ceilings(detect(llm.config.device.device)).reading(needed).median


def _lines(results: list[Result], head: bool) -> list[str]:
    rows = [
        (
            r.model,
            r.work,
            str(r.requests),
            f"{r.seconds:.2f}",
            f"{r.out_tok_s:,.1f}",
            f"{r.total_tok_s:,.1f}",
            f"{r.ttft_ms:,.1f}",
            f"{r.tpot_ms:,.2f}" if r.tpot_ms else "-",
            f"{r.of_floor:.0%}" if r.of_floor else "-",
        )
        for r in results
    ]
    columns = ("model", "work", "requests", "seconds", "out tok/s", "all tok/s", "TTFT ms", "TPOT ms", "of floor")
    lines = table(columns, rows, widths=(20, 13, 8, 8, 10, 10, 10, 8, 8))[0 if head else 1 :]
    return [*lines, *(line for r in results for line in (f"  {_account_line(r.account)}", *kernel_lines(r.kernels or [])))]


if __name__ == "__main__":
    from flatout.cli import main

    sys.exit(main(["bench", "offline", *sys.argv[1:]]))
