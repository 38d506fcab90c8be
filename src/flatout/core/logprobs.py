"""LogprobRows (arrays over rows) -> PositionLogprobs, as many alternatives as the request asked for.

Data in, data out; no request state. Called by scheduler.py at commit, for requests that asked.
"""

from __future__ import annotations

from flatout.request import PositionLogprobs, Request, TokenLogprob
from flatout.step import LogprobRows


def position(rows: LogprobRows, row: int, token: int, top: int) -> PositionLogprobs:
    """Row `row`, whose chosen (or given) token is `token`, with the first `top` of the batch's K alternatives."""
    if rows.top_ids.shape[1] < top:
        raise ValueError(f"{top} logprobs were asked and the runner returned {rows.top_ids.shape[1]}")
    ids, values = rows.top_ids[row, :top].tolist(), rows.top_logprobs[row, :top].tolist()
    return PositionLogprobs(
        TokenLogprob(token, float(rows.logprobs[row]), int(rows.ranks[row])),
        [TokenLogprob(*pair, rank) for rank, pair in enumerate(zip(ids, values), 1)],
    )


def extend_prompt(known: list[PositionLogprobs | None], rows: LogprobRows, start: int, request: Request) -> None:
    """Append what a chunk starting at `start` brings. Its row i belongs to prompt token start + 1 + i; a recomputed one adds nothing."""
    first = len(known) - 1 - start
    if first < 0:
        raise ValueError(f"prompt logprobs start at position {start}, but only those before {len(known) - 1} came so far")
    for row in range(first, len(rows.logprobs)):
        known.append(position(rows, row, request.prompt_ids[start + 1 + row], request.params.prompt_logprobs or 0))
