"""doctor selfcheck: its arithmetic by hand, its twin against Transformers, sound models pass, faults put in are found and named."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import make, reference_logits

from flatout.cli import main
from flatout.config import ConfigError, ModelConfig
from flatout.doctor import exact
from flatout.doctor import selfcheck as selfcheck_module
from flatout.doctor.compare import Figures, positions
from flatout.doctor.exact import Exact
from flatout.doctor.prompts import PROMPTS
from flatout.doctor.selfcheck import ALONE, EXACT, PROMPT, ROUNDED, TOGETHER, Run, selfcheck
from flatout.kernels import native
from flatout.kernels.op import Op
from flatout.modelfile.sources import resolve_model
from flatout.quant import gguf

needs_native = pytest.mark.skipif(not native.available(), reason="the native library was not built")
SMALL = {"max_model_len": 512, "threads": 1, "kv_cache_memory_bytes": 8 << 20}


# -- the comparison --------------------------------------------------------------------------------------------------


def test_equal_logits_are_off_by_nothing():
    logits = torch.randn(20, 50)
    several = positions(PROMPT, range(20), logits, logits.clone())
    assert [p.token for p in several] == list(range(20))
    figures = Figures.of(several)
    assert (figures.rms, figures.largest, figures.kl_max, figures.flips, figures.agreement) == (0, 0, 0, 0, 1)
    assert figures.closest_flip is None and figures.first_flip is None


def test_figures_by_hand():
    right = torch.tensor([[2.0, 0.0, -2.0, 0.0], [2.0, 0.0, -2.0, 0.0], [0.0, 3.0, 0.0, 3.5]])
    other = torch.tensor([[2.0, 0.0, -2.0, 1.0], [2.0, 2.5, -2.0, 0.0], [0.0, 3.6, 0.0, 3.5]])
    first, second, third = positions(ALONE, (7, 8, 9), right, other)
    spread = math.sqrt(2)
    assert first.rms == pytest.approx(0.5 / spread)
    assert first.largest == pytest.approx(1 / spread)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (np.array([2.0, 0, -2, 0]), np.array([2.0, 0, -2, 1])))
    assert first.kl == pytest.approx((p * np.log(p / q)).sum())
    assert not first.flipped and first.margin == 0
    assert second.flipped and second.margin == pytest.approx(2)
    assert third.flipped and third.margin == pytest.approx(0.5)
    figures = Figures.of([first, second, third])
    assert (figures.flips, figures.first_flip) == (2, 8)
    assert (figures.closest_flip, figures.widest_flip) == (pytest.approx(0.5), pytest.approx(2))
    assert figures.agreement == pytest.approx(1 / 3)
    assert figures.rms == pytest.approx(math.sqrt((first.rms**2 + second.rms**2 + third.rms**2) / 3))
    with pytest.raises(ValueError, match="no positions"):
        Figures.of([])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_the_worst_there_is(wrong):
    right, other = torch.randn(2, 8), torch.randn(2, 8)
    other[1, 3] = wrong
    sound, broken = positions(PROMPT, range(2), right, other)
    assert math.isfinite(sound.rms)
    assert broken.rms == broken.largest == broken.kl == math.inf and broken.flipped
    written = Figures.of([sound, broken]).to_json()
    assert written["logit_error_rms_share"] is None
    assert "NaN" not in json.dumps(written) and "Infinity" not in json.dumps(written)


# -- the twin --------------------------------------------------------------------------------------------------------


def twin_of(folder, longest=64):
    source = resolve_model(ModelConfig(model=str(folder)))
    return Exact(source, source.spec.for_length(512), 512, longest, "cpu")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "phi3"])
def test_the_twin_is_transformers(family, tmp_path, monkeypatch):
    folder = make(family, tmp_path)
    monkeypatch.setattr(exact, "TOKENS_AT_ONCE", 48)  # of the three prompts two go together
    monkeypatch.setattr(Op, "dispatch", lambda *args: pytest.fail("a fast path ran"))
    prompts = [np.random.default_rng(i).integers(3, 256, n).tolist() for i, n in enumerate((23, 1, 40))]
    wanted = [sorted({0, len(ids) // 2, len(ids) - 1}) for ids in prompts]
    made = list(twin_of(folder).logits(list(zip(prompts, wanted))))
    for ids, at, logits in zip(prompts, wanted, made, strict=True):
        np.testing.assert_allclose(logits.numpy(), reference_logits(folder, ids)[at], atol=2e-3, rtol=1e-4)


def test_a_twin_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"selfcheck: the float32 twin of .* takes 0\.\d GiB and 0\.0 GiB is free"):
        twin_of(make("llama", tmp_path))


# -- sound models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_float32_is_float32(family, tmp_path):
    check = selfcheck({"model": str(make(family, tmp_path)), "dtype": "float32", **SMALL})
    assert check.failures == []
    assert check.limits == EXACT
    assert check.served.promised
    assert len(check.served.prompts) == len(PROMPTS)
    for kind in (PROMPT, ALONE, TOGETHER):
        figures = check.figures(kind=kind)
        assert figures.positions > 50
        assert figures.rms < 2e-5
    names = [run.name for run in check.served.runs]
    assert {"prefix cached", "chunks of 8", "6 together"} <= set(names)
    assert all(run.same == run.of == 6 and run.first is None for run in check.served.runs)


@pytest.mark.parametrize(
    "tight",
    [
        {"max_model_len": 20},  # prompts are cut
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},  # they come in pieces, three at a time
        {"num_gpu_blocks_override": 12, "kv_cache_memory_bytes": None},  # the pool holds one or a few
        {"enforce_eager": True, "enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "async_scheduling": False, "block_size": 32},
    ],
    ids=lambda t: " ".join(t),
)
def test_settings_that_are_tight(tight, tmp_path):
    check = selfcheck({"model": str(make("llama", tmp_path)), "dtype": "float32", **SMALL, **tight}, most=8)
    assert check.failures == []
    assert check.figures(kind=PROMPT).rms < 2e-5
    assert check.figures(kind=ALONE).rms < 2e-5


def test_no_room_at_all(tmp_path):
    with pytest.raises(ConfigError, match="at least 13 tokens"):
        selfcheck({"model": str(make("llama", tmp_path)), "dtype": "float32", **SMALL, "max_model_len": 12})


def test_random_weights_are_the_same_ones(tmp_path):
    check = selfcheck({"model": str(make("llama", tmp_path)), "load_format": "dummy", "dtype": "bfloat16", **SMALL}, most=4)
    assert check.limits == ROUNDED
    assert check.failures == []
    assert 1e-4 < check.figures().rms < 0.1  # bfloat16's rounding, and not other weights


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_random_weights_that_are_rounded_are_the_same_ones(tmp_path, method):
    """The twin has what is left of them, so that the error is that of the rows alone."""
    check = selfcheck({"model": str(make("llama", tmp_path)), "load_format": "dummy", "quantization": method, **SMALL}, most=4)
    assert check.limits == ROUNDED and check.failures == []
    assert 1e-4 < check.figures().rms < 0.05


def test_the_default_model(default_model, capsys):
    assert main(["doctor", "selfcheck", "--json", "--quiet", "--threads", "1", "--max-model-len", "512", "--prompts", "6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True and report["failures"] == []
    assert [p["name"] for p in report["prompts"]] == list(PROMPTS)[:6]
    assert 0 < report["total"]["logit_error_rms_share"] < 0.15
    assert report["total"]["top1_agreement_share"] > 0.9
    assert 0 < report["total"]["kl_mean_nats"] < 0.02
    story = next(p for p in report["prompts"] if p["name"] == "story")
    assert len(story["by_position"]) == story["positions"] == 24 + 6 + 6
    assert report["arithmetic"]["quantization"] == ("gguf" if native.available() else "none")
    assert report["greedy"]["promised"] is (report["arithmetic"]["quantization"] == "none" and report["arithmetic"]["dtype"] == "float32")
    assert not any(text in json.dumps(report) for text in PROMPTS.values())
    assert any("rope" in line for line in report["load"])


# -- faults ----------------------------------------------------------------------------------------------------------


@needs_native
def test_a_wrong_decode_kernel_is_named(tmp_path, monkeypatch):
    attend = native.Rows.attend
    monkeypatch.setattr(native.Rows, "attend", lambda self, out, q, k, v, scale, cap: attend(self, out, q, k, v, 1.02 * scale, cap))
    check = selfcheck({"model": str(make("llama", tmp_path)), "dtype": "float32", **SMALL})
    assert check.figures(kind=PROMPT).rms < 2e-5
    said = " ".join(check.failures)
    assert "decode alone: the logits' error is" in said and "decode together" in said
    assert "prompt: the logits' error" not in said


@needs_native
def test_weights_packed_wrongly_are_found(default_model, monkeypatch):
    repack = gguf.repack
    # the scales of some groups land in others: what a wrong shuffle would do

    def shuffled(out, *args):
        repack(out, *args)
        out.copy_(out.roll(1, 1))

    monkeypatch.setattr(gguf, "repack", shuffled)
    check = selfcheck({"model": str(default_model), "max_model_len": 512, "threads": 1}, most=3)
    assert any("prompt: the logits' error" in failure for failure in check.failures)
    assert any("another choice than the exact one" in failure for failure in check.failures)


def test_a_row_that_minds_its_company_is_found(tmp_path, monkeypatch):
    llm_generate = selfcheck_module._greedy_runs

    def tampered(llm, prompts):
        generate = llm.generate

        def company_differs(asked, *args, **options):
            results = generate(asked, *args, **options)
            if len(asked) > 1:
                results[2].outputs[0].token_ids[5] ^= 1
            return results

        monkeypatch.setattr(llm, "generate", company_differs)
        return llm_generate(llm, prompts)

    monkeypatch.setattr(selfcheck_module, "_greedy_runs", tampered)
    check = selfcheck({"model": str(make("llama", tmp_path)), "dtype": "float32", **SMALL})
    (failure,) = check.failures
    assert failure.startswith("greedy tokens, 6 together: one word: output token 5 is ")
    (run,) = [run for run in check.served.runs if run.first]
    assert (run.same, run.of) == (5, 6)
    check.served.promised = False  # in bfloat16 it is shown and nobody's fault
    assert check.failures == []


def test_logits_that_are_not_finite_fail(tmp_path, monkeypatch, capsys):
    logits = selfcheck_module._Steps.logits

    def broken(self, prompts):
        made = logits(self, prompts)
        made[0][PROMPT] = made[0][PROMPT].clone()
        made[0][PROMPT][0, 3] = math.nan
        return made

    monkeypatch.setattr(selfcheck_module._Steps, "logits", broken)
    flags = ["--dtype", "float32", "--threads", "1", "--max-model-len", "512", "--prompts", "2", "--quiet"]
    assert main(["doctor", "selfcheck", str(make("llama", tmp_path)), *flags]) == 1
    out = capsys.readouterr().out
    assert "failed: prompt: the logits' error is not finite" in out
    assert "passed" not in out
    assert main(["doctor", "selfcheck", str(make("llama", tmp_path)), *flags, "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert report["prompts"][0]["logit_error_rms_share"] is None


def test_the_threshold_decides(tmp_path):
    check = selfcheck({"model": str(make("llama", tmp_path)), "dtype": "bfloat16", **SMALL}, most=2)
    assert check.failures == []
    worst = max(check.figures(kind=kind).rms for kind in (PROMPT, ALONE, TOGETHER))
    check.limits = replace(check.limits, error=worst * 0.99)
    assert len(check.failures) >= 1
    check.limits = replace(check.limits, error=worst * 1.01)
    assert check.failures == []


# -- the verb --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_fits_a_terminal(tmp_path, capsys, dtype):
    flags = ["--dtype", dtype, "--threads", "1", "--max-model-len", "512", "--kv-cache-memory-bytes", "8MiB"]
    assert main(["doctor", "selfcheck", str(make("llama", tmp_path)), *flags]) == 0
    captured = capsys.readouterr()
    lines = captured.out.rstrip("\n").split("\n")
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("passed: off by ") for line in lines[-2:])
    assert sum(line.startswith(tuple(PROMPTS)) for line in lines) == len(PROMPTS)
    assert any(line.startswith("  decode together") for line in lines)
    assert ("promised in this arithmetic" in captured.out) and (("not promised" in captured.out) is (dtype == "bfloat16"))
    assert "ready after" in captured.err


@pytest.mark.parametrize(
    ("argv", "code", "named"),
    [
        (["nowhere/at-all.gguf"], 1, "nowhere/at-all.gguf: no such file or folder"),
        (["smolm2"], 1, "did you mean smollm2?"),
        (["--max-error", "0"], 2, "--max-error: '0' is not a number over 0 and up to 1"),
        (["--max-error", "1.5"], 2, "--max-error"),
        (["--max-error", "nan"], 2, "--max-error"),
        (["--max-error", "-0.1"], 2, "--max-error"),
        (["--max-error", "small"], 2, "'small'"),
        (["--prompts", "0"], 2, "--prompts: there are 20, so 1 to 20; got 0"),
        (["--prompts", "21"], 2, "--prompts"),
        (["--prompts", "few"], 2, "--prompts"),
        (["--treshold", "1"], 2, "--treshold"),
        (["smollm2", "twice"], 2, "'twice'"),
        (["--dtype", "int3"], 2, "int3"),
        (["--threads", "0"], 1, "--threads"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(capsys, argv, code, named):
    assert main(["doctor", "selfcheck", *argv]) == code
    err = capsys.readouterr().err.rstrip("\n")
    assert err.startswith("flatout: error: ") and "\n" not in err
    assert named in err


def test_the_help_tells_the_limits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["doctor", "selfcheck", "--help"])
    assert f"(default: {EXACT.error:.4f} in float32, else {ROUNDED.error})" in " ".join(capsys.readouterr().out.split())


def test_prompts_have_names_and_lengths_of_many_kinds():
    lengths = [len(text) for text in PROMPTS.values()]
    assert len(PROMPTS) == 20
    assert min(lengths) < 5 and max(lengths) > 700
    assert Run("x", 1, 2, "y").to_json()["first_difference"] == "y"
