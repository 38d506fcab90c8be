"""Headers and shards: what is whole is read, what is cut, doubled or missing is refused by name, at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flatout.modelfile.safetensors_header import read_checkpoint, read_header
from flatout.modelfile.spec import ModelFileError

TENSORS = {f"t{i}": np.arange(6 * (i + 1), dtype=np.float32).reshape(i + 1, 6) for i in range(6)}


def shards(folder: Path, stem: str = "model", count: int = 3, index: bool = True) -> list[Path]:
    """The six tensors in `count` numbered files, as Transformers writes them."""
    names, files = list(TENSORS), []
    weight_map = {}
    for n in range(count):
        path = folder / f"{stem}-{n + 1:05}-of-{count:05}.safetensors"
        part = {k: TENSORS[k] for k in names[n::count]}
        save_file(part, path)
        weight_map |= dict.fromkeys(part, path.name)
        files.append(path)
    if index:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return files


def refused(folder: Path, match: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ModelFileError, match=match):
        read_checkpoint(folder)
    assert time.perf_counter() - begin < 2


def test_header_agrees_with_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    found = read_header(path)
    raw = path.read_bytes()
    with safe_open(path, framework="np") as f:
        assert sorted(found) == sorted(f.keys())
        for name, t in found.items():
            values = np.frombuffer(raw[t.offset : t.offset + t.nbytes], np.float32).reshape(t.shape)
            assert np.array_equal(values, f.get_tensor(name))


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -400, -1])
def test_a_cut_file_is_refused_with_its_name(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"a\.safetensors: .*incomplete download"):
        read_header(path)


def header(path: Path, values: object, data: int = 24) -> Path:
    raw = values if isinstance(values, bytes) else json.dumps(values).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (b"{nonsense", "header is not valid"),
        ([1], "not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "bytes follow the last tensor"),
        ({"a": {"dtype": "F32", "shape": [7], "data_offsets": [0, 24]}}, r"shape \[7\] of F32 does not fill its 24 bytes"),
        ({"a": {"dtype": "F99", "shape": [6], "data_offsets": [0, 24]}}, "unknown dtype 'F99'"),
        ({"a": {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}}, "entry for 'a' is not valid"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "entry for 'a' is not valid"),
        ({"a": 3}, "entry for 'a' is not valid"),
        (
            {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
            "b at byte .* overlaps",
        ),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}},
            "b at byte .* leaves a hole",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}',
            "'a' is there twice",
        ),
        (b"[" * 60000, "header is not valid"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, values, match):
    with pytest.raises(ModelFileError, match=match):
        read_header(header(tmp_path / "a.safetensors", values))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"<html>not found</html>" * 9)
    with pytest.raises(ModelFileError, match="not a safetensors file"):
        read_header(tmp_path / "a.safetensors")


def test_a_link_to_nowhere_is_refused(tmp_path):
    """What an interrupted hub download may leave."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(ModelFileError, match=r"model.safetensors: cannot be read: No such file.*incomplete download"):
        read_checkpoint(tmp_path)


# -- shards -----------------------------------------------------------------------------------------------------------------


def test_index_and_shards(tmp_path):
    files = shards(tmp_path)
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == set(TENSORS) and list(found.files) == files and not found.notices


def test_d17_missing_shard_is_named(tmp_path):
    shards(tmp_path)[1].unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors is missing, which model.safetensors.index.json lists; incomplete download")


def test_d17_no_index_but_all_shards_loads(tmp_path):
    shards(tmp_path, index=False)
    assert set(read_checkpoint(tmp_path).tensors) == set(TENSORS)


def test_d17_no_index_and_a_shard_missing_is_named(tmp_path):
    shards(tmp_path, index=False)[2].unlink()
    refused(tmp_path, "model-00003-of-00003.safetensors is missing; incomplete download")


def test_d17_index_names_a_tensor_that_no_file_has(tmp_path):
    shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refused(tmp_path, "says that ghost is in model-00001-of-00003.safetensors, but it isn't; incomplete download")


def test_d17_truncated_shard_is_named(tmp_path):
    files = shards(tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:-10])
    refused(tmp_path, "model-00002-of-00003.safetensors: .* incomplete download")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../../etc/x.safetensors"}}']
)
def test_a_damaged_index_is_refused(tmp_path, text):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json: not a valid index")


def test_d19_stale_index_is_told_from_a_missing_shard(tmp_path):
    for path in shards(tmp_path):
        path.rename(path.with_name(path.name.replace("model-", "weights-")))
    refused(tmp_path, "model-00001-of-00003.safetensors is missing.*while weights-00001.*the index is stale .*or the download incomplete")


def test_d19_unrelated_files_beside_an_index_are_ignored_and_told(tmp_path):
    shards(tmp_path)
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "optimizer.safetensors")
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == set(TENSORS)
    assert "optimizer.safetensors" in found.notices[0]


@pytest.mark.parametrize("index", [True, False])
def test_d19_consolidated_files_never_load_beside_hf_ones(tmp_path, index):
    shards(tmp_path, index=index)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == set(TENSORS) and "consolidated.safetensors" in found.notices[0]
    assert all(t.file.name.startswith("model-") for t in found.tensors.values())


def test_d19_consolidated_alone_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    refused(tmp_path, "Mistral's own layout")


def test_one_whole_file_counts_before_others(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "copy.safetensors")
    assert [f.name for f in read_checkpoint(tmp_path).files] == ["model.safetensors"]


def test_a_tensor_in_two_files_without_index_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    save_file({"t3": TENSORS["t3"]}, tmp_path / "b.safetensors")
    refused(tmp_path, "t3 is in both a.safetensors and b.safetensors")


def test_the_index_says_which_of_two_copies_counts(tmp_path):
    files = shards(tmp_path)
    save_file({**{k: TENSORS[k] for k in list(TENSORS)[1::3]}, "t0": np.zeros((1, 6), np.float32)}, files[1])
    assert read_checkpoint(tmp_path).tensors["t0"].file == files[0]


def test_two_sets_of_shards_without_index_are_refused(tmp_path):
    shards(tmp_path, index=False)
    shards(tmp_path, stem="ema", index=False)
    refused(tmp_path, "two sets of shards")


def test_nothing_there(tmp_path):
    refused(tmp_path, "no .safetensors file is there")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "only PyTorch .bin weights")


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sample") / "a.safetensors"
    save_file(TENSORS, path)
    return path.read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_a_damaged_file_is_refused_or_read_as_the_library_reads_it(sample, tmp_path, data):
    raw = bytearray(sample)
    end = int.from_bytes(sample[:8], "little") + 8
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    try:
        found = read_header(path)
    except ModelFileError as e:
        assert str(path) in str(e)
        return
    try:
        with safe_open(path, framework="np") as f:
            theirs = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118  # not a dict
    except SafetensorError:
        return  # stricter than we are about something that does not change what is read, such as an unknown key
    assert {n: t.shape for n, t in found.items()} == theirs
