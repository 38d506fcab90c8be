"""One step in three records: StepPlan (scheduler -> runner), StepResult (runner -> scheduler), StepRecord (-> ledger).

Arrays over rows; nothing that acts, no torch. A row is one sequence's share of the step; tokens of all rows lie end to end.
Made by core/scheduler.py and runner/; read by engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from flatout.request import Request

FROM_DEVICE = -1  # in StepPlan.token_ids: the id that the previous step sampled in that row's slot


@dataclass(slots=True)
class StepPlan:
    """R rows, T tokens. Host arrays; the runner copies them to the device in one go."""

    step: int
    slots: np.ndarray  # int32 [R] permanent row of each sequence
    starts: np.ndarray  # int32 [R] tokens whose KV is there when attention reads: computed before, or by another row of this plan
    counts: np.ndarray  # int32 [R] tokens computed now; sum = T
    token_ids: np.ndarray  # int32 [T] ids, or FROM_DEVICE
    samples: np.ndarray  # bool [R] the row reaches its last known token and yields a new one
    out_positions: np.ndarray  # int32 [R] output index of the token the row would yield
    requests: list[Request]  # [R] whose rows these are; the runner never looks inside
    admitted: list[Request] = field(default_factory=list)  # got a slot in this step (first time or resumed); theirs are the last rows
    # newly given blocks: table[slot, column] = block, for each cache group alike
    block_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    block_columns: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    block_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    copies: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int32))  # (from, to, tier); empty until KV is tiered
    waiting: dict[str, int] = field(default_factory=dict)  # requests left waiting in this step, by reason

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class LogprobRows:
    """Raw log-probabilities of some rows of logits."""

    logprobs: np.ndarray  # float32 [N] of the chosen (or given) token
    ranks: np.ndarray  # int32 [N] 1 = most likely
    top_ids: np.ndarray  # int32 [N, K] in falling order
    top_logprobs: np.ndarray  # float32 [N, K]


@dataclass(slots=True)
class StepResult:
    """What the device returned for a plan: one sampled id per row with plan.samples set, in row order (S of them)."""

    token_ids: np.ndarray  # int64 [S]
    logprobs: LogprobRows | None = None  # [S] rows; present when any sampled row asked
    # row index in the plan -> logprobs of the prompt tokens that follow this chunk's positions
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """What a step cost and held; seconds on the monotonic clock of the machine, which all its processes share. Kept by engine.py, read by ledger/.

    The device's time from the end of the step before to the end of this one is the step's wall time. It is what the device was busy for, what it
    stood still for while the engine's thread was in some stage, and `handover_s`: wall_s = busy_s + sum(exposed) + handover_s, but for what no clock saw.
    """

    step: int
    start: float  # when it was planned
    ended: float = 0.0
    wall_s: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)  # by stage of the engine's thread (ledger/laps.py); "idle": it had no work
    handover_s: float = 0.0  # device idle though the step had been handed to it
    # host seconds of the stages, hidden behind the device or not
    drain_s: float = 0.0  # requests and aborts taken in
    schedule_s: float = 0.0
    inputs_s: float = 0.0  # plan -> ForwardBatch; on the CPU the compute thread's, where nothing hides it
    launch_s: float = 0.0  # host time to issue forward and sample on CUDA; on the CPU the compute thread's device_s holds it
    wait_s: float = 0.0  # host blocked on the device
    commit_s: float = 0.0
    deliver_s: float = 0.0  # outputs handed on; in a script their text, too
    device_s: float = 0.0  # device busy: events on CUDA, the compute thread's clock on the CPU
    sample_s: float = 0.0  # of device_s: from logits to ids; on the CPU alone
    python_s: float = 0.0  # of device_s: Python between ops and programs; on the CPU alone
    tokens: int = 0
    rows: int = 0
    prefill_tokens: int = 0
    decodes: int = 0  # rows that bring one token and yield one
    sampled: int = 0
    padded: int = 0  # rows that a captured step computes for nobody
    rejected: int = 0  # draft tokens that it computed and threw away
    kv_tokens: int = 0  # context read by attention, summed over rows
    # by cache group, as ledger/table.py:StepShape has them: keys read, (query, key) pairs, keys of sampled rows
    keys: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    last_keys: tuple[int, ...] = ()
    graph: str = ""  # "hit", "padded" or "missed": whether a captured step held it; "": nothing is captured here
    running: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preempted: int = 0
    threads: int = 0  # of the native CPU library: fewer than --threads while others use the cores (runner/threads.py); 0: always all
    waiting: dict[str, int] = field(default_factory=dict)  # requests left waiting, by reason
    ops: list[tuple[str, float]] | None = None  # of a deep step: each op's name and seconds, in order
