"""draw and token_logprobs of kernels/sampling.py in Triton: what they accept, their scratch and their launches.

The kernels are in draw.py and logprobs.py beside this file. Launches depend on shapes alone, so they can be captured; a row is split over
as many programs as fill the device, which changes no bit of its result. Registered with the ops by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flatout.kernels.gpu import draw as drawing
from flatout.kernels.gpu import logprobs as rating
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.sampling import draw, token_logprobs

GROUP, PIVOTS = drawing.GROUP.value, drawing.PIVOTS.value
LONGEST = 1 << 19  # vocabularies under this: masses fit 63 bits
CANDIDATES = 1024  # of a row, that its top_k is found among
TILE, WARPS = 8, 4  # groups that a program takes at a time, of survey and narrow
TILE_OF_ROW, WARPS_OF_ROW = 8, 8  # of the kernels that have a program a row
PROGRAMS = 10  # a multiprocessor, of kernels that split rows: so many survey's 48 registers allow
ALTERNATIVES = (0, 8, 32)  # the most of a row that rate_rows is compiled for, each when it is first asked


def split(rows: int, tiles: int, sms: int) -> tuple[int, int]:
    """(programs a row, tiles of each) where `rows` rows of `tiles` tiles are read: programs run at once, or there is one a row."""
    per = cdiv(tiles, max(1, min(tiles, PROGRAMS * sms // rows)))
    return cdiv(tiles, per), per


def few(vocab: int) -> int:
    """The largest top_k whose row's candidates are collected: by the maxima of groups, of which it is half at most, or all there are."""
    return vocab if vocab <= CANDIDATES else min(vocab // GROUP, CANDIDATES) // 2


def wide(vocab: int) -> int:
    """Columns of a table of groups: a power of two that all tiles' groups fit in."""
    return next_power_of_2(max(cdiv(vocab, GROUP), TILE, TILE_OF_ROW))


def _lasting(device: torch.device) -> None:
    """Scratch is made once and for the calls of one stream; its first values would be lost in a graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first draw or logprobs on a device, or the first of so many rows, must come before a capture")


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels of a draw hand on, each writing what the next reads; see there."""

    tops: Tensor
    ranks: Tensor
    masses: Tensor
    pivots: Tensor
    above: Tensor
    count: Tensor
    found: Tensor
    found_ids: Tensor


@cache
def _scratch(device: torch.device, rows: int, wide: int, tiles: int, candidates: int) -> _Scratch:
    """34 KB a row at a vocabulary of 152k."""
    _lasting(device)

    def new(columns: int, dtype: torch.dtype, value: float = 0) -> Tensor:
        return torch.full((rows, columns), value, dtype=dtype, device=device)

    return _Scratch(
        tops=new(wide, torch.float32, -math.inf),
        ranks=new(wide, torch.int64, drawing.NOTHING.value),
        masses=new(tiles, torch.int64),
        pivots=new(PIVOTS, torch.float32),
        above=new(PIVOTS, torch.int64),
        count=new(1, torch.int32),
        found=new(candidates, torch.float32),
        found_ids=new(candidates, torch.int32),
    )


def _draw_accepts(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32 and logits.shape[1] < LONGEST


@draw.implementation("triton", _draw_accepts)
def draw_triton(ids: Tensor, logits: Tensor, rows: Tensor, params: Tensor, keys: Tensor, hashes: Tensor) -> None:
    """Three launches. hashes stay unread: a token's hash takes nine instructions, its table as many bytes as the logits."""
    device, vocab, count = facts(logits.device), logits.shape[1], rows.shape[0]
    tiles = cdiv(vocab, GROUP * TILE)
    splits, per = split(count, tiles, device.sms)
    s = _scratch(logits.device, max(64, next_power_of_2(count)), wide(vocab), tiles, CANDIDATES)
    row, shape = (ids, logits, rows, params), (vocab, logits.stride(0), tiles, few(vocab))
    reading = {"WIDE": wide(vocab), "TILE": TILE, "num_warps": WARPS, "PDL": device.pdl, "launch_pdl": device.pdl}
    deciding = reading | {"TILE": TILE_OF_ROW, "num_warps": WARPS_OF_ROW, "CANDIDATES": CANDIDATES, "CUDA": logits.is_cuda}
    found = s.pivots, s.above, s.count, s.found, s.found_ids
    launch(
        drawing.survey, (splits, count),
        *row, keys, s.tops, s.ranks, s.masses, s.above, s.count, *shape, per, CUDA=logits.is_cuda, **reading,
    )  # fmt: skip
    launch(drawing.narrow, (splits, count), *row, s.tops, s.ranks, *found, *shape, per, CANDIDATES=CANDIDATES, **reading)
    launch(drawing.choose, (count,), *row, keys, s.ranks, s.masses, *found, *shape, splits, **deciding)


def _logprobs_accepts(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32 and logits.shape[1] < LONGEST and top_ids.shape[1] <= ALTERNATIVES[-1]


@cache
def _tables(device: torch.device, rows: int, wide: int, tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    """tops, sums and reach of the kernels."""
    _lasting(device)
    return (
        torch.full((rows, wide), -math.inf, device=device),
        torch.zeros(rows, wide, device=device),
        torch.empty(rows, tiles, dtype=torch.int32, device=device),
    )


@token_logprobs.implementation("triton", _logprobs_accepts)
def token_logprobs_triton(chosen: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, ids: Tensor) -> None:
    """Two launches, of which the first alone reads the logits, but for the groups that hold the first k."""
    device, (count, vocab), k = facts(logits.device), logits.shape, top_ids.shape[1]
    tiles = cdiv(vocab, GROUP * TILE)
    splits, per = split(count, tiles, device.sms)
    tables, shape = _tables(logits.device, max(64, next_power_of_2(count)), wide(vocab), tiles), (vocab, logits.stride(0), tiles)
    common = {"WIDE": wide(vocab), "PDL": device.pdl, "launch_pdl": device.pdl}
    top = next(most for most in ALTERNATIVES if k <= most)
    launch(rating.rate_groups, (splits, count), logits, ids, *tables, *shape, per, TILE=TILE, num_warps=WARPS, **common)
    launch(
        rating.rate_rows, (count,),
        chosen, ranks, top_ids, top_logprobs, logits, ids, *tables, *shape, splits, k, TOP=top, num_warps=WARPS_OF_ROW, **common,
    )  # fmt: skip
