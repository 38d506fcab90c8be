"""What if: a model's steps as they are predicted here and with settings, hardware, dtype or scheme changed on paper.

Calibrated shares come from what was measured on this machine (calibrate.py); another machine's are taken for the same, as nothing better is known.
Throughput of a load is plan/simulate.py's. Called by cli/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.doctor.calibrate import calibrate, form_of, kept_calibration
from flatout.doctor.predict import OnPaper, on_paper
from flatout.ledger.table import CostTable, StepShape

BATCHES, CONTEXTS = (1, 8, 32), (128, 1024)


@dataclass(frozen=True)
class Step:
    """One step's shape and its seconds, now and then."""

    batch: int
    context: int
    now: float
    then: float


def calibrated(paper: OnPaper, options: Mapping[str, Any], measure: bool = False) -> tuple[OnPaper, str]:
    """The model with what was measured on this machine; and a line that says where its shares come from.

    measure: what is not known of this form (form_of) is measured now, which loads the model; options: as on_paper() takes them.
    """
    form, model = form_of(paper.config), paper.table.model
    found = kept_calibration(paper.hardware, model, form)
    if measure and (found is None or found.model != model):
        found, _ = calibrate(options)
    if found is None:
        roof = paper.table.roof
        return paper, "no op was measured here: " + ("ceilings" if roof.measured else "a data sheet") + " and launches alone (--calibrate)"
    whose = "of this model" if found.model == model else f"of {found.model}"
    off = "" if found.off is None else f"; other steps were predicted {found.off:.0%} off in the median"
    return replace(paper, table=found.apply(paper.table)), f"ops as measured here {whose} ({found.form}){off}"


def changed(options: Mapping[str, Any], changes: Mapping[str, Any], gpu: str | None = None) -> OnPaper:
    """The model with changed settings, and on a named GPU instead of this machine. A device that was given goes with this machine."""
    both = {**options, **changes}
    if gpu is not None:
        both = {name: value for name, value in both.items() if name not in ("device", "threads") or name in changes}
    return on_paper(both, gpu)


def decode_shape(table: CostTable, batch: int, context: int) -> StepShape:
    """A step that adds a token to each of `batch` requests, of so many keys with it."""
    keys = tuple(batch * min(context, window or context) for window in table.windows)
    return StepShape(batch, batch, keys, keys, keys, batch, batch)


def steps(now: OnPaper, then: OnPaper, batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS) -> Iterator[Step]:
    """Decode steps of both, those of each batch and context that both their settings allow."""
    for batch in batches:
        for context in contexts:
            if all(batch <= (p.config.scheduler.max_num_seqs or 0) and context <= (p.config.model.max_model_len or 0) for p in (now, then)):
                seconds = [p.table.step_seconds(decode_shape(p.table, batch, context), captured=_captures(p)) for p in (now, then)]
                yield Step(batch, context, *seconds)


def _captures(paper: OnPaper) -> bool:
    return not paper.config.device.enforce_eager
