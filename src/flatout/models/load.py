"""Weights from files into the decoder's destinations, one tensor at a time, and the proof of it: LoadReport.

What will go where is settled from names and shapes before a byte is read, so a checkpoint that does not fit is refused at once, by name.
File formats are modelfile/'s, block types quant/'s, names registry.py's. Called by runner/build.py.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.layers.destination import Copy, Destination
from flatout.layers.embedding import HEAD
from flatout.modelfile.gguf import GGUFTensor
from flatout.modelfile.safetensors_header import StoredTensor
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelFileError, ModelSpec
from flatout.models.registry import NUMBER, Skipped, Target, names_of
from flatout.models.report import LoadReport
from flatout.models.staging import Staging
from flatout.quant import gguf
from flatout.quant.packed import bits_of, misfit
from flatout.quant.rounding import rounded_weight

SHOWN = 4  # names that an error lists before it counts the rest
LARGEST_FLOAT16 = 65504.0
DUMMY_STD = 0.02  # Transformers' initializer_range
MOST_READERS = 8  # threads that read files: more only wait for the disk
FLOATS = ("F64", "F32", "F16", "BF16")


# projections that may stay packed by themselves: all but the router's and the experts'
PACKABLE = re.compile(r"(layers\.\d+\.(attn\.(qkv|o)|(mlp|moe\.shared)\.(gate_up|down))|head)\.weight")
EXPERTS = re.compile(r"(layers\.\d+\.moe)\.(gate_up|down)\.weight")  # those may too, both or neither, as they are one op


class Loadable(Protocol):
    """What the loader needs of a decoder."""

    @property
    def spec(self) -> ModelSpec: ...

    def destinations(self) -> dict[str, Destination]: ...


@dataclass(frozen=True, slots=True)
class _Move:
    """One tensor of the checkpoint and where it goes."""

    name: str
    stored: StoredTensor | GGUFTensor
    target: Target
    destination: Destination

    @property
    def kind(self) -> str:
        """The stored type's name."""
        return self.stored.type.name if isinstance(self.stored, GGUFTensor) else self.stored.dtype

    @property
    def bits(self) -> int:
        """Of the packed weight that it becomes, or 0."""
        return bits_of(self.destination.tensor) if self.destination.lines > 1 else 0


def load_weights(decoder: Loadable, source: ModelSource, *, seed: int = 0) -> LoadReport:
    """Fill every destination of the decoder from `source` ("dummy": with random values made in place from `seed`).

    Raises ModelFileError naming tensor, file and mend: missing, left over, wrong shape, a type or value that cannot be held.
    """
    begin = time.perf_counter()
    destinations = decoder.destinations()
    report = LoadReport(source.name, source.kind, decoder.spec, files=len(source.files))
    for name, destination in destinations.items():
        report.add_parameters(name, destination)
    if source.kind == "dummy":
        _fill(destinations, decoder.spec, seed)
    else:
        if decoder.spec.quantization:
            method = decoder.spec.quantization.get("quant_method", "of an unnamed kind")
            raise ModelFileError(
                f"{source.name}: quantization {method} is not supported yet; supported: unquantised safetensors, or GGUF files"
            )
        moves = _plan(destinations, source, report)
        _run(moves, decoder.spec)
        report.used = len({move.name for move in moves})  # an embedding that is the head too goes two ways
        assert not any(d.missing() for d in destinations.values())
    report.seconds = time.perf_counter() - begin
    return report


def kept_packed(source: ModelSource) -> dict[str, int]:
    """Bits of the projections of a GGUF file that can stay packed, for Decoder(packed=...): all tensors of one must be quantised and of whole blocks
    of rows. It has the bits of the tensor that needs most."""
    assert source.gguf is not None
    names, found = names_of(source.spec), dict[str, list[int]]()
    stored = {name: (names.target(name), tensor) for name, tensor in source.gguf.tensors.items()}
    for target, tensor in stored.values():
        if not isinstance(target, Target):
            continue
        name = target.name
        if name == "embed.weight" and source.spec.tie_embeddings:
            name = "head.weight"
        if PACKABLE.fullmatch(name) or EXPERTS.fullmatch(name):
            rows, *columns = tensor.shape[-2:]  # of experts there may be a stack
            if name.endswith("gate_up.weight") and target.segment is None:
                rows //= 2  # gates and ups are blocks of their own
            found.setdefault(name, []).append(gguf.kept_bits(tensor.type.name, (rows, *columns)))
    kept = {name: max(bits) for name, bits in found.items() if all(bits)}
    halves = Counter(m[1] for m in map(EXPERTS.fullmatch, kept) if m)
    whole = (name for name in kept if not (m := EXPERTS.fullmatch(name)) or halves[m[1]] == 2)
    return {name.removesuffix(".weight"): kept[name] for name in whole}


def kept_embedding(source: ModelSource, packed: Mapping[str, int]) -> str:
    """How the embedding of a GGUF file is kept beside these projections, for Decoder(embedding=...), so that it gives the very values of the file: by
    a tied head that has them; else in the file's blocks; "": in floats, where those are in the file or a tied head needs them."""
    assert source.gguf is not None
    spec, targets = source.spec, _targets(source.gguf.tensors, source.spec, tie=source.spec.tie_embeddings)
    kind = next((source.gguf.tensors[n].type.name for n, t in targets.items() if isinstance(t, Target) and t.name == "embed.weight"), "")
    if kind not in gguf.PACKED or (spec.tie_embeddings and "head" not in packed):
        return ""
    return HEAD if spec.tie_embeddings and not gguf.change(kind, packed["head"]) else kind


def rounded_packed(shapes: Mapping[str, Destination], spec: ModelSpec, bits: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bits of the projections that --quantization int8 or int4 rounds, for Decoder(packed=...): all whose parts fall into whole groups, the head in 8.
    Those that do not: in words -> how many. shapes: destinations of a plain decoder, on any device."""
    found, left = dict[str, int](), Counter[str]()
    for name, destination in shapes.items():
        if name == "embed.weight" and spec.tie_embeddings:
            name = "head.weight"
        if PACKABLE.fullmatch(name):
            name, (rows, columns) = name.removesuffix(".weight"), destination.shape_of()
            parts = [end - first for first, end in destination.segments.values()] or [rows]
            if why := misfit(parts, columns):
                left[f"{NUMBER.sub('', name).removeprefix('layers.')} ({why})"] += 1
            else:
                found[name] = 8 if name == "head" else bits
    return found, dict(left)


def _plan(destinations: Mapping[str, Destination], source: ModelSource, report: LoadReport) -> list[_Move]:
    """What goes where, or why it cannot."""
    moves, unknown = [], []
    stored: Mapping[str, StoredTensor | GGUFTensor] = source.gguf.tensors if source.gguf is not None else source.tensors
    targets = _targets(stored, source.spec, tie="head.weight" not in destinations or source.spec.tie_embeddings)
    for name, tensor in stored.items():
        target = targets[name]
        if isinstance(target, Skipped):
            report.skip(name, target.reason)
        else:
            places = [] if target is None else [target]
            if target is not None and target.name == "embed.weight" and source.spec.tie_embeddings:
                places.append(replace(target, name="head.weight"))  # packed for itself though it is tied, and maybe for the embedding
            places = [place for place in places if place.name in destinations]
            if not places:
                unknown.append(name)
            for where in places:
                move = _Move(name, tensor, where, destinations[where.name])
                moves.append(move)
                report.add_scheme(where.name, move.kind, move.destination, gguf.change(move.kind, move.bits) if move.bits else "")
    if unknown:
        raise ModelFileError(
            f"{source.name}: the checkpoint holds tensors that {source.spec.architecture} has no place for: {_some(unknown)}"
        )
    claimed: dict[tuple[str, int | None, str | None], str] = {}
    for move in moves:
        _check(move, source)
        for expert, segment in move.destination.pieces(move.target.segment, move.target.expert):
            other = claimed.setdefault((move.target.name, expert, segment), move.name)
            if other != move.name:
                raise ModelFileError(
                    f"{source.name}: {other} and {move.name} hold the same parameter; remove the file that is not part of the model"
                )
    absent = [(name, e, s) for name, d in destinations.items() for e, s in d.pieces() if (name, e, s) not in claimed]
    if absent:
        present = {NUMBER.sub(".#", name) for name in stored}
        names = names_of(source.spec)
        lacking = [names.spelling(name, segment, expert, present) for name, expert, segment in absent]
        raise ModelFileError(f"{source.name}: the checkpoint lacks {_some(lacking)}; incomplete download? fetch it again")
    return moves


def _targets(stored: Iterable[str], spec: ModelSpec, tie: bool) -> dict[str, Target | Skipped | None]:
    """Where each tensor of the checkpoint goes, by its name."""
    names = names_of(spec)
    targets = {name: names.target(name) for name in stored}
    if tie:
        _tie(targets)
    return targets


def _tie(targets: dict[str, Target | Skipped | None]) -> None:
    """A tied head needs no tensor of its own. Files that hold the shared tensor under the head's name alone give it to the embedding."""
    heads = [n for n, t in targets.items() if isinstance(t, Target) and t.name == "head.weight"]
    embedded = any(isinstance(t, Target) and t.name == "embed.weight" for t in targets.values())
    for name in heads:
        targets[name] = Skipped("the head is tied to the embedding") if embedded else Target("embed.weight")


def _check(move: _Move, source: ModelSource) -> None:
    """Type and shape, from the headers."""
    where = f"{move.stored.file}: {move.name}"
    supported = gguf.SUPPORTED if isinstance(move.stored, GGUFTensor) else FLOATS
    if move.kind not in supported:
        raise ModelFileError(f"{where}: type {move.kind} is not supported; supported: {', '.join(supported)}")
    try:
        expected = move.destination.shape_of(move.target.segment, move.target.expert)
    except ValueError as e:
        raise ModelFileError(f"{where}: {e}") from None
    found = move.stored.shape
    if found == expected or (
        math.prod(found) == math.prod(expected) and tuple(n for n in expected if n != 1) == tuple(n for n in found if n != 1)
    ):
        return
    mend = "the config and the weights do not belong together"
    if move.target.name in ("embed.weight", "head.weight") and len(found) == 2 and found[1:] == expected[1:]:
        mend = f"set vocab_size to {found[0]}, or fetch the config that belongs to these weights (vocab_size is {source.spec.vocab_size})"
    raise ModelFileError(f"{where}: shape {list(found)} where {list(expected)} is expected; {mend}")


def _run(moves: list[_Move], spec: ModelSpec) -> None:
    """Read, convert and write every tensor, a few at a time."""
    with ExitStack() as stack:
        files = dict.fromkeys(m.stored.file for m in moves if isinstance(m.stored, StoredTensor))
        opened = {file: stack.enter_context(_opened(file)) for file in files}
        pool = stack.enter_context(_single_threads())
        devices = {m.destination.tensor.device for m in moves}
        staging = next((Staging(device) for device in devices if device.type == "cuda"), None)
        copy = Tensor.copy_ if staging is None else staging.copy

        def move_one(move: _Move) -> None:
            stored = move.stored
            plain = None if isinstance(stored, GGUFTensor) else opened[stored.file].get_tensor(stored.name)
            if move.destination.blocks:
                assert isinstance(stored, GGUFTensor)
                _write_blocks(move, stored)
            elif move.bits and isinstance(stored, GGUFTensor):
                for one, _ in _by_expert(move, stored):
                    _write_packed(one, None, spec, copy)
            elif move.bits:
                _write_packed(move, plain, spec, copy)
            elif isinstance(stored, GGUFTensor):
                for part, value in _unpacked(move, stored):
                    _write(part, value, spec, copy)
            else:
                assert plain is not None
                _write(move, plain, spec, copy)

        for _ in pool.map(move_one, moves):
            pass
        if staging is not None:
            staging.finish()


@contextmanager
def _single_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that make a tensor each: torch's own, which meet after every small operation, make the default model's load 10 times slower on a
    machine whose cores are busy (8 s instead of 0.8 s), and no faster on a quiet one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, MOST_READERS), "load") as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as e:  # it checks the parts of the header that we do not read
        raise ModelFileError(f"{file}: the safetensors header is not valid: {e}; fetch the file again") from None


def _by_expert(move: _Move, stored: GGUFTensor) -> Iterator[tuple[_Move, GGUFTensor]]:
    """The tensor, or of stacked experts each."""
    if len(stored.shape) < 3:
        yield move, stored
        return
    each = len(stored.data) // stored.shape[0]
    for expert in range(stored.shape[0]):
        one = replace(stored, shape=stored.shape[1:], data=stored.data[expert * each : (expert + 1) * each])
        yield replace(move, stored=one, target=replace(move.target, expert=expert)), one


def _unpacked(move: _Move, stored: GGUFTensor) -> Iterator[tuple[_Move, Tensor]]:
    """A GGUF tensor in the parameter's dtype; stacked experts one by one."""
    dtype = move.destination.tensor.dtype
    if dtype == torch.float16:
        dtype = torch.float32  # so that what does not fit is noticed
    for one, part in _by_expert(move, stored):
        yield one, gguf.dequantize(part.data, part.type.name, part.shape, dtype)


def _write(move: _Move, value: Tensor, spec: ModelSpec, copy: Copy) -> None:
    target = move.target
    if target.paired_heads:
        value = _halves(value, spec.num_heads if target.segment == "q" else spec.num_kv_heads)
    if move.destination.tensor.dtype == torch.float16 and value.dtype != torch.float16:
        low, high = value.aminmax()
        if not (low >= -LARGEST_FLOAT16 and high <= LARGEST_FLOAT16):
            reached = max(abs(low.item()), abs(high.item()))
            raise ModelFileError(
                f"{move.stored.file}: {move.name}: values up to {reached:g} do not fit float16 (65504); use --dtype bfloat16 or float32"
            )
    move.destination.write(value.view(move.destination.shape_of(target.segment, target.expert)), target.segment, target.expert, copy)


def _write_blocks(move: _Move, stored: GGUFTensor) -> None:
    """As the file has them."""

    def copied(place: Tensor) -> None:
        place.view(-1).numpy()[:] = stored.data

    move.destination.fill(copied, move.target.segment, move.target.expert)


def _write_packed(move: _Move, plain: Tensor | None, spec: ModelSpec, copy: Copy) -> None:
    """In groups with scales: as a GGUF file has it, laid out anew, or rounded, a few rows at a time. plain: the tensor of another file."""
    target, stored, bits = move.target, move.stored, move.bits
    rows, columns = move.destination.shape_of(target.segment, target.expert)
    order = None
    if target.paired_heads:
        order = _halves(torch.arange(rows), spec.num_heads if target.segment == "q" else spec.num_kv_heads).numpy()

    def read(first: int, end: int) -> Tensor:
        if not isinstance(stored, GGUFTensor):
            assert plain is not None
            return plain.view(rows, columns)[first:end]
        lines = stored.data.reshape(rows, -1)
        some = lines[first:end] if order is None else lines[order[first:end]]
        return gguf.dequantize(some.reshape(-1), move.kind, (end - first, columns))

    try:
        if isinstance(stored, GGUFTensor) and gguf.repacks(move.kind, bits):
            move.destination.fill(lambda place: gguf.repack(place, stored.data, move.kind, bits, order), target.segment, target.expert)
        else:
            move.destination.write(rounded_weight(read, rows, columns, bits), target.segment, target.expert, copy)
    except ValueError as e:
        raise ModelFileError(f"{stored.file}: {move.name}: {e}; use --quantization none") from None


def _halves(value: Tensor, heads: int) -> Tensor:
    """Rows [2i, 2i+1] of each head, rotated as a pair, become rows [i, i + head_dim/2]."""
    return value.view(heads, value.shape[0] // heads // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _fill(destinations: Mapping[str, Destination], spec: ModelSpec, seed: int) -> None:
    """Random weights of a fresh model's size, made on the device: norms pass values through, biases are 0."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, destination in destinations.items():
        tensor = destination.tensor
        if tensor.device.type == "meta" or destination.lines > 1:
            continue
        if name.endswith("norm.weight"):
            tensor.fill_(1.0 - spec.norm_offset)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            generator = generators.get(tensor.device)
            if generator is None:
                generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
            tensor.normal_(0.0, DUMMY_STD, generator=generator)

    def round_one(index: int, name: str, destination: Destination) -> None:
        rows, columns = destination.shape_of()
        generator = torch.Generator().manual_seed(seed * len(destinations) + index)
        embedded = destinations["embed.weight"].tensor if name == "head.weight" and spec.tie_embeddings else None

        def read(first: int, end: int) -> Tensor:
            if embedded is not None:
                return embedded[first:end]
            return torch.empty(end - first, columns).normal_(0.0, DUMMY_STD, generator=generator)

        destination.write(rounded_weight(read, rows, columns, bits_of(destination.tensor)))

    with _single_threads() as pool:
        packed = [(i, name, d) for i, (name, d) in enumerate(destinations.items()) if d.lines > 1]
        for _ in pool.map(lambda one: round_one(*one), packed):
            pass


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
