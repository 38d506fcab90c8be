"""Plans against what real starts take, and against arithmetic by hand."""

import json
import subprocess
import sys

import pytest

from flatout import LLM
from flatout.cli import main
from flatout.config import ConfigError
from flatout.doctor.predict import on_paper
from flatout.plan.capacity import capacity
from flatout.plan.fit import ways

QWEN2_7B = "src/flatout/bench/models/qwen2-7b.json"

# what an engine holds in a process of its own, whose tokenizer is no part of it, after a full budget and a full batch
HELD = """
import json, sys
from flatout.config import Config
from flatout.engine import Engine
from flatout.request import Request, SamplingParams
options, prompt = json.loads(sys.argv[1]), int(sys.argv[2])

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

import torch
torch.ones(64, 64) @ torch.ones(64, 64)
before = anonymous()
engine = Engine(Config.make(**options))
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
for i in range(options["max_num_seqs"]):
    engine.add([Request(str(i), [7 + i] * prompt, params)])
while engine.has_work:
    engine.step()
weights = sum(d.tensor.nbytes for d in engine.runner.decoder.destinations().values())
print(json.dumps({"taken": anonymous() - before, "pool_tokens": engine.facts.pool_tokens, "weights": weights}))
engine.close()
"""
WIDE = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=768, intermediate_size=3072, num_hidden_layers=10,
    num_attention_heads=12, num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_size=512, intermediate_size=1024, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=2048, rms_norm_eps=1e-6,
    num_local_experts=8, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=True,
)  # fmt: skip
MODELS = {
    "packed file": ({"model": "smollm2"}, None),
    "float32 file": ({"model": "smollm2", "quantization": "none", "dtype": "float32"}, None),
    "dense": ({"load_format": "dummy", "dtype": "float32"}, WIDE),
    "experts": ({"load_format": "dummy", "dtype": "float32"}, EXPERTS),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_within_a_tenth_of_a_real_run(name, tmp_path, default_model):
    options, config = MODELS[name]
    options = {
        **options,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "max_model_len": 1024,
        "device": "cpu",
        "enable_prefix_caching": False,
    }
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        options["model"] = str(tmp_path)
    plan = capacity(on_paper(options))
    run = subprocess.run([sys.executable, "-c", HELD, json.dumps(options), "300"], capture_output=True, text=True, check=True)
    held = json.loads(run.stdout.splitlines()[-1])
    assert plan.weights == held["weights"]
    assert plan.pool_tokens == held["pool_tokens"]
    used = 4 * 304 * plan.kv_token  # blocks of 16 that prompts and outputs wrote to; the others are promised alone
    assert plan.weights + plan.buffers + used == pytest.approx(held["taken"], rel=0.1)


def test_qwen2_7b_on_an_h200_by_hand():
    plan = capacity(
        on_paper({"model": QWEN2_7B, "load_format": "dummy", "max_num_seqs": 256}, "h200"), lengths=(1000, 4096), batches=(1, 64)
    )
    embedding = 152064 * 3584
    layer = (3584 + 1024) * 3584 + 4608 + 3584 * 3584 + 3 * 18944 * 3584 + 2 * 3584
    assert plan.weights == 2 * (2 * embedding + 28 * layer + 3584)
    assert plan.kv_token == 28 * 2 * 512 * 2
    # the budget's rows: stream, qkv, mixed, delta, gate and up, their product, rope's; the batch's: picked twice, normed, picked streams and queries, logits
    rows = 16384 * 2 * (3 * 3584 + 4608 + 3 * 18944 + 256)
    batch = 256 * (2 * (2 * 3584 + 2 * 3584) + 4 * 152064)
    tables = 131072 * 2 * 256 + 4 * 256 * 8192  # of rope, and of blocks of 16
    assert plan.buffers == rows + batch + tables
    usable = int(143771 * 2**20 * 0.92)
    left = usable - plan.weights - plan.buffers - 2 * 4 * 152064 * 256 - plan.outside
    assert plan.pool == (left // (16 * plan.kv_token) - 1) * 16 * plan.kv_token
    assert plan.fits[0].requests == plan.pool_tokens // 1008 and plan.fits[0].running == 256
    # one step reads 14.14 GB and 57 MB of keys and values, of 0.91 x 4.8 TB/s; and an op takes 2.6 us
    assert plan.rates[0].floor_s == pytest.approx((14_141_245_440 + 57_401_344) / 4.368e12, rel=0.002)
    assert 0.8 < plan.rates[0].floor_s / plan.rates[0].step_s < 1


@pytest.mark.parametrize(
    ("gpu", "measured_ms"),  # decode at batch 1 of 512 + 128 tokens, as docs/performance.md has it of an H200
    [("H200", {"qwen2-7b": 3.70, "llama-3.2-1b": 0.80, "llama-3.1-8b": 3.91})],
)
def test_steps_by_data_sheet_are_near_those_measured(gpu, measured_ms):
    for model, expected in measured_ms.items():
        paper = on_paper({"model": f"src/flatout/bench/models/{model}.json", "load_format": "dummy"}, gpu)
        plan = capacity(paper, lengths=(640,), batches=(1,))
        assert plan.rates[0].step_s * 1e3 == pytest.approx(expected, rel=0.1), model


def test_a_model_too_large_says_what_is_missing(capsys):
    assert main(["doctor", "plan", QWEN2_7B, "--gpu", "L4", "--dtype", "float32"]) == 1
    out = capsys.readouterr().out
    assert "it does not fit: " in out and "GiB are missing" in out


def test_json_has_what_the_lines_say(capsys):
    assert (
        main(["doctor", "plan", QWEN2_7B, "--gpu", "H200", "A100", "--lengths", "8k", "--batches", "4", "--prompts", "2k", "--json"]) == 0
    )
    h200, a100 = json.loads(capsys.readouterr().out)
    assert h200["machine"] == "H200" and a100["machine"] == "A100 80GB"
    assert h200["weights"] == a100["weights"] and h200["pool"] > a100["pool"] > 0
    assert h200["rates"][0]["tokens_s"] == pytest.approx(4 / h200["rates"][0]["step_s"])
    assert h200["rates"][0]["step_s"] < a100["rates"][0]["step_s"]
    assert [f["length"] for f in h200["fits"]] == [8000] and h200["firsts"][0]["prompt"] == 2000


def test_a_scheme_on_paper(capsys):
    plain, narrow = (
        capacity(on_paper({"model": QWEN2_7B, "load_format": "dummy", **more}, "h200"))
        for more in ({}, {"quantization": "int4", "kv_cache_dtype": "float8_e4m3fn"})
    )
    assert narrow.kv_token * 2 == plain.kv_token
    assert narrow.weights < 0.45 * plain.weights  # 20 bits of 32 for all but the embedding, and the head in 8
    assert len(narrow.notes) == 2 and all("on paper" in note for note in narrow.notes)


def test_wrong_words_are_told_in_one_line(capsys):
    for argv, word in (
        (["doctor", "plan", QWEN2_7B, "--gpu", "H300"], "--gpu: 'H300' is not known; known: B200"),
        (["doctor", "plan", QWEN2_7B, "--gpu", "H200", "--device", "cpu"], "--device: cpu and --gpu contradict each other"),
        (["doctor", "plan", QWEN2_7B, "--batches", "0"], "--batches: must be at least 1"),
        (["doctor", "whatif", QWEN2_7B], "what is to change?"),
        (["doctor", "whatif", QWEN2_7B, "--set", "max_num_seq=3"], "did you mean max_num_seqs?"),
        (["doctor", "whatif", QWEN2_7B, "--set", "dtype=float31"], "'float31' is not one of"),
        (["simulate", QWEN2_7B, "--rate", "1", "--concurrency", "2"], "--rate and --concurrency"),
        (["simulate", QWEN2_7B, "--gpu", "L4", "--dtype", "float32"], "does not fit on L4"),
        (["simulate", QWEN2_7B, "--prompt", "0"], "--prompt: must be at least 1"),
    ):
        assert main(argv) in (1, 2), argv
        assert word in capsys.readouterr().err, argv


def test_a_plan_loads_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("flatout.runner.build.build", refuse)
    monkeypatch.setattr(LLM, "__init__", refuse)
    assert capacity(on_paper({"model": QWEN2_7B, "load_format": "dummy"}, "h100")).pool > 0


def test_what_a_start_would_refuse_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--max-model-len"):
        on_paper({"model": QWEN2_7B, "load_format": "dummy", "max_model_len": 1 << 20}, "h200")


def test_e10_what_to_change_so_that_they_fit(capsys):
    """Qwen2-7B with 16 GiB, contexts of 32,768: weights of 15.2 GB leave room for none; in 8 bits and less for some."""
    base = ["doctor", "plan", QWEN2_7B, "--max-model-len", "32K", "--lengths", "32K", "--gpu", "H200"]

    def to_fit(*flags):
        main([*base, "--json", *flags])
        (plan,) = json.loads(capsys.readouterr().out)
        return plan, plan["to_fit"]

    plan, fit = to_fit("--memory", "16GiB", "--fit", "2")
    assert plan["memory"] == 16 << 30 and plan["short"] > 0
    assert fit["ways"] and all(way["running"] >= 2 for way in fit["ways"])
    assert all("quantization" in way["changes"] for way in fit["ways"]) and "--quantization" in fit["sentence"]
    _, fit = to_fit("--memory", "16GiB", "--fit", "500")
    assert fit["ways"][0]["running"] < 500 and "can't be made to fit" in fit["sentence"]
    _, fit = to_fit("--fit", "2")
    assert fit["ways"] == [] and "run at once as it is" in fit["sentence"]
    _, fit = to_fit("--fit", "20", "--max-num-seqs", "4")
    assert {"max_num_seqs": 20} in [way["changes"] for way in fit["ways"]]


def test_a_way_that_is_named_fits(default_model):
    """On the CPU the pool takes a quarter of what is free unless it is told its size."""
    options = {"model": "smollm2", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 256}
    memory, length, wanted = 1 << 30, 2048, 12
    found = ways(options, None, memory, length, wanted)
    assert found
    for way in found:
        plan = capacity(on_paper({**options, **way.changes}, None, memory), lengths=(length,))
        assert plan.fits[0].running >= wanted == way.running and plan.held <= plan.usable and not plan.short
    plan = capacity(on_paper(options, None, memory), lengths=(length,))
    assert plan.fits[0].running < wanted
