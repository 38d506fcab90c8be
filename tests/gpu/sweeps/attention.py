"""Sweeps paged attention: keys a tile, stages, warps and programs for rows of one query; kernel, queries, keys for longer ones.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/attention.py` (two minutes; all cores compile first).

1. Random cases, and every size swept on one of them, against float64.
2. Rows of one query, us a call in graphs over caches larger than L2; a column is rows x keys, a line `keys,stages,warps pN` (N programs a
   multiprocessor): for decode_sizes, PROGRAMS, PROGRAMS_OF_FEW (up to FEW rows) and LATENT of gpu/attention.py. Up to LATENT rows believe
   step.py instead: there the kernels beside this one decide, which a chain of attention alone does not show.
3. Tiles of queries, TFLOP/s of causal pairs; a line is `kernel queries keys,stages,warps`: for hopper_sizes or prefill_sizes, and for SMALL
   and LARGE of attention/triton.py. Deterministic mode may use larger tiles only where the last line of this part says: the same bits.
4. torch's flash and cuDNN on dense operands (TFLOP/s, and ms of a first call); then long chunks as the op times its implementations.
"""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from functools import partial

import timing
import torch
from timing import BF16, CUDA, microseconds, patched, said, spent

# isort: split
import attention_rows
import numpy as np
from attention_rows import case_of, implementation, plan_of, spec_of

from flatout.attention import triton as planning
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.attention import LongChunks
from flatout.kernels.gpu import attention as launches
from flatout.kernels.gpu.device import facts
from flatout.kernels.timing import medians

BIG, SMALL = (28, 4, 128), (32, 8, 64)  # heads, KV heads, head_dim
BLOCK, TOKENS = 16, 1_200_000
DECODES = {"1x512": (1, 512), "1x8000": (1, 8000), "8x640": (8, 640), "64x640": (64, 640), "256x640": (256, 640), "256x800": (256, 800),
           "32x16k": (32, 16000), "shared": (256, 4256)}  # fmt: skip
PREFILLS = {"512": [(0, 512)], "8k": [(0, 8000)], "16k": [(0, 16000)], "16k+16k": [(16000, 16000)], "32x512": [(0, 512)] * 32,
            "8x64@2k": [(2000, 64)] * 8}  # fmt: skip
SINGLES = {  # (keys, stages, warps), programs
    BIG: [((64, 3, 4), 1), ((64, 3, 4), 2), ((64, 3, 4), 3), ((64, 3, 4), 4), ((128, 1, 4), 1), ((128, 1, 8), 1), ((64, 1, 4), 1),
          ((64, 1, 4), 3), ((64, 2, 4), 3), ((64, 4, 4), 2), ((64, 5, 4), 1), ((64, 3, 2), 3), ((64, 3, 8), 3), ((32, 4, 4), 3),
          ((32, 6, 4), 2), ((128, 3, 4), 1), ((128, 3, 8), 1)],
    SMALL: [((128, 3, 4), 1), ((128, 3, 4), 2), ((128, 3, 4), 3), ((128, 1, 4), 1), ((128, 1, 4), 3), ((64, 4, 4), 3), ((64, 5, 4), 3),
            ((128, 4, 4), 2), ((128, 3, 8), 2)],
}  # fmt: skip
TILES = {  # kernel, queries, keys, stages, warps
    BIG: [("hopper", 128, 128, 2, 8), ("hopper", 128, 128, 3, 8), ("hopper", 128, 64, 3, 8), ("hopper", 128, 64, 2, 8),
          ("hopper", 64, 64, 3, 4), ("hopper", 64, 64, 2, 4), ("hopper", 64, 128, 2, 4), ("plain", 128, 64, 3, 8), ("plain", 128, 64, 2, 8),
          ("plain", 128, 128, 2, 8), ("plain", 64, 64, 3, 4), ("plain", 64, 64, 2, 4)],
    SMALL: [("hopper", 128, 128, 2, 8), ("hopper", 128, 64, 2, 8), ("hopper", 64, 64, 2, 4), ("hopper", 64, 64, 3, 4),
            ("hopper", 64, 128, 2, 4), ("plain", 128, 64, 3, 8), ("plain", 64, 64, 3, 4)],
}  # fmt: skip
KERNELS = ("hopper", "plain") if launches._hopper(facts(CUDA).capability, "prefill") else ("plain",)
CHECKED = [(n, 1) for n in (0, 62, 63, 64, 500, 1300, 127, 5)], [(0, 300), (100, 1), (63, 65), (500, 40), (0, 18)]
RECORD: dict[str, float] = {}


def using(variant: tuple | None):
    """The op launches this inside: ("singles", sizes, programs), ("tiles", kernel, queries, keys, stages, warps); None: what it does now."""
    if variant is None:
        return nullcontext()
    if variant[0] == "singles":
        _, sizes, programs = variant
        chosen = launches.Sizes(*sizes)
        return patched(
            (launches, "decode_sizes", lambda *_: chosen), (launches, "PROGRAMS", programs), (launches, "PROGRAMS_OF_FEW", programs)
        )
    _, kernel, queries, *sizes = variant
    chosen = launches.Sizes(*sizes)
    changes = [(launches, name, lambda *_: chosen) for name in ("hopper_sizes", "prefill_sizes")]
    changes += [(planning, name, queries) for name in ("SMALL", "LARGE")]
    if kernel == "plain":
        changes.append((launches, "_hopper", lambda capability, name: None))
    return patched(*changes)


def label(variant: tuple | None) -> str:
    if variant is None:
        return "now"
    if variant[0] == "singles":
        return ",".join(map(str, variant[1])) + f" p{variant[2]}"
    return f"{variant[1]} {variant[2]} " + ",".join(map(str, variant[3:]))


def backend_of(heads: tuple[int, int, int], deterministic: bool = False, block: int = BLOCK, window=None, softcap=0.0):
    spec = spec_of(*heads, window, softcap)
    backend = planning.TritonBackend(spec, block, deterministic)
    backend.allocate_kv(spec, 1, block, BF16, CUDA)
    backend.dense = False  # all by the paged kernels
    return backend


def check(job) -> list[str]:
    """In a process of its own: what went wrong in these cases of one shape."""
    variant, heads, window, softcap, cases = job
    wrong = []
    for rows, deterministic, seed in cases:
        try:
            with using(variant):
                case = case_of(rows, spec_of(*heads, window, softcap), BF16, seed=seed, device=CUDA)
                backend = backend_of(heads, deterministic, attention_rows.BLOCK, window, softcap)
                for on_device in (False, True) if all(n == 1 for _, n in rows) else (False,):
                    work = plan_of(case.spec, rows, case.table, BF16, CUDA, backend, on_device)
                    case.holds(case.run(implementation("triton"), work), relative=True)
        except Exception as error:
            wrong.append(f"{label(variant)} {heads} {window} {softcap} {str(rows)[:60]}{' det' if deterministic else ''}: {said(error)}")
    return wrong


def jobs() -> list[tuple]:
    made: list[tuple] = []
    rng = random.Random(0)
    bands = ((None, 0.0), (100, 0.0), (64, 20.0))
    for i, heads in enumerate(((28, 4, 128), (9, 3, 64), (8, 1, 256), (64, 1, 80)) * 3):
        cases = []
        for seed in range(3):
            before, new = (0, 1, 63, 64, 127, 700, rng.randrange(3000)), (1, 1, 2, 17, 64, 200)
            cases.append(([(rng.choice(before), rng.choice(new)) for _ in range(rng.randrange(1, 12))], seed == 2, seed))
        made.append((None, heads, *bands[i // 4], cases))
    for heads in (BIG, SMALL):
        made += [(("singles", s, 2), heads, None, 0.0, [(CHECKED[0], False, 1)]) for s in dict.fromkeys(s for s, _ in SINGLES[heads])]
        made += [(("tiles", *v), heads, None, 0.0, [(CHECKED[1], v[1] == 64, 2)]) for v in TILES[heads] if v[0] in KERNELS]
    return made


class Caches:
    """One pool of blocks, of which each call has its own."""

    def __init__(self):
        self.k, self.v = (torch.randn(TOKENS * 512, device=CUDA, dtype=BF16) for _ in range(2))
        self.blocks = torch.randperm(TOKENS // BLOCK, device=CUDA, dtype=torch.int32)

    def view(self, heads) -> list[torch.Tensor]:
        return [cache.view(TOKENS, heads[1], heads[2]) for cache in (self.k, self.v)]

    def tables(self, rows: int, keys: int, shared: int = 0) -> list[torch.Tensor]:
        width, common = -(-keys // BLOCK), shared // BLOCK
        need = rows * (width - common) + common
        made = []
        for i in range(max(1, min(128, len(self.blocks) // need))):
            mine = self.blocks[i * need : (i + 1) * need]
            made.append(torch.cat([mine[:common].expand(rows, common), mine[common:].view(rows, width - common)], 1).contiguous())
        return made


def batch_of(rows, table: torch.Tensor) -> tuple[ForwardBatch, HostBatch]:
    q_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((new, before + new) for before, new in rows)))
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    starts_, lens_, slots_ = (torch.from_numpy(a).to(CUDA) for a in (starts, kv_lens, np.arange(len(rows), dtype=np.int32)))
    empty = torch.empty(0, dtype=torch.int64, device=CUDA)
    host = HostBatch(q_lens, kv_lens, (table.cpu().numpy(),))
    return ForwardBatch(empty, empty, starts_, lens_, (table,), slots_, (empty,), empty), host


def chain(caches: Caches, heads, tokens: int, works: list, count: int) -> float:
    """us a call of `count`, each over the next work's blocks."""
    fused = torch.randn(tokens, (heads[0] + 2 * heads[1]) * heads[2], device=CUDA, dtype=BF16)
    q, run = fused[:, : heads[0] * heads[2]], implementation("triton")
    operands = (torch.empty_like(q, memory_format=torch.contiguous_format), q, *caches.view(heads))
    return microseconds([partial(run, *operands, works[i % len(works)], heads[2] ** -0.5, 0.0) for i in range(count)])


def decode_us(caches: Caches, heads, name: str) -> float:
    rows, keys = DECODES[name]
    backend, works = backend_of(heads), []
    for table in caches.tables(rows, keys, 4096 if name == "shared" else 0):
        batch, _ = batch_of([(keys - 1, 1)] * rows, table)
        backend.plan_decode(batch)
        works += batch.attention
    expected = max(3, rows * keys * 2048 / timing.roof()[0] * 1e6)
    return chain(caches, heads, rows, works, max(8, min(100, int(4000 / expected))))


def pairs_of(rows) -> int:
    return sum((b + n) * (b + n + 1) // 2 - b * (b + 1) // 2 for b, n in rows)


def calls_for(flops: float) -> int:
    """As many as take some milliseconds."""
    return max(2, min(40, int(4e-3 * 400e12 / flops)))


def prefill_tflops(caches: Caches, heads, name: str) -> float:
    rows = PREFILLS[name]
    backend, works = backend_of(heads), []
    for table in caches.tables(len(rows), max(b + n for b, n in rows))[:8]:
        batch, host = batch_of(rows, table)
        backend.plan(batch, host)
        works += batch.attention
    flops = 4 * pairs_of(rows) * heads[0] * heads[2]
    return flops / chain(caches, heads, sum(n for _, n in rows), works, calls_for(flops)) / 1e6


def show(title: str, columns, variants: list, measure, best) -> None:
    """A line for each variant, of what measure(column) returns; below, the best of each column."""
    print(f"{title:26}" + "".join(f"{c:>9}" for c in columns), flush=True)
    winners: dict[str, tuple[float, str]] = {}
    for variant in variants:
        cells, why = [], ""
        for column in columns:
            try:
                with using(variant):
                    value = measure(column)
            except Exception as error:
                cells.append(f"{'-':>9}")
                why = said(error)
                continue
            RECORD[f"{title} {label(variant)} {column}"] = value
            cells.append(f"{value:9.1f}")
            winners[column] = best(winners.get(column, (value, label(variant))), (value, label(variant)))
        print(f"{label(variant):26}" + "".join(cells) + f"  {why}".rstrip(), flush=True)
    print("  best: " + "; ".join(f"{c} {v:.1f} [{w}]" for c, (v, w) in winners.items()), flush=True)


def same_bits() -> None:
    """Do tiles of 128 packed queries give the bits of tiles of 64, with the same tiles of keys?"""
    case = case_of([(0, 700), (300, 77)], spec_of(*BIG, None), BF16, device=CUDA)
    for kernel in KERNELS:
        outs = []
        try:
            for queries, warps in ((64, 4), (128, 8)):
                with using(("tiles", kernel, queries, 64, 3, warps)):
                    work = plan_of(case.spec, case.rows, case.table, BF16, CUDA, backend_of(BIG, True, attention_rows.BLOCK))
                    outs.append(case.run(implementation("triton"), work))
        except Exception as error:
            print(f"{kernel}: {said(error)}")
        else:
            print(f"{kernel}: tiles of 64 and of 128 queries give {'the same' if torch.equal(*outs) else 'OTHER'} bits")


def dense(heads, tokens: int, what: str):
    """A call on dense operands: K and V per KV head, or one for each query head."""
    h, kv, d = heads
    q, k, v = (torch.randn(tokens, n, d, device=CUDA, dtype=BF16) for n in (h, kv, kv))
    if what == "flash":
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=CUDA)
        return partial(torch.ops.aten._flash_attention_forward, q, k, v, starts, starts, tokens, tokens, 0.0, True, False, scale=d**-0.5)
    if what == "cudnn stride 0":  # a batch of KV heads, each with its query heads
        query = q.view(tokens, kv, h // kv, d).permute(1, 2, 0, 3)
        key, value = (t.permute(1, 0, 2).unsqueeze(1).expand(-1, h // kv, -1, -1) for t in (k, v))
    else:
        repeat = h // kv if what == "cudnn copied" else 1
        query, key, value = (t.transpose(0, 1)[None] for t in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
    sdpa = torch.ops.aten._scaled_dot_product_cudnn_attention
    return partial(sdpa, query, key, value, None, False, 0.0, True, False, scale=d**-0.5)


def libraries() -> None:
    lengths = (512, 8000, 16000)
    print(f"{f'dense {BIG} TFLOP/s':26}" + "".join(f"{n:>18}" for n in lengths))
    for what in ("flash", "cudnn stride 0", "cudnn gqa", "cudnn copied"):
        cells = []
        for tokens in lengths:
            try:
                run = dense(BIG, tokens, what)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                run()
                torch.cuda.synchronize()
                first = (time.perf_counter() - begin) * 1e3
                flops = 4 * pairs_of([(0, tokens)]) * BIG[0] * BIG[2]
                RECORD[f"{what} {tokens}"] = rate = flops / microseconds([run] * calls_for(flops)) / 1e6
                cells.append(f"{rate:8.0f} ({first:4.0f} ms)")
            except Exception as error:
                cells.append(type(error).__name__[:17])
        print(f"{what:26}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def long_chunks(caches: Caches) -> None:
    """cuDNN's implementation of the op against ours, ms a call, as the op's choice between them is made."""
    backend = backend_of(BIG)
    backend.dense = True
    k, v = caches.view(BIG)
    for before, new in ((0, 8000), (0, 4611), (16384, 15616)):
        fused = torch.randn(-(-new // 512) * 512, (BIG[0] + 2 * BIG[1]) * BIG[2], device=CUDA, dtype=BF16)
        q = fused[:new, : BIG[0] * BIG[2]]
        batch, host = batch_of([(before, new)], caches.tables(1, before + new)[0])
        backend.plan(batch, host)
        (work,) = batch.attention
        if not isinstance(work.arrangement, LongChunks):
            print(f"{before}+{new}: dense attention is not asked for such a chunk")
            continue
        outs = {name: torch.empty(new, q.shape[1], device=CUDA, dtype=BF16) for name in ("triton", "cudnn")}
        try:
            runs = {name: partial(implementation(name), out, q, k, v, work, BIG[2] ** -0.5, 0.0) for name, out in outs.items()}
            cells = []
            for name, seconds in medians(runs, CUDA).items():
                RECORD[f"{before}+{new} {name} ms"] = ms = seconds * 1e3
                cells.append(f"{name} {ms:.3f}")
            furthest = (outs["triton"].float() - outs["cudnn"].float()).abs().max().item()
            print(f"{before}+{new} ms: " + ", ".join(cells) + f"; furthest apart {furthest:.3g} of {outs['triton'].abs().max().item():.3g}")
        except Exception as error:
            print(f"{before}+{new}: {said(error)}")


def main() -> None:
    work = jobs()
    wrong = [line for lines in timing.apart(check, work) for line in lines]
    for line in wrong:
        print("WRONG", line)
    cases = sum(len(job[4]) for job in work)
    print(f"{torch.cuda.get_device_name()}: {cases - len(wrong)} of {cases} cases right; {spent():.0f} s")
    caches = Caches()
    for heads in (BIG, SMALL):
        variants = [None, *(("singles", *v) for v in SINGLES[heads])]
        show(f"singles {heads} us", DECODES, variants, partial(decode_us, caches, heads), min)
    for heads in (BIG, SMALL):
        variants = [None, *(("tiles", *v) for v in TILES[heads] if v[0] in KERNELS)]
        show(f"tiles {heads} TFLOP/s", PREFILLS, variants, partial(prefill_tflops, caches, heads), max)
    same_bits()
    libraries()
    long_chunks(caches)
    timing.save("attention", RECORD)


if __name__ == "__main__":
    main()
