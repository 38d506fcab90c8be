"""The ledger: StepRecords and the CostTable become an account of where the time went, every part by its name, over windows and since the start.

Records are summed as they come, for a few microseconds each; floors are told when somebody asks, from the mean shapes of alike steps, as costs are
linear in what differs among them. Plain data, no torch. Called by server/, bench/ and doctor/; the records are engine.py's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flatout.ledger.laps import IDLE
from flatout.ledger.table import CostTable, StepShape
from flatout.ledger.usual import Usual, shape_key
from flatout.step import StepRecord

SECONDS_KEPT = 120
WINDOWS = {"1s": 1, "10s": 10, "60s": 60}
# stages of the host for which the device can stand still; "wait": the engine's thread had yet to notice the end of a step
STAGES = ("drain", "schedule", "inputs", "wait", "commit", "deliver")
HOST = "host_"  # before a stage's name among the parts
# the parts of a step's wall time, in the order in which they are shown
PARTS = (
    "floor_bandwidth",  # what bytes would take at the measured bandwidth, of ops that they limit
    "floor_compute",  # and FLOPs at the measured rate
    "kernels",  # beyond the floor, in ops
    "padding",  # rows computed for nobody
    "sample",  # from logits to ids, where it is timed apart
    "launch",  # the device at hand, between ops and between steps
    *(HOST + stage for stage in STAGES),  # the device had nothing to do until the host was through
    "communication",  # between ranks
    "idle",  # no request was there
    "underway",  # a step that has not ended yet
    "residual",  # what no clock saw
)


@dataclass(slots=True)
class _Alike:
    """Steps of about one shape: sums of what a StepShape holds."""

    steps: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * 5)  # tokens, sampled, requests, decodes, padded
    groups: list[int] = field(default_factory=list)  # keys, pairs and last_keys, each by cache group

    def add(self, steps: int, counts: Sequence[int], groups: Sequence[int]) -> None:
        self.steps += steps
        self.counts = [a + b for a, b in zip(self.counts, counts)]
        self.groups = [a + b for a, b in zip(self.groups, groups)] if self.groups else list(groups)

    def mean(self) -> StepShape:
        tokens, sampled, requests, decodes, padded = (round(count / self.steps) for count in self.counts)
        each = [round(count / self.steps) for count in self.groups]
        n = len(each) // 3
        keys, pairs, last_keys = (tuple(each[i * n : (i + 1) * n]) for i in range(3))
        return StepShape(tokens, sampled, keys, pairs, last_keys, requests, decodes, padded)


@dataclass(slots=True)
class Sums:
    """Of some steps; they add up. Seconds and counts."""

    steps: int = 0
    wall: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # by stage, hidden behind the device or not
    handover: float = 0.0
    python: float = 0.0
    sample: float = 0.0
    tokens: int = 0
    prefill_tokens: int = 0
    sampled: int = 0
    padded: int = 0
    preempted: int = 0
    rejected: int = 0  # draft tokens that were computed and thrown away
    chunks: int = 0  # steps that computed more than newest tokens, and
    chunk_tokens: int = 0  # theirs
    held: float = 0.0  # seconds x decodes that such steps took beyond the usual step of those decodes
    longest: float = 0.0  # the longest of them that kept a decode waiting
    largest: int = 0  # and its tokens
    stalls: int = 0  # steps out of the usual (usual.py), and
    stalled: dict[str, float] = field(default_factory=dict)  # seconds of them, by the stage for which the device stood still, or "device"
    cold: float = 0.0  # seconds that the first step of a shape took longer than the next one
    device: dict[bool, float] = field(default_factory=dict)  # busy, in steps of decodes alone or not
    graphs: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)  # seconds x requests left waiting, by reason
    rows: float = 0.0  # seconds x rows
    blocks: float = 0.0  # seconds x share of the pool in use
    alike: dict[tuple[int, ...], _Alike] = field(default_factory=dict)
    # of deep steps, by whether they were decodes alone: seconds busy, and seconds and floor of each op by label
    deep: dict[bool, float] = field(default_factory=dict)
    ops: dict[tuple[bool, str], tuple[float, float]] = field(default_factory=dict)

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.wall += record.wall_s
        for stage, seconds in record.exposed.items():
            self.exposed[stage] = self.exposed.get(stage, 0.0) + seconds
        for stage in ("drain", "schedule", "inputs", "launch", "wait", "commit", "deliver"):
            self.host[stage] = self.host.get(stage, 0.0) + getattr(record, stage + "_s")
        self.handover += record.handover_s
        self.python += record.python_s
        self.sample += record.sample_s
        self.tokens += record.tokens
        self.prefill_tokens += record.prefill_tokens
        self.sampled += record.sampled
        self.padded += record.padded
        self.preempted += record.preempted
        decodes = record.tokens == record.rows
        self.device[decodes] = self.device.get(decodes, 0.0) + record.device_s
        if record.graph:
            self.graphs[record.graph] = self.graphs.get(record.graph, 0) + 1
        for reason, count in record.waiting.items():
            self.waiting[reason] = self.waiting.get(reason, 0.0) + count * record.wall_s
        self.rows += record.rows * record.wall_s
        self.blocks += record.wall_s * record.blocks_used / max(record.blocks_total, 1)
        self.rejected += record.rejected
        counts = (record.tokens, record.sampled, record.rows, record.decodes, record.padded)
        self.alike.setdefault(shape_key(record), _Alike()).add(1, counts, (*record.keys, *record.pairs, *record.last_keys))

    def add_odd(self, record: StepRecord, usual: Usual) -> None:
        """What is out of the usual in a step, and what its chunks kept waiting."""
        key, taken = shape_key(record), record.wall_s - record.exposed.get(IDLE, 0.0)
        stalled, cold = usual.excess(key, taken, record.tokens, record.rows)
        self.cold += cold
        if stalled:
            self.stalls += 1
            stage = max(record.exposed, key=lambda s: record.exposed[s] if s != IDLE else 0.0, default="device")
            stage = stage if record.exposed.get(stage, 0.0) > record.device_s else "device"
            self.stalled[stage] = self.stalled.get(stage, 0.0) + stalled
        if record.tokens > record.rows:
            self.chunks += 1
            self.chunk_tokens += record.tokens
            if record.decodes:
                alone = usual.seconds((record.decodes, 0)) or 0.0
                self.held += record.decodes * max(0.0, taken - alone)
                if taken > self.longest:
                    self.longest, self.largest = taken, record.tokens

    def add_ops(self, record: StepRecord, ops: Iterable[tuple[str, float, float]]) -> None:
        """A deep step's (label, seconds, floor)."""
        decodes = record.tokens == record.rows
        self.deep[decodes] = self.deep.get(decodes, 0.0) + record.device_s - record.python_s - record.sample_s
        for label, seconds, floor in ops:
            known = self.ops.get((decodes, label), (0.0, 0.0))
            self.ops[decodes, label] = known[0] + seconds, known[1] + floor

    def merge(self, other: Sums) -> None:
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.longest > self.longest:
            self.longest, self.largest = other.longest, other.largest
        for name in ("exposed", "host", "device", "graphs", "waiting", "deep", "stalled"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + value
        for shape, alike in other.alike.items():
            self.alike.setdefault(shape, _Alike()).add(alike.steps, alike.counts, alike.groups)
        for op, (seconds, floor) in other.ops.items():
            known = self.ops.get(op, (0.0, 0.0))
            self.ops[op] = known[0] + seconds, known[1] + floor


# what of Sums is one number and adds up: all but the longest step
_ADDED = tuple(f.name for f in fields(Sums) if f.type in ("int", "float") and f.name not in ("longest", "largest"))


@dataclass(slots=True)
class OpTime:
    """One op of the model: its share of the window's device time, told from the deep steps."""

    label: str
    seconds: float
    floor: float

    @property
    def over(self) -> float:
        return max(0.0, self.seconds - self.floor)


@dataclass(slots=True)
class Account:
    """Where `seconds` of wall time went. The parts (PARTS, in seconds) sum to it."""

    seconds: float
    steps: int
    parts: dict[str, float]
    of_floor: float  # floor / time with load; 0 without a cost table. Over 1: the ceilings were measured too low
    ops: list[OpTime]  # falling by what they take over their floor; empty before the first deep step
    host: dict[str, float]  # seconds of the host's stages, hidden ones too
    waiting: dict[str, float]  # requests that waited in the mean, by reason
    rows: float  # a step's, in the mean over time with load
    blocks: float  # share of the block pool in use, likewise
    tokens: int
    prefill_tokens: int
    sampled: int
    padded: int
    preempted: int
    graphs: dict[str, int]
    # what the rules ask beside (ledger/rules.py); as Sums has them
    decode_s: float  # device busy in steps of decodes alone
    chunk_s: float  # and in the others
    decode_rows: float  # of a step of decodes alone, in the mean
    rejected: int
    chunks: int
    chunk_tokens: int
    held: float
    longest: float
    largest: int
    stalls: int
    stalled: dict[str, float]
    cold: float

    @property
    def loaded(self) -> float:
        """Seconds with something to do."""
        return self.seconds - self.parts[IDLE]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "ops"}
        return {**fields, "ops": [{"label": op.label, "seconds": op.seconds, "floor": op.floor} for op in self.ops]}


def account(sums: Sums, table: CostTable | None, seconds: float | None = None, busy: bool = False) -> Account:
    """Of these steps in a window of `seconds` (None: just theirs); busy: a step is under way at its end, else nothing is to be done."""
    device, idle = sum(sums.device.values()), sums.exposed.get(IDLE, 0.0)
    ops_s = max(0.0, device - sums.python - sums.sample)
    by_bytes = by_flops = executed = 0.0
    if table is not None:
        for alike in sums.alike.values():
            shape = alike.mean()
            floor = table.floor(shape)
            by_bytes += alike.steps * floor.by_bandwidth
            by_flops += alike.steps * floor.by_compute
            executed += alike.steps * (table.floor(shape.executed()).seconds if shape.padded else floor.seconds)
    floor_s = by_bytes + by_flops
    padding = ops_s * (1 - floor_s / executed) if executed else 0.0
    within = min(1.0, (ops_s - padding) / floor_s) if floor_s else 0.0  # under 1: faster than the ceilings allow
    parts = dict.fromkeys(PARTS, 0.0)
    parts["floor_bandwidth"], parts["floor_compute"], parts["padding"] = by_bytes * within, by_flops * within, padding
    parts["kernels"] = ops_s - padding - floor_s * within
    parts["sample"] = sums.sample
    parts["launch"] = sums.handover + sums.python
    for stage in STAGES:
        parts[HOST + stage] = sums.exposed.get(stage, 0.0)
    parts["idle"] = idle
    parts["residual"] = sums.wall - sum(parts.values())
    seconds = max(seconds or 0.0, sums.wall)
    parts["underway" if busy else "idle"] += seconds - sums.wall
    loaded = sums.wall - idle
    return Account(
        seconds=seconds,
        steps=sums.steps,
        parts=parts,
        of_floor=floor_s / loaded if loaded > 0 else 0.0,
        ops=_op_times(sums, device),
        host=dict(sums.host),
        waiting={reason: value / loaded for reason, value in sums.waiting.items()} if loaded > 0 else {},
        rows=sums.rows / sums.wall if sums.wall else 0.0,
        blocks=sums.blocks / sums.wall if sums.wall else 0.0,
        tokens=sums.tokens,
        prefill_tokens=sums.prefill_tokens,
        sampled=sums.sampled,
        padded=sums.padded,
        preempted=sums.preempted,
        graphs=dict(sums.graphs),
        decode_s=sums.device.get(True, 0.0),
        chunk_s=sums.device.get(False, 0.0),
        decode_rows=(sums.tokens - sums.chunk_tokens) / max(1, sums.steps - sums.chunks),
        rejected=sums.rejected,
        chunks=sums.chunks,
        chunk_tokens=sums.chunk_tokens,
        held=sums.held,
        longest=sums.longest,
        largest=sums.largest,
        stalls=sums.stalls,
        stalled=dict(sums.stalled),
        cold=sums.cold,
    )


def _op_times(sums: Sums, device: float) -> list[OpTime]:
    """Deep steps stand for all of their kind: of decodes alone, or with chunks."""
    found: dict[str, OpTime] = {}
    timed = sums.python + sums.sample
    share = 1 - timed / device if device else 0.0  # of the device's time that ops had
    for (decodes, label), (seconds, floor) in sums.ops.items():
        scale = sums.device.get(decodes, 0.0) * share / sums.deep[decodes] if sums.deep[decodes] else 0.0
        op = found.setdefault(label, OpTime(label, 0.0, 0.0))
        op.seconds += seconds * scale
        op.floor += floor * scale
    return sorted(found.values(), key=lambda op: -op.over)


class Ledger:
    """add() each record; window() and total() tell the account. Without a table there are no floors, and all of an op's time is "kernels"."""

    def __init__(self, table: CostTable | None = None, clock: Callable[[], float] = time.perf_counter):
        self.table = table
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, Sums]] = deque(maxlen=SECONDS_KEPT + 1)
        self._total = Sums()  # but for the second that is being filled
        self._usual = Usual()
        self.cold = 0.0  # since the start: Sums.cold
        self._labels: dict[tuple[int, bool], list[tuple[int, str]]] = {}

    def add(self, record: StepRecord) -> None:
        second = int(record.ended)
        if not self._seconds or second > self._seconds[-1][0]:
            if self._seconds:
                self._total.merge(self._seconds[-1][1])
            self._seconds.append((second, Sums()))
        sums = self._seconds[-1][1]
        sums.add(record)
        before = sums.cold
        sums.add_odd(record, self._usual)
        self.cold += sums.cold - before
        if record.ops:
            sums.add_ops(record, self.named(record, record.ops))

    def window(self, seconds: int, busy: bool = False) -> Account:
        """The last `seconds` (SECONDS_KEPT at most), whole ones: what the current second has is told with the next."""
        return account(self.sums(seconds), self.table, min(seconds, self._clock() - self._began), busy)

    def sums(self, seconds: int) -> Sums:
        """Of the window's steps."""
        sums, last = Sums(), int(self._clock())
        for second, each in self._seconds:
            if last - seconds <= second < last:
                sums.merge(each)
        return sums

    def closed(self) -> list[tuple[int, Sums]]:
        """The whole seconds in which steps ended, rising, as far as they are kept; the last may still gain steps that were told late."""
        last = int(self._clock())
        return [(second, sums) for second, sums in self._seconds if second < last]

    def total(self, busy: bool = False) -> Account:
        """Since the start."""
        sums = Sums()
        sums.merge(self._total)
        if self._seconds:
            sums.merge(self._seconds[-1][1])
        return account(sums, self.table, self._clock() - self._began, busy)

    def windows(self, busy: bool = False) -> dict[str, Account]:
        return {**{name: self.window(seconds, busy) for name, seconds in WINDOWS.items()}, "start": self.total(busy)}

    def named(self, record: StepRecord, ops: Sequence[tuple[str, float]]) -> Iterable[tuple[str, float, float]]:
        """Each op under its label in the table, with its floor; ops that the table has not, by their name and with none."""
        if self.table is None:
            return ((name, seconds, 0.0) for name, seconds in ops)
        shape = StepShape(
            record.tokens, record.sampled, record.keys, record.pairs, record.last_keys, record.rows, record.decodes, record.padded
        ).executed()
        labels = self._labels_of(shape, [name for name, _ in ops])
        floors = self.table.floor(shape).ops
        counts: dict[int, int] = {}
        for index, _ in labels:
            counts[index] = counts.get(index, 0) + 1
        return ((label, seconds, floors[i] / counts[i] if i >= 0 else 0.0) for (i, label), (_, seconds) in zip(labels, ops))

    def _labels_of(self, shape: StepShape, names: list[str]) -> list[tuple[int, str]]:
        """(index into the table's ops or -1, label) of each call: the n-th of a name is the n-th of that name in the table's sequence, where
        both have equally many; else all of the name are one."""
        assert self.table is not None
        key = len(names), shape.sampled < shape.tokens
        if key not in self._labels:
            calls: dict[str, list[int]] = {}
            for index in self.table.sequence:
                if shape.rows(self.table.ops[index].rows):
                    calls.setdefault(self.table.ops[index].name, []).append(index)
            alike = {name for name, indices in calls.items() if len(indices) == names.count(name)}
            turns = {name: iter(calls[name]) for name in alike}
            found = []
            for name in names:
                index = next(turns[name]) if name in alike else -1
                found.append((index, self.table.ops[index].label if index >= 0 else name))
            self._labels[key] = found
        return self._labels[key]
