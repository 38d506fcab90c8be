"""Triton implementations of the ops of kernels/, a file for each of theirs; each declines what it cannot do, and the op's own file holds reference and cost.

load() registers them; nothing imports triton before. Called by runner/build.py on CUDA, and by tests, which also run the kernels in Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

MODULES = (
    "attention",
    "embedding",
    "fp8",
    "gate",
    "greedy",
    "inputs",
    "linear",
    "blaslt",
    "hopper",
    "streaming",
    "moe",
    "norm",
    "prefixes",
    "rope",
    "sampling",
)


def load(cache: Path | None = None) -> bool:
    """Register every kernel; False where Triton is not installed. Again is free. cache: the folder for machine code that Triton does not keep."""
    if find_spec("triton") is None:
        return False
    from flatout.kernels.gpu.cuda import Program

    Program.folder = cache or Program.folder
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return True


def lacking(device: torch.device) -> list[str]:
    """A line for the user where kernels that this device could run are left out."""
    if find_spec("triton") is None:
        return ["kernels: torch's own, as Triton is not installed"]
    import triton

    from flatout.kernels.gpu import blaslt
    from flatout.kernels.gpu.cuda import available
    from flatout.kernels.gpu.device import facts
    from flatout.kernels.gpu.launch import TRITON

    lines = []
    if facts(device).capability == (9, 0) and not available(device):
        lines.append(
            "kernels: products of 2 to 192 rows by Triton and cuBLAS, some 8 % of a decode step slower: no NVRTC was found that compiles (pip install nvidia-cuda-nvrtc)"
        )
    if not triton.__version__.startswith(TRITON):
        lines.append(
            f"kernels: launched by Triton {triton.__version__} itself, a prompt's some 4 ms later, and prompts' attention by its common kernel: "
            f"what goes past it and what is written for this chip was tried with Triton {TRITON}x alone"
        )
    if not blaslt.available():
        lines.append("kernels: products of prompts by cuBLAS's own choice, some 4 % slower: no cuBLASLt of this torch's CUDA was found")
    return lines
