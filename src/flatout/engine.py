"""The loop: schedule, launch, commit the step before. One step ahead of the device, or plain (async_scheduling off).

Holds a Scheduler and a Runner and records each step; decides nothing itself and never sees text. Called by llm.py in-process and by
server/child.py in the engine process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flatout.config import Config, resolve
from flatout.core.scheduler import Scheduler
from flatout.hardware import detect
from flatout.ledger.laps import IDLE, Laps
from flatout.ledger.table import CostTable, shape_of
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.request import FinishReason, ModelFacts, Output, Request
from flatout.runner.build import abilities, build
from flatout.runner.runner import Handle, Timed
from flatout.step import StepPlan, StepRecord

RECORDS_KEPT = 4096
FAILURES_ALLOWED = 3  # steps in a row: more is a broken device, not a bad request


@dataclass(slots=True)
class _Flight:
    """A launched step, not yet committed."""

    plan: StepPlan
    handle: Handle
    record: StepRecord | None


class Engine:
    """Construct (loads the model), add() requests, step() until has_work is false. Not thread-safe: one thread drives it.

    Raises ConfigError or ModelFileError when it can't be built.
    """

    def __init__(self, config: Config, source: ModelSource | None = None, before: Mapping[str, float] | None = None):
        """before: seconds of what was done for this start already, by phase."""
        begin = time.perf_counter()
        self.source = source or resolve_model(config.model)
        hardware = detect(config.device.device)
        self.config, self.decisions = resolve(config, self.source.spec, hardware, **abilities(self.source))
        model, cache = self.config.model, self.config.cache
        assert model.max_model_len
        self.spec = self.source.spec.for_length(model.max_model_len)
        resolved = time.perf_counter()
        built = build(self.config, self.source, self.spec, hardware)
        self.runner = built.runner
        self.weight_bytes = built.weight_bytes
        self._costs = built.costs
        self.scheduler = Scheduler(num_blocks=built.num_blocks, **self.config.scheduling())
        self.facts = ModelFacts(
            model=self.source.name,
            vocab_size=self.spec.vocab_size,
            max_model_len=model.max_model_len,
            pool_tokens=built.num_blocks * cache.block_size,
            block_size=cache.block_size,
            eos_ids=self.spec.eos_ids,
            sampling_defaults=dict(self.spec.sampling_defaults) if model.generation_config == "auto" else {},
        )
        self.seconds = {**(before or {}), "config": resolved - begin, **built.seconds}
        self.start_lines = [
            *self.source.notices,
            *built.lines,
            *(f"{d.field} = {d.value}: {d.reason}" for d in self.decisions),
            "ready after " + ", ".join(f"{name} {s:.2f} s" for name, s in self.seconds.items()),
        ]
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.recording = True  # off, steps leave no record: to measure what recording costs
        self.windows = tuple(group.window for group in self.spec.cache_groups())
        self._laps = Laps()
        self._flights: deque[_Flight] = deque()  # oldest first; one is left in the air when stepping ahead
        self._ahead = int(self.config.scheduler.async_scheduling)
        self._steps = 0
        self._failures = 0  # steps failed in a row
        self.failure: Exception | None = None  # what keeps failing, for whoever can start over; None once a step succeeds
        self._closed = False

    @cached_property
    def costs(self) -> CostTable:
        """What each step's ops must do, and the machine's ceilings. The first time it takes 0.1 s."""
        return self._costs()

    @property
    def settings(self) -> dict[str, Any]:
        """What the doctor's rules hold steps against (ledger/rules.py): resolved settings, sizes in blocks and bytes, and the start's seconds by phase."""
        cache, scheduler, device = self.config.cache, self.config.scheduler, self.config.device
        return {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "block_size": cache.block_size,
            "num_blocks": self.scheduler.blocks.num_blocks,
            "weight_bytes": self.weight_bytes,
            "device": self.runner.device.type,
            "threads": device.threads,
            "start": self.seconds,
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def add(self, requests: list[Request]) -> None:
        """The n samples of one user request. Raises RequestError if they can never fit."""
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")
        self.mark("drain")
        self.scheduler.add(requests)

    def mark(self, stage: str) -> None:
        """The thread that drives this engine begins a stage (ledger/laps.py) of which only it knows: "drain", "deliver", "idle"."""
        if self.recording:
            self._laps.mark(stage)

    def state(self) -> dict[str, Any]:
        """How it stands, in numbers: server/mailbox.py:EngineState."""
        scheduler = self.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.waiting,
            "blocks_used": scheduler.blocks.num_used,
            "blocks_total": scheduler.blocks.num_blocks,
            "blocks_cached": scheduler.blocks.num_cached,
            "evictions": scheduler.blocks.evictions,
            "steps": self._steps,
            "preemptions": scheduler.counters.preemptions,
            "prefix_queries": scheduler.counters.prefix_queries,
            "prefix_hits": scheduler.counters.prefix_hits,
        }

    def deep(self, steps: int) -> None:
        """So many steps from the next one on tell their ops apart. On CUDA they run op by op."""
        self.runner.deep_steps = steps

    def abort(self, id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT, stop_reason: str | None = None) -> None:
        """End a request (or one sample of it) now; what is in flight for it is dropped. Unknown ids are past their end: nothing happens."""
        self.scheduler.abort(id, index, reason, stop_reason)

    def step(self) -> list[Output]:
        """Plan and launch a step, then commit one: the step before it, or itself when not async. A step that fails ends its own requests."""
        self.mark("schedule")
        begin = time.perf_counter()
        preempted = self.scheduler.counters.preemptions
        plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            self._steps += 1
            record = self._record(plan, begin, preempted) if self.recording else None
            self.mark("launch")
            self._flights.append(_Flight(plan, self._launch(plan), record))
        outputs: list[Output] = []
        if len(self._flights) > (self._ahead if plan is not None else 0):
            outputs = self._commit(self._flights.popleft())
        self.mark("deliver" if self.has_work else IDLE)
        return outputs

    def _record(self, plan: StepPlan, begin: float, preempted: int) -> StepRecord:
        shape = shape_of(plan.starts, plan.counts, plan.samples, self.windows)
        return StepRecord(
            step=self._steps,
            start=begin,
            schedule_s=time.perf_counter() - begin,
            tokens=plan.num_tokens,
            rows=len(plan.slots),
            prefill_tokens=shape.tokens - shape.sampled,
            decodes=shape.decodes,
            sampled=shape.sampled,
            kv_tokens=max(shape.keys) if None in self.windows else int(plan.starts.sum()) + shape.tokens,
            keys=shape.keys,
            pairs=shape.pairs,
            last_keys=shape.last_keys,
            running=self.scheduler.num_running,
            blocks_used=self.scheduler.blocks.num_used,
            blocks_total=self.scheduler.blocks.num_blocks,
            preempted=self.scheduler.counters.preemptions - preempted,
            waiting=plan.waiting,
        )

    def _launch(self, plan: StepPlan) -> Handle:
        """A step that fails to launch fails when it is committed, like one that fails on the device."""
        try:
            return self.runner.launch(plan)
        except Exception as error:
            failure = error

        def fail() -> Timed:
            raise failure

        return fail

    def _commit(self, flight: _Flight) -> list[Output]:
        begin = time.perf_counter()
        self.mark("wait")
        try:
            timed = flight.handle()
        except Exception as error:
            return self._fail(flight.plan, error)
        self._failures, self.failure = 0, None
        waited = time.perf_counter()
        self.mark("commit")
        outputs = self.scheduler.commit(flight.plan, timed.result, time.monotonic())
        if flight.record is not None:
            flight.record.wait_s, flight.record.commit_s = waited - begin, time.perf_counter() - waited
            self._keep(flight.record, timed, waited)
        return outputs

    def _keep(self, record: StepRecord, timed: Timed, waited: float) -> None:
        """The record with what the runner's clocks and the laps say; the last of the laps belong to steps around it."""
        record.inputs_s, record.launch_s, record.device_s = timed.inputs_s, timed.launch_s, timed.device_s
        record.sample_s, record.python_s, record.handover_s = timed.sample_s, timed.python_s, timed.handover_s
        record.graph, record.padded, record.ops, record.threads = timed.graph, timed.padded, timed.ops, timed.threads
        record.wall_s = timed.wall_s
        record.ended = waited
        record.exposed = self._laps.exposed(timed.begun - timed.gap_s, timed.begun - timed.handover_s)
        # the engine's thread hands a step over once its inputs are made, or hands the making of them over, too
        alone = timed.inputs_s if self.runner.makes_inputs_alone else 0.0
        record.exposed["inputs"] = record.exposed.pop("launch", 0.0) + alone
        spent = self._laps.spent()
        record.drain_s, record.deliver_s = spent.get("drain", 0.0), spent.get("deliver", 0.0)
        self.records.append(record)

    def _fail(self, plan: StepPlan, error: Exception) -> list[Output]:
        """A step that raised ends the requests it held, each with an Output that says so, and nobody else's."""
        ended = self.scheduler.fail(plan)
        self._failures += 1
        if self._failures >= FAILURES_ALLOWED:
            self.failure = error
        reason = f"the step failed: {type(error).__name__}: {error}"
        return [Output(r.id, r.index, [], finish_reason=FinishReason.ERROR, prompt_tokens=len(r.prompt_ids), error=reason) for r in ended]

    def close(self) -> None:
        """Stop the compute thread, when the steps in the air are done. The device's memory goes with the object."""
        self._closed = True
        self._flights.clear()
        self.runner.close()
