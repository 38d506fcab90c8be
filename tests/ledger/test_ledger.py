"""The ledger without an engine: laps cover every moment, parts sum to the wall time, windows add up, ops get their names, requests theirs."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from flatout.ledger.account import Marks, SequenceTimes, account_of
from flatout.ledger.laps import IDLE, Laps
from flatout.ledger.ledger import PARTS, Ledger, Sums, account
from flatout.ledger.table import CostTable, OpCost, Roof, Terms, shape_of
from flatout.request import NEXT_PLAN, PREEMPTED, Timing
from flatout.step import StepRecord

NO = Terms()


def op(name: str, part: str, rows: str = "tokens", weights: int = 0, flops: int = 0) -> OpCost:
    return OpCost(name, part, "", 1, rows, -1, "bfloat16", Terms(constant=weights), NO, NO, Terms(row=flops))


# a layer twice over: two products and the head of sampled rows
OPS = (op("linear", "a", weights=1000, flops=10), op("linear", "b", weights=3000, flops=10), op("linear", "head", "sampled", weights=500))
TABLE = CostTable("m", OPS, (0, 1, 2), (None,), Roof("r", ((1 << 30, 1e6),), {"bfloat16": 1e6}))


def record(rows: int = 4, ended: float = 10.0, **changes: object) -> StepRecord:
    fields = {
        "device_s": 0.010, "python_s": 0.001, "sample_s": 0.0005, "handover_s": 0.0002,
        "exposed": {"inputs": 0.0005, "commit": 0.0003, IDLE: 0.002},
        "tokens": rows, "rows": rows, "decodes": rows, "sampled": rows, "kv_tokens": 10 * rows,
        "keys": (10 * rows,), "pairs": (10 * rows,), "last_keys": (10 * rows,), "graph": "hit", "blocks_total": 8, "blocks_used": 2,
        **changes,
    }  # fmt: skip
    done = StepRecord(1, ended - 0.02, ended, **fields)  # type: ignore[arg-type]
    done.wall_s = done.wall_s or done.device_s + done.handover_s + sum(done.exposed.values())
    return done


def test_laps_leave_nothing_out() -> None:
    laps, random_ = Laps(), random.Random(0)
    begin = laps.mark("schedule")
    times = [begin]
    for _ in range(200):
        for stage in random_.sample(("drain", "schedule", "launch", "wait", "commit", "deliver", IDLE), 3):
            times.append(laps.mark(stage))
        low = random_.uniform(begin, times[-1])
        found = laps.exposed(low, times[-1])
        assert sum(found.values()) == pytest.approx(times[-1] - low, abs=1e-9)
        begin = low
    assert sum(laps.spent().values()) == pytest.approx(times[-1], rel=1e-6)  # from the beginning of the clock on
    assert not laps.spent()


def test_laps_name_the_stage() -> None:
    laps = Laps()
    a = laps.mark("commit")
    time.sleep(0.01)
    b = laps.mark("commit")  # again the same: goes on
    time.sleep(0.01)
    c = laps.mark("wait")
    assert laps.exposed(a, c) == pytest.approx({"commit": c - a}) and b > a
    assert laps.exposed(c, c + 5) == pytest.approx({"wait": 5})  # until it is said otherwise
    assert laps.exposed(c + 5, c + 5) == {}


def test_parts_sum_to_the_wall_time() -> None:
    sums = Sums()
    for rows in (1, 3, 4, 4):
        sums.add(record(rows))
    found = account(sums, TABLE)
    assert tuple(found.parts) == PARTS and min(found.parts.values()) >= 0
    assert found.seconds == pytest.approx(sums.wall) == pytest.approx(sum(found.parts.values()))
    assert found.parts["residual"] == pytest.approx(0, abs=1e-12)
    # 4,500 bytes at 1 MB/s, of which each of a and b takes 20 to 80 us for FLOPs
    assert found.parts["floor_bandwidth"] == pytest.approx(4 * 4500e-6) and found.parts["floor_compute"] == 0
    assert found.parts["launch"] == pytest.approx(4 * 0.0012) and found.parts["idle"] == pytest.approx(4 * 0.002)
    assert found.of_floor == pytest.approx(4 * 4500e-6 / (sums.wall - 0.008))


def test_what_no_clock_saw_is_residual() -> None:
    sums = Sums()
    sums.add(record(wall_s=0.5))
    assert account(sums, TABLE).parts["residual"] == pytest.approx(0.5 - 0.013)


def test_faster_than_the_roof_is_no_negative_part() -> None:
    sums = Sums()
    sums.add(record(device_s=0.003, python_s=0.0, sample_s=0.0))
    found = account(sums, TABLE)
    assert found.parts["kernels"] == pytest.approx(0, abs=1e-12) and found.of_floor > 1
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_padding_is_named() -> None:
    padded, whole = Sums(), Sums()
    heavy = CostTable("m", (op("linear", "a", flops=1000),), (0,), (None,), TABLE.roof)
    padded.add(record(rows=3, padded=1, graph="padded"))
    whole.add(record(rows=4))
    assert account(padded, heavy).parts["padding"] == pytest.approx(0.0085 / 4) and account(whole, heavy).parts["padding"] == 0


def test_windows_and_the_start() -> None:
    now = 100.5
    ledger = Ledger(TABLE, clock=lambda: now)
    for second in range(100, 200):
        for i in range(3):
            ledger.add(record(ended=second + i / 4))
    now = 200.5
    assert [ledger.window(seconds).steps for seconds in (1, 10, 60)] == [3, 30, 180]
    assert ledger.total().steps == 300
    last = ledger.window(10)
    assert last.seconds == 10 == pytest.approx(sum(last.parts.values()))
    assert last.parts["idle"] == pytest.approx(10 - 30 * 0.011)  # nothing was there but these steps
    assert ledger.window(10, busy=True).parts["underway"] == pytest.approx(10 - 30 * 0.013)
    assert ledger.window(1).waiting == {}


def test_ops_are_named_by_the_table() -> None:
    ledger = Ledger(TABLE, clock=lambda: 10.0)
    ledger.add(record())
    ledger.add(record(ops=[("inputs", 0.0005), ("linear", 0.002), ("linear", 0.005), ("linear", 0.001)]))
    found = {op.label: op for op in ledger.total().ops}
    assert set(found) == {"inputs", "linear a", "linear b", "linear head"}
    # the deep step's 8.5 ms stand for both
    assert found["linear b"].seconds == pytest.approx(0.010) and found["linear b"].floor == pytest.approx(0.006)
    assert sum(op.seconds for op in found.values()) == pytest.approx(2 * 0.0085)
    assert next(iter(ledger.total().ops)).label == "linear b"  # most over its floor first
    ledger.add(record(tokens=40, rows=4, decodes=0, ops=[("linear", 0.02)]))  # another count of calls: one name for all
    assert "linear" in {op.label for op in ledger.total().ops}


MOMENTS = {"accepted": 1.0, "parsing": 1.1, "sent": 1.3, "texted": 9.2, "ended": 9.5}


def test_a_requests_parts_sum() -> None:
    timing = Timing(1.15, 3.0, 4.0, 9.0, {"slots": 1.2, "policy": 0.3, NEXT_PLAN: 0.35, PREEMPTED: 2.0}, chunks=3)
    times = SequenceTimes(timing, 4.1, 9.1, tokens=11, texted=9.2, cached_tokens=16, miss_reason="differs at token 20", preemptions=1)
    found = account_of(Marks(**MOMENTS, detokenise_s=0.4, stalled_s=2.0, late_stall_s=0.2), [times], 30, 99.0)
    wanted = {
        "accept": 0.1, "tokenise": 0.2, "queue slots": 1.2, "queue policy": 0.3, "queue next plan": 0.2, "prefill": 1.0, "decode": 3.0,
        "preempted": 2.0, "detokenise": 0.2, "client": 0.2, "reply": 0.1,
    }  # fmt: skip
    assert found.parts == pytest.approx(wanted) and found.total == pytest.approx(8.5) == pytest.approx(sum(found.parts.values()))
    assert (found.ttft, found.tpot) == pytest.approx((3.1, 0.5))
    plain = found.plain()
    assert plain["total_ms"] == 8500 and plain["cache_miss"] == "differs at token 20" and plain["preemptions"] == 1


@pytest.mark.parametrize(
    "timing",
    [None, Timing(1.2, 0, 0, 0), Timing(1.2, 2.0, 0, 0), Timing(1.2, 2.0, 3.0, 0), Timing(1.2, 2.0, 3.0, 4.0), Timing(9.0, 9.9, 0.5, 20.0)],
)
@pytest.mark.parametrize("unset", [(), ("ended",), ("ended", "texted"), ("ended", "texted", "sent")])
def test_a_requests_parts_sum_whatever_is_known(timing: Timing | None, unset: tuple[str, ...]) -> None:
    """Given up at any moment, ended by a stop string that the engine did not know, or with clocks that lie."""
    moments = {**MOMENTS, **dict.fromkeys(unset, 0.0)}
    found = account_of(Marks(**moments), [SequenceTimes(timing), SequenceTimes(None)], 5, 9.6)
    assert sum(found.parts.values()) == pytest.approx(found.total) == pytest.approx((moments["ended"] or 9.6) - 1.0)
    assert min(found.parts.values()) >= 0


@pytest.mark.parametrize("seed", range(5))
def test_shapes_of_decodes_add_up(seed: int) -> None:
    """A step of decodes alone is told by a shorter way: it is the sum of its rows, and that of the same rows beside a chunk less the chunk."""
    rng = np.random.default_rng(seed)
    starts, windows = rng.integers(0, 3000, 17).astype(np.int32), (None, 512)
    ones, yes = np.ones(17, np.int32), np.ones(17, bool)
    alone = shape_of(starts, ones, yes, windows, padded=3)
    chunk = np.array([100], np.int32), np.array([700], np.int32), np.array([False])
    beside = shape_of(*(np.append(a, b) for a, b in zip((starts, ones, yes), chunk)), windows)
    only = shape_of(*chunk, windows)
    for name in ("tokens", "sampled", "requests", "decodes"):
        assert getattr(alone, name) == getattr(beside, name) - getattr(only, name)
    for name in ("keys", "pairs", "last_keys"):
        assert getattr(alone, name) == tuple(a - b for a, b in zip(getattr(beside, name), getattr(only, name)))
    assert alone.padded == 3
