"""What safetensors files hold: names, dtypes, shapes and places, read from the headers alone and checked against the files' sizes.

A folder's shards are settled here too: the index, missing and stale files, files that are not part of the model. No tensor data is
read and no torch is needed. Called by sources.py; models/load.py reads the tensors.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.modelfile.spec import ModelFileError

ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
INCOMPLETE = "incomplete download? fetch the file again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: `nbytes` bytes from `offset` on, row-major."""

    file: Path
    name: str
    dtype: str  # safetensors' word: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model, by name, and the files that hold them."""

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]
    notices: tuple[str, ...] = ()


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file. ModelFileError: a header that is garbage, or that does not fit the file."""
    try:
        size, f = path.stat().st_size, path.open("rb")
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}; incomplete download? fetch it again") from None
    with f:
        prefix = f.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise ModelFileError(f"{path}: {size} bytes are too few for a safetensors file; {INCOMPLETE}")
        if length > MAX_HEADER or length < 2:
            raise ModelFileError(f"{path}: not a safetensors file (its first 8 bytes give a header of {length} bytes)")
        if 8 + length > size:
            raise ModelFileError(f"{path}: the header needs {8 + length} bytes but the file has {size}; {INCOMPLETE}")
        raw = f.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: the safetensors header is not valid: {e}; fetch the file again") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the safetensors header is not a JSON object; fetch the file again")
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ModelFileError(f"{path}: the header's entry for {name!r} is not valid; fetch the file again")
    if dtype not in ITEM_BITS:
        raise ModelFileError(f"{path}: {name}: unknown dtype {dtype!r}; known: {', '.join(ITEM_BITS)}")
    if math.prod(shape) * ITEM_BITS[dtype] != (end - begin) * 8:
        raise ModelFileError(f"{path}: {name}: shape {list(shape)} of {dtype} does not fill its {end - begin} bytes; fetch the file again")
    return StoredTensor(path, name, dtype, shape, start + begin, end - begin)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Tensors lie end to end from the header to the end of the file: anything else is a cut or damaged file."""
    at = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            problem = "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            raise ModelFileError(f"{path}: {tensor.name} at byte {tensor.offset} {problem} (which ends at {at}); fetch the file again")
        at += tensor.nbytes
        if at > size:
            raise ModelFileError(f"{path}: {tensor.name} ends at byte {at} but the file has only {size}; {INCOMPLETE}")
    if at != size:
        raise ModelFileError(f"{path}: {size - at} bytes follow the last tensor; fetch the file again")


def read_checkpoint(folder: Path) -> Checkpoint:
    """The model's tensors in a folder, from every shard that belongs to it.

    With an index, what it lists; without, model.safetensors, a complete set of numbered shards, or all files. Raises ModelFileError
    naming the file or tensor.
    """
    present = {p.name: p for p in sorted(folder.glob("*.safetensors"))}
    indices = sorted(folder.glob("*.safetensors.index.json"))
    own = folder / "model.safetensors.index.json"
    index = own if own in indices or len(indices) != 1 else indices[0]
    if index in indices:
        weight_map = _read_index(index)
        names = _indexed_files(index, weight_map, present)
    else:
        weight_map = {}
        names = _unindexed_files(folder, present)
    notices = []
    if unused := [n for n in present if n not in names]:
        notices.append(f"{folder}: {', '.join(unused)} not part of the model: ignored")

    tensors: dict[str, StoredTensor] = {}
    for file in names:
        for name, tensor in read_header(present[file]).items():
            listed = weight_map.get(name, file)
            if listed != file and listed in names:
                continue  # the index says which of two copies counts; a copy that is not there is found below
            if name in tensors:
                raise ModelFileError(
                    f"{folder}: {name} is in both {tensors[name].file.name} and {file}; remove the file that is not part of the model"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ModelFileError(f"{index}: says that {name} is in {file}, but it isn't; incomplete download? fetch both files again")
    return Checkpoint(tensors, tuple(present[n] for n in names), tuple(notices))


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(f, str) and Path(f).name == f for f in weight_map.values()) and weight_map
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise ModelFileError(f"{index}: not a valid index (no weight_map of tensor names to file names); fetch the file again")
    return weight_map


def _indexed_files(index: Path, weight_map: dict[str, str], present: dict[str, Path]) -> list[str]:
    names = sorted(set(weight_map.values()))
    missing = [n for n in names if n not in present]
    others = [n for n in present if n not in names and not n.startswith("consolidated")]
    if not missing:
        return names
    what = f"{missing[0]} is missing" + (f" ({len(missing)} of {len(names)} files are)" if len(missing) > 1 else "")
    if others:
        raise ModelFileError(
            f"{index.parent}: {what}, while {', '.join(others[:3])} there {'is' if len(others) == 1 else 'are'} not in {index.name}: "
            "the index is stale (remove it, or fetch the missing files) or the download incomplete"
        )
    raise ModelFileError(f"{index.parent}: {what}, which {index.name} lists; incomplete download? fetch it again")


def _unindexed_files(folder: Path, present: dict[str, Path]) -> list[str]:
    """model.safetensors alone; else one complete set of numbered shards; else every file."""
    if "model.safetensors" in present:
        return ["model.safetensors"]
    ours = [n for n in present if not n.startswith("consolidated")]
    if not ours:
        raise ModelFileError(_no_weights(folder, present))
    sets: dict[tuple[str, str], list[str]] = {}
    for name in ours:
        if m := SHARD.match(name):
            sets.setdefault((m["stem"], m["count"]), []).append(name)
    if not sets:
        return ours
    if len(sets) > 1:
        raise ModelFileError(f"{folder}: two sets of shards ({' and '.join(s for s, _ in sets)}) and no index says which; keep one of them")
    (stem, count), names = next(iter(sets.items()))
    for number in range(1, int(count) + 1):
        name = f"{stem}-{number:05}-of-{count}.safetensors"
        if name not in names:
            raise ModelFileError(f"{folder}: {name} is missing; incomplete download? fetch it again")
    return names


def _no_weights(folder: Path, present: dict[str, Path]) -> str:
    if present:
        return f"{folder}: only {next(iter(present))} is there, Mistral's own layout; fetch the model*.safetensors files of the same model"
    if list(folder.glob("*.bin")):
        return f"{folder}: only PyTorch .bin weights are there; safetensors or GGUF files are needed (convert with save_pretrained)"
    return f"{folder}: no .safetensors file is there; incomplete download? Or --load-format dummy for random weights"
