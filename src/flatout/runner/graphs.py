"""Executor: how a step's forward is run: op by op for any mix, or, where every row decodes one token, as a captured CUDA graph or, on the CPU, a
program of the native library's (kernels/program.py).

A captured step reads everything that changes from one staged array (kernels/inputs.py), so a replay is one copy and one launch. Batch
sizes between those captured are padded with rows on the spare slot. On the CPU, where such rows would cost their share, every size is captured, when
it is first met. Where many rows share keys a second form of the step reads those once; it too is captured when it is first needed. Holds no request state. Called by runner.py; built by build.py.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.attention.backend import AttentionBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.inputs import decode_inputs, remember
from flatout.kernels.op import shape_class
from flatout.kernels.program import Program
from flatout.kernels.program import capture as capture_program
from flatout.kernels.sampling import greedy
from flatout.models.decoder import Decoder
from flatout.runner.slots import Slots
from flatout.step import StepPlan

RING = 4  # host buffers in turn, by a step's number: two may be in the air, and the copy of the one before them has long ended


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: exact to 4, then steps of at most a quarter: rows of padding cost a share of the attention alone, as the
    weights are read once for all."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 3))
    return (*sizes, most)


class Executor:
    def __init__(self, decoder: Decoder, backend: AttentionBackend):
        self.decoder = decoder
        self.backend = backend
        self.decodes: DecodeGraphs | None = None

    def forward(self, batch: ForwardBatch, host: HostBatch) -> Tensor:
        """Residual stream before the final norm: of all tokens [T, H] or of the sampled ones [S, H], as batch.last says."""
        self.backend.plan(batch, host)
        if batch.last is not None and host.last is not None:  # else nothing is sampled
            self.backend.plan(batch.last, host.last)
        return self.decoder.forward(batch)


@dataclass(slots=True)
class CapturedStep:
    """`size` rows of one token each: from the staged array to logits, and, as a second graph, to the next ids of a greedy batch.

    On the CPU `both` is the two in one. The other form, `cascade`, leaves its logits in the same place.
    """

    size: int
    batch: ForwardBatch
    staged: Tensor  # int32 on the device, laid out as decode_inputs says
    logits: Tensor  # float32 [size, V]
    ids: Tensor  # int64 [size]
    forward: Callable[[], object]
    choose: Callable[[], object]
    both: Callable[[], object] | None = None
    cascade: Callable[[], object] | None = None  # forward, with the keys that rows share read once; None: not needed yet
    shared: ForwardBatch | None = None  # what that works on, which must stay where it is


@dataclass(slots=True)
class Staged:
    """A plan where a captured step will find it. No tensor made for it: to free one lets Python's lock go, for which the engine's thread may wait."""

    step: CapturedStep
    turn: int  # which host buffer
    used: int  # of it
    cascade: bool


def _plainly(forward: Callable[[], object]) -> None:
    forward()


class DecodeGraphs:
    """Static buffers, the same for every size, and the graphs over them."""

    def __init__(self, executor: Executor, slots: Slots, block_size: int, sizes: Sequence[int]):
        self.decoder, self.backend, self.slots = executor.decoder, executor.backend, slots
        self.block_size = block_size
        self.sizes = tuple(sorted(sizes))
        self.steps: dict[int, CapturedStep] = {}  # by size
        device, most = slots.device, self.sizes[-1]
        self._tokens, self._positions, self._kv_slots, self._ids = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(4))
        self._kv_lens, self._rows = (torch.ones(most, dtype=torch.int32, device=device) for _ in range(2))
        self._every_row = torch.arange(most, device=device)
        self._q_starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        length = 1 + 1 + 3 * most + 3 * diffs_of(most)
        # the depth at which rows are grouped, or -1: nothing is shared; then the array of decode_inputs
        self._staged = torch.zeros(length, dtype=torch.int32, device=device)
        self._host = [torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._arrays = [host.numpy() for host in self._host]
        self._staged_array = self._staged.numpy() if device.type == "cpu" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # of memory, the same for all graphs
        self._rehearsed: set[int] = set()  # classes of sizes whose other form ran once

    def capture(self) -> str:
        """Capture every size, the largest first, so that they share one pool of memory. Runs each once before, which measures and compiles
        what a capture cannot. Returns why it captured nothing, or ""."""
        with _capturing(self._pool) as capture, torch.inference_mode():
            batch, staged, _, _ = self.rehearse(self.sizes[-1])
            if why := _waits(partial(self._forward, batch, staged)):
                return why
            for size in reversed(self.sizes):
                self._capture(size, capture)
        return ""

    def _capture(self, size: int, capture: Callable[[Callable[[], object]], Callable[[], object]]) -> CapturedStep:
        batch, staged, ids, logits = self.rehearse(size)
        forward = capture(partial(self._forward, batch, staged))
        choose = capture(partial(self._choose, ids, logits, batch))
        both = forward.then(choose) if isinstance(forward, Program) and isinstance(choose, Program) else None
        step = self.steps[size] = CapturedStep(size, batch, staged, logits, ids, forward, choose, both)
        return step

    def _captured(self, size: int) -> CapturedStep:
        """In the midst of serving where it was not captured before, on the CPU: a step of padding, and a few milliseconds."""
        if size not in self.steps:
            with _capturing(self._pool) as capture, torch.inference_mode():
                self._capture(size, capture)
        return self.steps[size]

    def rehearse(self, size: int, cascade: bool = False) -> tuple[ForwardBatch, Tensor, Tensor, Tensor]:
        """Run a step of padding; returns what a capture of it works on: batch, staged array, ids and logits."""
        host = torch.zeros_like(self._staged, device="cpu")
        self._stage(size, _nothing(), host.numpy())
        self._staged.copy_(host)
        batch, staged, ids = self._batch(size, cascade), self._staged[: 2 + 3 * size + 3 * diffs_of(size)], self._ids[:size]
        logits = self._forward(batch, staged, cascade)
        self._choose(ids, logits, batch)
        return batch, staged, ids, logits

    def is_captured(self, plan: StepPlan) -> bool:
        """Whether there is nothing left to capture when this plan is staged."""
        return not self.backend.cascades and self.fitting(plan) in self.steps

    def fitting(self, plan: StepPlan) -> int:
        """Of the smallest step that holds this plan: rows that sample after one token, and no more new blocks than are staged. 0: none does."""
        rows = len(plan.slots)
        if plan.num_tokens != rows or rows > self.sizes[-1] or not plan.samples.all():
            return 0
        size = self.sizes[bisect_left(self.sizes, rows)]
        return size if len(plan.block_ids) <= diffs_of(size) else 0

    def stage(self, plan: StepPlan) -> Staged | None:
        """Write the plan where run() will find it, on the host; its rows are the plan's, then padding. None: no captured step holds it."""
        size = self.fitting(plan)
        if not size:
            return None
        step = self._captured(size)
        if len(plan.block_ids):
            self.slots.host_tables[plan.block_slots, plan.block_columns] = plan.block_ids
        depth = self.backend.shared_depth(self.slots.host_tables, plan.slots, plan.starts + 1)
        if depth >= 0 and step.cascade is None:
            self._capture_cascade(step)
        turn = plan.step % RING
        used = self._stage(size, plan, self._arrays[turn], depth)
        return Staged(step, turn, used, depth >= 0)

    def run(self, staged: Staged, choose: bool, by: Callable[[Callable[[], object]], object] = _plainly) -> None:
        """Queue the forward of what was staged, and the choice of each row's likeliest id if that is asked; `by` calls it."""
        if self._staged_array is not None:  # by numpy, which keeps Python's lock for so few
            self._staged_array[: staged.used] = self._arrays[staged.turn][: staged.used]
        else:
            self._staged[: staged.used].copy_(self._host[staged.turn][: staged.used], non_blocking=True)
        step = staged.step
        cascade = step.cascade if staged.cascade else None
        if choose and step.both is not None and cascade is None:
            by(step.both)
            return
        by(cascade or step.forward)
        if choose:
            step.choose()

    def _capture_cascade(self, step: CapturedStep) -> None:
        """In the midst of serving: steps before it may be under way, and this one waits for it, some 20 ms. Groups are found from the tables as
        they are when it is replayed."""
        if (known := shape_class(step.size)) not in self._rehearsed:
            self.rehearse(step.size, cascade=True)
            self._rehearsed.add(known)
        step.shared = self._batch(step.size, cascade=True)
        with _capturing(self._pool) as capture, torch.inference_mode():
            step.cascade = capture(partial(self._forward, step.shared, step.staged, cascade=True))

    def _stage(self, size: int, plan: StepPlan, whole: np.ndarray, depth: int = 0) -> int:
        """Write the plan into a host buffer; returns how much of it is in use."""
        rows, most = len(plan.slots), diffs_of(size)
        whole[0], array = depth, whole[1:]
        array[0] = diffs = len(plan.block_ids)
        per_row = array[1 : 1 + 3 * size].reshape(3, size)
        for line, values, padding in zip(per_row, (plan.token_ids, plan.starts, plan.slots), (0, 0, self.slots.spare)):
            line[:rows], line[rows:] = values, padding
        per_diff = array[1 + 3 * size : 1 + 3 * size + 3 * most].reshape(3, most)
        for line, values in zip(per_diff, (plan.block_slots, plan.block_columns, plan.block_ids)):
            line[:diffs] = values
        return 2 + 3 * size + (3 * most if diffs else 0)

    def _batch(self, size: int, cascade: bool = False) -> ForwardBatch:
        groups = len(self.decoder.spec.cache_groups())
        batch = ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            q_starts=self._q_starts[: size + 1],
            kv_lens=self._kv_lens[:size],
            block_tables=(self.slots.tables,) * groups,
            table_rows=self._rows[:size],
            kv_slots=(self._kv_slots[:size],) * groups,
            sample_rows=self._every_row[:size],
        )
        self.backend.plan_decode(batch, cascade)
        return batch

    def _forward(self, batch: ForwardBatch, staged: Tensor, cascade: bool = False) -> Tensor:
        decode_inputs(
            batch.tokens,
            batch.positions,
            batch.kv_lens,
            batch.kv_slots[0],
            batch.table_rows,
            self.slots.tables,
            staged[1:],
            self.slots.last_ids,
            self.block_size,
        )
        if cascade:
            self.backend.find_shared(batch, staged[:1])
        return self.decoder.logits(self.decoder.forward(batch), batch.sample_rows)

    def _choose(self, ids: Tensor, logits: Tensor, batch: ForwardBatch) -> None:
        greedy(ids, logits)
        remember(self.slots.last_ids, batch.table_rows, ids)


def diffs_of(size: int) -> int:
    """New blocks that a captured step of this size can take: two a row, and a long cached prompt."""
    return 2 * size + 128


def _nothing() -> StepPlan:
    """Padding alone."""
    empty = np.empty(0, np.int32)
    return StepPlan(0, empty, empty, empty, empty, np.empty(0, bool), empty, [])


def _waits(run: Callable[[], object]) -> str:
    """What torch says of the first thing in the run that waits for the device, which no graph can hold; "" if nothing does."""
    if not torch.cuda.is_available():
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says each time that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@contextmanager
def _capturing(pool: Any) -> Iterator[Callable[[Callable[[], object]], Callable[[], object]]]:
    """Gives what turns a run of ops into its replay, by a pool of memory; None: on the CPU, by a program."""
    if pool is None:
        yield capture_program
        return
    stream = torch.cuda.Stream()

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may pin memory meanwhile
        try:
            run()
        finally:
            graph.capture_end()
        return graph.replay

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield capture
    torch.cuda.current_stream().wait_stream(stream)
