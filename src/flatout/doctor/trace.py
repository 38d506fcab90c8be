"""A trace of some steps: torch's profiler, and beside it on the same clock each step, each op of it by name and the engine's thread.

A native program is one call of which the profiler sees nothing: its ops come from the deep steps' clocks, one after the other. On CUDA a step runs op by
op, each in an NVTX range of its name. Opens in Perfetto. Called by cli/doctor/trace.py; what the costs mean is ledger/largest.py's.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from flatout.kernels.op import Op
from flatout.ledger.ledger import Account, Ledger
from flatout.llm import LLM
from flatout.request import SamplingParams
from flatout.runner.clock import CudaClock, StepClock
from flatout.step import StepRecord

MARK = "flatout: two clocks meet"  # an event of the profiler's during which ours is read
PROCESS = 1  # of our tracks, in the file; the profiler's are under real process ids
ENGINE, STEPS = 1, 2  # tracks
WARM = 3  # tokens of a first run: programs, choices and graphs are made by then


@dataclass(frozen=True)
class Traced:
    """`file`: a Chrome trace as JSON has it; none where a profiler of the outside (Nsight Systems) was to record. Accounts of steps that are alike:
    those of one token a request, and those that read prompts."""

    file: dict[str, Any] | None
    decodes: Account
    prompts: Account

    def write(self, path: Path) -> None:
        """Compressed, whatever it is called: Perfetto looks inside. OSError."""
        with gzip.open(path, "wt", compresslevel=5) as out:
            json.dump(self.file, out)


@dataclass
class _Spans:
    """Of one step, on the clock of time.perf_counter: (name, begin, seconds) of each op in order, and of the choice of tokens."""

    ops: list[tuple[str, float, float]] = field(default_factory=list)
    sampling: list[tuple[str, float, float]] = field(default_factory=list)


class CpuSpans(StepClock):
    """A step's clock that notes when each op began, too."""

    def __init__(self, spans: _Spans):
        super().__init__(deep=True)
        self.spans = spans

    def program(self, run: Callable[[], object]) -> None:
        known, at = len(self.ops), time.perf_counter()
        super().program(run)
        for name, seconds in self.ops[known:]:
            self.spans.ops.append((name, at, seconds))
            at += seconds

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        begin = time.perf_counter()
        with record_function(op.name):
            super().record(op, args)
        self.spans.ops.append((op.name, begin, self.ops[-1][1]))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        begin = time.perf_counter()
        with record_function("sampling"), super().sampling():
            yield
        self.spans.sampling.append(("sampling", begin, time.perf_counter() - begin))


class CudaSpans(CudaClock):
    """A step's clock under which the profiler and Nsight Systems know each op by its name. When they ran is the profiler's to tell."""

    def __init__(self, spans: _Spans):
        super().__init__(deep=True)

    @contextmanager
    def loose(self) -> Iterator[None]:
        with _ranged("forward"), super().loose():
            yield

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        with _ranged(op.name):
            super().record(op, args)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with _ranged("sampling"), super().sampling():
            yield


@contextmanager
def _ranged(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range(name), record_function(name):
        yield


def prompts_of(llm: LLM, batch: int, prompt: int) -> list[list[int]]:
    """Of `prompt` tokens each, that differ from their first one on."""
    return [[(17 * row + 31 * i + row * i) % (llm.spec.vocab_size - 10) + 10 for i in range(prompt)] for row in range(batch)]


def run_warm(llm: LLM, batch: int, prompt: int) -> None:
    """What a first run alone does is over after this."""
    generate(llm, batch, prompt, WARM, "warm")


def trace(llm: LLM, steps: int = 16, batch: int = 4, prompt: int = 128, outside: bool = False) -> Traced:
    """Of `batch` requests: the steps that read their prompts, then `steps` more of one token each. outside: no profiler of torch's, but a call that
    starts one of the outside (cudaProfilerStart), to which CUDA lends itself only once.

    RequestError: they do not fit the model or the cache.
    """
    run_warm(llm, batch, prompt)
    engine, runner = llm.engine, llm.engine.runner
    spans, before = list[_Spans](), runner.clock_of
    kind: type[CpuSpans] | type[CudaSpans] = CudaSpans if runner.device.type == "cuda" else CpuSpans

    def clock(deep: bool) -> StepClock:  # all of them are
        spans.append(_Spans())
        return kind(spans[-1])

    engine.records.clear()
    runner.clock_of = clock
    try:
        with _from_outside() if outside else nullcontext(), _profiled() if not outside else nullcontext() as profiled:
            generate(llm, batch, prompt, steps + 1, "traced")
    finally:
        runner.clock_of = before
    decodes, prompts, records = Ledger(engine.costs), Ledger(engine.costs), list(engine.records)
    for record in records:
        (prompts if record.prefill_tokens else decodes).add(record)
    file = None
    if profiled is not None:
        file = profiled.file
        file["traceEvents"] += _ours(decodes, records, spans, profiled.offset)
    return Traced(file, decodes.total(), prompts.total())


def generate(llm: LLM, batch: int, prompt: int, tokens: int, salt: str) -> None:
    """Greedily, past any end id; salt: prompts are in the cache for no other one."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts_of(llm, batch, prompt), greedy, use_tqdm=False, cache_salt=salt)


@contextmanager
def _from_outside() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@dataclass
class _Profiled:
    file: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0  # seconds, from our clock to the profiler's


@contextmanager
def _profiled() -> Iterator[_Profiled]:
    """Torch's profiler meanwhile, on all threads; filled in at the end."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the compute thread runs the ops
    found = _Profiled()
    with profile(activities=activities, experimental_config=everywhere) as profiler:
        with record_function(MARK):
            now = time.perf_counter()
        yield found
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.file = json.loads(path.read_text())
    mark = next(event for event in found.file["traceEvents"] if event.get("name") == MARK and event.get("ph") == "X")
    found.offset = (mark["ts"] + mark["dur"] / 2) / 1e6 - now


# -- our own tracks ----------------------------------------------------------------------------------------------------


def _ours(ledger: Ledger, records: Sequence[StepRecord], spans: Sequence[_Spans], offset: float) -> list[dict[str, Any]]:
    """Events of the engine's thread and, on the CPU, of each step and what it consists of."""

    def named(what: str, name: str, **track: int) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": PROCESS, "args": {"name": name}, **track}

    def event(track: int, name: str, begin: float, seconds: float, **args: Any) -> dict[str, Any]:
        at, lasts = (begin + offset) * 1e6, seconds * 1e6
        return {"ph": "X", "cat": "flatout", "name": name, "pid": PROCESS, "tid": track, "ts": at, "dur": lasts, "args": args}

    made = [named("process_name", "flatout"), named("thread_name", "engine", tid=ENGINE), named("thread_name", "steps", tid=STEPS)]
    for record, one in zip(records, spans, strict=True):
        on_engine, on_steps = partial(event, ENGINE), partial(event, STEPS)
        made.append(on_engine("schedule", record.start, record.schedule_s, step=record.step))
        made.append(on_engine("wait", record.ended - record.wait_s, record.wait_s, step=record.step))
        made.append(on_engine("commit", record.ended, record.commit_s, step=record.step))
        if not one.ops:
            continue
        first, (_, last, lasted) = one.ops[0][1], max(one.ops + one.sampling, key=lambda span: span[1] + span[2])
        begin = first - record.inputs_s
        facts = {"rows": record.rows, "tokens": record.tokens, "prompt tokens": record.prefill_tokens, "context": record.kv_tokens}
        made.append(on_steps(f"step {record.step}: {_what(record)}", begin, last + lasted - begin, **facts))
        made.append(on_steps("inputs", begin, record.inputs_s))
        for (_, at, seconds), (label, _, floor) in zip(one.ops, ledger.named(record, record.ops or []), strict=True):
            args = {"floor_us": round(floor * 1e6, 3), "times_its_floor": round(seconds / floor, 2)} if floor else {}
            made.append(on_steps(label, at, seconds, **args))
        made += [on_steps(*span) for span in one.sampling]
    return made


def _what(record: StepRecord) -> str:
    rows = f"{record.rows} row{'s' * (record.rows != 1)}"
    return f"{rows}, {record.prefill_tokens} prompt tokens" if record.prefill_tokens else f"{rows}, a token each"
