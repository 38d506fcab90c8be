"""CostTable: the ops of a model's step, with bytes and FLOPs as functions of the step's shape, and the ceilings that turn them into seconds.

Plain data that crosses processes once, at start: engine, server and doctor tell the same account from it. Whole numbers are exact; how the
functions are found (the model itself, recorded) is runner/costs.py's business. No torch. Called by ledger/, engine.py, doctor/ and plan/.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

KINDS = ("weights", "kv", "activations", "flops")  # of costs; bytes but for the last
# which of a step's rows an op has: all tokens, those that yield a token, or the latter where they are copied out from among others
ROWS = ("tokens", "sampled", "picked")


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes. By cache group (ModelSpec.cache_groups) where a window makes a difference: one entry each."""

    tokens: int  # computed, and written to the cache
    sampled: int  # of them, those that yield a token: all that the last layer goes on with
    keys: tuple[int, ...]  # cached positions that attention reads, summed over requests
    pairs: tuple[int, ...]  # (query, key it sees), summed over requests
    last_keys: tuple[int, ...]  # as keys, of the sampled tokens alone
    requests: int = 0
    decodes: int = 0  # of them, those with one token that yields one
    padded: int = 0  # rows of one key beside them, which a captured step of fixed size computes for nobody

    def executed(self) -> StepShape:
        """As the device saw it: rows of padding are rows like others."""
        n = self.padded
        if not n:
            return self

        def more(each: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(count + n for count in each)

        return replace(
            self, tokens=self.tokens + n, sampled=self.sampled + n, keys=more(self.keys), pairs=more(self.pairs),
            last_keys=more(self.last_keys), requests=self.requests + n, decodes=self.decodes + n, padded=0,
        )  # fmt: skip

    def rows(self, of: str) -> int:
        """How many rows an op has; of: one of ROWS."""
        if of == "tokens":
            return self.tokens
        return self.sampled if of == "sampled" or self.sampled < self.tokens else 0


def shape_of(starts: np.ndarray, counts: np.ndarray, samples: np.ndarray, windows: Sequence[int | None], padded: int = 0) -> StepShape:
    """Of a StepPlan's rows: tokens before each row's own, its tokens, whether it yields one. windows: of each cache group (CostTable.windows)."""
    if (rows := len(starts)) and False not in samples.tolist() and max(counts.tolist()) == 1:
        # decodes alone, the most of steps, and of few rows: Python's own numbers take 2 us where numpy's take 9
        before = starts.tolist()
        seen = tuple(sum(before) + rows if window is None else sum(min(n + 1, window) for n in before) for window in windows)
        return StepShape(rows, rows, seen, seen, seen, rows, rows, padded)
    counts, ends = counts.astype(np.int64), starts.astype(np.int64) + counts
    tokens, sampled = int(counts.sum()), int(samples.sum())
    singles = tokens == len(counts)
    keys, pairs, last = [], [], []
    for window in windows:
        seen = ends if window is None else np.minimum(ends, counts + (window - 1))
        keys.append(int(seen.sum()))
        pairs.append(keys[-1] if singles else pairs_of(counts, ends, window))
        if sampled == tokens:
            last.append(keys[-1])
        else:
            chosen = ends[samples] if window is None else np.minimum(ends[samples], window)
            last.append(int(chosen.sum()))
    decodes = int((samples & (counts == 1)).sum())
    return StepShape(tokens, sampled, tuple(keys), tuple(pairs), tuple(last), len(counts), decodes, padded)


def pairs_of(counts: np.ndarray, ends: np.ndarray, window: int | None) -> int:
    """(query, key it sees), summed over rows: int64 [R] queries, which are the last of so many keys."""

    def up_to(length: np.ndarray) -> np.ndarray:
        if window is None:
            return length * (length + 1) // 2
        inside = np.minimum(length, window)
        return inside * (inside + 1) // 2 + window * (length - inside)

    return int((up_to(ends) - up_to(ends - counts)).sum())


def expected_experts(tokens: int, top_k: int, experts: int) -> float:
    """Distinct experts met by `tokens` tokens if routing is even: the cost is told before the routing is known."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Terms:
    """One kind of cost of one call: constant + row * rows + key * keys + pair * pairs + expert * experts met; 0 of no rows."""

    constant: int = 0
    row: int = 0
    key: int = 0
    pair: int = 0
    expert: int = 0  # of one expert
    experts: tuple[int, int] = (0, 0)  # how many there are, and how many a token has

    def at(self, rows: int, keys: int, pairs: int) -> int:
        if not rows:
            return 0
        total = self.constant + self.row * rows + self.key * keys + self.pair * pairs
        if self.expert:
            count, top_k = self.experts
            total += round(expected_experts(rows, top_k, count) * self.expert)
        return total


@dataclass(frozen=True, slots=True)
class OpBytes:
    """A cost in numbers: bytes that must cross memory once, by kind, and floating-point operations."""

    weights: int = 0
    kv: int = 0
    activations: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.weights + self.kv + self.activations

    def __add__(self, other: OpBytes) -> OpBytes:
        return OpBytes(self.weights + other.weights, self.kv + other.kv, self.activations + other.activations, self.flops + other.flops)

    def __mul__(self, count: int) -> OpBytes:
        return OpBytes(self.weights * count, self.kv * count, self.activations * count, self.flops * count)


@dataclass(frozen=True, slots=True)
class Shares:
    """Measured: which part of an op's time its bytes and FLOPs would take at the ceilings, by rows and (of attention) keys a row. Over 1 where
    a cache gives more than memory. Between knots logarithms are interpolated, beyond them the nearest holds."""

    rows: tuple[int, ...]  # rising
    keys: tuple[int, ...]  # rising; (1,) where keys make no difference
    share: tuple[tuple[float, ...], ...]  # [rows][keys]

    def at(self, rows: float, keys: float = 1.0) -> float:
        i, x = _between(self.rows, rows)
        j, y = _between(self.keys, keys)
        logs = [[math.log(self.share[a][b]) for b in (j, min(j + 1, len(self.keys) - 1))] for a in (i, min(i + 1, len(self.rows) - 1))]
        low, high = (left + (right - left) * y for left, right in logs)
        return math.exp(low + (high - low) * x)


def _between(knots: tuple[int, ...], value: float) -> tuple[int, float]:
    """(index of the knot below, how far to the next by logarithms)."""
    i = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 1)
    if i == len(knots) - 1 or value <= knots[i]:
        return i, 0.0
    return i, math.log(value / knots[i]) / math.log(knots[i + 1] / knots[i])


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op of a step, as often as layers call it alike."""

    name: str  # the op's, kernels/
    part: str  # the projection whose weights it reads ("attn.qkv"), or ""
    shape: str  # of its weights or rows, to read
    count: int  # calls a step
    rows: str  # one of ROWS
    group: int  # cache group of attention, else -1
    dtype: str  # whose arithmetic it is: a key of Roof.flops
    weights: Terms
    kv: Terms
    activations: Terms
    flops: Terms
    shares: Shares | None = None  # of rows of one query, and of ops that know no queries
    chunks: Shares | None = None  # of attention over chunks

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.name, self.part, self.shape)))

    def cost(self, shape: StepShape) -> OpBytes:
        """Of one call."""
        rows = shape.rows(self.rows)
        keys = pairs = 0
        if self.group >= 0:
            few = self.rows == "sampled"
            keys = (shape.last_keys if few else shape.keys)[self.group]
            pairs = (shape.last_keys if few else shape.pairs)[self.group]
        at = (rows, keys, pairs)
        return OpBytes(self.weights.at(*at), self.kv.at(*at), self.activations.at(*at), self.flops.at(*at))


@dataclass(frozen=True, slots=True)
class Roof:
    """What a machine gives: measured, or by its data sheet."""

    name: str
    read: tuple[tuple[int, float], ...]  # (working set in bytes, bytes/s), rising: a large cache may hold a small model
    flops: Mapping[str, float] = field(default_factory=dict)  # by dtype: FLOP/s of matrix products
    cache: int = 0  # bytes of the last cache: an op's activations that it holds need not cross memory
    launch_s: float = 0.0  # of an op by itself
    captured_launch_s: float = 0.0  # of an op in a captured step
    measured: bool = True

    def bandwidth(self, working_set: int) -> float:
        """Bytes/s of reading so many bytes over and over; infinite where nothing is known."""
        return next((rate for size, rate in self.read if size >= working_set), self.read[-1][1] if self.read else math.inf)

    def rate(self, dtype: str) -> float:
        """FLOP/s; of a type that is not known here the most of any, so that a floor stays one; 0: none is known."""
        return self.flops.get(dtype) or max(self.flops.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of a step's ops, [ops of the table] each with all its calls."""

    bandwidth: tuple[float, ...]
    compute: tuple[float, ...]

    @property
    def ops(self) -> tuple[float, ...]:
        return tuple(map(max, self.bandwidth, self.compute))

    @property
    def seconds(self) -> float:
        return sum(self.ops)

    @property
    def by_bandwidth(self) -> float:
        """Seconds of the ops that bytes limit."""
        return sum(b for b, c in zip(self.bandwidth, self.compute) if b >= c)

    @property
    def by_compute(self) -> float:
        return sum(c for b, c in zip(self.bandwidth, self.compute) if b < c)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Of one model in one form on one machine. Equal calls of several layers are one entry of `ops`; `sequence` has every call of a step in
    order (index into ops), those that a step of this shape does not make (no rows) included."""

    model: str
    ops: tuple[OpCost, ...]
    sequence: tuple[int, ...]
    windows: tuple[int | None, ...]  # of each cache group
    roof: Roof
    weight_bytes: int = 0  # held: of a tied embedding whose head is packed for itself both
    kv_bytes_token: int = 0  # of one position, all layers
    # measured: seconds of a step beside the ops of its forward, where it is captured and where it is not, and of each row that yields a token
    step_s: float = 0.0
    loose_s: float = 0.0
    issue_s: float = 0.0  # seconds that the host takes to issue a step op by op, while the device works: such a step takes no less
    row_s: float = 0.0
    host_s: float = 0.0  # of the engine's thread for each step: behind the device, where that takes longer

    def cost(self, shape: StepShape) -> OpBytes:
        """Of the whole step, padding left out; shape.executed() has it."""
        return sum((op.cost(shape) * op.count for op in self.ops), OpBytes())

    def floor(self, shape: StepShape) -> Floor:
        """By bandwidth: weights and KV, and activations that the last cache does not hold. By compute: at the rate of the op's dtype."""
        costs = [op.cost(shape) for op in self.ops]
        bandwidth = self._bandwidth(costs)
        by_bytes, by_flops = [], []
        for op, cost in zip(self.ops, costs):
            by_bytes.append(op.count * (cost.weights + cost.kv + max(0, cost.activations - self.roof.cache)) / bandwidth)
            rate = self.roof.rate(op.dtype)
            by_flops.append(op.count * cost.flops / rate if rate else 0.0)
        return Floor(tuple(by_bytes), tuple(by_flops))

    def predicted(self, shape: StepShape, captured: bool = False) -> tuple[float, ...]:
        """Seconds of each of `ops` with all its calls, by the shares that were measured; of an op without one its bytes and FLOPs at the ceilings
        and a launch."""
        shape = shape.executed()
        costs = [op.cost(shape) for op in self.ops]
        bandwidth = self._bandwidth(costs)
        launch = self.roof.captured_launch_s if captured else self.roof.launch_s
        seconds = []
        for op, cost in zip(self.ops, costs):
            rows = shape.rows(op.rows)
            if not rows:
                seconds.append(0.0)
                continue
            rate = self.roof.rate(op.dtype)
            ideal = max(cost.bytes / bandwidth, cost.flops / rate if rate else 0.0)
            keys, shares = 1.0, op.shares
            if op.group >= 0:
                few = op.rows == "sampled"
                rows = shape.sampled if few else shape.requests
                keys = (shape.last_keys if few else shape.keys)[op.group] / rows
                if not few and shape.tokens > shape.requests and op.chunks is not None:
                    shares, rows = op.chunks, shape.tokens
            seconds.append(op.count * (launch + ideal if shares is None else ideal / shares.at(rows, keys)))
        return tuple(seconds)

    def step_seconds(self, shape: StepShape, captured: bool = False) -> float:
        """Predicted time of the whole step."""
        seconds = sum(self.predicted(shape, captured)) + (self.step_s if captured else self.loose_s) + self.row_s * shape.sampled
        return seconds if captured else max(seconds, self.issue_s)

    def calls(self, shape: StepShape) -> int:
        """Ops that such a step runs."""
        return sum(op.count for op in self.ops if shape.rows(op.rows))

    def _bandwidth(self, costs: Sequence[OpBytes]) -> float:
        return self.roof.bandwidth(sum(op.count * (cost.weights + cost.kv) for op, cost in zip(self.ops, costs)))

    def plain(self) -> dict[str, Any]:
        """For JSON or msgpack: dicts, lists, numbers and strings."""
        return asdict(self)


def table_from(plain: Mapping[str, Any]) -> CostTable:
    """The table again from plain(), after JSON or msgpack too. ValueError: it is none of this version's."""
    try:
        return CostTable(**{
            **plain,
            "ops": tuple(_op_from(op) for op in plain["ops"]),
            "sequence": tuple(plain["sequence"]),
            "windows": tuple(plain["windows"]),
            "roof": roof_from(plain["roof"]),
        })  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"no cost table of this version: {error!r}") from error


def roof_from(plain: Mapping[str, Any]) -> Roof:
    return Roof(**{**plain, "read": tuple((int(size), float(rate)) for size, rate in plain["read"])})


def shares_from(plain: Mapping[str, Any]) -> Shares:
    return Shares(tuple(plain["rows"]), tuple(plain["keys"]), tuple(map(tuple, plain["share"])))


def _op_from(plain: Mapping[str, Any]) -> OpCost:
    terms = {kind: Terms(**{**plain[kind], "experts": tuple(plain[kind]["experts"])}) for kind in KINDS}
    shares = {name: plain[name] and shares_from(plain[name]) for name in ("shares", "chunks")}
    return OpCost(**{**plain, **terms, **shares})
