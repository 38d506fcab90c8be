"""Runner: executes a StepPlan and hands back a StepResult. Gather, forward, sample; be paranoid about adding lines here.

On CUDA launch() returns when the work is queued; on the CPU one compute thread takes plans in order. Either way the engine plans the
next step meanwhile, and the two devices look alike to it. Knows no policy and no text. Called by engine.py; built by build.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.attention.backend import AttentionBackend
from flatout.kernels.inputs import remember
from flatout.kernels.op import choices
from flatout.kernels.upload import upload
from flatout.models.decoder import Decoder
from flatout.runner.clock import CudaClock, StepClock
from flatout.runner.graphs import RING, CapturedStep, Executor, Staged
from flatout.runner.inputs import build_inputs
from flatout.runner.sampler import Logprobs, Sampler
from flatout.runner.slots import Slots
from flatout.runner.threads import Threads
from flatout.step import LogprobRows, StepPlan, StepResult


@dataclass(slots=True)
class Timed:
    """A result with what it cost, in seconds."""

    result: StepResult
    inputs_s: float
    launch_s: float
    device_s: float
    wall_s: float  # since the end of the step before, as device_s was told
    begun: float  # when it could begin, and
    gap_s: float  # how long the device stood still until then,
    handover_s: float  # for this part of it with the step at hand
    sample_s: float = 0.0
    python_s: float = 0.0
    graph: str = ""
    padded: int = 0
    ops: list[tuple[str, float]] | None = None
    threads: int = 0  # of the native library


Handle = Callable[[], Timed]  # blocks until the step is done
# steps on the CPU of which one tells its ops apart, which takes 0.1 us for each: of decodes alone, and of those that take longer
DEEP_EVERY, DEEP_CHUNKS = 64, 8


class Runner:
    def __init__(
        self, decoder: Decoder, backend: AttentionBackend, *, max_slots: int, max_blocks: int, block_size: int, device: torch.device
    ):
        self.decoder = decoder
        self.device = device
        self.block_size = block_size
        self.groups = len(decoder.spec.cache_groups())
        self.slots = Slots(max_slots, max_blocks, device)
        self.sampler = Sampler(decoder.spec.vocab_size, max_slots, device)
        self.executor = Executor(decoder, backend)
        # of captured steps: where their ids go on the host, in turn, and which is next
        self._results = [torch.empty(max_slots, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._turn = 0
        self.deep_steps = 0  # how many from now on are to tell their ops apart; on the CPU some do in any case
        self.clock_of: Callable[[bool], StepClock] = (
            CudaClock if device.type == "cuda" else StepClock
        )  # deep or not; doctor/trace.py has its own
        self._launched = 0
        self._clock = self.clock_of(False)  # of the step that is being executed, and
        self._step: CapturedStep | None = None  # the captured one that holds it
        self._finished = time.perf_counter()  # when the last step ended, on the CPU
        self._end: torch.cuda.Event | None = None  # of the last step, on CUDA
        self.prompts: dict[int, tuple[np.ndarray, int]] = {}  # slot -> (prompt ids, alternatives) of requests that want prompt logprobs
        self.threads: Threads | None = None  # where there may be fewer than were asked for
        self.makes_inputs_alone = device.type == "cpu"  # on the compute thread, so that the device waits for them
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute") if device.type == "cpu" else None

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step. Plans run in the order they are launched."""
        self._launched += 1
        deep = self.deep_steps > 0
        self.deep_steps -= deep
        if self._thread is not None:
            every = DEEP_EVERY if plan.num_tokens == len(plan.slots) else DEEP_CHUNKS
            clock, staged = self.clock_of(deep or self._launched % every == 0), self._stage_ahead(plan)
            future: Future[Timed] = self._thread.submit(self._run_on_cpu, plan, staged, clock, time.perf_counter())
            return future.result
        return self._launch_on_cuda(plan, self.clock_of(deep))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        choices.save()  # shapes first met while serving

    def _stage_ahead(self, plan: StepPlan) -> Staged | None:
        """A captured step's inputs, made on the engine's thread while the steps before it run. Not where somebody is admitted: only there do tables
        change, which those steps read; elsewhere they grow."""
        decodes = self.executor.decodes
        if plan.admitted or decodes is None or not decodes.is_captured(plan):
            return None
        return decodes.stage(plan)

    def _run_on_cpu(self, plan: StepPlan, staged: Staged | None, clock: StepClock, handed: float) -> Timed:
        before, begin = self._finished, time.perf_counter()
        self._clock = clock
        with torch.inference_mode():
            output, inputs_s = self._execute(plan, lambda: None, staged)
        result = output.to_result()
        result.token_ids = result.token_ids.copy()  # a captured step's lie where its next ones will
        self._finished = end = time.perf_counter()
        seconds, threads = end - begin, self.threads
        busy = seconds - inputs_s
        timed = Timed(
            result,
            inputs_s,
            0.0,
            busy,
            wall_s=end - before,
            begun=begin,
            gap_s=begin - before,
            handover_s=begin - max(before, handed),
            sample_s=clock.sample_s,
            python_s=busy - clock.sample_s - clock.native_s,
            ops=clock.per_op(),
            threads=threads.now if threads else 0,
            **self._captured(plan),
        )
        if threads is not None:
            threads.after(len(plan.slots) if plan.num_tokens == len(plan.slots) else 0, seconds)
        return timed

    def _launch_on_cuda(self, plan: StepPlan, clock: StepClock) -> Handle:
        begin = begun = time.perf_counter()
        early = False  # the device had not ended the step before when it was given this one
        self._clock = clock
        before, start, end = self._end, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def begins() -> None:
            nonlocal begun, early
            early = before is not None and not before.query()
            start.record()
            begun = time.perf_counter()

        with torch.inference_mode():
            output, inputs_s = self._execute(plan, begins)
            output = output.map(self._to_host)
        end.record()
        self._end = end
        launch_s, captured = time.perf_counter() - begin - inputs_s, self._captured(plan)

        def wait() -> Timed:
            end.synchronize()
            busy = start.elapsed_time(end) / 1e3
            gap = max(0.0, before.elapsed_time(start) / 1e3 - clock.held_s()) if before is not None else 0.0
            handover = gap if early else 0.0
            return Timed(output.to_result(), inputs_s, launch_s, busy, gap + busy, begun, gap, handover, ops=clock.per_op(), **captured)

        return wait

    def _captured(self, plan: StepPlan) -> dict[str, Any]:
        """Whether the step just issued was a captured one, and its rows of padding."""
        decodes, step = self.executor.decodes, self._step
        if decodes is None:
            return {}
        if step is None:
            return {"graph": "missed"}
        padded = step.size - len(plan.slots)
        return {"graph": "padded" if padded else "hit", "padded": padded}

    def _execute(self, plan: StepPlan, begins: Callable[[], object], staged: Staged | None = None) -> tuple[_StepOutput, float]:
        """The step's output, under way, and the seconds until its forward began; begins() is called then, so that a device's wait for the host
        is not taken for work."""
        try:
            return self._run(plan, begins, staged)
        except Exception:
            self.slots.apply(plan)  # whatever failed: later plans rely on the tables
            raise

    def _run(self, plan: StepPlan, begins: Callable[[], object], staged: Staged | None) -> tuple[_StepOutput, float]:
        begin = time.perf_counter()
        clock, decodes = self._clock, self.executor.decodes
        rating = self._admit(plan)
        apart = clock.deep and self.device.type == "cuda"  # a graph's ops can't be told apart
        if staged is None and decodes is not None and not rating and not apart:
            staged = decodes.stage(plan)
        self._step = None
        if staged is not None and decodes is not None and not rating:
            self._step = step = staged.step
            greedy, inputs_s = self.sampler.plainly_greedy(plan.slots), time.perf_counter() - begin
            begins()
            decodes.run(staged, greedy, clock.program)
            with clock.sampling():
                return self._chosen(step, plan, greedy), inputs_s
        inputs = build_inputs(plan, self.slots, self.block_size, self.groups, narrow=not rating)
        inputs_s = time.perf_counter() - begin

        clock.ahead()
        begins()
        output, logits = _StepOutput(None, None, {}), None
        with clock.loose():
            hidden = self.executor.forward(inputs.batch, inputs.host)
            if len(inputs.sampled_slots):
                logits = self.decoder.logits(hidden, (inputs.batch.last or inputs.batch).sample_rows)
        if logits is not None:
            with clock.sampling():
                sampled = self.sampler.sample(logits, inputs.sampled_slots, inputs.sampled_positions)
                remember(self.slots.last_ids, inputs.sampled_slots_device, sampled.ids)
            output = _StepOutput(sampled.ids, sampled.logprobs, {})
        if rating:
            self._prompt_logprobs(plan, hidden, output)
        return output, inputs_s

    def _admit(self, plan: StepPlan) -> bool:
        """Take over what the sampler needs of new requests. Whether this step owes anybody the logprobs of a prompt."""
        # admitted requests have the last rows. Their own `slot` may have changed by now: the engine's thread goes on meanwhile
        for request, slot in zip(plan.admitted, plan.slots[len(plan.slots) - len(plan.admitted) :].tolist()):
            self.sampler.admit(slot, request)
            self.prompts.pop(slot, None)
            # once a request: not for samples that share the prompt, nor when it is computed again after preemption
            asks = request.params.prompt_logprobs is not None and len(request.prompt_ids) > 1  # the first token has none
            if asks and request.index == 0 and not request.output_ids:
                self.prompts[slot] = (np.asarray(request.prompt_ids, np.int64), request.params.prompt_logprobs or 0)
        return bool(self.prompts) and not self.prompts.keys().isdisjoint(plan.slots.tolist())

    def _chosen(self, step: CapturedStep, plan: StepPlan, greedy: bool) -> _StepOutput:
        """From a captured forward's logits; by the captured step itself where every row is greedy and asks nothing else."""
        rows = len(plan.slots)
        if greedy:
            return _StepOutput(step.ids[:rows], None, {})
        sampled = self.sampler.sample(step.logits[:rows], plan.slots, plan.out_positions)
        remember(self.slots.last_ids, step.batch.table_rows[:rows], sampled.ids)
        return _StepOutput(sampled.ids, sampled.logprobs, {})

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy under way. Ids, which every step has, go through the ring: pinning memory anew costs more than the copy."""
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            return tensor.to("cpu", non_blocking=True)
        self._turn = (self._turn + 1) % RING
        return self._results[self._turn][: tensor.shape[0]].copy_(tensor, non_blocking=True)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor, output: _StepOutput) -> None:
        """Logits of prompt positions, a slice at a time so that nothing grows with the prompt."""
        begin = 0
        for row, (slot, start, count) in enumerate(zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist())):
            prompt, top = self.prompts.get(slot, (None, 0))
            if prompt is not None and start < len(prompt) - 1:
                targets = prompt[start + 1 : start + count + 1]
                pieces = []
                for low in range(0, len(targets), self.decoder.max_logits):
                    piece = targets[low : low + self.decoder.max_logits]
                    rows = torch.arange(begin + low, begin + low + len(piece), device=self.device)
                    pieces.append(self.sampler.prompt_logprobs(self.decoder.logits(hidden, rows), upload(self.device, [piece])[0], top))
                output.prompts[row] = pieces
                if start + count >= len(prompt) - 1:
                    del self.prompts[slot]
            begin += count


@dataclass(slots=True)
class _StepOutput:
    """Device tensors on their way to a StepResult."""

    ids: Tensor | None
    logprobs: Logprobs | None
    prompts: dict[int, list[Logprobs]]

    def map(self, move: Callable[[Tensor], Tensor]) -> _StepOutput:
        return _StepOutput(
            None if self.ids is None else move(self.ids),
            self.logprobs and self.logprobs.map(move),
            {row: [piece.map(move) for piece in pieces] for row, pieces in self.prompts.items()},
        )

    def to_result(self) -> StepResult:
        """Only once the tensors are on the host and filled."""
        return StepResult(
            token_ids=np.empty(0, np.int64) if self.ids is None else self.ids.numpy(),
            logprobs=None if self.logprobs is None else _rows([self.logprobs]),
            prompt_logprobs={row: _rows(pieces) for row, pieces in self.prompts.items()},
        )


def _rows(pieces: list[Logprobs]) -> LogprobRows:
    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name).numpy() for p in pieces])

    return LogprobRows(join("chosen"), join("ranks"), join("top_ids"), join("top_logprobs"))
