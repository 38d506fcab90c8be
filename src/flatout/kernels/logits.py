"""Op finish_logits: the head's output in float32, scaled and capped.

Called by layers/head.py. The sampler starts from what this writes.
"""

from __future__ import annotations

from torch import Tensor

from flatout.kernels.op import Cost, nbytes, op


def _cost(out: Tensor, x: Tensor, scale: float, softcap: float) -> Cost:
    return Cost(activations=nbytes(out, x), flops=out.numel() * ((scale != 1.0) + 3 * bool(softcap)))


@op(cost=_cost, last_resort=True)
def finish_logits(out: Tensor, x: Tensor, scale: float, softcap: float) -> None:
    """out float32 [S, V] = scale * x, then softcap * tanh(. / softcap) unless softcap is 0. out may be x."""
    out.copy_(x)
    if scale != 1.0:
        out.mul_(scale)
    if softcap:
        out.div_(softcap).tanh_().mul_(softcap)
