"""Cases of kernels/fp8.py's ops, their truth in float64, and checks that the tests of the reference, the interpreter and the GPU share.

Used by tests/cpu/test_fp8.py, tests/kernels/test_fp8_interpreted.py and tests/gpu/test_fp8_gpu.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.kernels.fp8 import LARGEST, SMALLEST

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    biased: bool = False
    one_scale: bool = False  # of the whole weight
    seed: int = 0

    def operands(self, device: torch.device | str = "cpu") -> tuple:
        """linear_fp8's. Results are of the order of 1, a poisoned `out` apart; scales differ from row to row and from output to output."""
        draw = torch.Generator(device).manual_seed(self.seed * 1000 + self.rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device)

        def spread(count: int) -> Tensor:
            return torch.rand(count, generator=draw, device=device) + 0.5

        return (
            torch.full((self.rows, self.outputs), float("nan"), dtype=self.dtype, device=device),
            (normal(self.rows, self.columns) * 64).to(E4M3),
            spread(self.rows) / 64,
            (normal(self.outputs, self.columns) * 32).to(E4M3),
            spread(1 if self.one_scale else self.outputs) * self.columns**-0.5 / 32,
            normal(self.outputs).to(self.dtype) if self.biased else None,
        )


def truth(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """float64 of the operands as they were given."""
    y = x.double() @ weight.double().T * x_scales.double()[:, None] * weight_scales.double()
    return y if bias is None else y + bias.double()


def close(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """To a unit in the last place for each rounding, and what tensor cores lose of 128 columns' sum before it is added in float32."""
    slack = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[found.dtype] * roundings
    torch.testing.assert_close(found.double(), expected, rtol=slack, atol=slack)


def uneven_rows(width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """[16, width]: rows of very different sizes, of zeros, of the least and of the largest numbers of the dtype, of one number among zeros."""
    x = torch.randn(16, width, generator=torch.Generator(device).manual_seed(width), device=device)
    x *= 2.0 ** torch.arange(-8, 8, device=device)[:, None]
    limits = torch.finfo(dtype)
    x[3] = 0
    x[4] = limits.tiny * x[4].sign()
    x[5] = limits.max * x[5].sign()
    x[6] = 0
    x[6, width // 2] = -3.0
    x = x.to(dtype)
    x[7] = limits.smallest_normal * limits.eps  # subnormal
    x[8, -1] = LARGEST * 2
    return x


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """What quantise_rows makes of finite rows, by float64 arithmetic and a search among all numbers of e4m3 for the nearest, of two the even one."""
    wide = x.double().cpu()
    most = wide.abs().amax(-1)
    scales = (most.float() / LARGEST).clamp(min=SMALLEST)
    scales[most == 0] = 1
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).double()  # 0 to 448
    quotients = (wide.float() / scales[:, None]).double()
    above = torch.searchsorted(numbers, quotients.abs().clamp(max=LARGEST)).clamp(1, 126)
    low, high = quotients.abs() - numbers[above - 1], numbers[above] - quotients.abs()
    chosen = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (numbers[chosen] * torch.where(quotients < 0, -1.0, 1.0)).to(E4M3), scales
