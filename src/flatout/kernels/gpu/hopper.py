"""Products of more than a few rows with plain weights on sm_90: tiles by shape, and the launch of hopper_product.cu, which says how it works.

Registers on kernels/linear.py's ops. Tiles were swept on an H200 (tests/gpu/sweeps/products.py); cuBLAS and linear.py's kernels compete with
it by measured choice. Needs NVRTC: where that is not found, it declines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flatout.kernels.gpu.cuda import Program, available, tensor_map
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.linear import LEAST_ROWS
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.norm import rms_norm
from flatout.kernels.op import shape_class

GATES = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
SHARES = ("nothing", "weight", "rows", "columns")
WIDEST = 256  # rows of the weight that one instruction takes
LEAST_GATED = 9  # below, linear.py's kernel, which norms its rows itself, took 9 us a layer less in a step (8 rows of 7B)
FEW_ROWS = 256  # up to here one tile holds all of x, and the weight is read once
MOST_ROWS = 512  # beyond, cuBLAS did 4 % more within the power that the device may take
# part of the multiprocessors on which clusters of 4 find room: the others are left over, as they are grouped unevenly
FULL = 0.9


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut. A tile: 64 * blocks * warpgroups rows of x by `weight` rows of the weight, 64 columns at a time."""

    weight: int
    warpgroups: int
    blocks: int
    stages: int
    cluster: int = 1  # programs that share ...
    share: str = "nothing"  # ... what: one of SHARES
    group: int = 16  # tiles over x before the next of the weight: those that run together find both in the L2

    @property
    def rows(self) -> int:
        return 64 * self.blocks * self.warpgroups

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
def tiles(rows: int, outputs: int, gated: bool, device: Facts) -> Tiles:
    """For rows by a weight of `outputs` rows (gated: twice as many).

    Few rows: what counts is that every multiprocessor reads its part of the weight all the time. A tall weight gives each the same number of
    tiles; a low one has too few tiles, so four programs, or two, share the columns of each.
    """
    lines = outputs * (2 if gated else 1)
    form = (1 if rows <= 64 else 2, 2 if rows > 128 else 1, 1)
    if rows > FEW_ROWS:
        return _stages(Tiles(_evenly(lines, device.sms), *form, 2, "rows"), device)
    if lines >= 96 * device.sms:
        return _stages(Tiles(_evenly(lines, device.sms), *form), device)
    most = 160 if rows > 128 else 240  # sums in registers
    for cluster in (4, 2):
        width = _up(-(-lines // int(FULL * device.sms / cluster)), 16)
        if width <= most:
            return _stages(Tiles(width, *form, cluster, "columns"), device)
    return _stages(Tiles(_evenly(lines, device.sms), *form), device)


def _evenly(lines: int, sms: int) -> int:
    """Rows of a tile of at most 160 that give every multiprocessor as many tiles as the others."""
    waves = -(-lines // (160 * sms))
    return _up(-(-lines // (waves * sms)), 16)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _source(TN: int, BF16: int, **_: int) -> str:
    """The kernel behind its wgmma(): an instruction's registers are counted in its text, so the text is made for TN."""
    parts = 1 if TN <= WIDEST else 2
    n, dtype = TN // parts, "bf16" if BF16 else "f16"
    regs = n // 2
    listed = ", ".join(f"%{i}" for i in range(regs))
    lines = []
    for part in range(parts):
        sums = ", ".join(f'"+f"(d[{part * regs + i}])' for i in range(regs))
        lines.append(
            f'asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, %{regs + 2}, 0;\\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} '
            f'{{{listed}}}, %{regs}, %{regs + 1}, p, 1, 1, 0, 0;}}" : {sums} : "l"(a), "l"(b + {part * n * 8}ull), "r"(go));'
        )
    head = f"__device__ __forceinline__ void wgmma(float (&d)[{TN // 2}], unsigned long long a, unsigned long long b, int go)"
    return f"{head} {{\n" + "\n".join(lines) + "\n}\n" + Path(__file__).with_name("hopper_product.cu").read_text()


PROGRAM = Program(_source, "product", "mmppiiiiif")


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
    """out [T, N] = product of the rows x [T, K] with weight [N, K], or gated: [2N, K]; add: out += scale * it."""
    device = facts(x.device)
    rows, columns = x.shape
    outputs = out.shape[1]
    t = chosen or tiles(shape_class(rows), outputs, activation is not None, device)
    halves = 2 if activation else 1
    kernel = PROGRAM.get(
        x.device,
        TN=t.weight,
        WGS=t.warpgroups,
        MB=t.blocks,
        STAGES=t.stages,
        CLUSTER=t.cluster,
        SHARE=SHARES.index(t.share),
        FEW=int(rows <= FEW_ROWS),
        GATE=GATES[activation],
        ADD=int(add),
        BF16=int(x.dtype == torch.bfloat16),
    )
    if kernel is None:
        return
    x_map = tensor_map(x, t.rows // (t.cluster if t.share == "rows" else 1), 64)
    w_map = tensor_map(weight, t.weight // halves // (t.cluster if t.share == "weight" else 1), 64)
    block = 128 * (t.warpgroups + 1)
    tall, across = -(-rows // t.rows), -(-outputs // (t.weight // halves))
    if t.share == "columns":
        programs = tall * across * t.cluster
    else:
        units = -(-tall // t.cluster) * across if t.share == "weight" else tall * -(-across // t.cluster)
        programs = min(units, kernel.clusters(block, t.shared_memory, t.cluster) if t.cluster > 1 else device.sms) * t.cluster
    args = (x_map, w_map, out, bias, rows, outputs, columns, out.stride(0), t.group, scale)
    kernel.launch(programs, block, t.shared_memory, args, cluster=t.cluster, pdl=True)


def _suits(out: Tensor, x: Tensor, weight: Tensor, invariant: bool, least: int = LEAST_ROWS, most: int = FEW_ROWS) -> bool:
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


@linear_add.implementation("hopper", _linear_add_accepts)
def _linear_add(stream: Tensor, scratch: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, invariant: bool) -> None:
    product(stream, x, weight, bias, scale, add=True)


def _norm_linear_accepts(
    out: Tensor, scratch: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None,
    invariant: bool,
) -> bool:  # fmt: skip
    return _suits(out, x, weight, invariant)


@norm_linear.implementation("hopper", _norm_linear_accepts)
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
    return _suits(out, x, weight, invariant, LEAST_GATED, MOST_ROWS)  # its gate is worth that much


@norm_gated.implementation("hopper", _norm_gated_accepts)
def _norm_gated(
    out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, norm_weight: Tensor, eps: float, offset: float, weight: Tensor,
    bias: Tensor | None, activation: str, invariant: bool,
) -> None:  # fmt: skip
    rms_norm.dispatch(scratch, x, norm_weight, eps, offset)
    product(out, scratch, weight, bias, activation=activation)
