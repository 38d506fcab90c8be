"""The doctor's rules over signals made by hand: each names its fault with the number and the flag, and says nothing of a healthy server."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.ledger.heads import Heads
from flatout.ledger.ledger import PARTS, Account, Ledger
from flatout.ledger.pulse import Pulse
from flatout.ledger.rules import all_rules, judge
from flatout.ledger.signals import Signals
from flatout.ledger.table import CostTable, OpCost, Roof, Terms
from flatout.ledger.usual import ANEW, Usual
from flatout.ledger.verdict import verdict_from
from flatout.ledger.vitals import Vitals, machine
from flatout.step import StepRecord

NO = Terms()
# a step reads 1 MB of weights at 1 GB/s, and each row takes 20 us of arithmetic
OPS = (OpCost("linear", "all", "", 1, "tokens", -1, "bfloat16", Terms(constant=1_000_000), NO, NO, Terms(row=20_000)),)
TABLE = CostTable("m", OPS, (0,), (None,), Roof("r", ((1 << 30, 1e9),), {"bfloat16": 1e9}))
SETTINGS = {
    "max_num_seqs": 64, "max_num_batched_tokens": 1024, "enable_chunked_prefill": True, "enable_prefix_caching": True, "block_size": 16,
    "num_blocks": 1000, "weight_bytes": 100_000_000, "device": "cpu", "threads": 2, "start": {"weights": 0.2},
}  # fmt: skip


def account(parts: dict[str, float] | None = None, **changes: Any) -> Account:
    """Ten seconds of 800 steps, eight requests in each."""
    whole = {
        **dict.fromkeys(PARTS, 0.0),
        "floor_bandwidth": 5.0,
        "kernels": 4.0,
        "idle": 0.6,
        "host_schedule": 0.2,
        "sample": 0.2,
        **(parts or {}),
    }
    known = dict(
        seconds=10.0, steps=800, parts=whole, of_floor=0.55, ops=[], host={"schedule": 1.0}, waiting={}, rows=8.0, blocks=0.1, tokens=7000,
        prefill_tokens=600, sampled=6400, padded=0, preempted=0, graphs={}, decode_s=8.0, chunk_s=1.0, decode_rows=8.0, rejected=0, chunks=20,
        chunk_tokens=800, held=0.4, longest=0.06, largest=60, stalls=0, stalled={}, cold=0.0,
    )  # fmt: skip
    return Account(**{**known, **changes})


GREW = {
    "requests": 100, "ended": 100, "e2e_s": 80.0, "part.tokenise": 0.2, "part.decode": 70.0, "prompt_tokens": 600, "completion_tokens": 6400,
    "detokenise_s": 0.3, "log_s": 0.01, "looks": 40, "loop_late_s": 0.04, "engine.cpu_s": 18.0, "front.cpu_s": 1.0, "engine.core_wait_s": 0.6,
    "engine.gc_s": 0.01, "machine.busy_s": 19.2, "machine.cores": 0,
}  # fmt: skip


def signals(
    account_: Account | None = None, settings: dict[str, Any] | None = None, late: dict[str, float] | None = None, **grew: float
) -> Signals:
    gauges = {"running": 8, "waiting": 0, "in_flight": 8, "cores": 2.0}
    more = {name.replace("__", "."): value for name, value in grew.items()}
    return Signals(
        account_ or account(),
        TABLE,
        {**SETTINGS, **(settings or {})},
        10.0,
        {**GREW, **more},
        late or {"requests": 50, "ended": 50},
        gauges,
        {},
        1e4,
    )


def first(s: Signals) -> tuple[str, str]:
    verdict = judge(s)[0]
    assert verdict_from(verdict.to_json()) == verdict
    return verdict.constraint, f"{verdict.sentence} {verdict.remedy}"


FAULTS: list[tuple[str, Signals, str]] = [
    ("tokeniser bound", signals(part__tokenise=40.0), "400 ms each"),
    ("detokeniser bound", signals(detokenise_s=8.0), "1.25 ms a token"),
    ("slow clients", signals(client_s=50.0), "62%"),
    ("blocking log", signals(log_s=3.0), "30 ms a request"),
    ("front bound", signals(front__cpu_s=9.5), "95%"),
    ("grammar compiling", signals(**{"part__queue grammar": 30.0}), "38%"),
    ("overload", signals(account({"idle": 0.0}), requests=300, late={"requests": 150, "ended": 50}), "30 a second come, 10 are answered"),
    ("prefix cache off", signals(account(chunk_s=6.0, decode_s=3.0), lost__off=500), "--enable-prefix-caching"),
    ("prefix heads differ", signals(account(chunk_s=6.0, decode_s=3.0), lost__differs=500, parted__7=480, parted__90=20), "part, at token 7"),
    ("salts split the prefix cache", signals(account(chunk_s=6.0, decode_s=3.0), lost__salted=500), "cache_salt"),
    ("prefix cache too small", signals(account(chunk_s=6.0, decode_s=3.0), lost__evicted=500), "larger pool"),
    ("prefix shorter than a block", signals(account(chunk_s=6.0, decode_s=3.0), **{"lost__too short": 500}), "--block-size"),
    ("prompt logprobs bypass the prefix cache", signals(account(chunk_s=6.0, decode_s=3.0), lost__prompt_logprobs=500), "echo"),
    ("host bound", signals(account({"host_schedule": 4.0})), "planning steps"),
    ("host bound", signals(account({"host_deliver": 4.0})), "handing tokens on"),
    ("slots", signals(account(waiting={"slots": 28.0}, rows=4.0, decode_rows=3.9), {"max_num_seqs": 4}), "--max-num-seqs 32, now 4"),
    ("pool too small", signals(account(waiting={"blocks": 5.0}, blocks=0.9), preemptions=20), "20 preemptions"),
    ("budget too small", signals(account(chunks=700, chunk_tokens=21_000, chunk_s=8.0, decode_s=1.0), {"max_num_batched_tokens": 32}), "now 32"),
    ("long prompts stall others", signals(account(longest=3.0, largest=4000, held=40.0)), "4,000 tokens"),
    ("logprobs", signals(account({"sample": 3.0}), logprob_tokens=6400, logprob_entries=6400 * 20), "20 alternatives"),
    ("sampling", signals(account({"sample": 5.0})), "53%"),
    ("stalls", signals(account(stalls=6, stalled={"device": 2.0})), "device's own time"),
    ("stalls", signals(account(stalls=6, stalled={"schedule": 2.0}), engine__gc_s=1.9), "garbage collector"),
    ("page faults", signals(account(stalls=6, stalled={"device": 2.0}), engine__major_faults=3000.0), "300 pages a second"),
    ("drafts rejected", signals(account(rejected=3500)), "50%"),
    ("padding", signals(account({"padding": 3.0, "kernels": 1.0}, padded=3000)), "for nobody"),
    ("communication", signals(account({"communication": 3.0})), "wait for each other"),
    ("graphs missed", signals(account({"launch": 3.0}, graphs={"missed": 700, "hit": 100}), {"device": "cuda"}), "not captured"),
    ("threads unused", signals(None, {"threads": 1}, engine__cpu_s=9.0, machine__busy_s=10.2), "--threads 2, now 1"),
    ("threads over cores", signals(None, {"threads": 8}), "--threads 2, now 8"),
    ("noisy neighbour", signals(engine__cpu_s=9.0, engine__core_wait_s=8.0), "46%"),
    ("cold load", replace(signals(settings={"start": {"weights": 3.0}}), at_start={"disk_read": 9e7}, uptime=12.0), "90 MB"),
    ("cold first requests", replace(signals(), gauges={**signals().gauges, "cold_s": 2.0}, uptime=12.0), "2 s longer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seen", "says"), FAULTS, ids=[f"{i} {name}" for i, (name, _, _) in enumerate(FAULTS)])
def test_each_fault_is_named_first(name: str, seen: Signals, says: str) -> None:
    constraint, text = first(seen)
    assert constraint == name, text
    assert says in text, text


def test_every_rule_is_tried_and_says_what_it_rests_on() -> None:
    rules = all_rules()
    names = [rule.constraint for rule in rules]
    assert len(set(names)) == len(names) and set(names) == {name for name, _, _ in FAULTS}
    for rule in rules:
        assert rule.inputs and rule.origin and rule.remedy and rule.unless, rule.constraint
        assert set(rule.instead_of) <= set(names), rule.constraint


HEALTHY = {
    "decodes": signals(),
    "one stream": signals(account(rows=1.0, decode_rows=1.0, tokens=900, blocks=0.01)),
    "prompts": signals(account({"floor_compute": 6.0, "floor_bandwidth": 1.0}, chunk_s=8.0, decode_s=1.0, chunks=300, chunk_tokens=90_000, prefill_tokens=90_000), prompt_tokens=90_000),
    "shared heads, cached": signals(account(chunk_s=6.0, decode_s=3.0), lost__evicted=100),
    "little": signals(account({"idle": 7.0, "floor_bandwidth": 1.5, "kernels": 1.0, "sample": 0.1})),
    "just started": signals(account(steps=3, cold=0.1)),
    "a few steps of a burst": signals(account(stalls=1, stalled={"device": 0.2})),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong(name: str) -> None:
    found = judge(HEALTHY[name])
    assert [v.healthy for v in found] == [True], found
    assert "Nothing is wrong" in found[0].sentence
    assert ("no load" if name == "little" else "of what this machine can do") in f"{found[0].constraint} {found[0].sentence}"


def test_the_most_time_comes_first_and_what_could_not_be_seen_is_told() -> None:
    both = signals(account({"host_schedule": 4.0}), client_s=8 * 8.0)
    found = judge(both)
    assert [v.constraint for v in found] == ["slow clients", "host bound", "bandwidth-bound decode"]
    assert found[0].factor > found[1].factor > 1 and not found[2].healthy
    blind = replace(both, table=None, grew={k: v for k, v in both.grew.items() if not k.startswith("machine.")})
    assert len(judge(blind)[0].unseen) == 2


def test_a_machine_without_ceilings_has_a_verdict() -> None:
    """A table that tells no time: its roof was never measured."""
    bare = replace(TABLE, roof=Roof("bare", (), {}))
    seen = signals(account(waiting={"slots": 28.0}, rows=4.0, decode_rows=3.9, chunks=700, chunk_tokens=21_000), {"max_num_seqs": 4})
    assert judge(replace(seen, table=bare))[0].constraint == "slots"
    assert judge(replace(HEALTHY["decodes"], table=bare))[0].healthy


def test_an_empty_server_has_a_state() -> None:
    empty = Signals(Ledger(TABLE).window(10))
    assert [v.constraint for v in judge(empty)] == ["no load"]
    stuck = Signals(account(dict.fromkeys(PARTS, 0.0) | {"underway": 10.0}, steps=0))
    assert judge(stuck)[0].constraint == "step under way"


def prompt(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def test_heads_that_were_there() -> None:
    heads, head = Heads(), list(range(100, 200))
    heads.ended(heads.see(prompt(1, *head)), 0, "differs at token 0", 101)
    like = heads.see(prompt(2, *head))
    assert (like.head, like.behind, like.parts_at) == (0, 100, 0)
    heads.ended(like, 0, "differs at token 0", 101)
    assert heads.lost == {"differs": 100} and heads.parted == {0: 100}
    like = heads.see(prompt(2, *head, 5, 6))
    assert like.head == 101
    for reason in ("salted", "off"):
        heads.ended(like, 16, reason, 103)
    heads.ended(like, 96, "", 103)  # all that could be was cached
    assert heads.lost == {"differs": 100, "salted": 85, "off": 85}
    heads.ended(heads.see(prompt(*range(900, 990))), 0, "differs at token 0", 90)  # a new one is nobody's fault
    assert heads.lost["differs"] == 100


def test_usual_steps_stalls_and_first_ones() -> None:
    usual = Usual()

    def excess(seconds: float, rows: int = 1) -> tuple[float, float]:
        return usual.excess((rows, 0), seconds, rows, rows)

    assert excess(1.5, 2) == (0.0, 0.0)
    assert excess(0.02, 1) == (0.0, 0.0), "a smaller one may well be faster"
    assert excess(0.02, 3) == (0.0, 1.48), "the first of its shape took longer than one that did more"
    assert excess(0.03, 2) == (0.0, 0.0)
    stall, cold = excess(0.4)
    assert stall == pytest.approx(0.38, abs=0.01) and not cold
    assert excess(0.02) == (0.0, 0.0)
    for _ in range(ANEW):
        excess(0.4)
    assert excess(0.4) == (0.0, 0.0), "it is what such steps take now"


def test_the_ledger_tells_stalls_and_held_decodes() -> None:
    ledger = Ledger(TABLE, clock=lambda: 20.0)

    def step(rows: int, tokens: int, seconds: float, ended: float, **changes: Any) -> None:
        ledger.add(StepRecord(1, ended - seconds, ended, seconds, device_s=seconds, tokens=tokens, rows=rows, decodes=rows - (tokens > rows),
                              sampled=rows, keys=(tokens,), pairs=(tokens,), last_keys=(rows,), blocks_total=8, **changes))  # fmt: skip

    for i in range(30):
        step(2, 2, 0.01, 10 + i / 100)
    step(2, 2, 0.5, 11.0)
    step(3, 802, 1.0, 12.0, rejected=3)
    found = ledger.total()
    assert (found.stalls, found.chunks, found.largest, found.longest, found.rejected) == (1, 1, 802, 1.0, 3)
    assert found.stalled == {"device": pytest.approx(0.49)} and found.held == pytest.approx(2 * 0.99)


def test_pulse_tells_growth() -> None:
    pulse = Pulse()
    assert pulse.over(10) == (0.0, {})
    for second in range(20):
        pulse.add(second, {"a": 2.0 * second, **({"late": 5.0} if second > 15 else {})})
    assert pulse.over(10) == (10.0, {"a": 20.0, "late": 5.0})
    assert pulse.over(100)[0] == 19.0
    assert not pulse.due(19.1) and pulse.due(19.6)


def test_vitals_count(tmp_path: Path) -> None:
    vitals = Vitals()
    try:
        before = vitals.read()
        gc.collect()
        after = vitals.read()
    finally:
        vitals.close()
    assert after["gc_s"] > before["gc_s"] and after["cpu_s"] >= before["cpu_s"] and after["major_faults"] >= before["major_faults"]
    (tmp_path / "stat").write_text("cpu 1 1 1 1 1 1 1 1\n" + "".join(f"cpu{i} 100 50 25 900 5 3 2 20 0 0\n" for i in range(256)))
    (tmp_path / "vmstat").write_text("pswpin 12\n")
    found = machine(tmp_path)
    assert found["swapped_in"] == 12 and found["busy_s"] > 0 and found["cores"] >= 1
    assert set(machine(tmp_path / "nothing")) == {"cores"}, "what is not told is left out"
