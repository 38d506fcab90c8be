"""Shared by all tests: one BLAS thread per worker, Triton's interpreter where no GPU is, the packaged default model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub; those with a local one unset this themselves
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels: triton reads it once, and any test collected before them may import triton


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file, pulled into the user's cache once."""
    from flatout.modelfile.sources import pull

    return pull("smollm2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=20.0, help="how long a soak test marked long runs (tests/cpu/test_soak.py)")
    parser.addoption("--soak-seed", type=int, default=0, help="the first seed of its rounds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, and counted, where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
