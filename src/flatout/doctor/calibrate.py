"""Calibration: how much of its roof each op of a model reaches on this machine, over a grid of rows and contexts; seconds, once, and kept.

Steps are made by hand and run by the engine's own runner, which tells their ops apart (runner/clock.py); what is left of a step is kept beside them.
Nothing is decided here. Called by whatif.py and cli/.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from flatout.config import Config, cache_dir
from flatout.doctor.predict import measured_roof
from flatout.hardware import Hardware, detect, keep_entry, read_kept
from flatout.ledger.table import CostTable, OpCost, Roof, Shares, StepShape, roof_from, shape_of, shares_from
from flatout.llm import LLM
from flatout.request import Request, SamplingParams
from flatout.runner.runner import Runner, Timed
from flatout.step import StepPlan

ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 256), (64, 1024)
CHUNKS, BEFORE = (16, 64, 256, 1024, 4096), (0, 1024)
ASKED = ((1, 3, 6, 12, 24), (128, 512), (40, 160, 640), (0, 512))  # rows, contexts, chunks and before: of the check
MOST_KEYS = 1 << 16  # that are filled, of the pool: more tells nothing new
RUNS, FEWEST = 10, 4  # of a step: half of them tell its ops apart; fewer where they take long
ENOUGH = 0.25  # seconds of them
HOST_STEPS = 24
HOST_BOUND = 0.9  # a device that is busy for less of a step waited for the host, which issued op by op
NOTHING = 1e-9  # seconds: of an op too short for the clock


@dataclass(frozen=True)
class Sample:
    """One step, measured: medians in seconds."""

    shape: StepShape
    captured: bool
    step_s: float  # of the device, its inputs where it makes them alone
    ops: tuple[float, ...]  # of each op of the table, all calls together; 0 where it was not told apart
    ahead: bool = False  # the host issues ops while the device runs those before

    @property
    def waits_for_host(self) -> bool:
        return self.ahead and not self.captured and sum(self.ops) < HOST_BOUND * self.step_s


@dataclass(frozen=True)
class Calibration:
    """Of one model in one form on one machine."""

    model: str
    form: str  # of the arithmetic: see form_of()
    roof: Roof  # that the shares are of
    shares: Mapping[str, Shares]  # by label of the op
    chunks: Mapping[str, Shares]  # of attention over chunks
    step_s: float
    loose_s: float
    issue_s: float
    row_s: float
    host_s: float
    measured: float  # seconds since 1970
    off: float | None = None  # median of how far steps between the calibrated ones were predicted wrongly, at once; None: not checked

    def apply(self, table: CostTable) -> CostTable:
        """The table with these shares: an op's own, else those of the op of its name and dtype whose weights are the nearest in size."""

        def shares(op: OpCost, known: Mapping[str, Shares]) -> Shares | None:
            alike = [label for label in known if label.split()[0] == op.name]
            return known.get(op.label) or (known[min(alike, key=lambda label: _apart(label, op.label))] if alike else None)

        ops = tuple(
            replace(op, shares=shares(op, self.shares), chunks=shares(op, self.chunks) if op.group >= 0 else None) for op in table.ops
        )
        return replace(
            table,
            ops=ops,
            roof=self.roof,
            step_s=self.step_s,
            loose_s=self.loose_s,
            issue_s=self.issue_s,
            row_s=self.row_s,
            host_s=self.host_s,
        )


def _apart(a: str, b: str) -> float:
    """How far two labels' shapes are from each other, by logarithms of their sizes."""

    def size(label: str) -> float:
        return float(np.log(np.prod([float(n) for n in label.split()[-1].split("x") if n.isdigit()] or [1.0])))

    return abs(size(a) - size(b))


def form_of(config: Config) -> str:
    """What shares depend on beside the model: dtypes, how weights are held, threads, whether steps are captured."""
    model, device = config.model, config.device
    threads = f" {device.threads} threads" if device.device == "cpu" else ""
    return f"{model.dtype} {model.quantization} kv {config.cache.kv_cache_dtype}{threads}{' eager' if device.enforce_eager else ''}"


# -- kept --------------------------------------------------------------------------------------------------------------


def kept_calibration(hardware: Hardware, model: str, form: str) -> Calibration | None:
    """This model's in this form, else the newest of another model in this form; None: nothing was measured here."""
    kept = read_kept(cache_dir() / "calibration.json").get(_machine(hardware), {})
    found = kept.get(f"{model}: {form}") or max(
        (entry for entry in kept.values() if entry.get("form") == form), key=lambda entry: entry.get("measured", 0.0), default=None
    )
    if found is None:
        return None

    def shares(plain: Mapping[str, Any]) -> dict[str, Shares]:
        return {label: shares_from(each) for label, each in plain.items()}

    try:
        read = {"roof": roof_from(found["roof"]), "shares": shares(found["shares"]), "chunks": shares(found["chunks"])}
        return Calibration(**{**found, **read})
    except (KeyError, TypeError):
        return None  # another version's: measured anew


def keep(hardware: Hardware, calibration: Calibration) -> None:
    path = cache_dir() / "calibration.json"
    machine = _machine(hardware)
    entries = {**read_kept(path).get(machine, {}), f"{calibration.model}: {calibration.form}": asdict(calibration)}
    keep_entry(path, machine, entries, "calibration")


def _machine(hardware: Hardware) -> str:
    return f"{hardware.fingerprint()} torch {torch.__version__}"


def calibrate(options: Mapping[str, Any]) -> tuple[Calibration, list[Sample]]:
    """Load the model (Config's options by flat name), measure, check by other steps, keep. The steps that were checked come along."""
    hardware = detect(options.get("device", "auto"))
    roof = measured_roof(hardware)  # before a model takes the memory
    with LLM(**options) as llm:
        table = replace(llm.engine.costs, roof=roof)
        calibration = fitted(table, list(measure(llm)), form_of(llm.config))
        asked = list(measure(llm, *ASKED))
        off = errors(calibration.apply(table), asked)
        calibration = replace(calibration, host_s=host_seconds(llm), off=median(map(abs, off)))
        keep(hardware, calibration)
    return calibration, asked


def errors(table: CostTable, samples: Sequence[Sample]) -> list[float]:
    """Of each step: predicted / measured - 1."""
    return [table.step_seconds(sample.shape, sample.captured) / sample.step_s - 1 for sample in samples]


# -- measured ----------------------------------------------------------------------------------------------------------


def measure(
    llm: LLM, rows: Sequence[int] = ROWS, contexts: Sequence[int] = CONTEXTS, chunks: Sequence[int] = CHUNKS, before: Sequence[int] = BEFORE
) -> Iterator[Sample]:
    """Steps of `rows` decoding requests with so many keys each, and single chunks after so many tokens: those that the engine's settings and pool
    hold. For an engine that serves nothing and has served nothing: its KV pool is written over."""
    engine, config = llm.engine, llm.config
    longest, size = config.model.max_model_len, config.cache.block_size
    seqs, budget, blocks = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, engine.scheduler.blocks.num_blocks
    assert longest and seqs and budget
    _fill(engine.runner, blocks)
    for n in sorted({min(n, seqs) for n in rows}):
        for context in sorted({min(n, longest - 1) for n in contexts}):
            if n * -(-context // size) <= min(blocks, MOST_KEYS // size):
                yield _sample(llm, np.full(n, context - 1), np.ones(n, np.int64))
    for tokens in sorted({min(n, budget, longest - 1) for n in chunks}):
        for start in before:
            if start + tokens < longest and -(-(start + tokens) // size) <= blocks:
                yield _sample(llm, np.array([start]), np.array([tokens]))


def host_seconds(llm: LLM) -> float:
    """Of the engine's thread for a step of a few requests. After measure(), which may have left anything in the cache: under a salt of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=HOST_STEPS, ignore_eos=True)
    n = min(4, llm.config.scheduler.max_num_seqs or 1)
    llm.generate([[5]] * n, params, use_tqdm=False, cache_salt="calibration")
    records = list(llm.engine.records)[-HOST_STEPS // 2 :]
    return median(r.drain_s + r.schedule_s + r.commit_s + r.deliver_s for r in records)


def _fill(runner: Runner, blocks: int) -> None:
    """Something in every block that will be read: pages that nothing was written to are one page, which a cache holds."""
    for layer in runner.decoder.layers:
        for cache in (layer.attention.k_cache, layer.attention.v_cache):
            cache[: min(blocks * runner.block_size, MOST_KEYS)] = 1


def _sample(llm: LLM, starts: np.ndarray, counts: np.ndarray) -> Sample:
    engine, size = llm.engine, llm.config.cache.block_size
    runner, table = engine.runner, engine.costs
    rows = len(starts)
    requests = [Request("calibration", [0], SamplingParams(temperature=0.0), seed=0, slot=i) for i in range(rows)]
    widths = -(-(starts + counts) // size)
    plan = StepPlan(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        token_ids=np.ones(int(counts.sum()), np.int32),
        samples=np.ones(rows, bool),
        out_positions=np.zeros(rows, np.int32),
        requests=requests,
        admitted=requests,
        block_slots=np.repeat(np.arange(rows, dtype=np.int32), widths),
        block_columns=np.concatenate([np.arange(w, dtype=np.int32) for w in widths]),
        block_ids=np.arange(int(widths.sum()), dtype=np.int32),
    )
    runner.launch(plan)()
    none = np.empty(0, np.int32)
    plan = replace(plan, admitted=[], block_slots=none, block_columns=none, block_ids=none)
    runner.launch(plan)()
    plainly: list[Timed] = []
    apart: list[Timed] = []
    begin = time.perf_counter()
    for run in range(RUNS):  # one that is as fast as ever, and one that tells its ops apart, which on CUDA is never a captured one
        runner.deep_steps = run % 2
        (apart if run % 2 else plainly).append(runner.launch(plan)())
        if run + 1 >= FEWEST and time.perf_counter() - begin > ENOUGH:
            break
    step_s = median(timed.device_s + (timed.inputs_s if runner.makes_inputs_alone else 0.0) for timed in plainly)
    shape = shape_of(plan.starts, plan.counts, plan.samples, table.windows, plainly[0].padded)
    ops = _by_op(table, shape, [timed.ops or [] for timed in apart])
    return Sample(shape, plainly[0].graph in ("hit", "padded"), step_s, ops, not runner.makes_inputs_alone)


def _by_op(table: CostTable, shape: StepShape, deep: list[list[tuple[str, float]]]) -> tuple[float, ...]:
    """Medians of each call's time, summed by op: the n-th call of a name is the n-th of that name in the table's sequence."""
    names = [name for name, _ in deep[0]]
    calls: dict[str, list[int]] = {}
    for index in table.sequence:
        if shape.rows(table.ops[index].rows):
            calls.setdefault(table.ops[index].name, []).append(index)
    seconds, seen = [0.0] * len(table.ops), dict.fromkeys(names, 0)
    for i, name in enumerate(names):
        mine = calls.get(name, [])
        if len(mine) == names.count(name):
            seconds[mine[seen[name]]] += max(NOTHING, median(ops[i][1] for ops in deep))
        seen[name] += 1
    return tuple(seconds)


# -- fitted ------------------------------------------------------------------------------------------------------------


def fitted(table: CostTable, samples: Sequence[Sample], form: str, host_s: float = 0.0) -> Calibration:
    """Shares of the table's roof at the rows and keys that were measured. Ops are scaled so that with what is beside them they add up to the steps
    that told nothing apart. ValueError: the table's roof is not known."""
    if not table.roof.read:
        raise ValueError("shares are of ceilings, and those of this table's roof are not known")
    samples = _without_clocks(table, samples)
    issued = [sample.step_s for sample in samples if sample.waits_for_host]
    issue_s = median(issued) if issued else 0.0
    beside = [(sample.shape.sampled, sample.captured, sample.step_s - sum(sample.ops)) for sample in samples if not sample.waits_for_host]
    step_s, row_s = _line([(n, rest) for n, captured, rest in beside if captured])
    loose = [rest - row_s * n for n, captured, rest in beside if not captured]
    loose_s = max(0.0, median(loose)) if loose else step_s
    plain = replace(
        table,
        ops=tuple(replace(op, shares=None, chunks=None) for op in table.ops),
        roof=replace(table.roof, launch_s=0.0, captured_launch_s=0.0),
    )
    shares: dict[str, dict[tuple[int, int], list[float]]] = {}
    chunks: dict[str, dict[tuple[int, int], list[float]]] = {}
    for sample in samples:
        shape = sample.shape.executed()
        rest = (step_s if sample.captured else loose_s) + row_s * sample.shape.sampled
        told = sum(sample.ops)
        scale = max(0.05, (sample.step_s - rest) / told) if told and not sample.waits_for_host else 1.0
        for op, seconds, least in zip(table.ops, sample.ops, plain.predicted(sample.shape)):
            rows = shape.rows(op.rows)
            if not rows or not seconds or not least:
                continue
            few, keys = op.rows == "sampled", 1
            if op.group >= 0:
                keys = round((shape.last_keys if few else shape.keys)[op.group] / shape.requests)
            into = chunks if op.group >= 0 and not few and shape.tokens > shape.requests else shares
            into.setdefault(op.label, {}).setdefault((rows, keys), []).append(least / (seconds * scale))
    return Calibration(
        model=table.model,
        form=form,
        roof=table.roof,
        shares={label: _grid(found) for label, found in shares.items()},
        chunks={label: _grid(found) for label, found in chunks.items()},
        step_s=step_s,
        loose_s=loose_s,
        issue_s=issue_s,
        row_s=row_s,
        host_s=host_s,
        measured=time.time(),
    )


def _without_clocks(table: CostTable, samples: Sequence[Sample]) -> list[Sample]:
    """With what telling ops apart takes of each call, some 2 us of an event on a GPU, taken off: captured steps end sooner by so much."""

    def calls(sample: Sample) -> int:
        return sum(op.count for op, seconds in zip(table.ops, sample.ops) if seconds)

    over = [(sum(sample.ops) - sample.step_s) / calls(sample) for sample in samples if sample.captured and calls(sample)]
    clock_s = max(0.0, median(over)) if over else 0.0

    def less(sample: Sample) -> tuple[float, ...]:
        return tuple(max(seconds - clock_s * op.count, seconds / 4) for op, seconds in zip(table.ops, sample.ops))

    return [replace(sample, ops=less(sample)) for sample in samples]


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(at 0 rows, of each row) of the least squared error relative to the time, neither below 0."""
    if len({n for n, _ in points}) < 2:
        return max(0.0, median([s for _, s in points])) if points else 0.0, 0.0
    rows, seconds = (np.array(column, float) for column in zip(*points))
    row_s = max(0.0, float(np.polyfit(rows, seconds, 1)[0]))
    return max(0.0, float(np.median(seconds - row_s * rows))), row_s


def _grid(measured: Mapping[tuple[int, int], list[float]]) -> Shares:
    """Every row count with every number of keys; a place that was not measured has the nearest one's share of its row count, else of all."""
    found = {place: median(shares) for place, shares in measured.items()}
    rows, keys = sorted({r for r, _ in found}), sorted({k for _, k in found})

    def at(r: int, k: int) -> float:
        place = min(found, key=lambda p: (abs(np.log(p[0] / r)), abs(np.log(p[1] / k))))
        return found[place]

    return Shares(tuple(rows), tuple(keys), tuple(tuple(at(r, k) for k in keys) for r in rows))
