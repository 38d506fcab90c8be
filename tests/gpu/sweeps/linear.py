"""Sweeps the skinny products: kernel, rows of the weight, columns, warps, stages, shares, columns ahead; for config() of gpu/linear.py.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/linear.py [seconds, 90]`. All cores compile first; then come

1. a few cases against float64;
2. for each product and number of rows: the best config swept, its us and GB/s of weights | what config() takes now | cuBLAS's product alone
   and composed with norm, gate or sum. v4w8a512: `vector`, 4 rows of the weight, 8 warps, 512 columns ahead; t64x128w4s4/2a256: `tiles` of
   64 by 128, 4 stages, 2 shares. From the rows on where composed cuBLAS wins everywhere, MOST_ROWS ends;
3. for each number of rows, the cuts that lose least over all shapes, as factors of the best: config() should name one of the first;
4. whole layers chained, where a kernel's first loads overlap with the one before it: choose `ahead` by these, not by single products;
5. the invariant product beside cuBLAS, and which tiles give the same bits: only between those may its sizes depend on the number of rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import product as every

import timing
import torch
import torch.nn.functional as F
from timing import BF16, CUDA, microseconds, said, spent

# isort: split
import triton
import triton.language as tl
from products import OPS, Case, close, implementation

import flatout.kernels.gpu.linear as gpu
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.invariant import products
from flatout.kernels.gpu.linear import PARTIALS, VECTOR_ROWS, Config, config
from flatout.kernels.linear import linear

DEVICE = facts(CUDA)
# name: (form, outputs, columns, biased, float32 results)
SHAPES = {
    "q.qkv": ("norm_linear", 4608, 3584, True, False),  # of Qwen2-7B
    "q.o": ("linear_add", 3584, 3584, False, False),
    "q.up": ("norm_gated", 18944, 3584, False, False),
    "q.down": ("linear_add", 3584, 18944, False, False),
    "q.head": ("norm_linear", 152064, 3584, False, True),
    "l.qkv": ("norm_linear", 3072, 2048, False, False),  # of Llama-3.2-1B
    "l.o": ("linear_add", 2048, 2048, False, False),
    "l.up": ("norm_gated", 8192, 2048, False, False),
    "l.down": ("linear_add", 2048, 8192, False, False),
    "l.head": ("norm_linear", 128256, 2048, False, True),
}
PARTS = ("qkv", "o", "up", "down")
ROWS = (1, 8, 64, 16, 32, 4, 2)  # in the order of what matters, should time be short
TALL = 30_000  # rows of a weight that fill the device without shares
AHEAD = {"tiles": (0, 256, 1024, 4096), "vector": (0, 512, 1024)}


def lines(shape) -> int:
    return shape[1] * (2 if shape[0] == "norm_gated" else 1)


def size_of(shape) -> int:
    return 2 * lines(shape) * shape[2]


def now(shape, m: int) -> Config:
    return config(m, lines(shape), shape[2], "norm" in shape[0], DEVICE)


def candidates(shape, m: int) -> list[Config]:
    """Only (block_n, block_k, warps, stages, rows, shares > 1) make a new kernel."""
    n, k = lines(shape), shape[2]
    held = 1 << (m - 1).bit_length()
    made = []
    if m == 1:
        made += [Config("vector", 1, b, 256 * w, w, ahead=k) for b, w in every((4, 8, 16), (1, 2, 4))]
        made.append(Config("vector", 1, 4, 2048, 8, ahead=k))
    elif m <= 4:
        made += [Config("vector", held, b, 256 * w, w, ahead=k) for b, w in every((4, 8), (2, 4))]
    if m == 1:
        return made
    held = max(8, held)
    cuts = {
        8: [(16, 256, 1, 4), (32, 128, 2, 4), (64, 128, 4, 4), (128, 64, 4, 4)],
        16: [(16, 128, 1, 6), (64, 128, 4, 4), (128, 64, 4, 4)],
        32: [(64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3)],
        64: [(64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 4)],
    }[held]
    for block_n, block_k, warps, stages in cuts:
        blocks, steps = -(-n // block_n), -(-k // block_k)
        shares = {1} if n >= TALL or block_n > 16 else {1, 2}
        if blocks < 2 * DEVICE.sms and n < TALL:
            shares |= {round(each * DEVICE.sms / blocks) for each in (1, 2, 3, 4)}
        most = min(PARTIALS // (blocks * (block_n + 1) * held), steps // 2)
        made += [Config("tiles", held, block_n, block_k, warps, s, stages, 512) for s in sorted(shares) if s == 1 or 1 < s <= most]
    return [c for c in made if c.kernel == "vector" or c.shared_memory() <= DEVICE.shared_memory]


def cut(c: Config) -> str:
    return f"v{c.block_n}w{c.warps}" if c.kernel == "vector" else f"t{c.block_n}x{c.block_k}w{c.warps}s{c.stages}"


def label(c: Config) -> str:
    return cut(c) + (f"/{c.shares}" if c.kernel == "tiles" else "") + (f"a{c.ahead}" if c.ahead else "")


def kernel_key(shape, c: Config) -> tuple:
    """What makes a kernel of its own, at these shapes."""
    form, _, _, biased, wide = shape
    return (form, biased, wide, c.kernel, c.rows, c.block_n, c.block_k, c.warps, c.stages, c.shares > 1)


class Layer:
    """Weights of one product."""

    def __init__(self, shape):
        self.form, self.outputs, self.columns, biased, _ = shape
        self.weight = torch.empty(lines(shape), self.columns, dtype=BF16, device=CUDA).normal_(0, self.columns**-0.5)
        self.bias = torch.zeros(lines(shape), dtype=BF16, device=CUDA) if biased else None
        self.norm = torch.ones(self.columns, dtype=BF16, device=CUDA) if "norm" in self.form else None

    def ours(self, out, x, chosen: Config | None = None) -> None:
        gated = "silu" if self.form == "norm_gated" else None
        add = self.form == "linear_add"
        gpu.product(out, x, self.weight, self.bias, self.norm, 1e-6, add=add, activation=gated, chosen=chosen)

    def blas(self, wide, x) -> None:
        """The product alone."""
        if wide.dtype != x.dtype:
            torch.mm(x, self.weight.t(), out_dtype=wide.dtype, out=wide)
        elif self.bias is not None:
            torch.addmm(self.bias, x, self.weight.t(), out=wide)
        else:
            torch.mm(x, self.weight.t(), out=wide)

    def composed(self, out, wide, x) -> None:
        """With torch's norm, gate and sum about it."""
        if self.form == "linear_add":
            torch.addmm(out, x, self.weight.t(), out=out)
            return
        self.blas(wide, F.rms_norm(x, (self.columns,), self.norm, 1e-6))
        if self.form == "norm_gated":
            gate, up = wide.chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out)


def compiled(jobs) -> list[tuple[tuple, str]]:
    """In a process of its own: run each kernel once at a small shape that specialises alike. Returns what failed."""
    failed = []
    for key, c in jobs:
        form, biased, wide = key[:3]
        try:
            layer = Layer((form, 512, 4096, biased, wide))
            out = torch.zeros(c.rows, 512, dtype=torch.float32 if wide else BF16, device=CUDA)
            layer.ours(out, torch.zeros(c.rows, 4096, dtype=BF16, device=CUDA), replace(c, shares=min(c.shares, 2)))
            torch.cuda.synchronize()
        except Exception as error:  # one that does not compile is reported and left out
            failed.append((key, said(error)))
    return failed


def compile_all() -> dict[tuple, str]:
    jobs: dict[tuple, Config] = {}
    for name, m in every(SHAPES, ROWS):
        shape = SHAPES[name]
        for c in [*candidates(shape, m), now(shape, m)]:
            jobs.setdefault(kernel_key(shape, c), c)
    shares = [list(jobs.items())[i::42] for i in range(42)]
    failed = dict(pair for part in timing.apart(compiled, [s for s in shares if s]) for pair in part)
    print(f"{len(jobs)} kernels compiled, {len(failed)} failed; {spent():.0f} s")
    for key, why in failed.items():
        print("FAILED", key, why)
    return failed


def checks() -> None:
    """tests/gpu/test_linear_gpu.py has the rest."""
    wrong = count = 0
    for name in ("q.qkv", "q.o", "q.up", "q.down", "l.down", "l.head"):
        form, outputs, columns, biased, wide = SHAPES[name]
        for rows in (1, 4, 8, 16, 64):
            case = Case(form, rows, outputs, columns, biased=biased, wide=wide)
            given = case.operands(CUDA)
            expected = case.truth(given)
            again = {part: t if t is None else t.clone() for part, t in given.items()}
            count += 1
            try:
                for operands in (given, again):
                    implementation(OPS[form], "skinny")(*case.arguments(operands))
                close(given["out"], expected, case, rounded_rows=rows > VECTOR_ROWS)
                assert torch.equal(given["out"], again["out"]), "other bits the second time"
            except Exception as error:
                wrong += 1
                print("WRONG", case, said(error, 200))
    print(f"{count - wrong} of {count} checks right; {spent():.0f} s")


def sweep(copies: dict[str, list[Layer]], failed: dict, limit: float) -> dict[tuple[str, int], dict]:
    table: dict[tuple[str, int], dict] = {}
    for m, name in every(ROWS, SHAPES):
        if spent() > limit:
            print(f"time is short: {m} rows of {name} and later ones left out")
            break
        if row := measured(name, m, copies[name], failed):
            table[name, m] = row
    return table


def measured(name: str, m: int, weights: list[Layer], failed: dict) -> dict | None:
    """All configs for one product and number of rows, over distinct weights; None where none of them ran."""
    shape = SHAPES[name]
    out = torch.zeros(m, shape[1], dtype=torch.float32 if shape[4] else BF16, device=CUDA)
    wide = torch.zeros(m, lines(shape), dtype=out.dtype, device=CUDA)
    x = torch.randn(m, shape[2], device=CUDA).to(BF16) * 0.01
    repeat = max(1, round(1.2e9 / (size_of(shape) * len(weights))))
    found: dict[Config, float] = {}

    def attempt(c: Config) -> None:
        if kernel_key(shape, c) in failed or c in found:
            return
        try:
            found[c] = microseconds([partial(layer.ours, out, x, c) for layer in weights], repeat)
        except Exception as error:
            print("FAILED", name, m, label(c), said(error))

    for c in candidates(shape, m):
        attempt(c)
    if found:
        best = min(found, key=found.get)
        for ahead in AHEAD[best.kernel]:
            attempt(replace(best, ahead=ahead))
    attempt(default := now(shape, m))
    if not found:
        return None
    best = min(found, key=found.get)
    return {
        "rows": m,
        "shape": name,
        "best": label(best),
        "us": found[best],
        "now": label(default),
        "now_us": found.get(default),
        "blas_us": microseconds([partial(layer.blas, wide, x) for layer in weights], repeat),
        "composed_us": microseconds([partial(layer.composed, out, wide, x) for layer in weights], repeat),
        "all": {label(c): round(us, 3) for c, us in sorted(found.items(), key=lambda item: item[1])},
        "config": best,
        "cuts": [(cut(c), us) for c, us in found.items()],
    }


def show(table: dict) -> None:
    print("\nrows: best config, us, GB/s | config()'s us | cuBLAS alone, composed us       (two shapes a line: Qwen2-7B, Llama-3.2-1B)")
    for m, part in every(sorted(ROWS), (*PARTS, "head")):
        cells = []
        for model in "ql":
            if row := table.get((f"{model}.{part}", m)):
                rate = size_of(SHAPES[row["shape"]]) / row["us"] / 1e3
                blas = f"{row['blas_us']:6.2f} {row['composed_us']:6.2f}"
                cells.append(f"{row['best']:21} {row['us']:6.2f} {rate:5.0f} |{row['now_us'] or float('nan'):6.2f} |{blas}")
        if cells:
            print(f"{m:2} {part:4} " + " || ".join(cells))


def rules(table: dict) -> None:
    """For each number of rows, the cuts whose best shares and ahead lose least on average over the shapes, small and tall apart."""
    for m, tall in every(sorted(ROWS), (False, True)):
        rows = [r for (name, at), r in table.items() if at == m and (lines(SHAPES[name]) >= TALL) == tall]
        losses: dict[str, list[tuple[float, str]]] = {}
        for row in rows:
            least: dict[str, float] = {}
            for name, us in row["cuts"]:
                least[name] = min(us, least.get(name, us))
            for name, us in least.items():
                losses.setdefault(name, []).append((us / row["us"], row["shape"]))
        ranked = sorted((sum(loss for loss, _ in each) / len(each), name) for name, each in losses.items() if len(each) == len(rows))
        cells = [f"{name} {mean:.3f} (worst {max(losses[name])[0]:.2f} {max(losses[name])[1]})" for mean, name in ranked[:4]]
        if cells:
            print(f"{m} rows, {'tall' if tall else 'small'}: " + ", ".join(cells))
    ratio = {key: r["now_us"] / r["us"] for key, r in table.items() if r["now_us"]}
    if ratio:
        worst = ", ".join(f"{name} {m} rows {ratio[name, m]:.2f}" for name, m in sorted(ratio, key=ratio.get)[-5:])
        print(f"config() takes {sum(ratio.values()) / len(ratio):.3f} of the best on average; most: {worst}")


@triton.jit
def spin(x, PDL: tl.constexpr):
    """One block that waits 5,400 cycles, 3 us or so, launched as ours are: as attention leaves the memory idle."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.inline_asm_elementwise(
        """{
        .reg .u64 a, b; .reg .pred p;
        mov.u64 a, %clock64;
        SPIN: mov.u64 b, %clock64;
        sub.u64 b, b, a;
        setp.lt.u64 p, b, 5400;
        @p bra SPIN;
        mov.u32 $0, 1;
        }""",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(x, tl.load(x) * n.to(tl.float32))


class Chain:
    """Calls of qkv, o, up and down of a model's layers over distinct weights, each reading what the one before wrote."""

    def __init__(self, model: str, m: int, copies: dict[str, list[Layer]]):
        self.shapes = {part: SHAPES[f"{model}.{part}"] for part in PARTS}
        self.weights = {part: copies[f"{model}.{part}"] for part in PARTS}
        self.count = min(len(each) for each in self.weights.values())
        hidden, inner = self.shapes["o"][1], self.shapes["up"][1]
        widths = (self.shapes["qkv"][1], hidden, inner, 2 * inner)
        self.qkv, self.attended, act, self.wide = (torch.zeros(m, n, dtype=BF16, device=CUDA) for n in widths)
        stream = torch.randn(m, hidden, device=CUDA).to(BF16)
        self.operands = {"qkv": (self.qkv, stream), "o": (stream, self.attended), "up": (act, stream), "down": (stream, act)}

    def us(self, chosen: dict[str, Config] | None, pause: bool = False) -> float:
        """Of a layer. chosen None: cuBLAS's; pause: spin() between qkv and o."""
        calls = []
        for i, (part, (out, x)) in every(range(self.count), self.operands.items()):
            layer = self.weights[part][i]
            if chosen is None:
                calls.append(partial(layer.composed, out, self.qkv if part == "qkv" else self.wide, x))
            else:
                calls.append(partial(layer.ours, out, x, chosen[part]))
            if pause and part == "qkv":
                calls.append(partial(spin[(1,)], self.attended, PDL=DEVICE.pdl, launch_pdl=DEVICE.pdl, num_warps=1))
        return microseconds(calls, repeat=max(1, 24 // self.count)) * len(calls) / self.count


def layers(table: dict, copies: dict[str, list[Layer]], limit: float) -> dict:
    results = {}
    for model, m in every("ql", (1, 8)):
        if spent() > limit:
            print("time is short: layers left out from", model, m)
            break
        chain = Chain(model, m, copies)
        plain = {part: now(shape, m) for part, shape in chain.shapes.items()}
        best = {part: table[f"{model}.{part}", m]["config"] if (f"{model}.{part}", m) in table else plain[part] for part in PARTS}
        none = {part: replace(c, ahead=0) for part, c in best.items()}
        full = {part: replace(c, ahead=chain.shapes[part][2]) for part, c in best.items()}
        mixed = {**best, "o": full["o"]}
        tried = {"config()": plain, "best": best, "best, ahead 0": none, "best, ahead all": full, "best, o ahead all": mixed}
        row = {}
        for (name, chosen), pause in every([*tried.items(), ("cuBLAS composed", None)], (False, True)):
            try:
                row[name + " + pause" * pause] = chain.us(chosen, pause)
            except Exception as error:
                print("FAILED layer", model, m, name, said(error))
        row["floor: weights read once"] = sum(size_of(shape) for shape in chain.shapes.values()) / timing.roof()[0] * 1e6
        results[f"{model}, {m} rows"] = row
    print(f"\n{'us a layer':28}" + "".join(f"{column:>12}" for column in results))
    for name in dict.fromkeys(name for row in results.values() for name in row):
        print(f"{name:28}" + "".join(f"{row.get(name, float('nan')):12.2f}" for row in results.values()))
    return results


def invariants(limit: float) -> dict:
    """Speed of the invariant product, and whether other tiles would change its bits."""
    run, results = implementation(linear, "invariant"), {}
    for n, k in ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)):
        weights = [torch.randn(n, k, device=CUDA).to(BF16) for _ in range(max(2, 200_000_000 // (2 * n * k)))]
        cells = []
        for m in (1, 16, 64, 4096):
            if spent() > limit:
                break
            x, out = torch.randn(m, k, device=CUDA).to(BF16), torch.zeros(m, n, dtype=BF16, device=CUDA)
            ours = microseconds([partial(run, out, x, w, None, True) for w in weights], turns=3)
            blas = microseconds([partial(torch.mm, x, w.t(), out=out) for w in weights], turns=3)
            results[f"{n}x{k} {m} rows"] = (ours, blas)
            rate = f" ({2 * m * n * k / ours / 1e6:.0f} TFLOP/s, {blas / ours:.0%})" if m > 64 else ""
            cells.append(f"{m} rows {ours:.1f} / {blas:.1f}{rate}")
        print(f"invariant {n}x{k}, us ours / cuBLAS: " + "; ".join(cells))
    x, w = torch.randn(256, 3584, device=CUDA).to(BF16), torch.randn(512, 3584, device=CUDA).to(BF16)
    bits = {}
    for block_m, block_n, warps in ((128, 64, 4), (16, 64, 4), (64, 64, 4), (128, 128, 8), (256, 128, 8), (64, 256, 8)):
        out = torch.zeros(256, 512, dtype=torch.float32, device=CUDA)
        try:
            products[(256 // block_m * 512 // block_n,)](
                out, x, w, None, 256, 512, 3584, 512, 3584, 3584, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, GROUP=8, EVEN=True,
                PDL=DEVICE.pdl, launch_pdl=DEVICE.pdl, num_warps=warps, num_stages=3,
            )  # fmt: skip
            bits[f"{block_m}x{block_n}"] = out
        except Exception as error:
            print(f"FAILED invariant {block_m}x{block_n}", said(error))
    if "128x64" in bits:
        print("bits as with 128 rows of x by 64 of the weight:", {size: torch.equal(out, bits["128x64"]) for size, out in bits.items()})
    return results


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 90
    print(torch.cuda.get_device_name(), DEVICE)
    failed = compile_all()
    checks()
    copies = {name: [Layer(shape) for _ in range(max(2, -(-300_000_000 // size_of(shape))))] for name, shape in SHAPES.items()}
    table = sweep(copies, failed, limit - 18)
    show(table)
    rules(table)
    chained = layers(table, copies, limit - 6)
    kept = [{name: value for name, value in row.items() if name not in ("config", "cuts")} for row in table.values()]
    timing.save("linear", {"sweep": kept, "layers": chained, "invariant": invariants(limit)})


if __name__ == "__main__":
    main()
