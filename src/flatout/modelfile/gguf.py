"""GGUF files, memory-mapped: metadata and where each tensor's bytes lie. Versions 2 and 3, one file or a set of split files.

Every read is checked against the file's size, so that a cut or damaged file ends in a ModelFileError with file, place and mend. What the
metadata mean is gguf_spec.py's and text/'s business; what the bytes mean is quant/gguf.py's. Called by sources.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.modelfile.spec import ModelFileError


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `block` elements are stored in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


# ggml's type numbers. All that exist are here, so that a file with one we cannot read is refused by its name.
TYPES = {
    number: BlockType(name, block, nbytes)
    for number, name, block, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # metadata type -> struct code
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_QWORD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`data`: uint8 view of the mapped file. `shape` in torch's order: rows first, the last dimension contiguous."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    data: np.ndarray
    file: Path


class _Strings:
    """A string array whose place is known and whose strings are not made yet: a vocabulary has 50,000 and more. ends: of each, from `start` on."""

    __slots__ = ("ends", "start")

    def __init__(self, start: int, ends: list[int]):
        self.start = start
        self.ends = ends


class Metadata(Mapping[str, Any]):
    """Key -> int, float, bool, str, list[str] or numpy array. String lists are made when they are asked for."""

    def __init__(self, reader: _Reader):
        self._reader = reader
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Strings):
            value = self._values[key] = self._reader.strings(value, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def count(self, key: str) -> int:
        """Entries of an array, without making its strings."""
        value = self._values[key]
        return len(value.ends) if isinstance(value, _Strings) else len(value)

    def add(self, key: str, value: Any) -> None:
        self._values[key] = value


class _Reader:
    """A cursor over one mapped file. Reading past the end is a ModelFileError."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.size = path.stat().st_size
            self.bytes = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        except OSError as e:
            raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from None
        self.view = memoryview(self.bytes)  # type: ignore[arg-type]  # numpy arrays are buffers; the stubs of old Pythons do not say so
        self.at = 0

    def error(self, at: int, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: at byte {at}: {problem}")

    def need(self, count: int, what: str) -> int:
        """Step over `count` bytes; where they begin."""
        at = self.at
        if count > self.size - at:
            raise self.error(at, f"the file ends ({self.size} bytes) inside {what}; incomplete download? fetch it again")
        self.at = at + count
        return at

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.view, self.need(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str, at_most: int | None = None) -> str:
        length = self.scalar("Q", what)
        if at_most is not None and length > at_most:
            raise self.error(self.at - 8, f"{what} of {length} bytes; not a valid GGUF file, fetch it again")
        at = self.need(length, what)
        return self._text(at, length, what)

    def _text(self, at: int, length: int, what: str) -> str:
        try:
            return str(self.view[at : at + length], "utf-8")
        except UnicodeDecodeError:
            raise self.error(at, f"{what} is not UTF-8; not a valid GGUF file, fetch it again") from None

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            raise self.error(self.at - 4, f"{key} has the unknown type {kind}; not a valid GGUF file, fetch it again")
        item, count = self.scalar("I", key), self.scalar("Q", key)
        if item in _DTYPES:
            dtype = np.dtype(_DTYPES[item])
            at = self.need(count * dtype.itemsize, key)
            return np.frombuffer(self.view[at : self.at].tobytes(), dtype)
        if item == _STRING:
            return self._skip_strings(count, key)
        raise self.error(self.at - 12, f"{key} is an array of type {item}, which is not supported")

    def _skip_strings(self, count: int, key: str) -> _Strings:
        """Step over the strings by their lengths: the array does not say where it ends. 20 ms for 98,000 strings."""
        if count * 8 > self.size - self.at:
            raise self.error(self.at, f"{key} says {count} strings, more than the file has room for; fetch it again")
        at, raw, length_at, ends = 0, self.view[self.at :], _QWORD.unpack_from, list[int]()
        try:
            for _ in range(count):
                at += 8 + length_at(raw, at)[0]
                ends.append(at)
        except (struct.error, OverflowError):
            at = self.size + 1
        return _Strings(self.need(at, key), ends)

    def strings(self, array: _Strings, key: str) -> list[str]:
        at, ends, found = 0, array.ends, list[str]()
        raw = self.view[array.start : array.start + (ends[-1] if ends else 0)].tobytes()
        try:
            for end in ends:
                found.append(raw[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise self.error(array.start + at, f"{key} holds a string that is not UTF-8; not a valid GGUF file, fetch it again") from None
        return found


class GGUFFile:
    """A model in GGUF form: `metadata`, and `tensors` by name, over all parts of a split file. Pickles as its path."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.files = split_parts(self.path)
        self.tensors: dict[str, GGUFTensor] = {}
        parts = [self._read(file) for file in self.files]
        self.metadata = parts[0]
        for file, part in zip(self.files, parts):
            said = part.get("split.count", 1)
            if said not in (len(parts), 0) or (len(parts) > 1 and part.get("split.no") != self.files.index(file)):
                raise ModelFileError(
                    f"{file}: says that it is part {part.get('split.no', 0)} of {said}; restore the names that the parts came with"
                )

    def __reduce__(self) -> tuple[type[GGUFFile], tuple[Path]]:
        return (GGUFFile, (self.path,))

    def _read(self, path: Path) -> Metadata:
        reader = _Reader(path)
        magic = bytes(reader.view[:4])
        if magic != b"GGUF":
            raise ModelFileError(f"{path}: not a GGUF file (it begins with {magic!r}, not b'GGUF')")
        reader.need(4, "the header")
        version = reader.scalar("I", "the header")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise ModelFileError(f"{path}: {kind} GGUF is not supported; supported: little-endian versions 2 and 3")
        num_tensors, num_keys = reader.scalar("Q", "the header"), reader.scalar("Q", "the header")
        metadata = Metadata(reader)
        for _ in range(num_keys):
            key = reader.string("a metadata key", at_most=65535)
            if key in metadata:
                raise reader.error(reader.at, f"the key {key} is there twice; not a valid GGUF file, fetch it again")
            metadata.add(key, reader.value(reader.scalar("I", key), key))
        alignment = metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelFileError(f"{path}: general.alignment is {alignment!r}; must be a power of two")
        infos = [self._info(reader) for _ in range(num_tensors)] if num_tensors * 24 <= reader.size - reader.at else None
        if infos is None:
            raise reader.error(reader.at, f"the header says {num_tensors} tensors, more than the file has room for; fetch it again")
        self._place(reader, infos, -(-reader.at // alignment) * alignment, alignment)
        return metadata

    def _info(self, reader: _Reader) -> tuple[str, BlockType, tuple[int, ...], int]:
        at = reader.at
        name = reader.string("a tensor name", at_most=1024)
        dims = reader.scalar("I", name)
        if not 1 <= dims <= 4:
            raise reader.error(at, f"tensor {name!r} has {dims} dimensions; not a valid GGUF file, fetch it again")
        shape = tuple(reversed(struct.unpack_from(f"<{dims}Q", reader.view, reader.need(8 * dims, name))))
        number, offset = reader.scalar("I", name), reader.scalar("Q", name)
        if number not in TYPES:
            raise reader.error(at, f"tensor {name!r} has the unknown type {number}; fetch the file again, or a newer version of flatout")
        if 0 in shape or shape[-1] % TYPES[number].block:
            raise reader.error(at, f"tensor {name!r} of shape {list(shape)} cannot be {TYPES[number].name}; fetch the file again")
        return name, TYPES[number], shape, offset

    def _place(self, reader: _Reader, infos: list[tuple[str, BlockType, tuple[int, ...], int]], start: int, alignment: int) -> None:
        """Give every tensor its bytes; they must lie inside the file, aligned, and not share a byte."""
        end = start
        for name, kind, shape, offset in sorted(infos, key=lambda i: i[3]):
            begin, nbytes = start + offset, math.prod(shape) // kind.block * kind.nbytes
            if begin + nbytes > reader.size:
                problem = f"needs bytes up to {begin + nbytes} but the file has {reader.size}; incomplete download? fetch it again"
                raise ModelFileError(f"{reader.path}: tensor {name} {problem}")
            if offset % alignment or begin < end:
                problem = "overlaps another" if begin < end else f"is not aligned to {alignment} bytes"
                raise reader.error(begin, f"tensor {name} {problem}; not a valid GGUF file, fetch it again")
            if name in self.tensors:
                raise ModelFileError(f"{reader.path}: tensor {name} is there twice; not a valid GGUF file, fetch it again")
            self.tensors[name] = GGUFTensor(name, kind, shape, reader.bytes[begin : begin + nbytes], reader.path)
            end = begin + nbytes


def split_parts(path: Path) -> tuple[Path, ...]:
    """All parts of a split file, whichever was named; the file itself if it is whole. ModelFileError names a missing part."""
    m = SPLIT.match(path.name)
    if m is None:
        return (path,)
    parts = tuple(path.with_name(f"{m['stem']}-{n:05}-of-{m['count']}.gguf") for n in range(1, int(m["count"]) + 1))
    for part in parts:
        if not part.is_file():
            raise ModelFileError(f"{part}: this part of the split file is missing; incomplete download? fetch it too")
    return parts or (path,)
