"""Traces hold what the steps did, on one clock; and the largest costs are told in words that are true to the account."""

import gzip
import json
import warnings
from collections import Counter
from itertools import pairwise

import pytest
import torch

from flatout import LLM
from flatout.cli import main
from flatout.doctor import syncs
from flatout.doctor.facts import NotAvailable
from flatout.doctor.trace import MARK, PROCESS, STEPS, trace
from flatout.ledger.largest import largest
from flatout.ledger.ledger import PARTS

STEPS_TRACED, BATCH, PROMPT = 4, 2, 24


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM("smollm2", threads=1, max_model_len=256, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def traced(llm):
    return trace(llm, STEPS_TRACED, BATCH, PROMPT)


def test_a_file_that_perfetto_reads_has_each_step_and_op(llm, traced, tmp_path):
    path = tmp_path / "t.json.gz"
    traced.write(path)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    ours = [e for e in events if e.get("pid") == PROCESS and e["ph"] == "X" and e["tid"] == STEPS]
    steps = [e for e in ours if e["name"].startswith("step ")]
    assert [e["args"]["tokens"] for e in steps] == [BATCH * PROMPT] + [BATCH] * STEPS_TRACED
    calls: Counter[str] = Counter()
    for op in llm.engine.costs.ops:
        calls[op.label] += op.count * (op.rows in ("tokens", "sampled"))
    for step in steps[1:]:
        inside = [e for e in ours if e is not step and step["ts"] - 1 <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] + 1]
        names = Counter(e["name"] for e in inside)
        assert all(names[label] == count for label, count in calls.items() if count)  # each call of a native program by itself
        ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in inside)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(ends))  # one after the other, to a microsecond
    floors = [e["args"]["floor_us"] for e in ours if "mlp.gate_up" in e["name"]]
    assert len(floors) == (1 + STEPS_TRACED) * llm.spec.num_layers and min(floors) > 0


def test_our_clock_and_the_profilers_are_one(traced):
    """Ops of the first step are called one by one, so that both saw them."""
    events = traced.file["traceEvents"]
    mark = next(e for e in events if e.get("name") == MARK)
    theirs = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "attention"]
    mine = [e for e in events if e.get("pid") == PROCESS and e["ph"] == "X" and e["name"].startswith("attention")][: len(theirs)]
    assert len(mine) == len(theirs) > 0
    late = sorted(a["ts"] - b["ts"] for a, b in zip(theirs, mine))
    assert abs(late[len(late) // 2]) <= mark["dur"] + 200  # us


def test_steps_of_both_kinds_have_their_account(llm, traced):
    assert (traced.prompts.steps, traced.decodes.steps) == (1, STEPS_TRACED)
    assert traced.prompts.tokens == BATCH * PROMPT and traced.decodes.tokens == BATCH * STEPS_TRACED
    assert {op.label for op in traced.decodes.ops} >= {op.label for op in llm.engine.costs.ops if op.rows == "tokens"}


def test_tracing_leaves_the_engine_as_it_was(llm, traced):
    before = llm.engine.runner.clock_of
    llm.generate([[5, 6, 7]], llm.default_params(max_tokens=3, temperature=0.0), use_tqdm=False)
    assert before is llm.engine.runner.clock_of and llm.engine.runner.deep_steps == 0
    assert all(record.ops is None or len(record.ops) for record in llm.engine.records)


def account(**parts):
    ops = [
        {"label": "linear mlp.down", "seconds": 0.4, "floor": 0.2},
        {"label": "rope", "seconds": 0.1, "floor": 0.0001},
        {"label": "linear head", "seconds": 0.05, "floor": 0.1},
    ]
    return {"seconds": 2.0, "steps": 10, "ops": ops, "parts": {**dict.fromkeys(PARTS, 0.0), "idle": 1.0, **parts}}


def test_the_largest_costs_by_hand():
    found = largest(account(sample=0.2, host_schedule=0.15, kernels=0.55), 4)
    assert [(cost.seconds, cost.share) for cost in found] == [
        pytest.approx(pair) for pair in ((0.04, 0.4), (0.02, 0.2), (0.015, 0.15), (0.01, 0.1))
    ]
    assert found[0].ratio == pytest.approx(2.0) and found[3].ratio is None
    assert [cost.sentence for cost in found] == [
        "linear mlp.down: 40 ms of each step, 40% of the time; its bytes and FLOPs allow 20 ms: 2.00 times its floor",
        "choosing tokens from logits: 20 ms of each step, 20% of the time; it has no floor",
        "the device waiting for the scheduler: 15 ms of each step, 15% of the time; it has no floor",
        "rope: 10 ms of each step, 10% of the time; it moves next to no bytes from memory and computes little, so nearly all of it is overhead",
    ]  # fmt: skip
    assert "faster than the 10 ms" in largest(account(), 9)[2].sentence


def test_before_a_deep_step_the_forward_is_one_cost():
    plain = {**account(floor_bandwidth=0.3, kernels=0.6), "ops": []}
    (forward,) = largest(plain)
    assert forward.ratio == pytest.approx(3.0) and "none told apart" in forward.name
    assert largest({**plain, "steps": 0}) == []


def test_syncs_are_counted_by_line(llm, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run():
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    (found,) = syncs.synchronising(run).items()
    assert found[0].rpartition(":")[0].endswith("doctor/test_trace.py") and found[1] == 3 and modes == ["warn", "default"]
    assert syncs.Syncs(2, dict([found])).sentence.startswith("1.50 device syncs a step, over 2 steps: 3 at ")
    with pytest.raises(NotAvailable, match="no device"):
        syncs.count_syncs(llm, 2, 1, 8)


def test_the_verb(default_model, tmp_path, capsys):
    path = tmp_path / "out.json.gz"
    flags = ["--steps", "3", "--batch", "1", "--prompt", "16", "--threads", "1", "--max-model-len", "128", "--quiet", "--output", str(path)]
    assert main(["doctor", "trace", "smollm2", *flags, "--json", "--syncs"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decode_steps"]["steps"] == 3 and len(told["decode_steps"]["costs"]) == 5 and told["file"] == str(path)
    assert told["syncs"]["syncs_per_step"] is None and "no device" in told["syncs"]["sentence"]
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--output", "nowhere/at/all.gz"], "--output"),
        (["smollm2", "--url", "http://127.0.0.1:1"], "--url"),
        (["--url", "http://127.0.0.1:1"], "--url"),
        (["--nvtx", "--device", "cpu"], "--nvtx"),
    ],
)
def test_what_cannot_be_asked(argv, named, capsys):
    assert main(["doctor", "trace", *argv]) in (1, 2)
    assert named in capsys.readouterr().err.splitlines()[-1]
