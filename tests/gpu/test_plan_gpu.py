"""Plans and predictions on CUDA: memory of real starts, and steps that were not calibrated."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median

import pytest
import torch

from flatout import LLM
from flatout.doctor.calibrate import errors, fitted, form_of, measure
from flatout.doctor.predict import measured_roof, on_paper
from flatout.hardware import detect
from flatout.plan.capacity import capacity

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def median_off(found: list[float]) -> float:
    return median(map(abs, found))


SHAPES = ("qwen2-7b", "llama-3.2-1b", "llama-3.1-8b")


def options_of(model: str) -> dict[str, object]:
    if model not in SHAPES:
        return {"model": model, "dtype": "bfloat16", "max_model_len": 2048}
    return {"model": f"src/flatout/bench/models/{model}.json", "load_format": "dummy", "max_model_len": 8192}


@pytest.mark.parametrize("model", [*SHAPES, "smollm2"])
def test_memory_is_within_a_tenth_of_a_real_start(model, default_model):
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    options = options_of(model)
    elsewhere = (total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / total  # others', and CUDA's own
    plan = capacity(on_paper(options))
    with LLM(**options) as llm:
        taken = total - torch.cuda.mem_get_info()[0]
        pool = llm.facts.pool_tokens
        weights = sum(d.tensor.nbytes for d in llm.engine.runner.decoder.destinations().values())
        held = torch.cuda.memory_allocated()
    print(f"{model}: pool planned {plan.pool_tokens:,} tokens, is {pool:,}; outside {elsewhere:.1%} of memory")
    assert plan.weights == weights
    assert plan.pool_tokens == pytest.approx(pool, rel=0.1)
    assert plan.held == pytest.approx(held, rel=0.1)
    assert plan.held + plan.worst_step + plan.outside == pytest.approx(taken, rel=0.1)


@pytest.mark.parametrize("model", ["qwen2-7b", "llama-3.2-1b"])
def test_steps_between_the_calibrated_ones_are_predicted(model):
    options = {**options_of(model), "gpu_memory_utilization": 0.6}
    with LLM(**options) as llm:
        table = replace(llm.engine.costs, roof=measured_roof(detect("cuda")))
        samples = list(measure(llm))
        asked = list(measure(llm, rows=(1, 3, 12, 24, 48, 100), contexts=(200, 600), chunks=(100, 500, 2000), before=(0, 512)))
        found = errors(fitted(table, samples, form_of(llm.config)).apply(table), asked)
    print(f"{model}: {median_off(found):.1%} off in the median, {max(map(abs, found)):.1%} at most")
    assert median_off(found) < 0.1
