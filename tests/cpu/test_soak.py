"""Seconds of soak.py in every run, `make long` minutes of it; and that it would see a step gone wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from soak import Soak, soak

from flatout.kernels import native
from flatout.runner.graphs import DecodeGraphs, Staged
from flatout.step import StepPlan

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native library")
SECONDS = 6


def test_random_steps_for_seconds(tmp_path: Path) -> None:
    tally = soak(tmp_path, SECONDS / 60, seed=1)
    assert not tally.differences, "\n".join(tally.lines())
    counts = tally.counts
    assert min(counts["of them programs"], counts["answers in float32"] + counts["answers of packed weights"]) > 0


@pytest.mark.long
@pytest.mark.timeout(0)
def test_random_steps_for_minutes(tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    minutes, seed = (request.config.getoption(name) for name in ("--minutes", "--soak-seed"))
    tally = soak(tmp_path, minutes, seed)
    with capsys.disabled():
        print(f"\n{minutes:g} minutes from seed {seed}:", *tally.lines(), sep="\n")
    assert not tally.differences


@pytest.mark.parametrize("seed", [3, 4])
def test_a_step_gone_wrong_is_seen(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed weights and in float32: programs in which one row writes its newest key over the one before."""
    stage = DecodeGraphs.stage

    def late(graphs: DecodeGraphs, plan: StepPlan) -> Staged | None:
        starts = plan.starts.copy()
        starts[-1] -= starts[-1] > 1
        return stage(graphs, replace(plan, starts=starts))

    monkeypatch.setattr(DecodeGraphs, "stage", late)
    run = Soak(tmp_path)
    run.round(seed)
    run.close()
    assert run.tally.differences
