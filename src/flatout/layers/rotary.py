"""Rotary embedding: frequencies of every scaling kind, the table of cos and sin made at load, and its rows for a step's positions.

Numbers follow Transformers: float32 frequencies and angles, cos and sin rounded to the model's dtype. The rotation itself is
kernels/rope.py. Called by models/decoder.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.kernels.embedding import gather_rows
from flatout.layers.workspace import Workspace

if TYPE_CHECKING:
    from flatout.modelfile.spec import RopeSpec


class Rotary:
    """One rope: after select(), cos and sin [T, 1, dim] of the step's positions, sin negated in its first half (kernels/rope.py swaps halves)."""

    def __init__(self, rope: RopeSpec, index: int, max_positions: int, workspace: Workspace, *, dtype: torch.dtype, device: torch.device):
        self.table = table(rope, max_positions).to(device, dtype)
        self._rows = workspace.rows(f"rope{index}", 2 * rope.dim)
        self._cos = workspace.view("cos", self._rows, lambda rows: rows[:, : rope.dim].unsqueeze(1))
        self._sin = workspace.view("sin", self._rows, lambda rows: rows[:, rope.dim :].unsqueeze(1))

    def select(self, positions: Tensor) -> None:
        """Gather the rows of int64 positions [T]: once a step."""
        gather_rows(self._rows.now, self.table, positions)

    @property
    def cos(self) -> Tensor:
        return self._cos.now

    @property
    def sin(self) -> Tensor:
        return self._sin.now


def table(rope: RopeSpec, max_positions: int) -> Tensor:
    """float32 [max_positions, 2 * dim] on the CPU."""
    inverse, factor = frequencies(rope)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos, -sin, sin), 1)


def frequencies(rope: RopeSpec) -> tuple[Tensor, float]:
    """(angle per position of each pair of dims: float32 [dim / 2], what cos and sin are multiplied by)."""
    made = _KINDS.get(rope.kind)
    if made is None:
        raise ValueError(f"rope kind {rope.kind!r}; supported: {', '.join(_KINDS)}")
    return made(rope)


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim


def _default(rope: RopeSpec) -> tuple[Tensor, float]:
    return 1.0 / rope.base ** _exponents(rope), 1.0


def _linear(rope: RopeSpec) -> tuple[Tensor, float]:
    return _default(rope)[0] / rope.factor, 1.0


def _dynamic(rope: RopeSpec) -> tuple[Tensor, float]:
    """NTK scaling for the fixed length of the spec."""
    stretch = max(rope.length, rope.original_max_position) / rope.original_max_position
    base = rope.base * (rope.factor * stretch - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2))
    return 1.0 / base ** _exponents(rope), 1.0


def _yarn(rope: RopeSpec) -> tuple[Tensor, float]:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    def dim_of(rotations: float) -> float:
        """Which dim turns this many times over the trained length."""
        return rope.dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    factor = rope.attention_factor
    if factor is None:
        factor = mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)
    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    scale = rope.base ** _exponents(rope)
    own, stretched = 1.0 / scale, 1.0 / (rope.factor * scale)
    kept = 1 - ramp
    return stretched * (1 - kept) + own * kept, factor


def _llama3(rope: RopeSpec) -> tuple[Tensor, float]:
    own, _ = _default(rope)
    wavelength = 2 * math.pi / own
    longest, shortest = rope.original_max_position / rope.low_freq_factor, rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * own / rope.factor + smooth * own
    made = torch.where(wavelength > longest, own / rope.factor, own)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, made), 1.0


def _longrope(rope: RopeSpec) -> tuple[Tensor, float]:
    """Long or short factors, by the fixed length of the spec."""
    factors = rope.long_factor if rope.length > rope.original_max_position else rope.short_factor
    attention = rope.attention_factor
    if attention is None:
        attention = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.base ** _exponents(rope)), attention


_KINDS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope}
