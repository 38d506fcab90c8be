"""Clocks of real steps on CUDA: events tell what the device did, the engine's laps why it stood still; both sum to the host's wall time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import pytest
import torch

from flatout import LLM, SamplingParams
from flatout.ledger.laps import IDLE
from flatout.ledger.ledger import Ledger
from flatout.step import StepRecord

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def llm(request: pytest.FixtureRequest, default_model: object) -> Iterator[LLM]:
    options = {"max_model_len": 2048, "gpu_memory_utilization": 0.3, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    with LLM("smollm2", enforce_eager=request.param, **options) as llm:
        yield llm


def steps_of(llm: LLM, prompts: list[list[int]], tokens: int) -> list[StepRecord]:
    llm.engine.records.clear()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False, cache_salt=str(time.monotonic()))
    return list(llm.engine.records)


LOADS = {
    "batch 1": ([[5] * 100], 200),
    "batch 8": ([[i + 5] * 100 for i in range(8)], 200),
    "batch 64": ([[i + 5] * 20 for i in range(64)], 200),
    "mixed": ([[i + 5] * (10 + 137 * i % 1500) for i in range(64)], 50),
}


@pytest.mark.parametrize("load", LOADS)
def test_parts_sum_to_the_wall_time(llm: LLM, load: str) -> None:
    steps_of(llm, *LOADS[load])  # kernels and graphs of this load
    records = steps_of(llm, *LOADS[load])
    span = records[-1].ended - records[0].ended
    assert sum(r.wall_s for r in records[1:]) == pytest.approx(span, rel=0.05, abs=0.005)
    shares = [(r.device_s + r.handover_s + sum(r.exposed.values())) / r.wall_s for r in records[1:]]
    assert 0.95 <= median(shares) <= 1.05, (load, sorted(shares)[:: len(shares) // 10])
    ledger = Ledger(llm.engine.costs)
    for record in records[1:]:
        ledger.add(record)
    total = ledger.total()
    assert sum(total.parts.values()) == pytest.approx(total.seconds)
    assert abs(total.parts["residual"]) < 0.05 * span


def test_time_without_work_is_idle(llm: LLM) -> None:
    steps_of(llm, [[5] * 20], 4)
    time.sleep(0.5)
    first = steps_of(llm, [[6] * 20], 4)[0]
    assert first.wall_s >= 0.5 and first.exposed[IDLE] >= 0.45


def test_a_slow_stage_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = llm.engine.scheduler.commit

    def slowly(*args: object) -> object:
        time.sleep(0.03)
        return commit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.scheduler, "commit", slowly)
    records = steps_of(llm, [[7] * 20], 20)[2:]
    assert median(r.exposed.get("commit", 0.0) for r in records) >= 0.02


def test_deep_steps_name_ops(llm: LLM) -> None:
    steps_of(llm, [[5] * 300], 4)
    llm.engine.deep(3)
    records = steps_of(llm, [[6] * 300], 6)
    deep = [r for r in records if r.ops]
    assert len(deep) == 3
    # for 15 ms each the device was kept waiting for the host to get ahead: no part of a step
    assert median(r.handover_s for r in deep) < 0.005
    ledger = Ledger(llm.engine.costs)
    for record in deep:
        assert record.ops is not None and 0 < sum(seconds for _, seconds in record.ops) <= record.device_s * 1.05
        ledger.add(record)
    labels = " ".join(op.label for op in ledger.total().ops)
    assert "attention" in labels and "mlp.down" in labels and "attn.qkv" in labels
    # graphs go on after them, with the tokens that they would have made
    assert {r.graph for r in records[-2:]} <= {"hit", "padded", ""}
