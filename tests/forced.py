"""Teacher forcing through a built engine's own decoder: logits at every position. Shared by tests; holds no tests."""

from __future__ import annotations

import numpy as np
import torch

from flatout import LLM
from flatout.request import Request, SamplingParams
from flatout.runner.inputs import build_inputs
from flatout.step import StepPlan


def logits_of(llm: LLM, ids: list[int]) -> np.ndarray:
    """float32 [T, V]. Uses blocks 0.. of the pool, so only in an idle engine without a prefix cache."""
    runner = llm.engine.runner
    size = runner.block_size
    blocks = -(-len(ids) // size)
    request = Request("forced", list(ids), SamplingParams(temperature=0), slot=0)
    one = np.zeros(1, np.int32)
    plan = StepPlan(
        step=0,
        slots=one,
        starts=one,
        counts=np.array([len(ids)], np.int32),
        token_ids=np.array(ids, np.int32),
        samples=np.ones(1, bool),
        out_positions=one,
        requests=[request],
        admitted=[request],
        block_slots=np.zeros(blocks, np.int32),
        block_columns=np.arange(blocks, dtype=np.int32),
        block_ids=np.arange(blocks, dtype=np.int32),
    )
    with torch.inference_mode():
        runner.slots.apply(plan)
        inputs = build_inputs(plan, runner.slots, size, runner.groups)
        hidden = runner.executor.forward(inputs.batch, inputs.host)
        pieces = []
        for low in range(0, len(ids), runner.decoder.max_logits):
            rows = torch.arange(low, min(low + runner.decoder.max_logits, len(ids)), device=runner.device)
            pieces.append(runner.decoder.logits(hidden, rows).cpu().numpy().copy())
    return np.concatenate(pieces)
