"""Versions of what flatout stands on, and the pairs of them that are known not to go together: data, and one rule that reads it.

Called by cli/doctor/hardware.py.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from flatout import __version__
from flatout.doctor.facts import Fact, NotAvailable, Section, fact
from flatout.doctor.nvml import Nvml


@dataclass(frozen=True)
class Bad:
    """`left relation right` doesn't work: names of versions, right may be a version itself. Compared to as many parts as `parts`."""

    left: str
    relation: str  # "<" | ">" | "!="
    right: str
    parts: int
    says: str  # {left} and {right}: the versions


KNOWN_BAD = (
    Bad("torch", "<", "2.11", 2, "flatout is written for torch 2.11 and later"),
    Bad(
        "cuda",
        ">",
        "driver_cuda",
        1,
        "this torch's CUDA {left} needs a newer driver than one for {right}: torch will see no GPU; update the driver",
    ),
    Bad("triton", "!=", "torch_triton", 2, "torch was released with Triton {right}: pip install triton=={right}"),
    Bad("numpy", ">", "2", 1, "flatout is written for numpy up to 2"),
)


def versions(torch: Any, library: Any = None) -> Section:
    """torch: the module; library: NVML's, for tests."""
    from flatout.kernels import native

    def native_library() -> tuple[str, str, str]:
        if not native.available():
            return "missing", "missing", "; ".join(native.lacking())
        isa, tiles = native.isa(), native.has_tiles()
        return isa + ("+amx" if tiles else ""), f"{isa}{', AMX' if tiles else ''}", ""

    found = {
        "python": fact("python", "Python", lambda: _same(platform.python_version())),
        "flatout": fact("flatout", "flatout", lambda: _same(__version__)),
        "torch": fact("torch", "torch", lambda: _same(torch.__version__)),
        "cuda": fact("cuda", "CUDA, torch's", lambda: _given(torch.version.cuda, "a torch built for CUDA")),
        "driver_cuda": fact("driver_cuda", "CUDA, at most", lambda: _same(_driver_cuda(library))),
        "triton": fact("triton", "Triton", lambda: _package("triton")),
        "torch_triton": fact("torch_triton", "Triton, torch's", lambda: _same(_torch_triton())),
        "numpy": fact("numpy", "numpy", lambda: _package("numpy")),
        "tokenizers": fact("tokenizers", "tokenizers", lambda: _package("tokenizers")),
        "safetensors": fact("safetensors", "safetensors", lambda: _package("safetensors")),
        "native_library": fact("native_library", "native library", native_library),
        "system": fact("system", "system", lambda: _same(f"{platform.system()} {platform.release()} {platform.machine()}")),
        "libc": fact(
            "libc", "C library", lambda: _given(" ".join(filter(None, platform.libc_ver())), "a C library that tells its version")
        ),
    }
    known = {key: str(f.value) for key, f in found.items() if f.value is not None}
    warned = {bad.left: says for bad in KNOWN_BAD if (says := judged(bad, known))}
    facts = [
        Fact(f.key, f.label, f.value, f.shown, f.needs, "; ".join(filter(None, (f.warning, warned.get(f.key, ""))))) for f in found.values()
    ]
    return Section("versions", "Versions", facts)


def judged(bad: Bad, known: dict[str, str]) -> str:
    """What to say of the pair, "" where it is sound or a side is unknown."""
    left, right = known.get(bad.left), known.get(bad.right, bad.right)
    a, b = _parts(left or "", bad.parts), _parts(right, bad.parts)
    if not a or not b:
        return ""
    holds = {"<": a < b, ">": a > b, "!=": a != b}[bad.relation]
    return bad.says.format(left=left, right=right) if holds else ""


def _parts(text: str, count: int) -> tuple[int, ...]:
    """The first numbers of "2.13.0+cpu"; () where it doesn't begin with as many."""
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    return numbers[:count] if len(numbers) >= count else ()


def _same(value: str) -> tuple[str, str]:
    return value, value


def _given(value: str | None, needs: str) -> tuple[str, str]:
    if not value:
        raise NotAvailable(needs)
    return value, value


def _package(name: str) -> tuple[str, str]:
    try:
        return _same(version(name))
    except PackageNotFoundError:
        raise NotAvailable(f"it installed: pip install {name}") from None


def _torch_triton() -> str:
    """The version that torch's own package asks for."""
    for requirement in requires("torch") or ():
        if found := re.match(r"triton\s*\(?==\s*([\d.]+)", requirement):
            return found[1]
    raise NotAvailable("a torch that comes with Triton")


def _driver_cuda(library: Any) -> str:
    """The newest CUDA that the driver runs."""
    with Nvml(library) as nvml:
        number = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
    return f"{number // 1000}.{number % 1000 // 10}"
