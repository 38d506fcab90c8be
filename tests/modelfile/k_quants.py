"""A plain quantiser of GGUF's K types, which the gguf library only reads: nearest values, no search. For modelfile_samples.py; holds no tests."""

from __future__ import annotations

import numpy as np

from flatout.quant.gguf import PACKED


def _rounded(values: np.ndarray, most: int, least: int = 0) -> np.ndarray:
    return np.clip(np.rint(np.nan_to_num(values)), least, most)


def _in_halves(factors: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, g] as float16 [n] times whole numbers [n, g] up to `most`."""
    unit = (factors.max(1) / most).astype(np.float16)
    return unit, _rounded(factors / unit.astype(np.float32)[:, None], most)


def _with_minima(groups: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K of float32 [n, 8, 32]."""
    low, most = np.minimum(groups.min(2), 0), (1 << bits) - 1
    d, scales = _in_halves((groups.max(2) - low) / most, 63)
    m, minima = _in_halves(-low, 63)
    scale, minimum = (unit.astype(np.float32)[:, None, None] * six[..., None] for unit, six in ((d, scales), (m, minima)))
    q = _rounded((groups + minimum) / scale, most).astype(np.uint8)
    s, t = scales.astype(np.uint8), minima.astype(np.uint8)
    blocks = np.empty(len(groups), PACKED[f"Q{bits}_K"].layout)
    blocks["d"], blocks["m"] = d, m
    tops = [six[:, :4] | (six[:, 4:] >> 4) << 6 for six in (s, t)]
    blocks["s"] = np.concatenate([*tops, (s[:, 4:] & 15) | (t[:, 4:] & 15) << 4], 1)
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    blocks["q"] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    if bits == 5:
        blocks["h"] = sum((q[:, i] >> 4) << i for i in range(8))
    return blocks


def _q6(groups: np.ndarray) -> np.ndarray:
    """Q6_K of float32 [n, 16, 16]."""
    d, scales = _in_halves(np.abs(groups).max(2) / 31, 127)
    q = _rounded(groups / (d.astype(np.float32)[:, None, None] * scales[..., None]), 31, -32) + 32
    quarters = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    blocks = np.empty(len(groups), PACKED["Q6_K"].layout)
    blocks["d"], blocks["s"] = d, scales
    blocks["q"] = ((quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4).reshape(-1, 128)
    blocks["h"] = sum((quarters[:, :, i] >> 4) << 2 * i for i in range(4)).reshape(-1, 64)
    return blocks


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [..., bytes of a row] of float32 [..., columns], a multiple of 256; kind: Q4_K, Q5_K or Q6_K."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a group of zeros has a scale of 0
        blocks = _q6(values.reshape(-1, 16, 16)) if kind == "Q6_K" else _with_minima(values.reshape(-1, 8, 32), int(kind[1]))
    return blocks.view(np.uint8).reshape(*values.shape[:-1], -1)
