"""Models by name from the Hugging Face hub: which files of a repository are the model, fetched into the hub's own cache.

huggingface_hub downloads (resumable, with progress bars) and is imported only here and only when a name asks for it. Without network
what is in the cache serves. Failures become one-line ModelFileErrors. Called by sources.py.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from flatout.config import hub_offline
from flatout.modelfile.gguf import SPLIT
from flatout.modelfile.spec import ModelFileError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TIMEOUT = 10  # seconds that the hub has for its first answer
NETWORK_LIBRARIES = ("httpx", "httpx2", "requests", "urllib3")  # which one depends on huggingface_hub's version


def fetch(repo: str, *, choose: Callable[[list[str]], list[str]], revision: str | None = None, download_dir: str | None = None) -> Path:
    """The local folder (a snapshot in the hub's cache) with the files that `choose` picks from the repository's names.

    Offline, or when the hub cannot be reached: the snapshot in the cache, as it is. ModelFileError says in one line what went wrong.
    """
    hub = _library()
    if hub_offline():
        return _cached(hub, repo, revision, download_dir, "HF_HUB_OFFLINE is set")
    try:
        with _told(repo, revision):
            # not list_repo_files: it tries for half a minute before it says that there is no network
            info = hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT)
    except _Unreachable as e:
        return _cached(hub, repo, revision, download_dir, str(e))
    chosen = choose([s.rfilename for s in info.siblings or []])
    try:
        with _told(repo, revision):
            return Path(
                hub.snapshot_download(
                    repo, revision=revision, cache_dir=download_dir, allow_patterns=[glob.escape(name) for name in chosen]
                )
            )
    except _Unreachable as e:
        raise ModelFileError(f"{repo}: the download broke off ({e}); run again, whole files are kept") from None


def choose_model(files: list[str], repo: str, load_format: str, gguf: str | None) -> list[str]:
    """Names of the files that make the model: safetensors with its config, or the one GGUF file."""
    text = [f for f in files if f in TEXT_FILES]
    if gguf is not None:
        if gguf not in files:
            raise ModelFileError(f"{repo}: has no file {gguf!r}; its GGUF files: {', '.join(_ggufs(files)) or 'none'}")
        return _parts(gguf, files)
    if load_format == "dummy":
        return text
    weights = [f for f in files if f.endswith(".safetensors") and "/" not in f and not f.startswith("consolidated")]
    if load_format != "gguf" and weights:
        indices = [f for f in files if f.endswith(".safetensors.index.json") and "/" not in f]
        return [*text, *indices, *(["model.safetensors"] if not indices and "model.safetensors" in weights else weights)]
    ggufs = _ggufs(files)
    if load_format == "safetensors" or not ggufs:
        raise ModelFileError(f"{repo}: holds no {'safetensors' if load_format == 'safetensors' else 'safetensors or GGUF'} weights")
    if len(ggufs) > 1:
        raise ModelFileError(f"{repo}: holds several GGUF files; name one, as in {repo}:{ggufs[0]} ({', '.join(ggufs)})")
    return _parts(ggufs[0], files)


def choose_text(files: list[str]) -> list[str]:
    """Config, tokenizer and template, no weights."""
    return [f for f in files if f in TEXT_FILES]


def _ggufs(files: list[str]) -> list[str]:
    """GGUF files, a split one by its first part."""
    return [f for f in sorted(files) if f.endswith(".gguf") and not ((m := SPLIT.match(f)) and int(m["number"]) > 1)]


def _parts(gguf: str, files: list[str]) -> list[str]:
    m = SPLIT.match(gguf)
    return [f for f in files if (p := SPLIT.match(f)) and (p["stem"], p["count"]) == (m["stem"], m["count"])] if m else [gguf]


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelFileError(
            "models by name need huggingface_hub: pip install 'flatout[hub]' (a local folder or .gguf file works without)"
        ) from None
    return huggingface_hub


def _cached(hub: ModuleType, repo: str, revision: str | None, download_dir: str | None, why: str) -> Path:
    from huggingface_hub import errors

    try:
        # the pattern keeps newer versions from asking for files that were never wanted; whether the weights are whole is checked later
        found = hub.snapshot_download(
            repo, revision=revision, cache_dir=download_dir, local_files_only=True, allow_patterns=["config.json"]
        )
    except errors.LocalEntryNotFoundError:
        at = f" at revision {revision}" if revision else ""
        raise ModelFileError(f"{repo}: not in the hub cache{at}, and the hub cannot be reached ({why})") from None
    except errors.HFValidationError as e:
        raise ModelFileError(f"{repo}: not a hub name: {e}") from None
    return Path(found)


class _Unreachable(Exception):
    """The network's failure, in a few words."""


@contextmanager
def _told(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line, or into _Unreachable where the network is at fault. Anything else is our bug."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelFileError(f"{repo}: is gated; accept its terms at https://huggingface.co/{repo} and log in (hf auth login)") from None
    except errors.RepositoryNotFoundError:
        raise ModelFileError(f"{repo}: the hub has no such model, or it is private (then log in: hf auth login)") from None
    except errors.RevisionNotFoundError:
        raise ModelFileError(f"{repo}: has no revision {revision!r}; see --revision") from None
    except errors.HFValidationError as e:
        raise ModelFileError(f"{repo}: not a hub name: {e}") from None
    except errors.HfHubHTTPError as e:
        status = getattr(e.response, "status_code", "an error")
        raise _Unreachable(f"it answered {status}") from None
    except Exception as e:
        if not isinstance(e, OSError) and type(e).__module__.split(".")[0] not in NETWORK_LIBRARIES:
            raise
        raise _Unreachable(" ".join(str(e).split())[:200] or type(e).__name__) from None
