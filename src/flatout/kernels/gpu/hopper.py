"""Products of 5 to 192 rows with plain weights on sm_90: tiles by shape, and the launch of hopper_product.cu, which says how it works.

Registers on kernels/linear.py's ops. Tiles were swept on an H200 (tests/gpu/sweeps/products.py). Up to 16 rows streaming.py's kernel comes first;
beyond, normed and long products are taken unmeasured, for others cuBLAS and linear.py's kernels compete. Needs NVRTC: else it declines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatout.kernels.gpu.cuda import Program, available, tensor_map, text_of
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.streaming import GATES
from flatout.kernels.gpu.streaming import MOST_ROWS as STREAMED
from flatout.kernels.gpu.whole import cdiv, round_up
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.norm import rms_norm

LEAST_ROWS, LEAST_GATED = 5, 9  # below, tiles are of nothing for the most part
# columns beyond which it is taken unmeasured: timed alone cuBLAS's split sums look as good, and take 4 us a layer more in a step (64 rows of 7B)
LONG_COLUMNS = 8192
# beyond, cuBLAS: of 256 rows of 7B gate and up took 18 us a layer more in a step, though no more when timed alone
MOST_ROWS = 192
MOST_NORMED = 64  # a norm and whichever product is the fastest took 3 to 6 us a layer less in a step of 128 rows
# part of the multiprocessors on which clusters of 4 find room: the others are left over, as they are grouped unevenly
FULL = 0.91  # H200: 30 of 33


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut. A tile: all rows of x, 64 to a warpgroup, by `weight` rows of the weight, 64 columns at a time."""

    weight: int
    warpgroups: int
    stages: int
    cluster: int = 1  # programs that share the columns

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def shared_memory(self) -> int:
        """Bytes: the stages, two barriers each, and what aligning takes."""
        return self.stages * ((self.rows + self.weight) * 128 + 16) + 1024


def _stages(t: Tiles, device: Facts) -> Tiles:
    """With as many stages as there is shared memory for, up to 8."""
    none = replace(t, stages=0).shared_memory
    one = replace(t, stages=1).shared_memory - none
    return replace(t, stages=min(8, (device.shared_memory - none) // one))


@cache
def tiles(warpgroups: int, outputs: int, gated: bool, device: Facts) -> Tiles:
    """For 64 rows to each warpgroup by a weight of `outputs` rows (gated: twice as many).

    What counts is that every multiprocessor reads its part of the weight all the time. A tall weight gives each the same number of
    tiles; a low one has too few tiles, so four programs, or two, share the columns of each.
    """
    lines = outputs * (2 if gated else 1)
    if lines < 96 * device.sms:
        most = 240 if warpgroups < 3 else 160  # sums in registers
        for cluster in (4, 2):
            width = round_up(cdiv(lines, int(FULL * device.sms / cluster)), 16 if gated else 8)
            if width <= most:
                return _stages(Tiles(width, warpgroups, 1, cluster), device)
    waves = cdiv(lines, 160 * device.sms)
    return _stages(Tiles(round_up(cdiv(lines, waves * device.sms), 16), warpgroups, 1), device)


def _source(TN: int, BF16: int, **_: int) -> str:
    """The kernel behind its wgmma(): an instruction's registers are counted in its text, so the text is made for TN."""
    sums = TN // 2
    dtype, listed = "bf16" if BF16 else "f16", ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return f"""__device__ __forceinline__ void wgmma(float (&d)[{sums}], unsigned long long a, unsigned long long b, int go) {{
  asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, %{sums + 2}, 0;\\nwgmma.mma_async.sync.aligned.m64n{TN}k16.f32.{dtype}.{dtype} {{{listed}}}, %{sums}, %{sums + 1}, p, 1, 1, 0, 0;}}"
               : {operands} : "l"(a), "l"(b), "r"(go));
}}
""" + text_of("product_parts.cu", "hopper_product.cu")


PROGRAM = Program(_source, "product", "mmppiiiif")


def product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float = 1.0,
    add: bool = False,
    activation: str | None = None,
    chosen: Tiles | None = None,
) -> None:
    """out [T, N] = product of the rows x [T, K] with weight [N, K], or gated: [2N, K]; add: out += scale * it. T at most MOST_ROWS."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = out.shape[1]
    t = chosen or tiles(cdiv(rows, 64), outputs, activation is not None, device)
    assert rows <= t.rows, "one tile holds all rows"
    kernel = PROGRAM.get(
        x.device,
        TN=t.weight,
        WGS=t.warpgroups,
        STAGES=t.stages,
        CLUSTER=t.cluster,
        GATE=GATES[activation],
        ADD=int(add),
        BF16=int(x.dtype == torch.bfloat16),
    )
    if kernel is None:
        return
    width = t.weight // 2 if activation else t.weight  # columns of out in a tile
    maps = tensor_map(x, t.rows, 64), tensor_map(weight, width, 64)
    units = cdiv(outputs, width)
    programs = units * t.cluster if t.cluster > 1 else min(units, device.sms)
    args = (*maps, out, bias, rows, outputs, columns, out.stride(0), scale)
    kernel.launch(programs, 128 * (t.warpgroups + 1), t.shared_memory, args, cluster=t.cluster, pdl=True)


def _suits(out: Tensor, x: Tensor, weight: Tensor, invariant: bool, least: int = LEAST_ROWS, most: int = MOST_ROWS) -> bool:
    """Rows and results of whole 16-byte units."""
    return (
        least <= x.shape[0] <= most
        and not invariant
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype == out.dtype
        and weight.shape[1] % 8 == 0
        and out.shape[1] % 8 == 0
        and weight.shape[0] >= 1024
        and available(x.device)
    )


def _linear_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return _suits(out, x, weight, invariant)


@linear.implementation("hopper", _linear_accepts)
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    product(out, x, weight, bias)


def _linear_add_accepts(
    stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool
) -> bool:
    return _suits(stream, x, weight, invariant)


def _add_sure(stream: Tensor, scratch: Tensor, x: Tensor, *_: Any) -> bool:
    return x.shape[0] > STREAMED and x.shape[1] > LONG_COLUMNS


@linear_add.implementation("hopper", _linear_add_accepts, sure=_add_sure)
def _linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    product(stream, x, weight, bias, scale, add=True)


def _norm_linear_accepts(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, most=MOST_NORMED)


def _normed_sure(out: Tensor, scratch: Tensor, x: Tensor, *_: Any) -> bool:
    return x.shape[0] > STREAMED


@norm_linear.implementation("hopper", _norm_linear_accepts, sure=_normed_sure)
def _norm_linear(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> None:  # fmt: skip
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    product(out, scratch, weight, bias)


def _norm_gated_accepts(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, LEAST_GATED)


@norm_gated.implementation("hopper", _norm_gated_accepts, sure=_norm_gated_accepts)
def _norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> None:  # fmt: skip
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    product(out, scratch, weight, bias, activation=activation)
