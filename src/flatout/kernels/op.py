"""Op: a kernel with its reference, its cost and a measured choice among implementations; and the recorder of op lists.

An op writes into buffers it is given (the operands named in `outs`) and returns nothing, so that a forward is a flat list of ops over
fixed buffers: recorded on meta tensors it is the cost table, captured on CUDA a graph, on the CPU a program. Called by layers/ and
attention/. No op lives here.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from flatout.kernels.timing import medians

# so near to the best, the implementation that was registered last is taken on a GPU: the most special one, which overlaps with the kernels
# beside it as no trial shows (H200, a layer of a 7B model at batch 8: fused norms seem 2 % slower alone and are 2 % faster in the step)
TIE = 1.05


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work an op can do: bytes that must cross device memory once, by kind, and floating-point operations."""

    weights: int = 0  # bytes of parameters read
    kv: int = 0  # bytes of KV cache read and written
    activations: int = 0  # bytes of everything else read and written
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.weights + self.kv + self.activations

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.weights + other.weights, self.kv + other.kv, self.activations + other.activations, self.flops + other.flops)


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes that one read (or write) of these tensors moves."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class Implementation:
    name: str
    run: Callable[..., None]
    accepts: Callable[..., bool]  # may depend on nothing but what the op's key holds
    instead_of: str | None = None  # the implementation that is no candidate where this one accepts
    sure: Callable[..., bool] | None = None  # for these operands, where it accepts, no other is a candidate
    native: bool = False  # nothing but one call of the native library, which a program can hold (kernels/program.py)


@dataclass(slots=True)
class Entry:
    """One recorded call."""

    op: str
    operands: tuple[Any, ...]  # tensors as (shape, dtype), the rest as given
    cost: Cost


@dataclass(slots=True)
class Recorder:
    """Collects the ops called while it is active. `execute=False` (meta tensors) records without running."""

    execute: bool = True
    entries: list[Entry] = field(default_factory=list)
    inside: bool = False  # an op is running: tests use it to prove that a forward runs nothing but ops

    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        shown = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        self.entries.append(Entry(op.name, shown, op.cost(*args)))
        if self.execute:
            self.inside = True
            try:
                op.dispatch(*args)
            finally:
                self.inside = False

    def total(self) -> Cost:
        return sum((e.cost for e in self.entries), Cost())


_state = threading.local()


class Records(Protocol):
    def record(self, op: Op, args: tuple[Any, ...]) -> None:
        """Is handed each call, instead of the op running."""
        ...


@contextmanager
def recording_by(recorder: Records) -> Iterator[None]:
    """This thread's op calls go to the recorder. Not reentrant."""
    _state.recorder = recorder
    try:
        yield
    finally:
        _state.recorder = None


@contextmanager
def recording(execute: bool = True) -> Iterator[Recorder]:
    """Record this thread's op calls. Not reentrant."""
    recorder = Recorder(execute)
    with recording_by(recorder):
        yield recorder


def shape_class(n: int) -> int:
    """Row counts that behave alike: exact to 4, then the next power of two; from 129 to 1,024, where tiles of 64 and 128 rows tell most, also
    three quarters of it. Keys with it keep the number of measurements small."""
    if n <= 4:
        return n
    most = 1 << (n - 1).bit_length()
    return most // 4 * 3 if 256 <= most <= 1024 and n <= most // 4 * 3 else most


def default_key(*args: Any) -> tuple[Any, ...]:
    """Device, dtypes and shapes, the leading (row) dimension of each tensor by class."""
    return tuple(
        (a.device.type, str(a.dtype), shape_class(a.shape[0]) if a.dim() else 0, tuple(a.shape[1:])) if isinstance(a, Tensor) else a
        for a in args
    )


class Op:
    """See the module's head. Call it with positional operands in the order of the reference's signature."""

    def __init__(
        self,
        reference: Callable[..., None],
        cost: Callable[..., Cost],
        outs: tuple[str, ...],
        updates: tuple[str, ...] = (),
        key: Callable[..., tuple[Any, ...]] = default_key,
        last_resort: bool = False,
    ):
        self.name = reference.__name__
        self.reference = reference
        self.cost = cost
        self.key = key
        self.last_resort = last_resort
        self.implementations: list[Implementation] = []
        parameters = list(inspect.signature(reference).parameters)
        self.out_indices = tuple(parameters.index(o) for o in outs)
        self.invariant_index = parameters.index("invariant") if "invariant" in parameters else None
        self.update_indices = frozenset(parameters.index(o) for o in updates)
        self.__doc__ = reference.__doc__
        self._chosen: dict[tuple[Any, ...], Callable[..., None]] = {}

    def implementation(
        self,
        name: str,
        accepts: Callable[..., bool],
        instead_of: str | None = None,
        sure: Callable[..., bool] | None = None,
        native: bool = False,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register a fast path. It declines operands for which accepts() is false; what it is instead of need not be measured beside it.
        sure: where it is taken unmeasured, as it gains beside other kernels what does not show when it is timed alone."""

        def register(run: Callable[..., None]) -> Callable[..., None]:
            self.implementations.append(Implementation(name, run, accepts, instead_of, sure, native))
            return run

        return register

    def __call__(self, *args: Any) -> None:
        recorder = getattr(_state, "recorder", None)
        if recorder is None:
            self.dispatch(*args)
        else:
            recorder.record(self, args)

    def dispatch(self, *args: Any) -> None:
        """Run the chosen implementation. About 2 us on top of it."""
        return self.chosen(*args)(*args)

    def chosen(self, *args: Any) -> Callable[..., None]:
        """The implementation for these operands, which may have to be measured on them."""
        if not self.implementations:
            return self.reference
        key = self.key(*args)
        run = self._chosen.get(key)
        if run is None:
            run = self._choose(key, args)
            if not choices.surveying:
                self._chosen[key] = run
        return run

    def _choose(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Callable[..., None]:
        able = [i for i in self.implementations if i.accepts(*args)]
        if sure := [i.run for i in able if i.sure is not None and i.sure(*args)]:
            return sure[-1]
        replaced = {i.instead_of for i in able}
        accepting = {i.name: i.run for i in able if i.name not in replaced}
        if self.invariant_index is not None and args[self.invariant_index] and not accepting:
            raise RuntimeError(f"{self.name}: none of its implementations can give a row the same bits in any company, for {key}")
        if not (self.last_resort and accepting):
            accepting = {"reference": self.reference, **accepting}
        if len(accepting) == 1:
            return next(iter(accepting.values()))
        stored = f"{self.name} {key} of {' '.join(accepting)}"  # one more to choose from: a choice to be made again
        name = choices.get(stored)
        if choices.surveying and name not in accepting:
            for run in accepting.values():
                run(*args)
            return next(iter(accepting.values()))
        if name not in accepting:
            name = choices.put(stored, self._fastest(accepting, args))
        return accepting[name]

    def _fastest(self, candidates: dict[str, Callable[..., None]], args: tuple[Any, ...]) -> str:
        """Name of the candidate with the least median time, or near it (TIE). Outputs that are inputs too are copied, so that trials leave no trace; the
        others (a KV cache may fill the device) are written in place, each time with the same values."""
        read = {id(a) for i, a in enumerate(args) if i not in self.out_indices or i in self.update_indices}
        copies = {id(args[i]): args[i].clone() for i in self.out_indices if id(args[i]) in read}
        trial = tuple(copies.get(id(a), a) for a in args)
        device = trial[self.out_indices[0]].device
        seconds = medians({name: partial(run, *trial) for name, run in candidates.items()}, device)
        best = min(seconds.values())
        if device.type == "cuda":
            return [name for name, median in seconds.items() if median <= TIE * best][-1]
        return min(seconds, key=seconds.__getitem__)


def op(
    *,
    cost: Callable[..., Cost],
    outs: tuple[str, ...] = ("out",),
    updates: tuple[str, ...] = (),
    key: Callable[..., tuple[Any, ...]] = default_key,
    last_resort: bool = False,
) -> Callable[[Callable[..., None]], Op]:
    """Decorator: the function becomes the reference of an Op of its name.

    outs: operands written; updates: those of them that are read too. key: what the choice may depend on.
    last_resort: the reference is written for reading and runs only where no implementation accepts; else it competes.
    """
    return lambda reference: Op(reference, cost, outs, updates, key, last_resort)


class Choices:
    """Which implementation won, by op and key: a fact about this machine, measured once and kept in a file."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._names: dict[str, str] = {}
        self._dirty = False
        self.surveying = False  # nothing really runs: where several could, all are called, none is timed

    def open(self, path: Path) -> None:
        """Use this file (one per machine and library version). An unreadable file is measured anew."""
        self.save()
        self._path = path
        try:
            loaded = json.loads(path.read_text())
        except (OSError, ValueError):
            loaded = {}
        self._names = {k: v for k, v in loaded.items() if isinstance(v, str)} if isinstance(loaded, dict) else {}

    def get(self, key: str) -> str | None:
        return self._names.get(key)

    def put(self, key: str, name: str) -> str:
        self._names[key] = name
        self._dirty = True
        return name

    @property
    def unsaved(self) -> bool:
        """Something was measured since the file was read or written."""
        return self._dirty

    def save(self) -> None:
        """Called after warm-up and at the end, not from the step loop."""
        if self._path is None or not self._dirty:
            return
        self._dirty = False
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._names, indent=0, sort_keys=True))
            temporary.replace(self._path)
        except OSError as error:
            warnings.warn(f"{self._path}: {error.strerror}; implementations are measured anew at each start", stacklevel=2)


choices = Choices()
