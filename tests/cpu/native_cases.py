"""Operands of the native library's products, and the comparison with native_reference.py's values. Used by test_native.py and test_native_plain.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

GATES = (None, "silu", "gelu_tanh", "gelu")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rows_of(rng: np.random.Generator, rows: int, columns: int, dtype: str = "float32", pad: int = 0) -> torch.Tensor:
    """Normal rows, some groups zero, one element far out, `pad` elements apart."""
    x = torch.from_numpy(rng.normal(size=(rows, columns + pad)).astype(np.float32) * 2)[:, :columns]
    x[rng.integers(rows), :32] = 0
    x[rng.integers(rows), rng.integers(columns)] = 300
    return x.to(TYPES[dtype]) if pad == 0 else torch.empty(rows, columns + pad, dtype=TYPES[dtype])[:, :columns].copy_(x)


def check(out: torch.Tensor, truth: tuple[Any, Any]) -> None:
    values, allowed = truth
    if out.dtype == torch.bfloat16:
        allowed = allowed + np.abs(values) * 2.0**-8
    off = np.abs(out.double().numpy() - values)
    assert (off <= allowed + 1e-30).all(), f"off by {(off / (allowed + 1e-30)).max():.2f} times what rounding explains"
