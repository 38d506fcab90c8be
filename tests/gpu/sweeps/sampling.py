"""Sweeps draw and token_logprobs: groups a program takes at a time, warps, programs a multiprocessor; for the constants of gpu/sampling.py.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/sampling.py [seconds, 60]` (half of it compiling; the sweep
starts no line after them). Checks against float64 come first. Then, for each vocabulary, torch/ours in us a call inside a graph, over logits
that are not in the cache (those of 1 and 8 rows would be, in a step: a little less then); zipf: rows like a model's (the likeliest has 0.4,
top_p 0.9 keeps about 60 tokens); flat: N(0, 1), where top_p 0.9 keeps half the vocabulary, the worst; floor: one read of the logits.
The sweep: each line is a choice of TILE, WARPS (survey, narrow, rate_groups), PROGRAMS, TILE_OF_ROW, WARPS_OF_ROW (choose, rate_rows);
take the one with the least sum that does not lose at one row.
"""

from __future__ import annotations

import sys
from functools import partial

import timing
import torch
from timing import CUDA, microseconds, patched, said, spent

# isort: split
import numpy as np
import sampling_kernels as kernels

from flatout.kernels import sampling
from flatout.kernels.gpu import sampling as gpu

VOCABULARIES = (152_064, 128_256)
ROWS = (1, 8, 64, 256)
CASES = {  # (temperature, top_p, min_p, top_k; 0: off), logits
    "temperature": ((0.8, 1.0, 0.0, 0), "zipf"),
    "top_p .9 zipf": ((1.0, 0.9, 0.0, 0), "zipf"),
    "top_p .9 flat": ((1.0, 0.9, 0.0, 0), "flat"),
    "top_p .3 flat": ((1.0, 0.3, 0.0, 0), "flat"),
    "top_k 50": ((1.0, 1.0, 0.0, 50), "zipf"),
    "k20 p.8 m.05": ((1.0, 0.8, 0.05, 20), "zipf"),
    "k1000 flat": ((1.0, 1.0, 0.0, 1000), "flat"),
}
ALTERNATIVES = (0, 5, 20)
NAMES = ("TILE", "WARPS", "PROGRAMS", "TILE_OF_ROW", "WARPS_OF_ROW")
CHOICES = ((8, 4, 5, 8, 8), (8, 4, 10, 8, 8), (8, 4, 20, 8, 8), (4, 4, 10, 8, 8), (4, 4, 16, 8, 8), (8, 8, 5, 8, 8), (16, 8, 5, 8, 8),
           (8, 4, 10, 16, 16), (8, 4, 10, 8, 4))  # fmt: skip
WATCHED = (("temperature", 1), ("temperature", 256), ("top_p .9 flat", 1), ("top_p .9 flat", 64), ("top_p .9 flat", 256), ("top_k 50", 1),
           ("top_k 50", 256))  # fmt: skip
RECORD: dict[str, float] = {}


class Work:
    """Sets of R rows of V logits, of one kind, more than the cache in all."""

    def __init__(self, rows: int, vocab: int, kind: str):
        self.rows, self.vocab = rows, vocab
        self.sets = max(4, -(-120_000_000 // (4 * rows * vocab)))
        generator = torch.Generator(CUDA).manual_seed(rows)
        self.logits = torch.empty(self.sets, rows, vocab, device=CUDA).normal_(generator=generator)
        if kind == "zipf":
            falling = -1.5 * torch.arange(1, vocab + 1, device=CUDA).log()
            for row in self.logits.view(-1, vocab):
                row.mul_(0.3).add_(falling[torch.randperm(vocab, device=CUDA, generator=generator)])
        self.greedy = self.logits.argmax(dim=2)
        self.ids = self.greedy.clone()
        self.at = torch.arange(rows, device=CUDA)
        rng = np.random.default_rng(0)
        self.keys = [torch.from_numpy(kernels.random_keys(rng, rows)).to(CUDA) for _ in range(self.sets)]
        self.hashes = sampling.token_hashes(vocab, CUDA)

    def draw(self, asked: tuple[float, float, float, int], by_torch: bool = False) -> float:
        """us a call."""
        params = torch.tensor([[*asked[:3], asked[3] or self.vocab]], dtype=torch.float64, device=CUDA).repeat(self.rows, 1)
        run = sampling.draw.reference if by_torch else gpu.draw_triton
        calls = [
            partial(run, self.ids[i], self.logits[i], self.at, params, self.keys[i], self.hashes)
            for i in range(min(self.sets, 8) if by_torch else self.sets)
        ]
        return microseconds(calls, reset=lambda: self.ids.copy_(self.greedy))

    def rate(self, k: int, by_torch: bool = False) -> float:
        """us a call."""
        outs = torch.empty(self.rows, device=CUDA), torch.empty(self.rows, dtype=torch.int32, device=CUDA)
        outs += torch.empty(self.rows, k, dtype=torch.int32, device=CUDA), torch.empty(self.rows, k, device=CUDA)
        run = sampling.token_logprobs.reference if by_torch else gpu.token_logprobs_triton
        count = min(self.sets, 8) if by_torch else self.sets
        return microseconds([partial(run, *outs, self.logits[i], self.greedy[i]) for i in range(count)])


def attempt(name: str, measure, *operands) -> float:
    """What measure returns; not a number where it fails, which one variant may."""
    try:
        RECORD[name] = measure(*operands)
    except Exception as error:
        print(f"{name}: {said(error)}")
        return float("nan")
    return RECORD[name]


def checks() -> None:
    """tests/gpu/test_sampling_gpu.py has more."""
    rng = np.random.default_rng(0)
    attempt("check noise", kernels.check_noise, CUDA, kernels.random_keys(rng, 1)[0], 150)
    for vocab, rows in ((129, 150), *((vocab, 75) for vocab in VOCABULARIES)):
        asked = kernels.random_asked(rng, rows, vocab, (2, 5, 40, 300, 1000, 5000))
        excused = attempt(f"check draw {vocab}", kernels.check_draw, CUDA, rng, rows, vocab, asked)
        for k in ALTERNATIVES:
            attempt(f"check logprobs {vocab} {k}", kernels.check_rate, CUDA, rng, 12, vocab, k)
        print(f"checked {rows} draws of {vocab} tokens: {excused} too close to call; {spent():.0f} s")
    RECORD.clear()


def table(vocab: int) -> None:
    lines: dict[str, list[str]] = {}

    def pair(name: str, measure, asked) -> None:
        theirs, ours = (attempt(f"{name} {vocab} {rows} {who}", measure, asked, who == "torch") for who in ("torch", "ours"))
        lines.setdefault(name, []).append(f"{theirs:8.1f}/{ours:8.1f}")

    for rows in ROWS:
        for kind in ("zipf", "flat"):
            work = Work(rows, vocab, kind)
            for name, (asked, logits) in CASES.items():
                if logits == kind:
                    pair(name, work.draw, asked)
            for k in ALTERNATIVES if kind == "zipf" else ():
                pair(f"logprobs {k}", work.rate, k)
    print(f"{f'{vocab}: torch/ours us':22}" + "".join(f"{f'{rows} rows':>17}" for rows in ROWS))
    for name, cells in lines.items():
        print(f"{name:22}" + "".join(cells))
    floors = (rows * vocab * 4 / timing.roof()[0] * 1e6 for rows in ROWS)
    print(f"{'floor of a read':22}" + "".join(f"{us:17.1f}" for us in floors) + f"   {spent():.0f} s")


def sweep(limit: float) -> None:
    works = {(rows, kind): Work(rows, VOCABULARIES[0], kind) for rows in ROWS for kind in ("flat", "zipf")}
    print(" ".join(NAMES) + ": " + ", ".join(f"{name} {rows}" for name, rows in WATCHED) + ", logprobs 5 1, 256")
    now = tuple(getattr(gpu, name) for name in NAMES)
    for values in (now, *(choice for choice in CHOICES if choice != now)):
        if values != now and spent() > limit:
            print("no time left")
            break
        with patched(*((gpu, name, value) for name, value in zip(NAMES, values))):
            cells = [attempt(f"sweep {values} {name} {rows}", works[rows, CASES[name][1]].draw, CASES[name][0]) for name, rows in WATCHED]
            cells += [attempt(f"sweep {values} logprobs {rows}", works[rows, "zipf"].rate, 5) for rows in (1, 256)]
        print(f"{values!s:22}" + "".join(f"{cell:8.1f}" for cell in cells) + f"   sum {sum(cells):8.1f}" + "   now" * (values == now))


def main() -> None:
    print(torch.cuda.get_device_name())
    with torch.inference_mode():
        checks()
        for vocab in VOCABULARIES:
            table(vocab)
        sweep(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
    timing.save("sampling", RECORD)


if __name__ == "__main__":
    main()
