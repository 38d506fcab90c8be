"""Products of few rows in CUDA C++ on sm_90: sizes by shape, and the launch of stream_product.cu, which says how it works.

Registers on kernels/linear.py's ops, and is taken unmeasured where all multiprocessors have work: timed alone it is no faster than linear.py's and
hopper.py's kernels, in a step of 8 rows of 7B by 12 us a layer, as its programs are on their way while the kernel before still runs. Needs NVRTC:
where that is not found, it declines.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flatout.kernels.gpu.cuda import Program, available, text_of
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.whole import cdiv
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear

# by name of the activation: GATE of product_parts.cu
GATES = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
LEAST_ROWS, MOST_ROWS = 2, 16
MOST_GATED = 8  # beyond, x takes as much of the L1 as the weight does: hopper.py's took 5 us a layer less in a step (16 rows of 7B)
MOST_TILES, WARPS, STAGES = 6, 16, 4  # of a program; on a multiprocessor (16 for 8: 1 to 2 us a layer of 7B less); at least
MANY = 20  # programs to a multiprocessor: more are even by themselves
SHARED_MEMORY, TAKEN = 228 * 1024, 1024  # bytes of a multiprocessor of sm_90; what each program takes beside its own
EVEN = 0.8  # of the multiprocessors' time: where less is used, other kernels compete
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: a warp has `tiles` times 8 lines of the weight and one of `warps` shares of their columns."""

    tiles: int
    warps: int
    stages: int
    most: int  # programs on a multiprocessor

    @property
    def shared_memory(self) -> int:
        """Bytes of a program: its stages, or as much as keeps more than `most` programs off a multiprocessor."""
        more = SHARED_MEMORY // (self.most + 1) - TAKEN
        return max(self.tiles * self.warps * self.stages * 1024, (more // 128 + 1) * 128)


def evenness(lines: int, tiles: int, device: Facts) -> float:
    """Which part of the multiprocessors is busy until the last program of a weight of so many lines ends."""
    programs = cdiv(lines, 8 * tiles)
    return 1.0 if programs > MANY * device.sms else round(programs / (cdiv(programs, device.sms) * device.sms), 2)


@cache
def cut(lines: int, columns: int, gated: bool, device: Facts) -> Cut:
    """For a weight [lines, columns].

    What counts is that every multiprocessor has as much to read as any other: as many programs as are spread evenly, of shared memory that lets
    no multiprocessor take more of them, whatever the kernels before and behind leave free (8 rows of 7B: 12 us a layer). Of equals the largest,
    which reads x least often.
    """
    tiles = max(range(2, MOST_TILES + 1, 2 if gated else 1), key=lambda tiles: (evenness(lines, tiles, device), tiles))
    # all at once where the weight is not as tall as a model's head
    most = min(cdiv(cdiv(lines, 8 * tiles), device.sms), SHARED_MEMORY // (tiles * STAGES * 1024 + TAKEN))
    warps = max(1, min(WARPS // most, columns // 256))
    room = SHARED_MEMORY // most - TAKEN
    return Cut(tiles, warps, min(6 if warps == 1 else STAGES, room // (tiles * warps * 1024)), most)


PROGRAM = Program(lambda **_: text_of("product_parts.cu", "stream_product.cu"), "product", "pppppiiiiiifff")


def product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    scale: float = 1.0,
    add: bool = False,
    activation: str | None = None,
    chosen: Cut | None = None,
) -> None:
    """out [T, N] = product of the (normed) rows x [T, K] with weight [N, K], or gated: [2N, K]; add: out += scale * it. T at most MOST_ROWS."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = out.shape[1]
    assert rows <= MOST_ROWS and outputs >= 8 and columns % 64 == 0, "whole tiles and stages"
    c = chosen or cut(weight.shape[0], columns, activation is not None, device)
    kernel = PROGRAM.get(
        x.device,
        TILES=c.tiles,
        WARPS=c.warps,
        STAGES=c.stages,
        ROWS=8 if rows <= 8 else 16,
        NORM=int(norm_weight is not None),
        GATE=GATES[activation],
        ADD=int(add),
        WIDE=int(out.dtype == torch.float32),
        BF16=int(x.dtype == torch.bfloat16),
    )
    if kernel is None:
        return
    width = c.tiles * 8 // (2 if activation else 1)
    numbers = (rows, outputs, columns, x.stride(0), weight.stride(0), out.stride(0), eps, offset, scale)
    kernel.launch(cdiv(outputs, width), 32 * c.warps, c.shared_memory, (x, weight, out, bias, norm_weight, *numbers), pdl=True)


def _suits(
    out: Tensor, x: Tensor, weight: Tensor, invariant: bool, normed: bool = False, wide: bool = False, most: int = MOST_ROWS
) -> bool:
    """Columns of whole stages. Normed float16 rows: x times the norm's weight may pass 65504 before it is scaled."""
    return (
        LEAST_ROWS <= x.shape[0] <= most
        and not invariant
        and x.dtype in (HALVES[:1] if normed else HALVES)
        and x.dtype == weight.dtype
        and (out.dtype == x.dtype or (wide and out.dtype == torch.float32))
        and weight.shape[1] % 64 == 0
        and out.shape[1] % 8 == 0
        and available(x.device)
    )


def _even(weight: Tensor, gated: bool = False) -> bool:
    """The multiprocessors all have work: measured on weights of 7B and 1B models alone, where it gained. Of others it competes."""
    device, lines = facts(weight.device), weight.shape[0]
    return evenness(lines, cut(lines, weight.shape[1], gated, device).tiles, device) >= EVEN


def _linear_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return _suits(out, x, weight, invariant, wide=True)


@linear.implementation("stream", _linear_accepts, sure=lambda *a: _even(a[2]))
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    product(out, x, weight, bias)


def _linear_add_accepts(
    stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool
) -> bool:
    return _suits(stream, x, weight, invariant)


@linear_add.implementation("stream", _linear_add_accepts, sure=lambda *a: _even(a[3]))
def _linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    product(stream, x, weight, bias, scale=scale, add=True)


def _norm_linear_accepts(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, normed=True, wide=True)


@norm_linear.implementation("stream", _norm_linear_accepts, sure=lambda *a: _even(a[6]))
def _norm_linear(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> None:  # fmt: skip
    product(out, x, weight, bias, norm_weight, eps, offset)


def _norm_gated_accepts(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, normed=True, most=MOST_GATED)


@norm_gated.implementation("stream", _norm_gated_accepts, sure=lambda *a: _even(a[7], gated=True))
def _norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> None:  # fmt: skip
    product(out, x, weight, bias, norm_weight, eps, offset, activation=activation)
