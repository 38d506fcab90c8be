"""Sweeps the small kernels' launches: norms, rotary encoding with cache write, gates, gathers, greedy, a step's inputs.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/small.py` (a minute, most of it compiling). Checks against
float64 come first. Then a line is an op, a model's sizes and a number of rows: torch's time in us a node of a graph of 200, ours as it is
launched now, with GB/s of the bytes in the op's cost, and the best launch of the sweep; * where that is over 5 % better than ours: then
change what chooses it: norm_launch in gpu/norm.py, column_blocks in gpu/rows.py (gates, gathers), heads_launch in gpu/rope.py, or BLOCK,
WARPS, LEAST of gpu/greedy.py and gpu/inputs.py. Up to 256 rows the activations stay in the L2 cache, as in a step, while weights and KV
caches are another layer's in each node; 8,000 rows run over 300 MB or more.
"""

from __future__ import annotations

from functools import partial

import timing
import torch
from timing import BF16, CUDA, microseconds, patched, said, spent

# isort: split
import small_kernels as small
import triton

from flatout.kernels.gpu import embedding as g_embedding
from flatout.kernels.gpu import gate as g_gate
from flatout.kernels.gpu import greedy as g_greedy
from flatout.kernels.gpu import inputs as g_inputs
from flatout.kernels.gpu import norm as g_norm
from flatout.kernels.gpu import rope as g_rope
from flatout.kernels.inputs import decode_inputs, remember

# hidden, heads, KV heads, head_dim, intermediate, vocabulary, layers
MODELS = {"7B": (3584, 28, 4, 128, 18_944, 152_064, 28), "1B": (2048, 32, 8, 64, 8192, 128_256, 16)}
DECODE, PREFILL = (1, 8, 64, 256), 8000
RECORD: list[dict] = []


def checks() -> None:
    """tests/gpu/test_small_gpu.py has more."""
    full = torch.float32
    todo: list[tuple] = []
    for dtype, width, offset in ((BF16, 3584, 0.0), (BF16, 3584, 1.0), (BF16, 16_384, 0.0), (full, 576, 0.0)):
        todo += [(small.check_norm, rows, width, dtype, offset, rows == 9, rows) for rows in (1, 9, 2500)]
    for rows in (1, 1500):
        todo += [(small.check_gate, rows, 18_944, BF16, activation, rows) for activation in ("silu", "gelu", "gelu_tanh")]
        todo += [(small.check_add, rows, 3584, BF16, 0.5, rows), (small.check_rows, rows, 3584, BF16, 0.5, rows)]
        todo += [(small.check_finish, rows, 4097, full, 2.0, 30.0, rows), (small.check_gate, rows, 1000, full, "gelu_tanh", rows)]
    for shape, normed, dtype in (((28, 4, 128, 128), True, BF16), ((32, 8, 64, 64), False, BF16), ((9, 3, 80, 80), True, full)):
        todo += [(small.check_rope, tokens, *shape, normed, 0.0, dtype, tokens) for tokens in (1, 65, 3000)]
    todo += [(small.check_greedy, rows, width, rows) for rows in (1, 3, 70, 300) for width in (1000, 50_257, 152_064)]
    failed = 0
    for check, *operands in todo:
        try:
            check(CUDA, *operands)
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            print(f"WRONG {check.__name__} {operands}: {said(error)}")
    print(f"{len(todo) - failed} of {len(todo)} checks right; {spent():.0f} s")


def case(title: str, op, make, moved: int, rows: int, sweep: dict | None = None, sets: int | None = None) -> None:
    """make() -> operands of a node; moved: bytes; sweep: name -> changes of `patched`; sets: distinct operands. Prints a line."""
    sets = sets or (4 if rows <= 1024 else max(2, min(16, 300_000_000 // moved + 1)))
    operands = [make() for _ in range(sets)]
    nodes, ours = 200 if rows <= 1024 else 100, small.triton(op)
    by_torch = next((i.run for i in op.implementations if i.name == "torch"), op.reference)
    runs = {"torch": (by_torch, ()), "ours": (ours, ())} | {name: (ours, changes) for name, changes in (sweep or {}).items()}
    times: dict[str, float] = {}
    for name, (run, changes) in runs.items():
        try:
            with patched(*changes):
                times[name] = microseconds([partial(run, *each) for each in operands], repeat=max(1, nodes // sets))
        except Exception as error:
            print(f"  FAILED {title} {name}: {said(error)}")
    RECORD.append({"case": title, "rows": rows, "bytes": moved, "us": times})
    print(line(title, moved, times), flush=True)


def line(title: str, moved: int, times: dict[str, float]) -> str:
    theirs, mine = (times.get(name, float("nan")) for name in ("torch", "ours"))
    tried = {name: us for name, us in times.items() if name not in ("torch", "ours")}
    other = ""
    if tried:
        best = min(tried, key=tried.get)
        other = f"{best:20} {tried[best]:8.2f}" + " *" * (tried[best] < 0.95 * mine)
    return f"{title:22} {theirs:9.2f} {mine:8.2f} {moved / mine / 1e3:7.0f}  {other}".rstrip()


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF16)


def norm_sweep(width: int) -> dict:
    made = {}
    for warps in (2, 4, 8, 16):
        for together in (1, 2):

            def launch(rows, width, n=together, w=warps):
                return triton.cdiv(rows, n), triton.next_power_of_2(width), n, w

            made[f"{together} rows, {warps} warps"] = [(g_norm, "norm_launch", launch)]
    return made


def block_sweep(module, rows: int) -> dict:
    made = {}
    for block, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        if rows <= 256 or block > 512:

            def blocks(rows, width, sms, b=block, w=warps):
                return rows * triton.cdiv(width, b), b, w

            made[f"{block}, {warps} warps"] = [(module, "column_blocks", blocks)]
    return made


def rope_sweep(rows: int) -> dict:
    few = ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4))
    many = ((8, 1), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8))
    chosen = few if rows <= 256 else many
    return {f"{heads} heads, {warps} warps": [(g_rope, "heads_launch", lambda *_, v=(heads, warps): v)] for heads, warps in chosen}


def greedy_sweep() -> dict:
    made = {}
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        for least in (1024, 2048, 4096, 8192):
            if least >= block:
                changes = [(g_greedy, "BLOCK", block), (g_greedy, "WARPS", warps), (g_greedy, "LEAST", least)]
                made[f"{block} w{warps} least {least}"] = changes
    return made


def inputs_sweep() -> dict:
    sizes = ((256, 8), (512, 8), (1024, 8), (1024, 16), (1024, 32))
    return {f"{block}, {warps} warps": [(g_inputs, "BLOCK", block), (g_inputs, "WARPS", warps)] for block, warps in sizes}


def layer(model: str, rows: int) -> None:
    """What a layer runs beside products and attention, and what comes before the first."""
    hidden, heads, kv, dim, inner, vocab, count = MODELS[model]
    deep = model == "7B" or rows == PREFILL  # swept
    distinct = count if rows <= 256 else 4
    weights = iter(bf16(distinct, hidden))
    norm = lambda: (bf16(rows, hidden), bf16(rows, hidden), next(weights), 1e-6, 0.0)  # noqa: E731
    case(
        f"rms_norm {model} {rows}", small.rms_norm, norm, 4 * rows * hidden + 2 * hidden, rows, norm_sweep(hidden) if deep else {}, distinct
    )

    cos, sin = (part.unsqueeze(1) for part in bf16(rows, 2 * dim).chunk(2, 1))
    slots = torch.randperm(8192, device=CUDA)[:rows]

    def rope():
        by_head = bf16(rows, (heads + 2 * kv) * dim).view(rows, -1, dim)
        caches = [torch.zeros(8192, kv, dim, device=CUDA, dtype=BF16) for _ in range(2)]
        return by_head[:, :-kv], by_head[:, -kv:], *caches, slots, cos, sin, None, None, 1e-6, 0.0

    moved = rows * (4 * (heads + kv) * dim + 6 * kv * dim + 4 * dim + 8)
    case(f"rope_kv {model} {rows}", small.rope_kv_write, rope, moved, rows, rope_sweep(rows), distinct)

    gate = lambda: (bf16(rows, inner), bf16(rows, 2 * inner), "silu")  # noqa: E731
    case(f"gate_mul {model} {rows}", small.gate_mul, gate, 6 * rows * inner, rows, block_sweep(g_gate, rows) if deep else {})
    if model == "7B" and rows in (1, 256, PREFILL):
        table, ids = bf16(vocab, hidden), torch.randint(0, vocab, (rows,), device=CUDA)
        embedding = lambda: (bf16(rows, hidden), ids, table, 1.0)  # noqa: E731
        case(f"embedding {rows}", small.embedding, embedding, 4 * rows * hidden, rows, block_sweep(g_embedding, rows))
        ropes, places = bf16(32_768, 2 * dim), torch.randint(0, 32_768, (rows,), device=CUDA)
        case(f"rope rows {rows}", small.gather_rows, lambda: (bf16(rows, 2 * dim), ropes, places), 8 * rows * dim, rows)
        case(f"add {rows}", small.add, lambda: (bf16(rows, hidden), bf16(rows, hidden), 1.0), 6 * rows * hidden, rows)
    torch.cuda.empty_cache()


def after(model: str, rows: int) -> None:
    """greedy."""
    vocab = MODELS[model][5]
    operands = lambda: (torch.empty(rows, dtype=torch.int64, device=CUDA), torch.randn(rows, vocab, device=CUDA))  # noqa: E731
    swept = greedy_sweep() if model == "7B" and rows in (1, 64, 256) else {}
    sets = max(2, min(100, 300_000_000 // (4 * rows * vocab)))
    case(f"greedy {model} {rows}", small.greedy, operands, 4 * rows * vocab, rows, swept, sets)
    torch.cuda.empty_cache()


def inputs(rows: int) -> None:
    tables, staged, last = small.staged_step(0, rows, 2 * rows + 128, rows // 16, 1025, 64, 16, CUDA)
    dtypes = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)
    outs = [torch.zeros(rows, dtype=dtype, device=CUDA) for dtype in dtypes]
    case(f"decode_inputs {rows}", decode_inputs, lambda: (*outs, tables, staged, last, 16), 60 * rows, rows, inputs_sweep(), 1)
    case(f"remember {rows}", remember, lambda: (last, outs[4], outs[0]), 20 * rows, rows, {}, 1)


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    checks()
    print(f"{'op, model, rows':22} {'torch us':>9} {'ours us':>8} {'GB/s':>7}  best of the sweep")
    for model in MODELS:
        for rows in (*DECODE, PREFILL):
            layer(model, rows)
        for rows in (*DECODE, 1024):
            after(model, rows)
    for rows in (1, 64, 1024):
        inputs(rows)
    timing.save("small", RECORD)


if __name__ == "__main__":
    main()
