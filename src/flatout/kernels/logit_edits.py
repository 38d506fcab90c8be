"""Ops that change some logits before a token is chosen: clean_logits, add_bias, penalise, ban_tokens, ban_words, allow_only; and append_tokens.

They touch only the cells they are told, as flat indices into logits (row * V + token id), so a row that uses no feature is not read.
What the cells are is runner/sampler.py's business, which calls these in vLLM's order (see there).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flatout.kernels.op import Cost, nbytes, op

# A banned token gets LOWEST and a token that is not allowed gets -inf: should nothing else be left, a banned one is still chosen
# before one that is not allowed.
LOWEST = torch.finfo(torch.float32).min
HIGHEST = torch.finfo(torch.float32).max
DISALLOWED = float("-inf")


def _clean_cost(logits: Tensor, edited: Tensor) -> Cost:
    """The CPU reads all; elsewhere the rows of `edited` are read and written."""
    return Cost(
        activations=nbytes(logits, edited)
        if logits.device.type == "cpu"
        else nbytes(edited) + 2 * edited.numel() * logits.shape[1] * logits.element_size()
    )


def _bias_cost(logits: Tensor, cells: Tensor, values: Tensor) -> Cost:
    return Cost(activations=nbytes(values, values, values, cells), flops=cells.numel())


def _penalise_cost(logits: Tensor, history: Tensor, spans: Tensor, penalties: Tensor, longest: int) -> Cost:
    tokens = spans.shape[0] * longest
    return Cost(activations=tokens * (history.element_size() + 2 * logits.element_size()), flops=5 * tokens)


def _ban_tokens_cost(logits: Tensor, cells: Tensor) -> Cost:
    return Cost(activations=nbytes(cells) + cells.numel() * logits.element_size())


def _ban_words_cost(logits: Tensor, cells: Tensor, history: Tensor, tails: Tensor, prefixes: Tensor) -> Cost:
    return Cost(
        activations=nbytes(cells, tails, prefixes) + tails.numel() * history.element_size() + 2 * cells.numel() * logits.element_size()
    )


def _allow_cost(logits: Tensor, rows: Tensor, cells: Tensor) -> Cost:
    return Cost(activations=nbytes(cells) + (rows.numel() * logits.shape[1] + 2 * cells.numel()) * logits.element_size())


def _append_cost(history: Tensor, cells: Tensor, ids: Tensor, rows: Tensor) -> Cost:
    return Cost(activations=nbytes(cells, rows) + cells.numel() * (ids.element_size() + history.element_size()))


@op(cost=_clean_cost, outs=("logits",), updates=("logits",))
def clean_logits(logits: Tensor, edited: Tensor) -> None:
    """In logits float32 [S, V]: NaN and -inf become the lowest finite float, +inf the highest; so one bad value cannot spoil a row.

    Elsewhere than on the CPU only in the rows of `edited` (int64 [N]): the ops that choose and rate (sampling.py) read the others as if they
    were clean. The CPU reads each row's maximum and rewrites only rows that need it and edited ones: a maximum shows NaN and +inf, and
    -inf matters only beside edits.
    """
    if logits.device.type != "cpu":
        _clean_rows(logits, edited)
        return
    bad = ~np.isfinite(logits.numpy().max(axis=1))
    bad[edited.numpy()] = True
    for row in np.flatnonzero(bad).tolist():
        logits[row].nan_to_num_(nan=LOWEST, posinf=HIGHEST, neginf=LOWEST)


def _clean_rows(logits: Tensor, edited: Tensor) -> None:
    if edited.numel():
        logits.index_copy_(0, edited, logits.index_select(0, edited).nan_to_num_(nan=LOWEST, posinf=HIGHEST, neginf=LOWEST))


@op(cost=_bias_cost, outs=("logits",))
def add_bias(logits: Tensor, cells: Tensor, values: Tensor) -> None:
    """logits [S, V] at cells (int64 [N], each once) += values float32 [N]."""
    logits.view(-1).scatter_add_(0, cells, values)


@op(cost=_penalise_cost, outs=("logits",))
def penalise(logits: Tensor, history: Tensor, spans: Tensor, penalties: Tensor, longest: int) -> None:
    """Repetition, frequency and presence penalties of n rows, in vLLM's arithmetic.

    history int32 [H, W]: a row holds distinct prompt ids, then the output ids in order.
    spans int64 [n, 4]: row of logits, row of history, number of prompt ids, of prompt and output ids (`longest`: the largest of these).
    penalties float32 [n, 3]: repetition (over all ids), frequency and presence (over output ids).
    """
    cells = logits.view(-1)
    row, source, prompt, total = (column.unsqueeze(1) for column in spans.unbind(1))
    repetition, frequency, presence = (column.unsqueeze(1) for column in penalties.unbind(1))
    column = torch.arange(longest, device=logits.device).unsqueeze(0)
    # Padding repeats a row's last token and all writes to one cell are equal, so repeated tokens do no harm.
    token = history[source, torch.minimum(column, (total - 1).clamp_(min=0))].long()
    cell = (row * logits.shape[1] + token).view(-1)
    before = cells[cell].view(token.shape)
    # The cells themselves count the output tokens: a table of counts by vocabulary would cost more than everything else here.
    cells.index_fill_(0, cell, 0.0)
    is_output = ((column >= prompt) & (column < total)).float()
    cells.scatter_add_(0, cell, is_output.view(-1))
    count = cells[cell].view(token.shape)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * count
    after -= presence * (count > 0)
    cells[cell] = torch.where(total > 0, after, before).view(-1)


@op(cost=_ban_tokens_cost, outs=("logits",))
def ban_tokens(logits: Tensor, cells: Tensor) -> None:
    """logits [S, V] at cells (int64 [N]) = LOWEST."""
    logits.view(-1).index_fill_(0, cells, LOWEST)


@op(cost=_ban_words_cost, outs=("logits",))
def ban_words(logits: Tensor, cells: Tensor, history: Tensor, tails: Tensor, prefixes: Tensor) -> None:
    """Ban cells[w] (int64 [N]; may repeat) when the tokens of history at tails[w] (flat, int64 [N, M]) are prefixes[w] (-1: any)."""
    found = ((history.view(-1)[tails] == prefixes) | (prefixes < 0)).all(dim=1)
    limit = torch.where(found, LOWEST, float("inf"))
    logits.view(-1).scatter_reduce_(0, cells, limit, "amin")  # several words may end in the same token: the least wins


@op(cost=_allow_cost, outs=("logits",))
def allow_only(logits: Tensor, rows: Tensor, cells: Tensor) -> None:
    """In the rows (int64 [n]) of logits everything but cells (int64 [N]) becomes -inf; those stay finite."""
    kept = logits.view(-1)[cells].clamp_(min=LOWEST)
    logits.index_fill_(0, rows, DISALLOWED)
    logits.view(-1)[cells] = kept


@op(cost=_append_cost, outs=("history",))
def append_tokens(history: Tensor, cells: Tensor, ids: Tensor, rows: Tensor) -> None:
    """history (int32) at cells (flat, int64 [n]) = ids (int64 [S]) at rows (int64 [n])."""
    history.view(-1)[cells] = ids[rows].to(torch.int32)
