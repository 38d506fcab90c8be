"""Clocks of real steps on the CPU: each step's parts sum to its wall time, at any batch; what is told of rows, ops and graphs is so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import pytest

from flatout import LLM, SamplingParams
from flatout.ledger.laps import IDLE
from flatout.ledger.ledger import Ledger, Sums, account
from flatout.runner.runner import DEEP_EVERY
from flatout.step import StepRecord


@pytest.fixture(scope="module")
def llm(default_model: object) -> Iterator[LLM]:
    with LLM("smollm2", threads=1, max_model_len=512, num_gpu_blocks_override=600, max_num_batched_tokens=256, max_num_seqs=64) as llm:
        yield llm


def steps_of(llm: LLM, prompts: list[list[int]], tokens: int, **params: object) -> list[StepRecord]:
    llm.engine.records.clear()
    given = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    llm.generate(prompts, given, use_tqdm=False, cache_salt=str(time.monotonic()))
    return list(llm.engine.records)


LOADS = {
    "batch 1": ([[5] * 20], 40),
    "batch 8": ([[i + 5] * 20 for i in range(8)], 20),
    "batch 64": ([[i + 5] * 3 for i in range(64)], 8),
    "mixed": ([[i + 5] * (10 + 37 * i % 300) for i in range(16)], 12),
}


@pytest.mark.parametrize("load", LOADS)
def test_parts_sum_to_the_wall_time(llm: LLM, load: str) -> None:
    records = steps_of(llm, *LOADS[load])
    # the wall time of a step is between two ends on the compute thread; the engine's thread sees them a little later
    span = records[-1].ended - records[0].ended
    assert sum(r.wall_s for r in records[1:]) == pytest.approx(span, rel=0.05, abs=0.02)
    shares = [(r.device_s + r.handover_s + sum(r.exposed.values())) / r.wall_s for r in records[1:]]
    assert 0.95 <= median(shares) <= 1.05
    for record in records:
        # exposed inputs are the compute thread's own and a hand-over of the engine's
        assert record.device_s >= record.python_s + record.sample_s > 0 and record.python_s > 0
        assert record.exposed["inputs"] >= record.inputs_s > 0
    ledger = Ledger(llm.engine.costs)
    for record in records:
        ledger.add(record)
    total = ledger.total()
    assert sum(total.parts.values()) == pytest.approx(total.seconds)
    loaded = sum(r.wall_s for r in records) - total.parts["idle"]
    assert abs(total.parts["residual"]) < 0.05 * max(loaded, sum(r.wall_s for r in records[1:]))
    if load == "mixed":
        assert any(r.decodes and r.prefill_tokens for r in records)


def test_time_without_work_is_idle(llm: LLM) -> None:
    steps_of(llm, [[5] * 20], 4)
    time.sleep(0.5)
    first = steps_of(llm, [[6] * 20], 4)[0]
    assert first.wall_s >= 0.5 and first.exposed[IDLE] >= 0.45


@pytest.mark.parametrize("stage", ["schedule", "commit", "deliver"])
def test_a_slow_stage_is_named(llm: LLM, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds up the device is exposed under its name; the plain loop, one step after the other, hides nothing."""
    monkeypatch.setattr(llm.engine, "_ahead", 0)
    scheduler = llm.engine.scheduler
    if stage == "deliver":
        push = llm._step

        def late() -> object:
            time.sleep(0.03)
            return push()

        monkeypatch.setattr(llm, "_step", late)
    else:
        before = getattr(scheduler, stage)

        def slowly(*args: object) -> object:
            time.sleep(0.03)
            return before(*args)

        monkeypatch.setattr(scheduler, stage, slowly)
    records = steps_of(llm, [[7] * 20], 10)[2:]
    assert median(r.exposed.get(stage, 0.0) for r in records) >= 0.025
    sums = Sums()
    for record in records:
        sums.add(record)
    parts = account(sums, llm.engine.costs).parts
    assert max((name for name in parts if name.startswith("host_")), key=parts.__getitem__) == f"host_{stage}"


def test_ops_of_deep_steps(llm: LLM) -> None:
    llm.engine.deep(2)
    deep = [r for r in steps_of(llm, [[5] * 40], 6) if r.ops]
    assert len(deep) >= 2  # the prompt's and a decode
    for record in deep:
        assert record.ops is not None
        names = [name for name, _ in record.ops]
        assert sum("norm" in name for name in names) >= llm.spec.num_layers and min(seconds for _, seconds in record.ops) >= 0
        native = record.device_s - record.python_s - record.sample_s
        assert sum(seconds for _, seconds in record.ops) == pytest.approx(native, rel=0.1)
    ledger = Ledger(llm.engine.costs)
    for record in deep:
        ledger.add(record)
    named = {op.label.split()[1] for op in ledger.total().ops if " " in op.label}
    assert {"attn.qkv", "attn.o", "mlp.gate_up", "mlp.down", "head"} <= named
    assert all(op.floor <= 2 * op.seconds for op in ledger.total().ops if op.floor > 1e-4)
    # and by itself one step in many
    assert sum(r.ops is not None for r in steps_of(llm, [[5]], DEEP_EVERY + 2)) >= 1


def test_counts(llm: LLM) -> None:
    records = steps_of(llm, [[5] * 300, [6] * 20], 5)
    assert records[0].tokens == records[0].prefill_tokens + records[0].sampled == 256 and records[0].graph == "missed"
    assert sum(r.sampled for r in records) == 10 and sum(r.prefill_tokens for r in records) == 320 - 2
    last = records[-1]
    assert (last.graph, last.padded, last.rows) == ("hit", 0, last.decodes) and last.keys == last.pairs == last.last_keys == (
        last.kv_tokens,
    )


def test_recording_can_be_switched_off(llm: LLM) -> None:
    llm.engine.recording = False
    try:
        assert steps_of(llm, [[5] * 20], 4) == []
    finally:
        llm.engine.recording = True
    records = steps_of(llm, [[5] * 20], 4)
    assert len(records) == 4 and all(0.95 <= (r.device_s + r.handover_s + sum(r.exposed.values())) / r.wall_s <= 1.05 for r in records[1:])


def test_preemptions_and_waits_are_told(default_model: object) -> None:
    """A pool of one sequence and a half: who waits for what, and that all of it is in the request's times."""
    with LLM("smollm2", threads=1, max_model_len=256, num_gpu_blocks_override=9, block_size=16, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate([[i + 5] * 40 for i in range(4)], params, use_tqdm=False)
        records = list(llm.engine.records)
    assert sum(r.preempted for r in records) == sum(o.preemptions for o in outputs) > 0
    assert {"slots", "blocks"} & set().union(*(r.waiting for r in records))
    for output in outputs:
        timing = output.timing
        assert timing is not None
        queued = sum(seconds for reason, seconds in timing.waited.items() if reason != "preempted")
        assert queued == pytest.approx(timing.first_scheduled - timing.arrival, abs=1e-6)
        assert ("preempted" in timing.waited) == bool(output.preemptions)
        assert timing.chunks >= 1 + output.preemptions
