"""Sweeps the expert nets' products: tokens of a tile, lines and columns of the weights, warps, stages; for config() of gpu/moe.py.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/moe.py` (a minute; all cores compile first). It prints

    SHAPE T=n floor F us (what binds) | grouped G | ours O (O/F) | best B: up CUT down CUT
        up CUT us, ... | down CUT us, ...   the op with another first product, the second as config() has it; and the other way; best four
        both CUT/CUT us     both products with others

CUT is tokens of a tile (0: each by itself):lines x columns w warps s stages. Times are us a call of the op `experts`, in a graph over
different routings; grouped: torch's product. WRONG: not what float64 says (8 tokens looked at); FAIL: did not compile or run. Where `best`
is under `ours` by more than 2 %, put its cuts into config().
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import timing
import torch
from timing import BF16, CUDA, microseconds, said, spent

# isort: split
import expert_nets as nets

from flatout.kernels.gpu import moe as gpu
from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.moe import Cut, Plan
from flatout.kernels.moe import experts, route

SHAPES = {
    "mixtral": (8, 4096, 14336, 2),
    "qwen2-moe": (60, 2048, 1408, 4),
    "qwen3-30b": (128, 2048, 768, 8),
}  # experts, hidden, width, top_k
TOKENS = {1: 16, 8: 12, 64: 6, 512: 4, 8192: 2}  # and calls in a graph
VECTORS = Plan(0, Cut(8, 1024, 4), Cut(8, 1024, 4))
SMALL_TILES = Plan(16, Cut(64, 128, 4, 4), Cut(64, 128, 4, 4))
LIMIT = 90  # seconds; what is left then is skipped, and counted


def name(plan: Plan, cut: Cut) -> str:
    return f"{plan.rows}:{cut.lines}x{cut.columns}w{cut.warps}" + (f"s{cut.stages}" if plan.rows else "")


def names(plan: Plan) -> str:
    return f"{name(plan, plan.up)}/{name(plan, plan.down)}"


def base(shape: str, tokens: int) -> Plan:
    number, hidden, _, top_k = SHAPES[shape]
    return gpu.config(tokens, top_k, number, hidden, False, False, facts(CUDA))


def cuts(plan: Plan) -> tuple[list[tuple[int, Cut]], list[tuple[int, Cut]]]:
    """(tokens of a tile, cut) to try for the first product and for the second."""
    if not plan.rows:
        up = [Cut(8, 1024, 4), Cut(8, 512, 2), Cut(16, 1024, 4), Cut(4, 1024, 4), Cut(8, 2048, 8)]
        down = [Cut(4, 2048, 8), Cut(8, 2048, 8), Cut(4, 1024, 4), Cut(8, 1024, 4), Cut(2, 2048, 8)]
        return [(0, c) for c in up], [(0, c) for c in down]
    if plan.rows == 16:
        both = [(16, c) for c in (Cut(64, 128, 4, 4), Cut(64, 128, 4, 3), Cut(128, 64, 4, 4), Cut(128, 128, 4, 3), Cut(64, 256, 4, 3))]
        both += [(8, Cut(64, 128, 4, 4)), (32, Cut(64, 128, 4, 4))]
    elif plan.rows == 64:
        both = [(64, c) for c in (Cut(128, 64, 4, 4), Cut(128, 64, 4, 3), Cut(128, 64, 8, 4), Cut(256, 64, 8, 3), Cut(64, 128, 4, 3))]
        both += [(32, Cut(128, 64, 4, 4))]
    else:
        both = [(128, c) for c in (Cut(256, 64, 8, 4), Cut(256, 64, 8, 3), Cut(128, 64, 4, 3), Cut(128, 64, 8, 3), Cut(128, 128, 8, 3))]
        both += [(64, Cut(256, 64, 8, 4)), (64, Cut(128, 64, 4, 3)), (256, Cut(128, 64, 8, 4))]
    return both, both


def plans(shape: str, tokens: int) -> list[tuple[str, Plan]]:
    """(which product is varied, plan). Both products have tiles of the same tokens: with others both cuts change."""
    now = base(shape, tokens)
    ups, downs = cuts(now)
    made = [("now", now)]
    made += [("up", replace(now, up=c)) for rows, c in ups if rows == now.rows]
    made += [("down", replace(now, down=c)) for rows, c in downs if rows == now.rows]
    made += [("both", Plan(rows, c, c)) for rows, c in ups if rows != now.rows]
    if tokens == 1 or (tokens == 8 and not now.rows):
        made.append(("both", SMALL_TILES))
    elif tokens == 8:
        made.append(("both", VECTORS))
    elif tokens == 512 and now.rows == 128:
        made.append(("both", Plan(64, Cut(128, 64, 4, 4), Cut(128, 64, 4, 4))))
    return made


class Work:
    """Weights of one shape and calls of the op over them."""

    def __init__(self, shape: str):
        self.shape = shape
        number, hidden, width, _ = SHAPES[shape]

        def normal(*size: int, spread: float) -> torch.Tensor:
            return torch.empty(*size, dtype=BF16, device=CUDA).normal_(0, spread)

        self.weights = [
            (normal(number, 2 * width, hidden, spread=hidden**-0.5), normal(number, hidden, width, spread=2 * width**-0.5))
            for _ in range(1 if shape == "mixtral" else 2)
        ]

    def calls(self, tokens: int) -> list[list]:
        number, hidden, width, top_k = SHAPES[self.shape]
        x = torch.randn(tokens, hidden, device=CUDA).to(BF16)
        out = torch.full_like(x, float("nan"))
        act, parts = (torch.full((tokens, top_k * n), float("nan"), dtype=x.dtype, device=CUDA) for n in (width, hidden))
        made = []
        for i in range(TOKENS[tokens]):
            weights, chosen = torch.softmax(torch.randn(tokens, number, device=CUDA), -1).topk(top_k, -1)
            made.append([out, act, parts, x, *self.weights[i % len(self.weights)], weights / weights.sum(-1, True), chosen, "silu", False])
        return made


def timed(run, calls: list[list]) -> float:
    return microseconds([partial(run, *call) for call in calls])


def measure(work: Work, tokens: int, deadline: float) -> dict:
    calls = work.calls(tokens)
    last = calls[-1]
    few = torch.randperm(tokens, device=CUDA)[:8]
    expected = nets.truth([*last[:3], last[3][few], *last[4:6], last[6][few], last[7][few], *last[8:]])
    found: dict[str, list[tuple[float, Plan]]] = {"now": [], "up": [], "down": [], "both": []}
    notes: list[str] = []
    skipped = 0

    def attempt(which: str, plan: Plan) -> None:
        nonlocal skipped
        if which != "now" and spent() > deadline:
            skipped += 1
            return
        try:
            last[0].fill_(float("nan"))
            us = timed(lambda *operands: nets.run(plan, list(operands)), calls)
            nets.close(last[0][few], expected)
            found[which].append((us, plan))
        except Exception as error:
            notes.append(f"{'WRONG' if isinstance(error, AssertionError) else 'FAIL'} {which} {names(plan)} {said(error, 90)}")

    for which, plan in plans(work.shape, tokens):
        attempt(which, plan)
    if found["up"] and found["down"]:
        attempt("both", replace(min(found["up"], key=lambda f: f[0])[1], down=min(found["down"], key=lambda f: f[0])[1].down))
    try:
        grouped = timed(next(i.run for i in experts.implementations if i.name == "grouped"), calls)
    except Exception as error:
        grouped = float("nan")
        notes.append(f"FAIL grouped {said(error, 90)}")
    if skipped:
        notes.append(f"no time for {skipped} plans")
    cost = experts.cost(*last)
    show(work.shape, tokens, cost.bytes, cost.flops, grouped, found)
    for note in notes:
        print("   ", note, flush=True)
    by_name = {f"{which} {names(plan)}": us for which, each in found.items() for us, plan in each}
    return {"shape": work.shape, "tokens": tokens, "grouped": grouped, "us": by_name}


def show(shape: str, tokens: int, size: int, flops: int, grouped: float, found: dict[str, list[tuple[float, Plan]]]) -> None:
    read, matrix = timing.roof()
    by_size, by_flops = size / read * 1e6, flops / matrix * 1e6
    floor, bound = max(by_size, by_flops), "bytes" if by_size > by_flops else "flops"
    now = found["now"][0][0] if found["now"] else float("nan")
    rate = f"{size / now / 1e6:.2f} TB/s" if bound == "bytes" else f"{flops / now / 1e6:.0f} TFLOP/s"
    line = f"{shape} T={tokens} floor {floor:.1f} us ({bound}) | grouped {grouped:.1f} | ours {now:.1f} ({now / floor:.2f}x, {rate})"
    every = [f for each in found.values() for f in each]
    if every:
        us, best = min(every, key=lambda f: f[0])
        line += f" | best {us:.1f}: up {name(best, best.up)} down {name(best, best.down)}"
    print(line)
    ranked = {which: sorted(each, key=lambda f: f[0]) for which, each in found.items()}
    few = [f"{w} " + ", ".join(f"{name(p, getattr(p, w))} {us:.1f}" for us, p in ranked[w][:4]) for w in ("up", "down")]
    print("    " + " | ".join(few))
    if ranked["both"]:
        print("    both " + ", ".join(f"{names(p)} {us:.1f}" for us, p in ranked["both"]))


def parts() -> None:
    """The small kernels of qwen3-30b, us each in a graph of 40."""
    number, hidden, _, top_k = SHAPES["qwen3-30b"]
    cells = []
    for tokens in TOKENS:
        logits = torch.randn(tokens, number, device=CUDA).to(BF16)
        weights = torch.empty(tokens, top_k, device=CUDA)
        chosen = torch.zeros(tokens, top_k, dtype=torch.int64, device=CUDA)
        ours, theirs = (timed(run, [[weights, chosen, logits, True]] * 40) for run in (nets.triton(route), route.reference))
        rows = gpu.config(tokens, top_k, number, hidden, False, False, facts(CUDA)).rows or 16
        grouped = timed(lambda c, r=rows: gpu.group(c, number, r), [[chosen]] * 40)
        cells.append(f"T={tokens} route {ours:.1f} (torch {theirs:.1f}) group {grouped:.1f}")
    print("small kernels, us:", "; ".join(cells))


def compiled(work: list[tuple[str, Plan]]) -> None:
    """In a process of its own: run each plan once, so that the cache on disk has its kernels. What fails does so again, and is printed, later."""
    for shape, plan in work:
        number, hidden, width, top_k = SHAPES[shape]
        sizes = (1, hidden), (1, top_k * width), (1, top_k * hidden), (1, hidden), (number, 2 * width, hidden), (number, hidden, width)
        tensors = [torch.empty(*size, dtype=BF16, device=CUDA) for size in sizes]
        weights, chosen = torch.ones(1, top_k, device=CUDA), torch.zeros(1, top_k, dtype=torch.int64, device=CUDA)
        try:
            nets.run(plan, [*tensors, weights, chosen, "silu", False])
            torch.cuda.synchronize()
        except Exception as error:
            print("compiling", shape, names(plan), said(error, 90))


def kernels() -> list[tuple[str, Plan]]:
    """A plan for each kernel that the sweep meets."""
    seen: dict[tuple, tuple[str, Plan]] = {}
    for shape in SHAPES:
        for tokens in TOKENS:
            for _, plan in plans(shape, tokens):
                for part in ("up", "down"):
                    seen.setdefault((plan.rows, getattr(plan, part), part, None if plan.rows else shape), (shape, plan))
    return list(dict.fromkeys(seen.values()))


def main() -> None:
    work = kernels()
    for _ in timing.apart(compiled, [work[i::8] for i in range(8)], most=8):
        pass
    print(f"{torch.cuda.get_device_name()}; compiled after {spent():.0f} s")
    parts()
    record = []
    for i, shape in enumerate(SHAPES):
        weights = Work(shape)
        deadline = LIMIT - 8 * (len(SHAPES) - 1 - i)  # the shapes that follow want some
        record += [measure(weights, tokens, deadline) for tokens in TOKENS]
        del weights
        torch.cuda.empty_cache()
    timing.save("moe", record)


if __name__ == "__main__":
    main()
