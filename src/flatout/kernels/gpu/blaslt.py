"""cuBLASLt's algorithms for linear and linear_add: of those it offers for a shape the one that is fastest here, measured once and kept.

cuBLAS takes the first that its own rules name. On a device that runs into its power limit that is often not the best: on an H200 other ones did
2 to 12 % more of a prompt's products (docs/performance.md). Called through ctypes, as torch has no words for it; the library is the one torch
brings. Registers on kernels/linear.py's ops instead of cuBLAS itself, whose own choice is one of the algorithms, and which stays where the
library is not found.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.gpu.cuda import enter
from flatout.kernels.gpu.linear import MOST_ROWS
from flatout.kernels.linear import linear, linear_add
from flatout.kernels.op import choices, shape_class
from flatout.kernels.timing import medians

# of cublasLt.h and library_types.h
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_32F, _16F, _16BF
_COMPUTE = 68  # CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _EPILOGUE, _BIAS = 3, 7, 8  # CUBLASLT_MATMUL_DESC_TRANSA, _EPILOGUE, _BIAS_POINTER
_EPILOGUE_BIAS = 4
_UNSUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
_MOST_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, _MIN_ALIGNMENT_A_BYTES to _D_BYTES
_ALIGNED = 16  # bytes: rows of 8 numbers
_WORKSPACE = 32 << 20  # bytes; what torch gives cuBLAS on sm_90
_OFFERED = 16  # asked for; version 13 offers at most 8 of its newest kernels
_CLEARLY = 0.99  # of the time of the library's own choice: less of a gain may be noise


class BlasError(RuntimeError):
    """What cuBLASLt said."""

    def __init__(self, said: str, code: int = 0):
        super().__init__(said)
        self.code = code


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: may be kept as bytes and used again by the same version."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    """The one that torch loads, by its name."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return None
    torch.cuda.current_blas_handle()  # loads it
    major = torch.version.cuda.split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    library.cublasLtMatmul.argtypes = (*(pointer,) * 14, ctypes.c_size_t, pointer)  # addresses go in as ints
    return library


@cache
def _version() -> int:
    library = _library()
    assert library is not None
    return int(library.cublasLtGetVersion())


def available() -> bool:
    return _library() is not None


def _ask(call: str, *args: Any) -> None:
    library = _library()
    if library is None:
        raise BlasError(f"{call}: cuBLASLt was not found")
    if code := getattr(library, call)(*args):
        raise BlasError(f"{call}: {library.cublasLtGetStatusString(code).decode()}", code)


def _made(call: str, *args: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _ask(call, ctypes.byref(made), *args)
    return made


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _made("cublasLtCreate")


@cache
def _workspace(device: torch.device) -> Tensor:
    """Of one stream at a time: a product is through with it before the next begins."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _set(description: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _ask("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@dataclass(frozen=True, slots=True)
class Form:
    """What an algorithm may depend on, beside the device. The product is out [rows, outputs] = x [rows, columns] @ weight^T, biased or added to out."""

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    wide: bool  # out is float32
    biased: bool
    adds: bool
    strides: tuple[int, int, int]  # of the rows of out, x and weight


class Product:
    """The products of one form on one device."""

    def __init__(self, form: Form, device: torch.device):
        self.form, self.device = form, device
        self._handle, self._room = _handle(device), _workspace(device)
        self._description = self._own("MatmulDesc", _COMPUTE, _TYPES[torch.float32])
        _set(self._description, _TRANSPOSE_A, ctypes.c_int(1))
        if form.biased:
            _set(self._description, _EPILOGUE, ctypes.c_int(_EPILOGUE_BIAS))
        out = torch.float32 if form.wide else form.dtype
        self._weight = self._layout(form.dtype, form.columns, form.outputs, form.strides[2])
        self._x = self._layout(form.dtype, form.columns, form.rows, form.strides[1])
        self._out = self._layout(out, form.outputs, form.rows, form.strides[0])
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if form.adds else 0.0)
        self._factors = ctypes.addressof(self._alpha), ctypes.addressof(self._beta)
        self._lock = threading.Lock()
        self.settled = False  # an algorithm was looked for
        self.chosen: _Algorithm | None = None  # none where the library has none

    def _own(self, kind: str, *args: Any) -> ctypes.c_void_p:
        made = _made(f"cublasLt{kind}Create", *args)
        # not by __del__, of which some run at the interpreter's end, when the module's names are gone
        weakref.finalize(self, getattr(_library(), f"cublasLt{kind}Destroy"), made).atexit = False
        return made

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        """Of a matrix in the library's order, columns first."""
        return self._own("MatrixLayout", _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))

    def offers(self) -> list[_Algorithm]:
        """The library's algorithms for this form, its own choice first; none where it has none."""
        preference = _made("cublasLtMatmulPreferenceCreate")
        room, found, offers = ctypes.c_size_t(_WORKSPACE), ctypes.c_int(), (_Offer * _OFFERED)()
        try:
            _ask("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.byref(room), ctypes.c_size_t(8))
            for operand in _ALIGNMENTS:
                aligned = ctypes.c_uint32(_ALIGNED)
                _ask("cublasLtMatmulPreferenceSetAttribute", preference, operand, ctypes.byref(aligned), ctypes.c_size_t(4))
            _ask(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._weight, self._x, self._out, self._out,
                preference, _OFFERED, offers, ctypes.byref(found),
            )  # fmt: skip
        except BlasError as error:
            if error.code != _UNSUPPORTED:
                raise
        finally:
            _ask("cublasLtMatmulPreferenceDestroy", preference)
        return [_Algorithm.from_buffer_copy(o.algorithm) for o in offers[: found.value] if o.state == 0]

    def takes(self, algorithm: _Algorithm) -> bool:
        """Whether an algorithm that was chosen for other numbers of rows does these."""
        offer, library = _Offer(), _library()
        assert library is not None
        code = library.cublasLtMatmulAlgoCheck(
            self._handle, self._description, self._weight, self._x, self._out, self._out, ctypes.byref(algorithm), ctypes.byref(offer)
        )
        return not code and offer.workspace <= _WORKSPACE

    def run(self, algorithm: _Algorithm, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> None:
        """Queue it on torch's current stream."""
        if self.device not in _entered.__dict__.setdefault("devices", set()):
            assert self.device.index is not None
            enter(self.device.index)
            _entered.devices.add(self.device)
        to, (alpha, beta) = out.data_ptr(), self._factors
        with self._lock:
            if bias is not None:
                _set(self._description, _BIAS, ctypes.c_void_p(bias.data_ptr()))
            self._alpha.value = scale
            _ask(
                "cublasLtMatmul", self._handle, self._description, alpha, weight.data_ptr(), self._weight, x.data_ptr(), self._x, beta,
                to, self._out, to, self._out, ctypes.addressof(algorithm), self._room.data_ptr(), _WORKSPACE,
                torch._C._cuda_getCurrentRawStream(self.device.index),
            )  # fmt: skip


_entered = threading.local()  # devices: those whose context this thread has
_products: dict[tuple[Any, ...], Product] = {}
_MOST = 4096  # of them kept


def _product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, adds: bool) -> Product:
    known = (x.device, x.dtype, out.dtype, x.shape, weight.shape, out.stride(), x.stride(), weight.stride(), bias is None, adds)
    made = _products.get(known)
    if made is None:
        form = Form(
            x.shape[0], weight.shape[0], x.shape[1], x.dtype, out.dtype != x.dtype, bias is not None, adds,
            (out.stride(0), x.stride(0), weight.stride(0)),
        )  # fmt: skip
        if len(_products) >= _MOST:
            _products.pop(next(iter(_products)))
        made = _products[known] = Product(form, x.device)
    return made


def _name(form: Form) -> str:
    """Of the choice for all rows of this form's class."""
    return f"cuBLASLt {_version()} {astuple(replace(form, rows=shape_class(form.rows)))}"


def in_use(rows: int) -> list[Product]:
    """Those of exactly so many rows that were multiplied with an algorithm, the largest first: what a tuner may change `chosen` of."""
    found = [p for p in list(_products.values()) if p.form.rows == rows and p.chosen is not None]
    return sorted(found, key=lambda p: -p.form.outputs * p.form.columns)


def keep(product: Product, algorithm: _Algorithm) -> None:
    """Take this algorithm for all rows of the product's class, now and at later starts. Steps captured before keep what they have."""
    name = _name(product.form)
    choices.put(name, bytes(algorithm).hex())
    for other in list(_products.values()):
        if _name(other.form) == name:
            other.settled = False  # which reads it
    product.chosen, product.settled = algorithm, True


def _choose(product: Product, *operands: Any) -> _Algorithm | None:
    """The algorithm for all rows of this form's class: the kept one, or the fastest of those offered. The library's own choice where that cannot
    do these rows, or nothing can be measured now; None where it has none."""
    name = _name(product.form)
    kept = _read(choices.get(name))
    if kept is not None and product.takes(kept):
        return kept
    offers = product.offers()
    if kept is not None or len(offers) < 2 or name in _unmeasured or torch.cuda.is_current_stream_capturing():
        return offers[0] if offers else None
    out, *others = operands
    try:
        trial = out.clone() if product.form.adds else out
        seconds = medians({str(i): partial(product.run, offer, trial, *others) for i, offer in enumerate(offers)}, product.device)
    except torch.OutOfMemoryError:  # first met where the device is full: not tried with every number of rows again
        _unmeasured.add(name)
        return offers[0]
    best = min(seconds, key=seconds.__getitem__)
    algorithm = offers[int(best) if seconds[best] < _CLEARLY * seconds["0"] else 0]
    choices.put(name, bytes(algorithm).hex())
    return algorithm


_unmeasured: set[str] = set()


def _read(kept: str | None) -> _Algorithm | None:
    try:
        return _Algorithm.from_buffer_copy(bytes.fromhex(kept)) if kept else None
    except ValueError:  # not what was written here
        return None


def _choose_later(product: Product, out: Tensor, x: Tensor, *others: Any) -> None:
    """For a product that was not multiplied: its rows are what memory held, often zeros, of which the device computes more than the power it may
    take allows of others."""
    x.normal_(generator=torch.Generator(x.device).manual_seed(0))
    _choose(product, out, x, *others)


_here = threading.local()  # postponed: inside postponing(), the choices that products would have had to make


@contextmanager
def postponing() -> Iterator[list[Callable[[], object]]]:
    """Inside, products are noted instead of chosen for and multiplied, in this thread alone. The list is complete when it is left."""
    later: list[Callable[[], object]] = []
    _here.postponed = noted = dict[Product, Callable[[], object]]()
    try:
        yield later
    finally:
        _here.postponed = None
        later += noted.values()


def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0, adds: bool = False) -> bool:
    """out [T, N] = scale * (x [T, K] @ weight [N, K]^T) + bias, and + out where it adds: by the fastest algorithm for rows of T's class. False,
    with nothing done, where the library has none."""
    product = _product(out, x, weight, bias, adds)
    if (postponed := getattr(_here, "postponed", None)) is not None:
        postponed[product] = partial(_choose_later, product, out, x, weight, bias, scale)
        return True
    if not product.settled:
        product.chosen, product.settled = _choose(product, out, x, weight, bias, scale), True
    if product.chosen is None:
        return False
    product.run(product.chosen, out, x, weight, bias, scale)
    return True


def _suits(out: Tensor, x: Tensor, weight: Tensor, invariant: bool) -> bool:
    """More rows than linear.py's own kernels take, in units of 16 bytes."""
    return (
        x.is_cuda
        and not invariant
        and x.shape[0] > MOST_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and out.dtype in (x.dtype, torch.float32)
        and weight.shape[0] % 8 == 0
        and weight.shape[1] % 8 == 0
        and available()
    )


def _linear_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return _suits(out, x, weight, invariant) and (bias is None or out.dtype == x.dtype)


@linear.implementation("blaslt", _linear_accepts, instead_of="blas")
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    if not multiply(out, x, weight, bias):
        linear.reference(out, x, weight, bias, invariant)


def _add_accepts(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> bool:
    return _suits(stream, x, weight, invariant) and stream.dtype == x.dtype and bias is None


@linear_add.implementation("blaslt", _add_accepts, instead_of="addmm")
def _linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    if not multiply(stream, x, weight, None, scale, adds=True):
        torch.addmm(stream, x, weight.t(), alpha=scale, out=stream)
