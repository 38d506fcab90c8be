"""The native CPU library by thin functions on torch tensors over its C ABI (native.h): products of plain and packed weights, attention of
single queries, rotation, what a decode step does around its layers; and blocks of such calls, noted once and made again by one. Those on rows by
themselves and on experts are rows.py's, those on GGUF's blocks blocks.py's.

It is built by setup.py and may be missing: available() says so and lacking() what that costs. No arithmetic and no choice lives here. Called by
kernels/linear.py, packed.py, attention.py and rope.py, which have the references, attention/sdpa.py, and runner/build.py, which sets the threads.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatout.kernels.kv import head_dim

LINES = 16  # of a weight are packed together, one for each lane of 32 bits
GROUP = 32  # elements share a scale
FROM_DEVICE = -1  # a staged id that means the slot's last one: step.FROM_DEVICE, which kernels may not import
# by kind, of a block of lines' group: values, then float16 scales, of 4 bits float16 minima too
BYTES = {4: LINES * (GROUP // 2 + 4), 8: LINES * (GROUP + 2)}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_PLAIN = {torch.bfloat16: 16, torch.float32: 32}  # kinds by type
_GATES = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}

_FILE = Path(__file__).with_name("libflatout.so")
# FlatoutProduct: x, weight, bias, norm, out; their strides, rows, outputs, columns; types, kind, gate, add, many; eps, offset, scale.
# Packing takes 0.2 us where a ctypes.Structure takes 0.9
_PRODUCT = struct.Struct("5P5q8i3f")
_ATTENTION, _ROTATION = struct.Struct("9P4q7i2f"), struct.Struct("9P4q6i2f")  # FlatoutAttention, FlatoutRotation, in their order
_GATHER, _GREEDY = struct.Struct("3P5qif"), struct.Struct("2P3q")
_CHUNK = struct.Struct("5P5q6if")
_INPUTS, _REMEMBER = struct.Struct("8P4q2i"), struct.Struct("3P2q")
# by their numbers in a program (FlatoutCall)
_FUNCTIONS = (
    *("product", "attention", "rotate", "gather", "greedy", "inputs", "remember", "chunk"),
    *("norm", "add", "gate", "route", "experts"),  # by native/rows.py
    "embed",  # by native/blocks.py
)


def _load() -> ctypes.CDLL | None:
    """None where there is no library, or one of another version that lacks a function."""
    try:
        library = ctypes.CDLL(str(_FILE))
        for name in _FUNCTIONS:
            getattr(library, f"flatout_{name}").argtypes = [ctypes.c_char_p]
        library.flatout_run.argtypes, library.flatout_run.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64
    except (OSError, AttributeError):
        return None
    library.flatout_dequantise.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),
    ]
    library.flatout_repack.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int32, ctypes.c_void_p),
    ]
    library.flatout_isa.restype = ctypes.c_char_p
    library.flatout_use_isa.argtypes = [ctypes.c_char_p]
    return library


_library = _load()


def available() -> bool:
    """The library was built and runs here. Without it all below but lacking() raises."""
    return _library is not None


def lacking() -> list[str]:
    """A line for the user where the library is missing."""
    if available():
        return []
    what = "could not be loaded" if _FILE.exists() else "was not built"
    mend = "install a C++17 compiler (apt install g++, xcode-select --install), then flatout again"
    cost = "a decode step by torch alone, slower, and --quantization gguf unpacks its weights, several times slower"
    return [f"kernels: {cost}: the native library {what} ({mend})"]


def keeps(cache: torch.dtype, rows: torch.dtype) -> bool:
    """Whether keys and values of rows of this type can be kept in a cache of that one, which attention of single queries then reads."""
    return rows in (torch.float32, torch.bfloat16) and (
        cache in (rows, torch.int8) or (rows == torch.float32 and cache in (torch.float16, torch.bfloat16))
    )


def isa() -> str:
    """The instruction set in use: avx512_vnni, avx2 or scalar."""
    return _native().flatout_isa().decode()


def has_tiles() -> bool:
    """Whether product() does many rows by the machine's matrix tiles (AMX)."""
    return available() and bool(_native().flatout_has_tiles())


def use_isa(name: str) -> bool:
    """Take another one, for tests; False where this machine lacks it."""
    return _native().flatout_use_isa(name.encode()) == 0


_here = threading.local()  # noted: inside noting(), the calls so far, as (function, operands)


@contextmanager
def noting() -> Iterator[list[tuple[int, bytes]]]:
    """Inside, this thread's calls are noted instead of made."""
    noted: list[tuple[int, bytes]] = []
    _here.noted = noted
    try:
        yield noted
    finally:
        _here.noted = None


def _declined(function: str, operands: bytes) -> bool:
    """Make the call or note it; whether the library declined it, with nothing done."""
    noted = getattr(_here, "noted", None)
    if noted is None:
        return bool(getattr(_native(), f"flatout_{function}")(operands))
    noted.append((_FUNCTIONS.index(function), operands))
    return False


class Block:
    """Calls that were noted, to be made in their order by one. What their operands point to must stay where it is."""

    def __init__(self, noted: list[tuple[int, bytes]]):
        self._noted = noted
        padded = [operands + bytes(-len(operands) % 8) for _, operands in noted]
        self._operands = ctypes.create_string_buffer(b"".join(padded))
        self._calls = np.empty((len(noted), 2), np.int64)  # FlatoutCall
        self._calls[:, 0] = [function for function, _ in noted]
        sizes = np.array([len(operands) for operands in padded])
        self._calls[:, 1] = ctypes.addressof(self._operands) + np.cumsum(sizes) - sizes
        self._run = _native().flatout_run
        self._address = self._calls.ctypes.data

    def __len__(self) -> int:
        return len(self._calls)

    def __call__(self, ns: np.ndarray | None = None) -> None:
        """ns: int64 [calls], to which the nanoseconds of each are added. Several Python threads must not make the same block's calls at once."""
        made = self._run(self._address, len(self._calls), None if ns is None else ns.ctypes.data)
        if made != len(self._calls):
            raise RuntimeError(f"the native library declines call {made} of {len(self._calls)} in a program: {self.names()[made]}")

    def then(self, other: Block) -> Block:
        return Block(self._noted + other._noted)

    def names(self) -> list[str]:
        """Of the functions called."""
        return [_FUNCTIONS[function] for function in self._calls[:, 0].tolist()]


def set_threads(n: int) -> int:
    """Use n threads, the caller's among them; how many it will be."""
    return _native().flatout_threads(n)


def product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    kind: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float, float] | None = None,
    gate: str | None = None,
    add: bool = False,
    scale: float = 1.0,
    many: bool = False,
) -> None:
    """out [T, N] = scale * (x [T, K] @ weight^T + bias), or with add that much more than it was.

    weight: packed, uint8 [lines / 16, K / 32, bytes], and x is rounded to int8 by groups (native.h); or plain [lines, K], contiguous, K a
    multiple of 16, and x is rounded to its type. kind: the weight's bits, 4 or 8 of packed ones, 16 of bfloat16, 32 of float32. x and out:
    float32 or bfloat16, rows any way apart. norm: (weight [K], eps, offset) of the RMS norm that x passes first. gate: the weight's lines are
    gates, then ups, and act(gate) * up is the result. bias and the norm's weight are of either type. many: x and packed weights are
    rounded to bfloat16 instead, or plain ones are of bfloat16, whole blocks of 16 lines and 32 columns; where has_tiles(). Takes 2 us on top of the work.
    """
    rows, columns = x.shape
    out_rows, outputs = out.shape
    (x_stride, x_step), (out_stride, out_step) = x.stride(), out.stride()
    lines = 2 * outputs if gate else outputs
    norm_weight, eps, offset = norm or (None, 0.0, 0.0)
    if kind in BYTES:
        blocks, groups, size = weight.shape
        fits = blocks * LINES == lines and groups * GROUP == columns and size == BYTES[kind]
    else:
        fits = weight.shape == (lines, columns) and _PLAIN.get(weight.dtype) == kind and weight.is_contiguous()
    if not fits or out_rows != rows:
        raise ValueError(
            f"product: {weight.dtype} {tuple(weight.shape)} of kind {kind} does not fit x {tuple(x.shape)}, out {tuple(out.shape)}, gate {gate}"
        )
    if x_step != 1 or out_step != 1:
        raise ValueError("product: needs rows of x and out whose elements are side by side")
    if bias is not None and bias.numel() != lines:
        raise ValueError(f"product: bias needs {lines} values, not {bias.numel()}")
    if norm_weight is not None and norm_weight.numel() != columns:
        raise ValueError(f"product: norm needs {columns} values, not {norm_weight.numel()}")
    asked = _PRODUCT.pack(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if norm_weight is None else norm_weight.data_ptr(),
        out.data_ptr(),
        x_stride,
        out_stride,
        rows,
        outputs,
        columns,
        _TYPES[x.dtype],
        _TYPES[out.dtype],
        0 if bias is None else _TYPES[bias.dtype],
        0 if norm_weight is None else _TYPES[norm_weight.dtype],
        kind,
        _GATES[gate],
        add,
        many,
        eps,
        offset,
        scale,
    )
    if _declined("product", asked):
        raise ValueError(f"product: the native library declines {tuple(x.shape)} on {tuple(weight.shape)} of kind {kind}")


def dequantise(out: Tensor, weight: Tensor, kind: int) -> None:
    """out [lines, K], float32 or bfloat16 = the packed weight's values."""
    blocks, groups, size = weight.shape
    if out.shape != (blocks * LINES, groups * GROUP) or size != BYTES.get(kind):
        raise ValueError(f"dequantise: {tuple(weight.shape)} of kind {kind} does not fit out {tuple(out.shape)}")
    if _native().flatout_dequantise(weight.data_ptr(), kind, *out.shape, out.data_ptr(), out.stride(0), _TYPES[out.dtype]):
        raise ValueError(f"dequantise: the native library declines {tuple(weight.shape)} of kind {kind}")


class Rows:
    """Rows of one query each, where attention() finds their keys: table int32 [S, W] of blocks in order, kv_lens int32 [R] of at least 1,
    table_rows int32 [R] which of the tables each has (None: its own); rows int32 [n] which of the rows, tokens int32 [n] whose queries are theirs.
    Kept as they are, int32 and contiguous ones without a copy: addresses are taken once and used in every layer, or in every step."""

    def __init__(
        self,
        table: np.ndarray,
        kv_lens: np.ndarray,
        rows: np.ndarray,
        tokens: np.ndarray,
        block_size: int,
        window: int | None,
        table_rows: np.ndarray | None = None,
    ):
        arrays = (table, kv_lens, table_rows, rows, tokens)
        self._arrays = [None if array is None else np.ascontiguousarray(array, np.int32) for array in arrays]
        self._addresses = [0 if array is None else array.ctypes.data for array in self._arrays]
        self._numbers = table.shape[1], len(rows)
        self._where = block_size, window or 0

    def attend(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, softcap: float) -> None:
        """out [T, heads * D] of these rows' tokens = softmax(scale * q k^T) v; scores s are capped to softcap * tanh(s / softcap), 0: not.
        q [T, heads * D], its rows apart as they like; k_cache, v_cache [slots, kv_heads, stored(D)], contiguous; one type, float32 or bfloat16, or a
        cache of 16 bits beside float32, or of int8 beside either."""
        kv_heads, dim = k_cache.shape[1], head_dim(k_cache)
        asked = _ATTENTION.pack(
            *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
            *self._addresses,
            *(q.stride(0), out.stride(0)),
            *self._numbers,
            *(q.shape[1] // dim, kv_heads, dim),
            *self._where,
            _TYPES[q.dtype],
            _TYPES[k_cache.dtype],
            scale,
            softcap,
        )
        if _declined("attention", asked):
            raise ValueError(f"attend: the native library declines queries {tuple(q.shape)} on a cache {tuple(k_cache.shape)}")


def rotate(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    """kernels/rope.py:rope_kv_write, whose operands these are; norms are of single heads, all types alike but for a cache of
    16 bits beside float32, or of int8."""
    tokens, heads, dim = qk.shape
    kv_heads = value.shape[1]
    asked = _ROTATION.pack(
        *(qk.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr()),
        *(0 if part is None else part.data_ptr() for part in (cos, sin, q_norm, k_norm)),
        *(tokens, qk.stride(0), value.stride(0), 0 if cos is None else cos.stride(0)),
        *(heads - kv_heads, kv_heads, dim, 0 if cos is None else cos.shape[2]),
        _TYPES[qk.dtype],
        _TYPES[k_cache.dtype],
        eps,
        offset,
    )
    if _declined("rotate", asked):
        raise ValueError(f"rotate: the native library declines {tuple(qk.shape)} with a cache {tuple(k_cache.shape)}")


def chunk(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    where: tuple[int, int] | Tensor,
    window: int | None,
    scale: float,
) -> None:
    """out [T, heads * D] = attention of q [T, heads * D], neighbouring queries of one row, to its keys: where in the cache (first slot, end), or
    int64 slots, contiguous; the last query sees the last key. q and out float32 or bfloat16, k_cache and v_cache [slots, kv_heads, stored(D)],
    contiguous, float16, bfloat16 or int8, D a multiple of 32. Multiplies in bfloat16, float32 rows on int8 exactly; where has_tiles()."""
    kv_heads, dim = k_cache.shape[1], head_dim(k_cache)
    slots, first, keys = (where.data_ptr(), 0, where.shape[0]) if isinstance(where, Tensor) else (0, where[0], where[1] - where[0])
    asked = _CHUNK.pack(
        *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), slots),
        *(first, q.stride(0), out.stride(0), q.shape[0], keys),
        *(q.shape[1] // dim, kv_heads, dim, window or 0),
        _TYPES[q.dtype],
        _TYPES[k_cache.dtype],
        scale,
    )
    if _declined("chunk", asked):
        raise ValueError(
            f"chunk: the native library declines queries {tuple(q.shape)} on a cache {tuple(k_cache.shape)} of {k_cache.dtype}"
        )


def gather(out: Tensor, source: Tensor, indices: Tensor, scale: float = 1.0) -> None:
    """out [S, H] = scale * source [N, H] at indices (int64 [S], contiguous); float32 or bfloat16. IndexError: one that is none of the rows."""
    asked = _GATHER.pack(
        *(source.data_ptr(), indices.data_ptr(), out.data_ptr()),
        *(source.stride(0), out.stride(0), out.shape[0], out.shape[1], source.shape[0]),
        _TYPES[out.dtype],
        scale,
    )
    if _declined("gather", asked):
        raise IndexError(f"gather: an index is none of the {source.shape[0]} rows")


def greedy(ids: Tensor, logits: Tensor) -> None:
    """ids int64 [S] = the largest of each row of logits float32 [S, V], the lowest id among equals; NaN counts as the lowest finite number, +inf as
    the highest."""
    if _declined("greedy", _GREEDY.pack(logits.data_ptr(), ids.data_ptr(), logits.stride(0), *logits.shape)):
        raise ValueError(f"greedy: the native library declines logits {tuple(logits.shape)}")


def inputs(
    tokens: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    kv_slots: Tensor,
    rows: Tensor,
    tables: Tensor,
    staged: Tensor,
    last_ids: Tensor,
    block_size: int,
) -> None:
    """kernels/inputs.py:decode_inputs, whose operands these are, all contiguous. IndexError: a slot, column or position that is none."""
    count = tokens.shape[0]
    asked = _INPUTS.pack(
        *(t.data_ptr() for t in (tokens, positions, kv_slots, kv_lens, rows, tables, staged, last_ids)),
        *(count, (staged.shape[0] - 1) // 3 - count, *tables.shape),
        block_size,
        FROM_DEVICE,
    )
    if _declined("inputs", asked):
        raise IndexError(f"inputs: a staged slot, column or position is outside of the tables {tuple(tables.shape)}")


def remember(last_ids: Tensor, rows: Tensor, ids: Tensor) -> None:
    """last_ids (int64 [S]) at rows (int32 [R]) = ids (int64 [R])."""
    if _declined("remember", _REMEMBER.pack(last_ids.data_ptr(), rows.data_ptr(), ids.data_ptr(), ids.shape[0], last_ids.shape[0])):
        raise IndexError(f"remember: a row is none of the {last_ids.shape[0]}")


def _native() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(lacking()[0])
    return _library
