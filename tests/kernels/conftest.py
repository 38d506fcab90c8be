"""Mends Triton's interpreter for these tests; tests/conftest.py has chosen it, before anything could import triton."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

KNOWN = ("3.6", "3.7", "3.8")  # the interpreter of 3.9 refuses masks that the compiler takes
interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None

if interpreted:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """Its scalars are arrays of one element, of which NumPy 2.4 no longer makes ints: loops over a kernel's own numbers fail."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skipped, and counted, under a Triton whose interpreter these kernels were not tried in."""
    if interpreted and ".".join(version("triton").split(".")[:2]) not in KNOWN:
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason=f"Triton {version('triton')}; its interpreter is known in {', '.join(KNOWN)}"))


@pytest.fixture(autouse=True)
def bfloat16_dots(monkeypatch):
    """Triton 3.6's interpreter multiplies bfloat16 by its bits, as integers: widen it first."""
    if not interpreted:
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

    plain = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle(_convert_float(handle.data, bfloat16, float32, None).view(np.float32), float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest))
