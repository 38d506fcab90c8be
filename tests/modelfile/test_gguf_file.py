"""The GGUF parser against the gguf library's reader; cut, damaged and split files."""

from __future__ import annotations

import pickle
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.modelfile.gguf import TYPES, GGUFFile
from flatout.modelfile.spec import ModelFileError

VALUES = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(path: Path, *, alignment: int | None = None, tensors: dict[str, np.ndarray] | None = None, split_max_tensors: int = 0) -> Path:
    w = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    if alignment:
        w.add_custom_alignment(alignment)
    w.add_uint32("a.u32", 7)
    w.add_int32("a.i32", -7)
    w.add_uint64("a.u64", 2**40)
    w.add_float32("a.f32", 0.25)
    w.add_float64("a.f64", 0.1)
    w.add_bool("a.bool", True)
    w.add_string("a.text", "Grüße 世界")
    w.add_array("a.words", ["", "a", "世界", "x" * 300])
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.floats", [0.5, 1.5])
    w.add_array("a.flags", [True, False])
    for name, value in (tensors or {"t.weight": VALUES, "u.weight": VALUES[0] + 1, "half.weight": VALUES.astype(np.float16)}).items():
        w.add_tensor(name, value)
    w.add_tensor("q.weight", gguf.quants.quantize(VALUES, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        GGUFFile(path)


def test_every_type_is_known_with_its_size():
    for number, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        ours = TYPES[int(number)]
        assert (ours.name, ours.block, ours.nbytes) == (number.name, block, nbytes)
    assert len(TYPES) == len(gguf.GGML_QUANT_SIZES)


@pytest.mark.parametrize("alignment", [None, 64])
def test_agrees_with_the_library(tmp_path, alignment):
    path = write(tmp_path / "a.gguf", alignment=alignment)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, value in fields.items():
        found = ours.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, key
    assert ours.metadata.count("a.words") == 4
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert mine.type.name == t.tensor_type.name
        assert mine.shape == tuple(reversed(t.shape.tolist()))
        assert mine.data.tobytes() == t.data.tobytes()


def test_the_default_model(default_model):
    """Header and metadata of a real file, against the library; in a hundredth of the library's 3-4 seconds."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        ours = GGUFFile(default_model)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1  # 13-25 ms on a quiet machine
    assert ours.metadata["general.architecture"] == "llama"
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == len(ours.metadata["tokenizer.ggml.token_type"]) == 49152
    assert ours.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (ours.metadata.count("tokenizer.ggml.merges"), len(ours.metadata["tokenizer.ggml.merges"])) == (48900, 48900)
    assert len(ours.tensors) == 272 and ours.tensors["token_embd.weight"].shape == (49152, 576)
    assert sum(t.data.nbytes for t in ours.tensors.values()) < default_model.stat().st_size


def test_pickles_as_its_path(tmp_path):
    file = GGUFFile(write(tmp_path / "a.gguf"))
    raw = pickle.dumps(file)
    assert len(raw) < 500
    assert pickle.loads(raw).tensors["t.weight"].data.tobytes() == VALUES.tobytes()


# -- split files ------------------------------------------------------------------------------------------------------------


def split(tmp_path: Path) -> list[Path]:
    write(tmp_path / "m.gguf", split_max_tensors=2)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_d21_either_part_of_a_split_file_names_the_whole(tmp_path):
    parts = split(tmp_path)
    assert [p.name for p in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for part in parts:
        file = GGUFFile(part)
        assert file.files == tuple(parts)
        assert sorted(file.tensors) == ["half.weight", "q.weight", "t.weight", "u.weight"]
        assert file.metadata["a.text"] == "Grüße 世界"
        assert {t.file for t in file.tensors.values()} == set(parts)


def test_d21_a_missing_part_is_named(tmp_path):
    parts = split(tmp_path)
    parts[1].unlink()
    refused(parts[0], r"m-00002-of-00002\.gguf: this part of the split file is missing; incomplete download")


def test_d21_parts_under_wrong_names_are_refused(tmp_path):
    first, second = split(tmp_path)
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    refused(first, "says that it is part")


def test_d21_a_part_under_a_plain_name_is_refused(tmp_path):
    split(tmp_path)[1].rename(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "says that it is part 1 of 2; restore the names")


# -- damage -----------------------------------------------------------------------------------------------------------------


def test_garbage_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    for raw in (b"", b"GG", b"GGUF", b"<html>", b"GGUF" + b"\xff" * 100, bytes(range(256)) * 9):
        path.write_bytes(raw)
        refused(path, r"a\.gguf: ")


@pytest.mark.parametrize(("version", "match"), [(1, "version 1 GGUF is not supported"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path, version, match):
    path = write(tmp_path / "a.gguf")
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack("<I", version)
    path.write_bytes(raw)
    refused(path, match)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    path = write(tmp_path / "a.gguf")
    raw = path.read_bytes()
    last = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)
    for keep in range(0, last, 7):
        path.write_bytes(raw[:keep])
        refused(path, r"a\.gguf: ")
    path.write_bytes(raw[: last - 1])
    refused(path, r"tensor q.weight needs bytes up to \d+ but the file has \d+; incomplete download")


def test_a_doubled_tensor_or_key_is_refused(tmp_path):
    path = write(tmp_path / "a.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"u.weight", b"t.weight", 1))
    refused(path, "tensor t.weight is there twice")
    path.write_bytes(raw.replace(b"a.i32", b"a.u32", 1))
    refused(path, "the key a.u32 is there twice")


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("sample") / "a.gguf").read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_a_damaged_file_is_refused_or_read_in_bounds(sample, tmp_path, data):
    raw = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
        for key in file.metadata:
            file.metadata[key]
    except ModelFileError as e:
        assert str(path) in str(e)
        return
    for t in file.tensors.values():
        assert t.data.nbytes == np.prod(t.shape, dtype=object) // t.type.block * t.type.nbytes
        assert len(t.data.tobytes()) == t.data.nbytes
