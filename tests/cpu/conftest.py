"""Shared by the tests of the native library: each of its instruction sets in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flatout.kernels import native


@pytest.fixture(params=["avx512_vnni", "avx2", "scalar"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The one in use; skips those that this machine lacks. One thread afterwards."""
    before = native.isa()
    if not native.use_isa(request.param):
        pytest.skip(f"this machine has no {request.param}")
    assert native.isa() == request.param
    yield request.param
    native.use_isa(before)
    native.set_threads(1)
