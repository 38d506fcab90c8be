"""Calibration and what-if: shares that are found again in a made-up machine, kept and told; and real steps, predicted beside being measured."""

import json
import math
import re
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from flatout import LLM, SamplingParams
from flatout.cli import main
from flatout.doctor.calibrate import Sample, errors, fitted, form_of, host_seconds, keep, kept_calibration, measure
from flatout.doctor.measure import Neighbours
from flatout.doctor.predict import on_paper
from flatout.doctor.whatif import calibrated, changed, decode_shape, steps
from flatout.hardware import Hardware
from flatout.ledger.table import CostTable, Roof, StepShape, shape_of
from flatout.plan.simulate import Load, simulate

QWEN2_7B = {"model": "src/flatout/bench/models/qwen2-7b.json", "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": 64}
ROOF = Roof("made up", ((1 << 40, 1e12),), {"bfloat16": 1e14, "float32": 1e13})
HERE = Hardware("cpu", "made up", None, 1 << 40, 8, True)
TINY = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=2000, max_position_embeddings=2048, rms_norm_eps=1e-5,
)  # fmt: skip


def median_off(found: list[float]) -> float:
    return median(map(abs, found))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    for module in ("predict", "calibrate"):  # measuring it takes seconds
        monkeypatch.setattr(f"flatout.doctor.{module}.measured_roof", lambda hardware: ROOF)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


# -- a made-up machine -------------------------------------------------------------------------------------------------


class MadeUp:
    """Each op has a launch, a bandwidth and a rate of its own, and rows that fill the machine little by little: what no table knows."""

    def __init__(self, table: CostTable, noise: float = 0.0, clock_s: float = 0.0, issue_s: float = 0.0):
        """clock_s: what telling an op apart takes; issue_s: the host's time for a step op by op, ahead of the device."""
        self.table, self.noise, self.random = table, noise, np.random.default_rng(5)
        self.clock_s, self.issue_s = clock_s, issue_s

    def sample(self, shape: StepShape) -> Sample:
        captured, ops = shape.decodes == shape.requests, []
        for i, op in enumerate(self.table.ops):
            cost, rows = op.cost(shape), shape.rows(op.rows)
            launch, reads, computes = 3e-6 + 4e-7 * (i % 5), 0.9 - 0.05 * (i % 7), 0.8 * rows / (rows + 12 + 3 * (i % 3))
            by_bytes, by_flops = cost.bytes / (1e12 * reads), cost.flops / (1e14 * max(computes, 1e-9))
            ops.append(op.count * (launch + max(by_bytes, by_flops)) if rows else 0.0)
        beside = (2e-4 if captured or self.issue_s else 1.5e-3) + 4e-6 * shape.sampled
        shown = [
            seconds * math.exp(self.noise * self.random.normal()) + (seconds > 0) * self.clock_s * op.count
            for seconds, op in zip(ops, self.table.ops)
        ]
        step_s = sum(ops) + beside if captured else max(sum(ops) + beside, self.issue_s)
        return Sample(shape, captured, step_s * math.exp(self.noise * self.random.normal()), tuple(shown), self.issue_s > 0)


def grid(table: CostTable, rows, contexts, chunks, before) -> list[StepShape]:
    shapes = [decode_shape(table, n, context) for n in rows for context in contexts]
    return shapes + [shape_of(np.array([b]), np.array([n]), np.array([True]), table.windows) for n in chunks for b in before]


LEARNT = ((1, 2, 4, 8, 16, 32, 64), (64, 1024), (16, 64, 256, 1024, 4096), (0, 1024))
ASKED = ((1, 3, 6, 12, 24, 48), (100, 400, 2000), (40, 500, 2500), (0, 300))  # none of them learnt but rows of 1


@pytest.mark.parametrize(("noise", "clocks"), [(0.0, {}), (0.05, {}), (0.0, {"clock_s": 3e-6, "issue_s": 12e-3})])
@pytest.mark.parametrize("model", ["qwen2-7b", "llama-3.2-1b"])
def test_steps_between_the_calibrated_ones_are_predicted(model, noise, clocks):
    table = replace(on_paper({**QWEN2_7B, "model": f"src/flatout/bench/models/{model}.json"}, "h200").table, roof=ROOF)
    machine = MadeUp(table, noise, **clocks)
    found = fitted(table, [machine.sample(shape) for shape in grid(table, *LEARNT)], "made up")
    exact = MadeUp(table, **clocks)
    asked = [exact.sample(shape) for shape in grid(table, *ASKED)]
    off = errors(found.apply(table), asked)
    assert median_off(off) < 0.1
    assert max(map(abs, off)) < 0.35
    assert median_off(errors(table, asked)) > 2 * median_off(off)  # ceilings alone say less


def test_a_step_with_chunks_and_decodes_is_predicted():
    table = replace(on_paper(QWEN2_7B, "h200").table, roof=ROOF)
    machine = MadeUp(table)
    found = fitted(table, [machine.sample(shape) for shape in grid(table, *LEARNT)], "made up").apply(table)
    mixed = shape_of(np.array([500] * 20 + [0]), np.array([1] * 20 + [400]), np.array([True] * 20 + [False]), table.windows)
    assert found.step_seconds(mixed) == pytest.approx(machine.sample(mixed).step_s, rel=0.2)


def test_another_dtype_and_another_model_take_the_nearest_ops_shares():
    wide = replace(on_paper(QWEN2_7B, "h200").table, roof=ROOF)
    found = fitted(wide, [MadeUp(wide).sample(shape) for shape in grid(wide, *LEARNT)], "made up")
    other = replace(on_paper({**QWEN2_7B, "model": "src/flatout/bench/models/llama-3.1-8b.json"}, "h200").table, roof=ROOF)
    asked = [MadeUp(other).sample(shape) for shape in grid(other, (1, 8, 32), (64, 1024), (), ())]
    assert median_off(errors(found.apply(other), asked)) < 0.15


def test_what_was_measured_is_kept_by_machine_model_and_form():
    table = replace(on_paper(QWEN2_7B, "h200").table, roof=ROOF)
    found = fitted(table, [MadeUp(table).sample(shape) for shape in grid(table, (1, 8), (64,), (16,), (0,))], "bfloat16 none")
    assert kept_calibration(HERE, table.model, "bfloat16 none") is None
    keep(HERE, found)
    again = kept_calibration(HERE, table.model, "bfloat16 none")
    assert again is not None
    assert again.apply(table) == found.apply(table)
    assert kept_calibration(HERE, "another", "bfloat16 none") == again  # better than none, and whose it is can be told
    assert kept_calibration(HERE, table.model, "float32 none") is None
    assert kept_calibration(replace(HERE, cpu_count=4), table.model, "bfloat16 none") is None


def test_shares_of_an_unknown_roof_are_refused():
    table = replace(on_paper(QWEN2_7B, "h200").table, roof=Roof("unknown", ()))
    with pytest.raises(ValueError, match="shares are of ceilings"):
        fitted(table, [MadeUp(table).sample(decode_shape(table, 1, 64))], "form")


def test_a_calibration_of_another_version_is_measured_anew(tmp_path):
    table = replace(on_paper(QWEN2_7B, "h200").table, roof=ROOF)
    keep(HERE, fitted(table, [MadeUp(table).sample(decode_shape(table, 1, 64))], "form"))
    path = tmp_path / "cache" / "calibration.json"
    path.write_text(path.read_text().replace('"step_s"', '"step_seconds"'))
    assert kept_calibration(HERE, table.model, "form") is None


# -- this machine ------------------------------------------------------------------------------------------------------


def test_real_steps_tell_their_ops_apart_and_are_predicted_as_they_were(tiny):
    with LLM(tiny, load_format="dummy", dtype="float32", max_num_seqs=8, max_num_batched_tokens=128, device="cpu") as llm:
        samples = list(measure(llm, rows=(1, 4, 8), contexts=(64, 512), chunks=(16, 128), before=(0, 256)))
        table = replace(llm.engine.costs, roof=ROOF)
        calibration = fitted(table, samples, form_of(llm.config))
    assert len(samples) == 3 * 2 + 2 * 2
    for sample in samples:
        names = {op.name for op, seconds in zip(table.ops, sample.ops) if seconds}
        assert {"attention", "norm_linear", "norm_gated", "linear_add", "rope_kv_write"} <= names
        assert sum(sample.ops) > 0
    assert calibration.form == "float32 none kv float32 " + calibration.form.partition("kv float32 ")[2]
    # the same steps again: whatever the machine was doing, the shares are of it
    assert median_off(errors(calibration.apply(table), samples)) < 0.25


def test_a_predicted_throughput_of_changed_slots_beside_the_measured_one(tmp_path):
    """Both engines in turns, and the quickest of each. Steps of 100 MB. Where others take the cores only the direction can be told."""
    wide = {**TINY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8000}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    load = Load(requests=8, prompt=32, output=16)
    options = {"load_format": "dummy", "dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 512, "device": "cpu"}
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    prompts, quickest, neighbours = [request.prompt_ids for request in load.made()], [math.inf, math.inf], Neighbours()
    with LLM(str(tmp_path), max_num_seqs=8, **options) as many, LLM(str(tmp_path), max_num_seqs=1, **options) as few:
        samples = list(measure(many, rows=(1, 2, 4, 8), contexts=(48,), chunks=(16, 32, 64), before=(0,)))
        table = replace(many.engine.costs, roof=ROOF)
        table = fitted(table, samples, "here", host_seconds(many)).apply(table)
        for turn in range(5):
            for i, llm in enumerate((many, few)):
                outputs = llm.generate(prompts, params, use_tqdm=False, cache_salt=f"turn {turn}")
                timings = [output.timing for output in outputs]
                seconds = max(t.finished for t in timings) - min(t.arrival for t in timings)
                quickest[i] = min(quickest[i], seconds)
        predicted = [simulate(llm.config, table, llm.engine.scheduler.blocks.num_blocks, load).seconds for llm in (many, few)]
    change, measured, others = predicted[1] / predicted[0], quickest[1] / quickest[0], neighbours.cores()
    print(f"one slot for 8 takes {measured:.2f} times as long, predicted {change:.2f}; others used {others} cores")
    assert change > 1.2 and measured > 1.2
    if others is not None and others < 0.1:
        assert change == pytest.approx(measured, rel=0.3)


# -- what if -----------------------------------------------------------------------------------------------------------


def test_changes_on_paper_move_what_they_should():
    now = on_paper(QWEN2_7B, "h200")
    half = changed(QWEN2_7B, {"dtype": "float32"}, "h200")
    assert half.table.cost(decode_shape(half.table, 1, 64)).weights == 2 * now.table.cost(decode_shape(now.table, 1, 64)).weights
    other = changed(QWEN2_7B, {}, "l4")
    pairs = list(steps(now, other, (1, 64, 128), (128, 1 << 18)))
    assert [(pair.batch, pair.context) for pair in pairs] == [(1, 128), (64, 128)]  # what both allow
    assert all(10 < pair.then / pair.now < 25 for pair in pairs)  # 4,800 to 300 GB/s


def test_without_a_calibration_it_is_said():
    paper, origin = calibrated(on_paper(QWEN2_7B, "h200"), QWEN2_7B)
    assert "no op was measured here: a data sheet" in origin
    assert all(op.shares is None for op in paper.table.ops)


def test_whatif_and_simulate_in_json(tiny, capsys):
    model = [tiny, "--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
    load = ["--requests", "6", "--prompt", "20", "--output", "4", "--json"]
    assert (
        main(["doctor", "whatif", *model, "--set", "max_num_seqs=2", "enable_prefix_caching=false", "--calibrate", "--check", *load]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert re.search(r"ops as measured here of this model \(float32 .*; other steps were predicted \d+% off", found["now"]["origin"])
    assert found["then"]["plan"]["fits"][0]["running"] == 2 and found["now"]["plan"]["fits"][0]["running"] == 8
    assert found["then"]["load"]["output_tokens"] == found["now"]["load"]["output_tokens"] == 24
    assert found["then"]["load"]["steps"] > found["now"]["load"]["steps"]
    assert found["now"]["measured_tokens_s"] > 0 and found["then"]["measured_tokens_s"] > 0
    assert main(["simulate", *model, *load]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["tokens_s"] == pytest.approx(found["now"]["load"]["tokens_s"])


def test_what_a_terminal_shows(capsys):
    model = [QWEN2_7B["model"], "--max-num-seqs", "64"]
    load = ["--requests", "8", "--prompt", "64", "--output", "8"]
    assert main(["simulate", *model, "--gpu", "H200", *load]) == 0
    out = capsys.readouterr().out
    assert "on H200, simulated; no op was measured here" in out and "tok/s over" in out and "waited for" in out
    assert main(["doctor", "plan", *model, "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert "by its data sheet" in out and "KV pool" in out and "fit whole" in out and "TTFT ms" in out
