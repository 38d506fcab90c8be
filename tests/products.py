"""Cases of the products of kernels/linear.py, their truth in float64, and checks that both the interpreter's tests and the GPU's make.

Used by tests/kernels/test_linear_interpreted.py and tests/gpu/test_linear_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.op import Op

EPS = 1e-6
OPS = {"linear": linear, "linear_add": linear_add, "norm_linear": norm_linear, "norm_gated": norm_gated}


@dataclass(frozen=True)
class Case:
    form: str  # a key of OPS
    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    biased: bool = False
    wide: bool = False  # float32 results over 16-bit operands
    activation: str = "silu"
    offset: float = 0.0
    scale: float = 1.0
    seed: int = 0

    def operands(self, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
        """Results are of the order of 1; `out` is poisoned, save where it is added to."""
        draw = torch.Generator(device).manual_seed(self.seed * 1000 + self.rows)

        def normal(*shape: int, spread: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw, device=device) * spread).to(self.dtype)

        lines = self.outputs * (2 if self.form == "norm_gated" else 1)
        out = torch.full((self.rows, self.outputs), float("nan"), dtype=torch.float32 if self.wide else self.dtype, device=device)
        # a norm must level rows of very different sizes; plain products stay of the order of 1
        sizes = 2.0 ** (torch.arange(self.rows, device=device) % (5 if "norm" in self.form else 1)).to(self.dtype)[:, None]
        return {
            "out": normal(self.rows, self.outputs) if self.form == "linear_add" else out,
            "x": normal(self.rows, self.columns) * sizes,
            "weight": normal(lines, self.columns, spread=self.columns**-0.5),
            "bias": normal(lines) if self.biased else None,
            "norm": normal(self.columns, spread=0.3) + (0 if self.offset else 1) if "norm" in self.form else None,
        }  # fmt: skip

    def truth(self, given: dict[str, Tensor | None]) -> Tensor:
        """float64 [rows, outputs] of the operands as they were given."""
        d = {name: None if t is None else t.double() for name, t in given.items()}
        x = d["x"]
        if d["norm"] is not None:
            x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * (d["norm"] + self.offset)
        y = x @ d["weight"].T
        if d["bias"] is not None:
            y = y + d["bias"]
        if self.form == "linear_add":
            return d["out"] + self.scale * y
        if self.form == "norm_gated":
            gate, up = y.chunk(2, -1)
            if self.activation == "silu":
                return gate / (1 + torch.exp(-gate)) * up
            if self.activation == "gelu":
                return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
            return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
        return y

    def arguments(self, given: dict[str, Tensor | None], invariant: bool = False) -> tuple:
        """The op's operands."""
        out, x = given["out"], given["x"]
        scratch = torch.full_like(x, float("nan"))
        weights = (given["norm"], EPS, self.offset, given["weight"], given["bias"])
        return {
            "linear": lambda: (out, x, given["weight"], given["bias"], invariant),
            "linear_add": lambda: (out, torch.full_like(out, float("nan")), x, given["weight"], given["bias"], self.scale, invariant),
            "norm_linear": lambda: (out, scratch, x, *weights, invariant),
            "norm_gated": lambda: (out, scratch, torch.cat([out, out], 1), x, *weights, self.activation, invariant),
        }[self.form]()

    def keywords(self) -> dict:
        """What flatout.kernels.gpu.linear.product takes beyond tensors."""
        gated = self.form == "norm_gated"
        return {
            "eps": EPS, "offset": self.offset, "scale": self.scale,
            "add": self.form == "linear_add", "activation": self.activation if gated else None,
        }  # fmt: skip


def chain_holds(product: Callable[..., None], gated: Case, down: Case, rows: int, normed: bool) -> None:
    """Products that read what the one before wrote, in a graph as one at a time: with dependent launches a missing wait shows as other bits.
    product(out, x, weight, bias, ...) as both launchers of kernels/gpu have it; normed: it takes a norm's weight and eps after them."""
    layers = []
    for seed in range(8):
        wide = replace(gated, rows=rows, outputs=1536, columns=1024, seed=seed).operands("cuda")
        narrow = replace(down, rows=rows, outputs=1024, columns=1536, seed=seed).operands("cuda")
        layers.append((wide, narrow))
    stream = torch.zeros(rows, 1024, dtype=gated.dtype, device="cuda")
    inner = torch.zeros(rows, 1536, dtype=gated.dtype, device="cuda")
    start = torch.randn(rows, 1024, device="cuda").to(gated.dtype)

    def forward(synchronous: bool) -> None:
        for _ in range(6):
            for wide, narrow in layers:
                norm = (wide["norm"], EPS) if normed else ()
                product(inner, stream, wide["weight"], None, *norm, activation="silu")
                if synchronous:
                    torch.cuda.synchronize()
                # what is not normed grows with its square
                product(stream, inner, narrow["weight"], None, scale=0.5 if normed else 0.02, add=True)
                if synchronous:
                    torch.cuda.synchronize()

    stream.copy_(start)
    forward(True)
    expected = stream.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(False)
    for _ in range(20):
        stream.copy_(start)
        inner.fill_(float("nan"))
        graph.replay()
        assert torch.equal(stream, expected)


def implementation(op: Op, name: str) -> Callable[..., None]:
    return next(i.run for i in op.implementations if i.name == name)


def close(found: Tensor, expected: Tensor, case: Case, rounded_rows: bool) -> None:
    """To a unit in the last place (Triton's interpreter truncates, and so do sums in tensor cores). rounded_rows: normed rows pass the tensor cores in 16 bits."""
    found = found.double()
    digits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 20}[torch.float32 if case.wide else case.dtype]
    # a row's roundings add up at random: of four million sums some are six deviations off
    slack = 2.0**-digits + (
        1.5 * 2.0 ** -(7 if case.dtype == torch.bfloat16 else 10)
        if rounded_rows and "norm" in case.form
        else 2.0 ** -(17 if case.dtype == torch.float32 else 14)
    )
    scale = 4 if case.form == "norm_gated" else 1  # a product of two results
    torch.testing.assert_close(found, expected, rtol=scale * slack, atol=scale * slack)
