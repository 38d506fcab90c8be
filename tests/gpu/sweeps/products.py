"""Tiles of hopper_product.cu beside cuBLAS's products: how `tiles` of kernels/gpu/hopper.py was chosen, to be run again on another chip.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/products.py [--rows 8,64,128,192]`, under a minute. For each
product of Qwen2-7B and number of rows: the floor, cuBLAS with what must follow it (gate, residual), and every cut of CUTS and its neighbours
that fits; microseconds, operations a second, bytes of weight a second. `tiles` is marked. Results are checked against float32 on the way.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import timing
import torch
from timing import BF16, CUDA, apart, microseconds, roof, said

# isort: split
import torch.nn.functional as F

from flatout.kernels import gpu
from flatout.kernels.activation import gate_mul
from flatout.kernels.gpu import hopper
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.hopper import Tiles, tiles

SHAPES = {"gate_up": (18944, 3584), "down": (3584, 18944), "qkv": (4608, 3584), "o": (3584, 3584)}
ADDED, GATED = ("down", "o"), ("gate_up",)


def cuts(rows: int, outputs: int, gated: bool) -> Iterator[Tiles]:
    """What `tiles` says, then neighbours: widths and clusters."""
    device = facts(CUDA)
    chosen = tiles(-(-rows // 64), outputs, gated, device)
    yield chosen
    seen, unit = {chosen}, 16 if gated else 8
    for width in (chosen.weight, chosen.weight - unit, chosen.weight + unit, chosen.weight // 2 // unit * unit, chosen.weight * 2):
        for cluster in (1, 2, 4, 8):
            cut = hopper._stages(replace(chosen, weight=width, cluster=cluster, stages=1), device)
            sums = cut.rows * (width + 4) * 4 if cluster > 1 else 0
            fits = unit <= width <= (160 if cut.warpgroups == 3 else 240) and cut.stages > 1
            if fits and sums <= cut.stages * (cut.rows + width) * 128 and cut not in seen:
                seen.add(cut)
                yield cut


def compile_one(job: tuple[str, int, Tiles]) -> None:
    """In a process of its own: what it leaves on disk, the sweep finds."""
    name, rows, cut = job
    n, k = SHAPES[name]
    lines = n * (2 if name in GATED else 1)
    made = [torch.zeros(size, device=CUDA, dtype=BF16) for size in ((rows, n), (rows, k), (lines, k))]
    hopper.product(*made, None, add=name in ADDED, activation="silu" if name in GATED else None, chosen=cut)


def sweep(name: str, rows: int, record: dict) -> None:
    n, k = SHAPES[name]
    add, gated = name in ADDED, name in GATED
    lines = n * (2 if gated else 1)
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [(torch.randn(lines, k, device=CUDA, generator=draw) / k**0.5).to(BF16) for _ in range(-(-150_000_000 // (lines * k * 2)))]
    x, base = (torch.randn(rows, m, device=CUDA, generator=draw).to(BF16) for m in (k, n))
    out, wide = (torch.empty(rows, m, device=CUDA, dtype=BF16) for m in (n, lines))
    operations, read = 2 * rows * lines * k, lines * k * 2

    def blas(weight: torch.Tensor) -> None:
        if gated:
            torch.mm(x, weight.t(), out=wide)
            gate_mul.dispatch(out, wide, "silu")
        elif add:
            torch.addmm(out, x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def took(call, turns: int = 8) -> float:
        return microseconds([lambda w=w: call(w) for w in weights], repeat=max(1, turns // len(weights)))

    bandwidth, rate = roof()
    floor = max(read / bandwidth, operations / rate) * 1e6
    record[f"{name} {rows}"] = found = {"floor": floor, "cuBLAS": took(blas)}
    print(f"{name}, {rows} rows: floor {floor:.1f} us, cuBLAS and what follows {found['cuBLAS']:.1f}", flush=True)
    truth = x.float() @ weights[0].float().t()
    truth = F.silu(truth[:, :n]) * truth[:, n:] if gated else truth + base.float() if add else truth
    for i, cut in enumerate(cuts(rows, n, gated)):

        def run(weight: torch.Tensor, cut: Tiles = cut) -> None:
            hopper.product(out, x, weight, None, add=add, activation="silu" if gated else None, chosen=cut)

        try:
            out.copy_(base)
            run(weights[0])
            worst = ((out.float() - truth).abs() / (truth.abs() + 0.3)).max().item()
            us = found[str(cut)] = took(run)
            wrong = "" if worst < 0.02 else f"  WRONG by {worst:.3f}"
            print(
                f"  {'*' if i == 0 else ' '} {us:8.1f} us {operations / us / 1e6:5.0f} TFLOP/s {read / us / 1e6:5.2f} TB/s  {cut.rows} x {cut.weight}, "
                f"{cut.stages} stages, {cut.cluster} share the columns{wrong}",
                flush=True,
            )
        except Exception as error:
            print(f"    FAILED {cut}: {said(error)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", default="8,64,128,192", type=lambda text: [int(n) for n in text.split(",")])
    asked = parser.parse_args()
    gpu.load()
    torch.backends.cuda.matmul.allow_tf32 = False
    jobs = [(name, rows, cut) for name, (n, _) in SHAPES.items() for rows in asked.rows for cut in cuts(rows, n, name in GATED)]
    for _ in apart(compile_one, jobs):
        pass
    record: dict[str, dict[str, float]] = {}
    for name in SHAPES:
        for rows in asked.rows:
            sweep(name, rows, record)
    timing.save("products", record)


if __name__ == "__main__":
    main()
