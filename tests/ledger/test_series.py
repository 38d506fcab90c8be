"""The ledger by seconds, and the roofline: nothing gets lost where steps are longer than a second, and points lie where the arithmetic puts them."""

from __future__ import annotations

import pytest
from test_ledger import OPS, TABLE, record

from flatout.ledger.ledger import Account, Ledger, Sums, account
from flatout.ledger.roofline import roofline
from flatout.ledger.series import series
from flatout.ledger.table import CostTable, Roof


def told(**fields: object) -> Account:
    sums = Sums()
    sums.add(record(**fields))  # type: ignore[arg-type]
    return account(sums, TABLE)


def busy(seconds: float, idle: float = 0.0) -> Account:
    return told(device_s=seconds, exposed={"idle": idle}, handover_s=0.0)


def test_seconds_without_an_end_belong_to_the_next_step() -> None:
    points = series([(100, busy(1.0)), (104, busy(4.0))], 0, 105, busy=True)
    assert [p.second for p in points] == [100, 101, 102, 103, 104]
    assert [sum(p.parts.values()) for p in points] == pytest.approx([1.0] * 5)
    assert sum(p.sampled for p in points) == pytest.approx(8) and points[1].sampled == pytest.approx(1)
    assert all(p.parts["idle"] == 0 for p in points)


def test_idleness_comes_before_the_work() -> None:
    points = series([(100, busy(1.0)), (110, busy(1.5, idle=8.5))], 0, 111, busy=False)
    assert [p.parts["idle"] for p in points[1:]] == pytest.approx([1.0] * 8 + [0.5, 0.0])
    assert [p.rows for p in points[1:9]] == [0.0] * 8 and points[-1].rows == 4


def test_the_open_end() -> None:
    closed = [(100, busy(1.0))]
    assert [p.parts for p in series(closed, 0, 103, busy=True)[1:]] == [{"underway": 1.0}] * 2
    assert [p.parts for p in series(closed, 0, 103, busy=False)[1:]] == [{"idle": 1.0}] * 2
    assert series([], 0, 103, busy=False) == []
    assert [p.second for p in series(closed, 101, 103, busy=False)] == [101, 102], "from the second that was asked for"
    assert len(series([(10, busy(1.0)), (500, busy(1.0, idle=489.0))], 490, 501, busy=False)) == 11


def test_a_first_step_after_long_idleness() -> None:
    points = series([(100, busy(0.5, idle=4.5))], 0, 101, busy=False)
    assert [p.second for p in points] == [96, 97, 98, 99, 100]
    assert [p.parts["idle"] for p in points] == pytest.approx([1, 1, 1, 1, 0.5])


def test_closed_seconds() -> None:
    now = 100.5
    ledger = Ledger(TABLE, clock=lambda: now)
    for ended in (100.2, 101.1, 101.9, 103.4):
        ledger.add(record(ended=ended))
    now = 103.6
    assert [(second, sums.steps) for second, sums in ledger.closed()] == [(100, 1), (101, 2)]
    assert ledger.sums(10).steps == 3


def test_points_of_the_roofline() -> None:
    sums = Sums()
    for _ in range(3):
        sums.add(record(4))
    sums.add(record(1, tokens=8, prefill_tokens=8, decodes=0, sampled=1, device_s=0.02))
    found = roofline(sums, TABLE)
    assert (
        found is not None
        and found["bandwidth"] == 1e6
        and found["flops"] == {"bfloat16": 1e6}
        and set(found["points"]) == {"decode", "prefill"}
    )
    decode = found["points"]["decode"]  # 80 FLOPs and 4,500 bytes a step, in 10 ms
    assert decode["steps"] == 3 and decode["intensity"] == pytest.approx(80 / 4500) and decode["flops_per_s"] == pytest.approx(8000)
    assert decode["of_roof"] == pytest.approx(8000 / (1e6 * 80 / 4500))
    assert found["points"]["prefill"]["flops_per_s"] == pytest.approx(160 / 0.02)


def test_no_roof_without_a_ceiling() -> None:
    assert roofline(Sums(), CostTable("m", OPS, (0, 1, 2), (None,), Roof("r", ()))) is None
    empty = roofline(Sums(), TABLE)
    assert empty is not None and empty["points"] == {}
