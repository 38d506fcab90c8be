"""A stand-in for Gluon on the CPU, as Triton's interpreter knows none: runs a kernel's Python over numpy, program after program.

Copies land when they are waited for and not before, and products read what lay there when they were issued: a kernel that reads too early,
writes over what is still being read or uses a product it has not waited for fails. Layouts mean nothing here. Holds no test.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """An array, or a pointer into a flat one: `array` then holds offsets."""

    def __init__(self, array: Any, base: np.ndarray | None = None):
        self.array, self.base = np.asarray(array), base

    @property
    def dtype(self) -> Any:
        return self.array.dtype if self.base is None else SimpleNamespace(element_ty=self.base.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **given: Any) -> Value:
        given.pop("out", None)  # in place: a new array will do
        bases = [i.base for i in inputs if isinstance(i, Value) and i.base is not None]
        arrays = [i.array if isinstance(i, Value) else i for i in inputs]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return Value(getattr(ufunc, method)(*arrays, **given), bases[0] if bases else None)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.array[index], self.base)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __index__(self) -> int:
        return int(self.array)

    def to(self, dtype: Any) -> Value:
        return Value(self.array.astype(dtype))


def plain(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


class Shared:
    """Shared memory: a view of an array."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape = array, array.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def store(self, value: Value) -> None:
        self.array[...] = value.array

    def load(self, layout: Any) -> Value:
        return Value(self.array.copy())


class Product:
    """A matrix product under way; of no use before its wait."""

    def __init__(self, a: Any, b: Shared, acc: Value, use_acc: bool):
        self.read = [(x.array, x.array.copy()) for x in (a, b)]
        self.acc, self.done = acc.array * bool(use_acc), False

    def finish(self) -> Value:
        for now, then in self.read:
            np.testing.assert_array_equal(now, then, "written over while a product read it")
        (_, a), (_, b) = self.read
        self.done = True
        return Value(self.acc + a.astype(FLOAT32) @ b.astype(FLOAT32))


class Machine:
    """One program: the functions of gluon.language and of its Hopper part that kernels use."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...]):
        self.place, self.grid = place, grid
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        self.groups: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.products: list[Product] = []

    def language(self) -> SimpleNamespace:
        names = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
        return SimpleNamespace(
            **dict.fromkeys(names, lambda *given: None),
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *given: None),
            constexpr=None,
            int64=INT64,
            float32=FLOAT32,
            program_id=lambda axis: Value(self.place[axis]),
            num_programs=lambda axis: Value(self.grid[axis]),
            static_range=range,
            arange=lambda low, high, layout: Value(np.arange(low, high)),
            zeros=lambda shape, dtype, layout: Value(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: Value(np.full(shape, value, dtype)),
            allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, np.nan, dtype)),
            convert_layout=lambda value, layout: value,
            thread_barrier=lambda: None,
            load=load,
            store=store,
            exp2=np.exp2,
            fma=lambda a, b, c: a * FLOAT32.type(b) + c,
            minimum=np.minimum,
            maximum=np.maximum,
            where=lambda condition, a, b: Value(np.where(plain(condition), plain(a), plain(b)).astype(FLOAT32)),
            max=lambda value, axis: Value(value.array.max(axis)),
            sum=lambda value, axis: Value(value.array.sum(axis)),
        )

    def copy(self, to: Shared, at: Value, mask: Value | None = None) -> None:
        self.copies.append((to.array, load(at, mask, 0).array))
        to.array[...] = np.nan

    def commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for to, what in self.groups.pop(0):
                to[...] = what

    def multiply(self, a: Any, b: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Any:
        started = Product(a, b, acc, use_acc)
        self.products.append(started)
        return started if is_async else self.wait_products(0, (started,))

    def wait_products(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        ended = {}
        while len(self.products) > outstanding:
            first = self.products.pop(0)
            ended[id(first)] = first.finish()
        results = tuple(ended.get(id(d), d) for d in deps)
        return results[0] if len(results) == 1 else results


def load(at: Value, mask: Value | None = None, other: float = 0) -> Value:
    assert at.base is not None
    where = at.array if mask is None else np.where(mask.array, at.array, 0)
    assert where.min() >= 0, "read before the operand"
    values = at.base[where]
    return Value(values if mask is None else np.where(mask.array, values, other).astype(values.dtype))


def store(at: Value, value: Value, mask: Value | None = None) -> None:
    assert at.base is not None
    keep = np.broadcast_to(True if mask is None else mask.array, at.array.shape)
    at.base[at.array[keep]] = np.broadcast_to(value.array, at.array.shape)[keep]


def run(kernel: GluonJITFunction, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    """Run a kernel of `module` on CPU tensors, which must own their storage's beginning. Options of the launch are ignored."""
    wanted = kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]
    constants = {name: value for name, value in constants.items() if name in wanted}
    pointers = [
        Value(0, o.as_strided((o.untyped_storage().nbytes() // o.element_size(),), (1,), 0).numpy()) if isinstance(o, torch.Tensor) else o
        for o in operands
    ]
    for o in operands:
        assert not isinstance(o, torch.Tensor) or o.storage_offset() == 0
    for place in product(*(range(n) for n in grid)):
        machine = Machine(place, grid)
        names: dict[str, Any] = {
            "gl": machine.language(),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=machine.copy, commit_group=machine.commit, wait_group=machine.wait_copies
            ),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": machine.multiply,
            "warpgroup_mma_wait": machine.wait_products,
        }
        scope = {**kernel.fn.__globals__, **names}
        for name, function in list(scope.items()):
            if isinstance(function, GluonJITFunction):
                scope[name] = FunctionType(function.fn.__code__, scope, name, function.fn.__defaults__)
        scope[kernel.fn.__name__](*pointers, **constants)
        assert not machine.products, "a product was never waited for"


def launcher(kernel: GluonJITFunction) -> Any:
    """kernel[grid](...) through run()."""

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *operands, **constants: run(kernel, grid, *operands, **constants)

    return Launcher()
