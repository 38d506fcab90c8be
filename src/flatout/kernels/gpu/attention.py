"""The op attention on CUDA for rows that lie in the block-wise cache (Paged): which kernel, in which sizes, by the device's capability.

Rows of one query go to attention_decode.py, what they share before that to attention_shared.py, tiles of queries to attention_hopper.py or
attention_prefill.py: two launches at most. Loaded by load() of this package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from flatout.kernels.attention import AttentionWork, LongChunks, Paged, attention
from flatout.kernels.gpu.attention_decode import decode
from flatout.kernels.gpu.attention_prefill import prefill
from flatout.kernels.gpu.attention_shared import shared
from flatout.kernels.gpu.device import Facts, facts
from flatout.kernels.gpu.launch import TRITON, launch
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.prefixes import Shared

ROWS = 128  # rows whose lengths a worker adds up at a time
AT_ONCE = 8  # pieces of a row that are read at a time when it is put together (4: 2 us a layer more at 64 rows of 800 keys of 7B)
# workers of the decode kernel on a multiprocessor: many rows fill the device best with two, while a row that falls to all of them is put
# together sooner from fewer pieces (H200, 28 heads on 4 of 128, us: 64 rows of 640 keys 24.9 with 2 and 28.6 with 3, 256 rows 76.5 and 78.5;
# 256 rows of 800 130 with 1; a row of 8,000 16 with 1, 23 with 3)
PROGRAMS, PROGRAMS_OF_FEW, FEW = 2, 1, 4
SHARING = 1  # workers on a multiprocessor of the kernel for what rows share
LATENT = 16  # rows up to which what counts is that the kernel's programs wait beside those of the kernel before
LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Sizes:
    tile: int  # keys read at a time
    stages: int
    warps: int


def decode_sizes(width: int, group: int, rows: int, device: Facts) -> Sizes:
    """About 32 KiB of keys and values a tile, where there is shared memory for PROGRAMS that hold two each. width: bytes of a head, padded.

    Of few rows a program holds one tile, twice as long: with three there is no room for it until the kernel before has ended. In a step of a 7B
    model on an H200 that costs 10 us a layer at one row (4.04 ms, and 3.77 with one tile of 128 keys); eight take 3.98 with one of 64, 3.92 of 128.
    """
    tile = 16_384 // width
    if device.shared_memory < 2**17:
        tile //= 2
    if rows <= LATENT:
        tile *= 2
    warps = 8 if group > 16 or (rows <= FEW and width > 128) else 4
    return Sizes(max(16, min(128, tile)), 1 if rows <= LATENT else 3, warps)


def prefill_sizes(width: int, queries: int, exact: bool, device: Facts) -> Sizes:
    """For tiles of this many packed queries. exact: float32, which has no tensor cores."""
    tile, warps = min(64, 16_384 // width), 8 if exact or queries > 64 else 4
    if device.shared_memory < 2**17:
        return Sizes(max(16, tile // 2), 2, warps)
    return Sizes(tile, 3, warps)


def hopper_sizes(width: int, queries: int) -> Sizes:
    """Measured on an H200: tiles of 64 keys, two of them on their way, were best at head_dim 64 and 128 alike."""
    if width > 256:
        return Sizes(64, 2, 8) if queries > 64 else Sizes(32, 2, 4)
    return Sizes(64, 2, 8 if queries > 64 else 4)


def shared_sizes(width: int, exact: bool, hopper: bool, device: Facts) -> tuple[int, Sizes]:
    """Packed queries of a tile, and the rest: as many queries as fit, since each tile of them reads all the keys again. hopper: in Hopper's own
    instructions."""
    if hopper:
        return 128, Sizes(32, 2, 8) if width > 256 else hopper_sizes(width, 128)  # 64 keys of 256 dims do not fit into the registers
    queries = 64 if exact or width > 256 or device.shared_memory < 2**17 else 128
    return queries, prefill_sizes(width, queries, exact, device)


@cache
def _hopper(capability: tuple[int, int], name: str) -> Any:
    """A kernel of attention_hopper.py where those run. Gluon is no stable interface yet: with no Triton but the one that they were tried with."""
    if capability != (9, 0) or not triton.__version__.startswith(TRITON):
        return None
    from flatout.kernels.gpu import attention_hopper

    return getattr(attention_hopper, name)


@cache
def _pieces(device: torch.device, pieces: int, state: int) -> tuple[Tensor, Tensor]:
    """Partials and states of the kernel for what rows share. One stream uses them at a time."""
    return torch.empty(pieces * state, dtype=torch.float32, device=device), torch.empty(pieces * 2, dtype=torch.float32, device=device)


@cache
def _scratch(device: torch.device, pieces: int, state: int, workers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Partials, states and arrivals of the decode kernel, which leaves the last as they are made: zeros. One stream uses them at a time."""
    made = [torch.empty(n, dtype=torch.float32, device=device) for n in (pieces * state, pieces * 2)]
    return made[0], made[1], torch.zeros(workers, dtype=torch.int32, device=device)


def _accepts(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> bool:
    return q.is_cuda and isinstance(work.arrangement, Paged | LongChunks)


@attention.implementation("triton", _accepts)
def _paged(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork, scale: float, softcap: float) -> None:
    """What it can do is attention/triton.py's to know (paged_runs): an arrangement made for other operands is an error."""
    plan = work.arrangement.whole if isinstance(work.arrangement, LongChunks) else work.arrangement
    assert isinstance(plan, Paged)
    kv_heads, dim = k_cache.shape[1:]
    device, exact = facts(q.device), q.dtype == torch.float32
    group = q.shape[1] // (kv_heads * dim)
    pad = next_power_of_2(max(dim, 16))
    width = pad * q.element_size()
    lengths = (plan.q_starts, plan.kv_lens, plan.tables, plan.table_rows)
    strides = (out.stride(0), q.stride(0), k_cache.stride(0), k_cache.stride(1), plan.tables.stride(0))
    scales = (softcap * LOG2E, 2 * LOG2E * scale / softcap) if softcap else (scale * LOG2E, 0.0)
    shape: dict[str, Any] = {
        "GROUP": group,
        "DIM": dim,
        "PAD": pad,
        "BLOCK": work.block_size,
        "CAPPED": bool(softcap),
        "PDL": device.pdl,
        "launch_pdl": device.pdl,
    }
    band, precision = {"WINDOW": work.window or 0}, {"PRECISION": "ieee" if exact else None}
    if plan.singles:
        kv_lens, theirs, form = plan.kv_lens, (None,) * 4 + (0, 0), dict.fromkeys(("SHARED_M", "SHARED_N", "GROUPS"), 0)
        if plan.shared is not None:
            theirs, form = _shared(plan, plan.shared, (q, k_cache, v_cache), strides[1:], scales, shape)
            kv_lens = plan.shared.own
        sizes = decode_sizes(width, group, plan.singles, device)
        m = next_power_of_2(max(group, 16))
        workers = max(1, device.sms * (PROGRAMS_OF_FEW if plan.singles <= FEW else PROGRAMS) // kv_heads)
        scratch = _scratch(q.device, kv_heads * workers * 2 * m, pad, kv_heads * workers)
        form |= {
            "M": m,
            "TILE": sizes.tile,
            "ROWS": ROWS,
            "AT_ONCE": AT_ONCE,
            "STAGES": sizes.stages,
            "num_warps": sizes.warps,
        }
        grid = (kv_heads, workers)
        launch(
            decode,
            grid,
            out, q, k_cache, v_cache, plan.rows, plan.q_starts, kv_lens, *lengths[2:], *scratch, *theirs, plan.singles, *strides, *scales,
            **form, **band, **precision, **shape,
        )  # fmt: skip
    if plan.num_tiles:
        kernel = None if exact else _hopper(device.capability, "prefill")
        if kernel is not None:
            sizes, precision = hopper_sizes(width, plan.tile_queries), {}
        else:
            kernel, sizes = prefill, prefill_sizes(width, plan.tile_queries, exact, device)
        form = {"M": plan.tile_queries, "N": sizes.tile, "STAGES": sizes.stages, "num_warps": sizes.warps}
        grid = (kv_heads, plan.num_tiles)
        launch(kernel, grid, out, q, k_cache, v_cache, plan.tiles, *lengths, *strides, *scales, **form, **band, **precision, **shape)


def _shared(
    plan: Paged, found: Shared, operands: tuple[Tensor, ...], strides: tuple[int, ...], scales: tuple[float, ...], shape: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Launch the kernel for what rows share; the operands and sizes by which the decode kernel finds what it leaves."""
    q, k_cache, _ = operands
    device, (_, kv_heads, _), groups = facts(q.device), k_cache.shape, found.groups.shape[0]
    exact = q.dtype == torch.float32
    kernel, precision = None if exact else _hopper(device.capability, "shared"), {}
    queries, sizes = shared_sizes(shape["PAD"] * q.element_size(), exact, kernel is not None, device)
    if kernel is None:
        kernel, precision = shared, {"PRECISION": "ieee" if exact else None}
    workers = max(1, device.sms * SHARING // kv_heads)
    # rows rounded, so that steps of similar sizes use the same memory
    room = cdiv(next_power_of_2(plan.singles) * shape["GROUP"], queries) + groups + workers
    pieces = _pieces(q.device, kv_heads * room * queries, shape["PAD"])
    form = {"M": queries, "N": sizes.tile, "GROUPS": groups, "STAGES": sizes.stages, "num_warps": sizes.warps}
    rows = (found.groups, found.order, plan.tables, plan.table_rows)
    launch(kernel, (kv_heads, workers), *pieces, *operands, *rows, room, *strides, *scales, **form, **precision, **shape)
    return (found.places, found.groups, *pieces, workers, room), {"SHARED_M": queries, "SHARED_N": sizes.tile, "GROUPS": groups}
