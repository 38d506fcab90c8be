"""Products of few rows with plain weights on the GPU, for kernels/linear.py's ops; and the product whose rows never change with their neighbours.

config() chooses kernel and blocks by capability and shape; the kernels are in skinny.py and invariant.py beside this. cuBLAS competes with all
of it by measured choice, save where invariance is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.invariant import products
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.skinny import tiles, vector
from flatout.kernels.gpu.whole import cdiv
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear

MOST_ROWS = 32  # above, cuBLAS was faster on every shape (H200: at 64 rows by 5 to 60 %)
VECTOR_ROWS = 2  # up to here every row is multiplied apart; the tensor cores' rounding of normed rows does not arise
PARTIALS, ARRIVALS = 1 << 22, 1 << 12  # float32 sums of shares, counters of tiles
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut into programs: block_n rows of the weight by `rows` rows of x by columns in steps of block_k."""

    kernel: str  # vector | tiles
    rows: int
    block_n: int
    block_k: int
    warps: int
    shares: int = 1  # programs that share the columns of a tile
    stages: int = 1
    ahead: int = 0  # columns of each row that are fetched into the L2 while the kernel before runs

    def shared_memory(self) -> int:
        """Bytes that a program of `tiles` takes at most: what the stages hold, the rows once more when they are normed, their norm's weights."""
        return 2 * self.block_k * (self.stages * (self.block_n + self.rows + 1) + self.rows)


@cache
def config(m: int, n: int, k: int, normed: bool, facts: Facts) -> Config:
    """For m rows of x [m, k] with a weight [n, k]; normed: the rows are normed on their way in.

    Measured on an H200 over the shapes of a 7B and a 1B model (docs/performance.md): `shares` keeps about as many programs on the device
    as were best there. More columns ahead than these, where the rest is long, only take the bandwidth from the kernel before.
    """
    tall = n >= 96 * facts.sms
    if m <= VECTOR_ROWS and (m == 1 or (not tall and k <= 4096)):
        if tall:
            return Config("vector", m, 8, 1024 if k % 1024 == 0 else 512, 4 if k % 1024 == 0 else 2)
        if normed:
            return Config("vector", m, 8, 1024, 4, ahead=512)
        if m == 1 and k <= 16384:
            return Config("vector", m, 4, 2048, 8, ahead=512)
        return Config("vector", m, 4 if m > 1 else 16, 1024, 4, ahead=512)
    rows = max(8, 1 << (m - 1).bit_length())
    if rows == 8:
        few = not normed and k <= 4096
        c, wanted = (
            (Config("tiles", rows, 32, 128, 2, stages=4, ahead=256), 3.8)
            if few
            else (Config("tiles", rows, 16, 256, 1, stages=4, ahead=512), 3.6)
        )
    elif normed:
        c, wanted = Config("tiles", rows, 128, 64, 4, stages=4), 1.1
    else:
        c, wanted = Config("tiles", rows, 64, 128, 4, stages=4, ahead=256), 0.9
    while c.shared_memory() > facts.shared_memory:
        c = replace(c, stages=c.stages - 1) if c.stages > 2 else replace(c, block_k=c.block_k // 2)
    blocks, steps = cdiv(n, c.block_n), cdiv(k, c.block_k)
    most = min(steps // 2, PARTIALS // (blocks * (c.block_n + 1) * rows))
    return replace(c, shares=max(1, min(most, round(wanted * facts.sms / blocks))) if blocks <= ARRIVALS else 1)


@cache
def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of shares and counters, of one stream at a time: a kernel is through with them before the next begins."""
    return torch.empty(PARTIALS, dtype=torch.float32, device=device), torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


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
    chosen: Config | None = None,
) -> None:
    """out [T, N] = product of the (normed) rows x [T, K] with weight [N, K], or gated: [2N, K]; add: out += scale * it. T at most MOST_ROWS."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = out.shape[1]
    c = chosen or config(rows, weight.shape[0], columns, norm_weight is not None, device)
    blocks = cdiv(weight.shape[0], c.block_n) if activation is None else cdiv(outputs, c.block_n // 2)
    numbers = (rows, outputs, columns, out.stride(0), x.stride(0), weight.stride(0), c.ahead, eps, offset, scale)
    form = {"ADD": add, "ACTIVATION": activation, "PDL": device.pdl, "launch_pdl": device.pdl, "num_warps": c.warps}
    if c.kernel == "vector":
        launch(
            vector,
            (blocks,),
            out, x, weight, bias, norm_weight, *numbers, ROWS=c.rows, BLOCK_N=c.block_n, BLOCK_K=c.block_k, **form
        )  # fmt: skip
        return
    partials, arrivals = scratch(x.device)
    launch(
        tiles,
        (blocks, c.shares),
        out, x, weight, bias, norm_weight, partials, arrivals, *numbers,
        ROWS=c.rows, BLOCK_N=c.block_n, BLOCK_K=c.block_k, EVEN=columns % c.block_k == 0, SPLIT=c.shares > 1,
        num_stages=c.stages, **form,
    )  # fmt: skip


def _suits(out: Tensor, x: Tensor, weight: Tensor, invariant: bool, normed: bool = False) -> bool:
    """Rows of 16-byte units. Normed float16 rows for the tensor cores: x times the norm's weight may pass 65504 before it is scaled."""
    return (
        x.is_cuda
        and not invariant
        and 1 <= x.shape[0] <= (VECTOR_ROWS if normed and x.dtype == torch.float16 else MOST_ROWS)
        and x.dtype in HALVES
        and weight.dtype == x.dtype
        and out.dtype in (x.dtype, torch.float32)
        and weight.shape[0] >= 16
        and weight.shape[1] % 16 == 0
    )


def _linear_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return _suits(out, x, weight, invariant)


@linear.implementation("skinny", _linear_accepts)
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    product(out, x, weight, bias)


def _linear_add_accepts(
    stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool
) -> bool:
    return _suits(stream, x, weight, invariant)


@linear_add.implementation("skinny", _linear_add_accepts)
def _linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    product(stream, x, weight, bias, scale=scale, add=True)


def _norm_linear_accepts(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, normed=True)


@norm_linear.implementation("skinny", _norm_linear_accepts)
def _norm_linear(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> None:  # fmt: skip
    product(out, x, weight, bias, norm_weight, eps, offset)


def _norm_gated_accepts(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant, normed=True)


@norm_gated.implementation("skinny", _norm_gated_accepts)
def _norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> None:  # fmt: skip
    product(out, x, weight, bias, norm_weight, eps, offset, activation=activation)


# ---------------------------------------------------------------- invariant


def _invariant_accepts(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> bool:
    return x.is_cuda and invariant and x.dtype in (*HALVES, torch.float32) and weight.dtype == x.dtype


@linear.implementation("invariant", _invariant_accepts)
def _invariant(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool) -> None:
    """Tiles of x are 128 rows (float32: 64) whatever T is, as that is an instruction's width; of the weight 64 rows at a time, or 128 from 128 rows on."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = weight.shape[0]
    if x.dtype == torch.float32:
        block_m, block_n, block_k, warps, stages = 64, 64, 32, 8, 3
    else:
        tall = rows > 128
        block_m, block_n, block_k, warps, stages = (
            128,
            128 if tall else 64,
            64,
            8 if tall else 4,
            4 if device.shared_memory > 140_000 else 3,
        )
    launch(
        products,
        (cdiv(rows, block_m) * cdiv(outputs, block_n),),
        out, x, weight, bias, rows, outputs, columns, out.stride(0), x.stride(0), weight.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8, EVEN=columns % block_k == 0, PDL=device.pdl,
        launch_pdl=device.pdl, num_warps=warps, num_stages=stages,
    )  # fmt: skip
