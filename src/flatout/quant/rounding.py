"""Values of any float type into the packed layout of kernels/packed.py: every group of 32 columns is rounded with a scale of its own, and in 4 bits
a minimum.

The one place that rounds weights, a few megabytes at a time; what a file holds rounded is quant/gguf.py's. Called by models/load.py and quant/gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.kernels.packed import BYTES, GROUP, LINES, pack

CHUNK = 1 << 18  # elements rounded at a time: their float32 values (1 MB) stay in the L2 cache
SMALLEST = 2.0**-24  # of float16: a scale that would be less is this, so that nothing is divided by 0
SPANS = (1.0, 0.9)  # shares of a group's range over which its 16 levels lie at first
FITS = 2  # times that scale and minimum are fitted again to the levels that were nearest


def rounded_weight(read: Callable[[int, int], Tensor], rows: int, columns: int, bits: int) -> Tensor:
    """The packed weight, uint8 [rows / 16, columns / 32, bytes], of what read(first, end) gives: [end - first, columns], any float type.

    ValueError: values that no float16 scale holds, or that are no numbers.
    """
    to_bits = {4: four_bits, 8: eight_bits}[bits]
    out = torch.empty(rows // LINES, columns // GROUP, BYTES[bits], dtype=torch.uint8)
    step = max(CHUNK // columns // LINES, 1) * LINES
    for at in range(0, rows, step):
        end = min(at + step, rows)
        values, *factors = to_bits(read(at, end).float().reshape(-1, GROUP))
        if not all(factor.isfinite().all() for factor in factors):
            raise ValueError(f"values that float16 scales for {bits} bits do not hold")
        out[at // LINES : end // LINES] = pack(values.view(end - at, -1, GROUP), *(factor.view(end - at, -1) for factor in factors))
    return out


def eight_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values uint8 [n, 32] and scales float16 [n], as pack() takes them, of groups float32 [n, 32]: the largest magnitude is 127 scales."""
    lanes = groups.t().contiguous()  # reductions over the first dimension are sums of vectors
    largest = torch.maximum(lanes.amax(0), -lanes.amin(0)).abs_()  # of zeros it may be -0
    scales = (largest / 127).half()
    # with few digits left to float16 the nearest one may be too small for the largest value (or 0): the next one then
    scales = torch.where(scales.float() * 127.5 <= largest, (scales.view(torch.int16) + 1).view(torch.float16), scales)
    return _bytes(lanes.div_(scales.float()).round_().add_(128)), scales


def four_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values uint8 [n, 32], scales and minima float16 [n], as pack() takes them, of groups float32 [n, 32].

    Each span's levels are fitted to the values by least squares, and the better fit is improved as k-means would. In rms of normal weights 7.2 % is
    lost, where levels from minimum to maximum lose 7.8 % and twenty spans 7.1 %.
    """
    lanes = groups.t().contiguous()
    low, high = lanes.amin(0), lanes.amax(0)
    lanes -= low  # so that the sums below keep their digits
    width, mean = high - low, lanes.mean(0)
    levels, scratch = torch.empty_like(lanes), torch.empty_like(lanes)

    def fitted(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scale and minimum [n] of the least squared error with the levels nearest to these, and how much less it is than that of the mean alone."""
        total = _nearest(levels, lanes, scale, minimum).sum(0)
        # 31 / 32 at least, or 0 and so is what it divides
        spread = torch.mul(levels, levels, out=scratch).sum(0).sub_(total * total / GROUP).clamp_(min=0.5)
        both = torch.mul(levels, lanes, out=scratch).sum(0).sub_(total * mean)
        scale = both / spread
        return scale, mean - scale * total / GROUP, both * scale

    scale, minimum, gain = fitted(width / 15, torch.zeros_like(width))
    for span in SPANS[1:]:
        other = fitted(width * (span / 15), width * ((1 - span) / 2))
        better = other[2] > gain
        scale, minimum, gain = (torch.where(better, new, old) for new, old in zip(other, (scale, minimum, gain), strict=True))
    for _ in range(FITS):
        scale, minimum, _ = fitted(scale, minimum)
    scales, minima = scale.clamp_(min=SMALLEST).half(), (minimum + low).half()
    return _bytes(_nearest(levels, lanes, scales.float(), minima.float() - low)), scales, minima


def _nearest(out: Tensor, lanes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The nearest of the levels 0..15, float32 [32, n]; returns out."""
    steps = scale.clamp(min=SMALLEST).reciprocal_()
    return torch.addcmul(-minimum * steps, lanes, steps, out=out).round_().clamp_(0, 15)


def _bytes(lanes: Tensor) -> Tensor:
    """uint8 [n, 32] of whole numbers, float32 [32, n]."""
    return lanes.to(torch.uint8).t().contiguous()
