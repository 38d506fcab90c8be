"""Where the time of a run went: the floor of its steps, what kernels took beyond it, and how long the device waited for the host.

A first ledger, from the engine's step records and the ceilings that were measured; the cost of a step is told from its counts, rows taken
as alike. Called by offline.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from flatout.cli.figures import ELEMENT_BYTES, kv_head_bytes, kv_read, weights_read
from flatout.hardware import Ceilings
from flatout.modelfile.spec import ModelSpec

if TYPE_CHECKING:
    from flatout.llm import LLM
    from flatout.step import StepRecord


@dataclass(frozen=True)
class Account:
    """Of all steps of one run. Seconds, and microseconds of the median step."""

    steps: int
    wall: float
    bandwidth_s: float  # floor of the steps that bytes limit
    compute_s: float  # and of those that operations limit
    device_s: float  # the device busy
    schedule_us: float
    inputs_us: float
    launch_us: float
    commit_us: float

    @property
    def floor(self) -> float:
        return self.bandwidth_s + self.compute_s

    @property
    def idle(self) -> float:
        """Seconds in which no step was on the device."""
        return max(0.0, self.wall - self.device_s)

    def line(self) -> str:
        def share(seconds: float) -> str:
            return f"{seconds / self.wall:.0%}"

        floor = f"floor {share(self.floor)}"
        if self.bandwidth_s and self.compute_s:
            floor += f" ({share(self.bandwidth_s)} bandwidth, {share(self.compute_s)} compute)"
        host = f"schedule {self.schedule_us:.0f}, inputs {self.inputs_us:.0f}, launch {self.launch_us:.0f}, commit {self.commit_us:.0f}"
        over = share(max(0.0, self.device_s - self.floor))
        return f"{self.steps} steps: {floor}, kernels over it {over}, device idle {share(self.idle)}; host us a step: {host}"


def account(llm: LLM, records: Sequence[StepRecord], wall: float, ceilings: Ceilings) -> Account:
    """Of a run of `wall` seconds whose steps these are."""
    element = ELEMENT_BYTES[llm.config.model.dtype]
    weights = weights_read(llm.spec, llm.engine.weight_bytes, element)
    bandwidth = compute = 0.0
    for record in records:
        read = weights + record.rows * kv_read(llm.spec, record.kv_tokens // record.rows, kv_head_bytes(llm))
        by_bytes = read / ceilings.reading(read).median
        by_operations = step_flops(llm.spec, weights // element, record) / ceilings.matrix if ceilings.matrix else 0.0
        if by_bytes >= by_operations:
            bandwidth += by_bytes
        else:
            compute += by_operations

    def typical(name: str) -> float:
        return median(getattr(r, name) for r in records) * 1e6

    host = (typical(name) for name in ("schedule_s", "inputs_s", "launch_s", "commit_s"))
    return Account(len(records), wall, bandwidth, compute, sum(r.device_s for r in records), *host)


def step_flops(spec: ModelSpec, parameters: int, record: StepRecord) -> float:
    """Operations of a step's matrix products and attention. parameters: those that one token meets, the head's included. Of the last layer,
    tokens that are not sampled meet the keys' and values' products alone (models/decoder.py)."""
    head = spec.vocab_size * spec.hidden_size
    tokens, rows, unsampled = record.tokens, record.rows, record.tokens - record.sampled
    layer, qkv = (parameters - head) / spec.num_layers, spec.hidden_size * (spec.q_size + 2 * spec.kv_size)
    products = 2 * (tokens * (parameters - head) - unsampled * (layer - qkv) + record.sampled * head)
    context = record.kv_tokens / rows - (tokens / rows - 1) / 2  # of the mean query
    *windows, last = (min(context, layer.window or context) for layer in spec.layers)
    return products + 4 * spec.q_size * (tokens * sum(windows) + record.sampled * last)
