"""How the element by element kernels of this package cut rows: which dtypes they take, and how many columns a program has.

No kernel lives here. Called by norm.py, gate.py, embedding.py, rope.py.
"""

from __future__ import annotations

import torch

from flatout.kernels.gpu.whole import cdiv, next_power_of_2

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def column_blocks(rows: int, width: int, sms: int) -> tuple[int, int, int]:
    """(programs, columns of each, warps): a program takes a run of one row. Short runs while all programs fit on the device at once, so that
    few rows spread over all of it; then twice as long, for more loads in flight and half the launches."""
    block = 1024 if rows * width < 1024 * 16 * sms else 2048
    block = min(block, next_power_of_2(width))
    return rows * cdiv(width, block), block, min(4, max(1, block // 256))
