"""Triton implementations of the ops of kernels/, a file for each of theirs; each declines what it cannot do, and the op's own file holds reference and cost.

load() registers them; nothing imports triton before. Called by runner/build.py on CUDA, and by tests, which also run the kernels in Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

MODULES = ("attention", "embedding", "gate", "greedy", "inputs", "linear", "moe", "norm", "rope", "sampling")


def load() -> bool:
    """Register every kernel; False where Triton is not installed. Again is free."""
    if find_spec("triton") is None:
        return False
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return True
