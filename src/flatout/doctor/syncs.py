"""Device syncs of served steps: how often the host waits for the GPU inside of torch's own calls, and which lines make it. There should be none.

By torch.cuda.set_sync_debug_mode, which sees operations that wait unasked (item(), a copy from pageable memory, nonzero) and not the one wait that each step
means, for its own end. On the CPU there is no device to wait for. Called by cli/doctor/trace.py.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.doctor.facts import NotAvailable
from flatout.doctor.trace import generate, run_warm
from flatout.llm import LLM

SAID = "synchroniz"  # in torch's warning
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Syncs:
    """Of some steps: how many of each line of code."""

    steps: int
    lines: dict[str, int]  # "runner/sampler.py:120" -> syncs

    @property
    def a_step(self) -> float:
        return sum(self.lines.values()) / self.steps

    @property
    def sentence(self) -> str:
        if not self.lines:
            return f"no device sync in {self.steps} steps"
        where = ", ".join(f"{count} at {line}" for line, count in Counter(self.lines).most_common(5))
        return f"{self.a_step:.2f} device syncs a step, over {self.steps} steps: {where}"

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "syncs_per_step": self.a_step, "lines": self.lines}


def count_syncs(llm: LLM, steps: int, batch: int, prompt: int) -> Syncs:
    """Of steps as they are served, captured ones too. NotAvailable on the CPU."""
    if llm.engine.runner.device.type != "cuda":
        raise NotAvailable("a GPU: on the CPU there is no device")
    run_warm(llm, batch, prompt)
    llm.engine.records.clear()
    lines = synchronising(lambda: generate(llm, batch, prompt, steps + 1, "syncs"))
    return Syncs(len(llm.engine.records), lines)


def synchronising(run: Callable[[], object]) -> dict[str, int]:
    """The lines that waited for the device meanwhile, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch says of the mode itself that it is a prototype
    waited = [w for w in caught if SAID in str(w.message) and "prototype" not in str(w.message)]
    return dict(Counter(f"{_shortly(Path(w.filename))}:{w.lineno}" for w in waited))


def _shortly(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])
