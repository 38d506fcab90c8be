"""Linear: a projection whose weights are a scheme's business, with the segments that files may hold apart; what norms its input or takes
its output comes along, so that one op can do both.

Fused projections (q, k, v; gate, up) are one Linear. Called by layers/ and models/.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.kernels.activation import gate_mul
from flatout.kernels.norm import add
from flatout.layers.destination import Destination
from flatout.layers.norm import Norm
from flatout.quant.scheme import Scheme


class Linear:
    def __init__(
        self,
        scheme: Scheme,
        rows: int,
        columns: int,
        *,
        bias: bool = False,
        segments: Mapping[str, int] | None = None,
        tied: Tensor | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """segments: name -> number of rows, in order, for a fused projection. tied: a plain weight that another layer owns and loads."""
        self.scheme = scheme
        self.tensors = scheme.tensors(rows, columns, dtype, device) if tied is None else {"weight": tied}
        self.tied = tied is not None
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self.segments = bounds(segments or {})
        self.columns = columns

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, rows] from x [T, columns]; returns out."""
        self.scheme.apply(out, x, self.tensors, self.bias)
        return out

    def after(self, norm: Norm | None, out: Tensor, scratch: Tensor, x: Tensor) -> Tensor:
        """out [T, rows] from norm(x), x [T, columns]; scratch [T, columns]. Returns out."""
        if norm is None:
            return self(out, x)
        self.scheme.normed(out, scratch, x, norm.operands, self.tensors, self.bias)
        return out

    def gated_after(self, norm: Norm | None, out: Tensor, scratch: Tensor, wide: Tensor, x: Tensor, activation: str) -> Tensor:
        """out [T, rows / 2] = activation(gate) * up of norm(x); scratch [T, columns], wide [T, rows]. Returns out."""
        if norm is None:
            gate_mul(out, self(wide, x), activation)
        else:
            self.scheme.gated(out, scratch, wide, x, norm.operands, self.tensors, self.bias, activation)
        return out

    def onto(self, stream: Tensor, norm: Norm | None, scratch: Tensor, x: Tensor, scale: float) -> None:
        """stream [T, rows] += scale * norm(this projection of x); scratch [T, rows]."""
        if norm is None:
            self.scheme.add(stream, scratch, x, self.tensors, self.bias, scale)
        else:
            add(stream, norm(scratch, self(scratch, x)), scale)

    def destinations(self) -> dict[str, Destination]:
        lines, columns = self.scheme.lines, self.columns
        made = {} if self.tied else {n: Destination(t, self.segments, lines=lines, columns=columns) for n, t in self.tensors.items()}
        if self.bias is not None:
            made["bias"] = Destination(self.bias, self.segments)
        return made


def bounds(segments: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """name -> (first row, end row) from name -> rows."""
    made, first = {}, 0
    for name, rows in segments.items():
        made[name] = (first, first + rows)
        first += rows
    return made


def under(prefix: str, destinations: Mapping[str, Destination]) -> dict[str, Destination]:
    """The same destinations with their names below a prefix."""
    return {f"{prefix}.{name}": destination for name, destination in destinations.items()}
