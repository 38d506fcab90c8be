"""CUDA C++ kernels: compiled at run time by NVRTC, kept on disk as machine code, launched through the driver; all by ctypes, no toolkit needed.

For what Triton has no words for (multicast, shared memory of a whole cluster). A kernel's file and its launch live beside this; called by
hopper.py, streaming.py and ahead.py. A machine without NVRTC or the driver is told by available(), and its products run elsewhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.whole import round_up

# of cuda.h
_STATIC_SHARED, _MOST_DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, _MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _SERIALISE = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE
_SWIZZLES = {0: 0, 128: 3}  # CU_TENSOR_MAP_SWIZZLE, by bytes
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B: with 256 a step of 64 rows of 7B takes 2 us a layer more
_PROMOTE_128 = 2

_MAP = 128  # bytes of a tensor map, and what it is aligned to: the driver of CUDA 12 asks for 64, the header of CUDA 13 for 128
_MAPS = 4096  # kept; a map costs some microseconds to make
_SLOTS = {"p": (8, "Q"), "i": (8, "i4x"), "f": (8, "f4x"), "m": (_MAP, f"{_MAP}s")}  # a parameter's alignment, and how struct writes it

Variant = tuple[tuple[str, int], ...]  # a kernel's macros
Size = int | tuple[int, ...]  # along x, or along x, y and z


class CudaError(RuntimeError):
    """What NVRTC or the driver said."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the union of 64 bytes begins with what is used of it here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


# ---------------------------------------------------------------- libraries


def _nvrtc_names() -> list[str]:
    """Where NVRTC may lie: the wheels that torch brings, then wherever the loader looks."""
    major = (torch.version.cuda or "0").split(".")[0]
    beside = Path(torch.__file__).parent.parent / "nvidia"
    found = [str(p) for folder in (f"cu{major}", "cuda_nvrtc") for p in sorted((beside / folder / "lib").glob(f"libnvrtc.so.{major}*"))]
    return [*found, f"libnvrtc.so.{major}"]


@cache
def _nvrtc() -> ctypes.CDLL | None:
    for name in _nvrtc_names():
        try:
            # it asks for its builtins by their bare name, which the loader does not find in a wheel's folder unless they are loaded already
            if folder := os.path.dirname(name):
                for builtins in sorted(Path(folder).glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins))
            nvrtc = ctypes.CDLL(name)
        except OSError:
            continue
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        return nvrtc
    return None


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuLaunchKernelEx") and hasattr(driver, "cuTensorMapEncodeTiled") else None


@cache
def available(device: torch.device) -> bool:
    """Whether these kernels run: on sm_90, for which all of them are written, with a driver of CUDA 12 on and an NVRTC that compiles."""
    if device.type != "cuda" or not torch.cuda.is_available() or facts(device).capability != (9, 0) or _driver() is None:
        return False
    try:
        _compiled("", [f"--gpu-architecture={_architecture(device)}"])  # 0.03 s
    except CudaError:
        return False
    return True


def _error(call: str, code: int) -> CudaError:
    driver, name, text = _driver(), ctypes.c_char_p(), ctypes.c_char_p()
    if driver is not None:
        driver.cuGetErrorName(code, ctypes.byref(name))
        driver.cuGetErrorString(code, ctypes.byref(text))
    return CudaError(f"{call}: {(name.value or b'unknown error').decode()} ({code}), {(text.value or b'no description').decode()}")


def _ask(call: str, *args: Any) -> None:
    """A call of the driver."""
    driver = _driver()
    if driver is None:
        raise CudaError(f"{call}: no driver of CUDA 12 or later was found")
    if code := getattr(driver, call)(*args):
        raise _error(call, code)


def enter(device: int) -> None:
    """A thread that has not used the device yet has no context: torch's becomes its. For what calls the driver past torch."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _ask("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _ask("cuDeviceGet", ctypes.byref(handle), device)
        _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        _ask("cuCtxSetCurrent", context)


# ---------------------------------------------------------------- compiling


def _ask_nvrtc(call: str, *args: Any) -> None:
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise CudaError("NVRTC was not found: the package nvidia-cuda-nvrtc brings it")
    if code := getattr(nvrtc, call)(*args):
        raise CudaError(f"{call}: {nvrtc.nvrtcGetErrorString(code).decode()}")


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """CUBIN or ProgramLog."""
    size = ctypes.c_size_t()
    _ask_nvrtc(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    _ask_nvrtc(f"nvrtcGet{what}", program, room)
    return room.raw


def _compiled(source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    _ask_nvrtc("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        words = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        try:
            _ask_nvrtc("nvrtcCompileProgram", program, len(options), words)
        except CudaError as error:
            log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            raise CudaError(f"{error}, {' '.join(options)}\n{log}") from None
        return _read(program, "CUBIN")
    finally:
        _ask_nvrtc("nvrtcDestroyProgram", ctypes.byref(program))


@cache
def _nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask_nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _architecture(device: torch.device) -> str:
    """From sm_90 on with the instructions of that one generation."""
    major, minor = capability = facts(device).capability
    return f"sm_{major}{minor}{'a' if capability >= (9, 0) else ''}"


def _kept(path: Path) -> bytes | None:
    """What _keep() wrote there, if it is there and whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    made, digest = data[:-32], data[-32:]
    return made if made and hashlib.sha256(made).digest() == digest else None


def _keep(path: Path, made: bytes) -> None:
    with suppress(OSError):  # a cache that cannot be written makes the next start slower, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(made + hashlib.sha256(made).digest())
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


_here = threading.local()  # noted: inside noting(), the variants that would have been launched


def text_of(*names: str) -> str:
    """These files of this folder, one after the other."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in names)


class Program:
    """A kernel in CUDA C++ and the variants of it that were met."""

    folder: Path | None = None  # where machine code is kept: load() of this package says

    def __init__(self, source: str | Callable[..., str], name: str, signature: str, options: tuple[str, ...] = ()):
        """source, or source(**macros), is the text, which includes nothing; `name` is the kernel's in it (extern "C"). signature: of each
        parameter p, a tensor's address or None; i, int32; f, float32; m, a tensor_map(). options: NVRTC's, beside architecture and macros."""
        self.source, self.name, self.signature, self.options = source, name, signature, options
        self._kernels: dict[tuple[torch.device, Variant], Kernel] = {}
        self._lock = threading.Lock()

    def get(self, device: torch.device, **macros: int) -> Kernel | None:
        """The variant, compiled and loaded where it is new, which no graph may be captured for meanwhile; None while variants are only noted.
        Raises CudaError, with the compiler's words if it is the compiler's."""
        variant = tuple(macros.items())
        if (noted := getattr(_here, "noted", None)) is not None:
            noted[self, _architecture(device), variant] = None
            return None
        kernel = self._kernels.get((device, variant))
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get((device, variant))
                if kernel is None:
                    kernel = self._kernels[device, variant] = self._load(device, variant)
        return kernel

    def compile(self, architecture: str, variant: Variant) -> bytes:
        """Machine code, from disk if it is there. Needs no GPU."""
        text = self.source if isinstance(self.source, str) else self.source(**dict(variant))
        macros = [f"-D{name}={value}" for name, value in sorted(variant)]
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *self.options, *macros]
        mark = hashlib.sha256("\0".join((_nvrtc_version(), *options, text)).encode()).hexdigest()
        path = Program.folder and Program.folder / f"{mark}.cubin"
        made = path and _kept(path)
        if not made:
            made = _compiled(text, options)
            if path:
                _keep(path, made)
        return made

    def _load(self, device: torch.device, variant: Variant) -> Kernel:
        code = self.compile(_architecture(device), variant)
        index = torch.cuda.current_device() if device.index is None else device.index
        module, function, static = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        with torch.cuda.device(index):
            enter(index)
            _ask("cuModuleLoadData", ctypes.byref(module), code)
            _ask("cuModuleGetFunction", ctypes.byref(function), module, self.name.encode())
            _ask("cuFuncGetAttribute", ctypes.byref(static), _STATIC_SHARED, function)
            _ask("cuFuncSetAttribute", function, _MOST_DYNAMIC_SHARED, facts(device).shared_memory - static.value)
        return Kernel(function, self.signature, index)


@contextmanager
def noting() -> Iterator[dict[tuple[Program, str, Variant], None]]:
    """Inside, variants are noted instead of compiled and launched, in this thread alone."""
    _here.noted = noted = dict[tuple[Program, str, Variant], None]()
    try:
        yield noted
    finally:
        _here.noted = None


# ---------------------------------------------------------------- launching


class Kernel:
    """A loaded variant. Parameters are copied at launch, so one set of them serves all launches."""

    def __init__(self, function: ctypes.c_void_p, signature: str, device: int):
        self._function, self._signature, self._device = function, signature, device
        self._queue = getattr(_driver(), "cuLaunchKernelEx")  # noqa: B009  of a driver that is there, or nothing was loaded
        offsets, form, end = [], "=", 0
        for kind in signature:
            size, written = _SLOTS[kind]
            offsets.append(round_up(end, size))
            form += f"{offsets[-1] - end}x{written}"
            end = offsets[-1] + size
        self._room, self._first = _aligned(end)
        self._write = struct.Struct(form).pack_into
        first = ctypes.addressof(self._room) + self._first
        self._parameters = (ctypes.c_void_p * len(signature))(*(first + offset for offset in offsets))
        self._configs: dict[tuple[Any, ...], tuple[_Config, Any]] = {}
        self._lock = threading.Lock()

    def launch(self, grid: Size, block: int, shared: int, args: Sequence[Any], cluster: Size = 1, pdl: bool = False) -> None:
        """Queue on torch's current stream: `grid` programs of `block` threads and `shared` bytes, in clusters. pdl: may start before the kernel
        before has ended, and waits for it by itself. An argument that its parameter cannot hold raises, and nothing is queued."""
        form = (grid, block, shared, cluster, pdl)
        made = self._configs.get(form)
        if made is None:
            config = _config(*form)
            made = self._configs.setdefault(form, (config, ctypes.byref(config)))
        config, reference = made
        values = [(0 if arg is None else arg.data_ptr()) if kind == "p" else arg for kind, arg in zip(self._signature, args, strict=True)]
        with self._lock:
            self._write(self._room, self._first, *values)
            config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            code = self._queue(reference, self._function, self._parameters, None)
            if code == _NO_CONTEXT:
                enter(self._device)
                code = self._queue(reference, self._function, self._parameters, None)
        if code:
            raise _error("cuLaunchKernelEx", code)


def _aligned(size: int) -> tuple[Any, int]:
    """A buffer and where in it `size` bytes begin that are aligned as a tensor map is."""
    room = ctypes.create_string_buffer(size + _MAP)
    return room, -ctypes.addressof(room) % _MAP


def _three(size: Size) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def _config(grid: Size, block: int, shared: int, cluster: Size, pdl: bool) -> _Config:
    attributes = (_Attribute * 2)()
    count = 0
    if _three(cluster) != (1, 1, 1):
        attributes[count].id = _CLUSTER
        attributes[count].value[:3] = _three(cluster)
        count += 1
    if pdl:
        attributes[count].id = _SERIALISE
        attributes[count].value[0] = 1
        count += 1
    # ctypes keeps `attributes` alive as long as the pointer to it
    return _Config(_three(grid), (block, 1, 1), shared, None, attributes, count)


_maps: dict[tuple[Any, ...], bytes] = {}


def tensor_map(tensor: Tensor, box_rows: int, box_columns: int, swizzle: int = 128) -> bytes:
    """How a kernel fetches boxes of a row-major matrix [rows, columns] of 16 or 32-bit floats, with zeros outside of it: the 128 bytes of a
    parameter `m`. A box begins at a column of whole 16 bytes: at others the device stopped with an illegal instruction (H200). swizzle: 128
    bytes, to which a box's row is limited, or 0. Raises ValueError for a matrix or box that cannot be fetched so."""
    form = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, box_rows, box_columns, swizzle)
    made = _maps.get(form)
    if made is None:
        made = _encoded(tensor, box_rows, box_columns, swizzle)
        if len(_maps) >= _MAPS:
            _maps.clear()
        _maps[form] = made
    return made


def _encoded(tensor: Tensor, box_rows: int, box_columns: int, swizzle: int) -> bytes:
    if tensor.dtype not in _MAP_TYPES or swizzle not in _SWIZZLES:
        raise ValueError(f"a tensor map of {tensor.dtype} with a swizzle of {swizzle} bytes: of 16 and 32-bit floats only, with 128 or 0")
    item = tensor.element_size()
    if tensor.dim() != 2 or not tensor.numel() or tensor.stride(1) != 1 or tensor.data_ptr() % 16 or tensor.stride(0) * item % 16:
        raise ValueError(
            f"a tensor map of {tuple(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}: of a matrix only, neighbours "
            "in a row side by side, rows at multiples of 16 bytes"
        )
    width = box_columns * item
    if not (1 <= box_rows <= 256 and 1 <= box_columns <= 256 and width % 16 == 0 and width <= (swizzle or width)):
        raise ValueError(
            f"a box of {box_rows} rows of {box_columns} columns, {width} bytes: at most 256 by 256, the columns a multiple of 16 bytes, with a "
            "swizzle no more than it"
        )
    room, first = _aligned(_MAP)
    _ask(
        "cuTensorMapEncodeTiled",
        ctypes.byref(room, first),
        _MAP_TYPES[tensor.dtype],
        2,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(tensor.shape[1], tensor.shape[0]),
        (ctypes.c_uint64 * 1)(tensor.stride(0) * item),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,  # not interleaved
        _SWIZZLES[swizzle],
        _PROMOTE_128,
        0,  # zeros outside
    )
    return room.raw[first : first + _MAP]
