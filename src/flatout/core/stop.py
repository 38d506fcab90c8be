"""When a sequence ends, by ids and lengths: end ids, stop ids, max_tokens and the most tokens it may ever reach.

Stop strings are text/'s: the text side ends such a request through Scheduler.abort(..., FinishReason.STOP, string). Called by scheduler.py.
"""

from __future__ import annotations

from flatout.request import FinishReason, Request, RequestError


def ending_ids(request: Request) -> frozenset[int]:
    """Ids worth a closer look by verdict()."""
    stops = frozenset(request.params.stop_token_ids or ())
    return stops if request.params.ignore_eos else stops | request.eos_ids


def verdict(request: Request) -> tuple[FinishReason | None, int | None]:
    """(finish reason or None, stop reason) after a token was appended. The end id stays in output_ids.

    As in vLLM: the model's end ids come first and give no stop reason; stop_token_ids hold under ignore_eos too and are the stop
    reason; neither ends anything among the first min_tokens (the sampler masks them there).
    """
    params = request.params
    token = request.output_ids[-1]
    if len(request.output_ids) > params.min_tokens:
        if token in request.eos_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if params.stop_token_ids and token in params.stop_token_ids:
            return FinishReason.STOP, token
    if request.num_tokens >= request.limit:
        return FinishReason.LENGTH, None
    return None, None


def longest(request: Request, *, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Most tokens, prompt and output, that the request may reach: the least of max_tokens, the context and the whole pool.

    Raises RequestError with the numbers and the flag to change when not even one token more fits.
    """
    prompt, asked = len(request.prompt_ids), request.params.max_tokens
    if prompt == 0:
        raise RequestError("prompt", "is empty; give at least one token")
    pool = num_blocks * block_size
    least = request.num_tokens + (asked != 0)
    need = f"has {request.num_tokens} tokens" + (", with one more to generate" if asked != 0 else "")
    if least > max_model_len:
        raise RequestError("prompt", f"{need}; the context holds {max_model_len}: shorten it or raise --max-model-len")
    if least > pool:
        raise RequestError(
            "prompt",
            f"{need}; the KV pool holds {pool} ({num_blocks} blocks of {block_size}): shorten it or raise --kv-cache-memory-bytes "
            "(--gpu-memory-utilization on a GPU, --num-gpu-blocks-override where that is set)",
        )
    limit = min(max_model_len, pool)
    if asked is not None:
        limit = min(limit, prompt + asked)
    if limit < least:
        raise RequestError(
            "max_tokens", f"{asked} are asked and the request brings {len(request.output_ids)} already: nothing is left to do"
        )
    return limit
