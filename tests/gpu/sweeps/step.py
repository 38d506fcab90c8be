"""What each part of a captured decode step costs: ops left out, products forced to each of their implementations, decode attention's sizes.

Run from the repository's root: `PYTHONPATH=src:tests python tests/gpu/sweeps/step.py [qwen2-7b] [--rows 1,8] [--keys 600]`, with a shape of
src/flatout/bench/models; about two minutes. A line is a change, a pair of columns a number of rows, all with as many keys before them:
milliseconds of a replay of the step (without the choice of a token), and by how many microseconds a layer that differs from the first line.

- `without X`: what X costs in the step, after what overlaps with it: the figure to weigh against its floor. `X = name`: that implementation
  wherever it accepts. One that gains a microsecond or more a layer on the first line should have been chosen: see TIE of kernels/op.py.
- `AT_ONCE`, `programs a multiprocessor` (PROGRAMS and PROGRAMS_OF_FEW), `decode_sizes` (keys a tile, stages, warps): of gpu/attention.py. Up
  to LATENT rows choose by these: a kernel timed alone does not show whether its programs found room beside those of the one before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import timing
import torch
from timing import patched, replays, said

# isort: split
import numpy as np

from flatout import LLM
from flatout.bench.offline import SHAPES
from flatout.kernels.attention import attention
from flatout.kernels.gpu import attention as launches
from flatout.kernels.gpu import streaming
from flatout.kernels.linear import linear, linear_add, norm_gated, norm_linear
from flatout.kernels.moe import experts, route
from flatout.kernels.norm import add, rms_norm
from flatout.kernels.op import Op
from flatout.kernels.rope import rope_kv_write
from flatout.runner.graphs import DecodeGraphs
from flatout.runner.runner import Runner
from flatout.step import StepPlan

PRODUCTS = (norm_linear, norm_gated, linear_add, linear)
PARTS = (attention, rope_kv_write, *PRODUCTS, rms_norm, add, route, experts)
BLAS = {norm_linear: "composed", norm_gated: "composed", linear_add: "addmm", linear: "blas"}
STREAMING = {"MOST_TILES": (2, 4, 8), "WARPS": (8, 24), "STAGES": (2, 3)}
SIZES = ((128, 1, 4), (128, 1, 8), (128, 2, 8), (64, 1, 4), (64, 2, 4), (64, 2, 8), (64, 3, 4), (32, 2, 4))


@contextmanager
def instead(op: Op, run: Callable[..., None], accepts: Callable[..., bool] = lambda *_: True) -> Iterator[list]:
    """The op runs this wherever it accepts, elsewhere what was chosen. Yields the keys of the calls that it took."""
    usual, taken = op._choose, []

    def choose(key: tuple, args: tuple) -> Callable[..., None]:
        if not accepts(*args):
            return usual(key, args)
        taken.append(key)
        return run

    op._chosen.clear()
    op._choose = choose
    try:
        yield taken
    finally:
        del op._choose
        op._chosen.clear()


def without(op: Op) -> AbstractContextManager[list]:
    return instead(op, lambda *_: None)


def forced(op: Op, name: str) -> AbstractContextManager[list]:
    chosen = next(i for i in op.implementations if i.name == name)
    return instead(op, chosen.run, chosen.accepts)


def chosen_names() -> str:
    """Which implementations of the products took part since they were last forgotten, by shape of the weight."""
    found = []
    for op in PRODUCTS:
        names = {i.run: i.name for i in op.implementations}
        for key, run in op._chosen.items():
            shape = next((tuple(part) for part in key if isinstance(part, torch.Size)), "")
            found.append(f"{op.name} {shape} {names.get(run, 'reference')}")
    return "; ".join(found)


def step_ms(runner: Runner, keys: int, rows: int) -> float:
    """A replay of a step captured now, of `rows` rows with `keys` keys before each."""
    graphs = DecodeGraphs(runner.executor, runner.slots, runner.block_size, (rows,))
    if why := graphs.capture():
        raise RuntimeError(why)
    width = keys // runner.block_size + 1
    table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    runner.slots.host_tables[:rows, :width] = table
    runner.slots.tables[:rows, :width] = torch.from_numpy(table).to(runner.slots.device)
    ones, every = np.ones(rows, np.int32), np.arange(rows, dtype=np.int32)
    plan = StepPlan(0, every, ones * keys, ones, ones * 5, np.ones(rows, bool), ones * 0, [None] * rows)
    (step,) = graphs.steps
    graphs.run(step, graphs.stage(step, plan))
    return replays(step.forward, 40)


class Table:
    """Lines of milliseconds, and microseconds a layer beside the first line's; measure(rows) -> milliseconds."""

    def __init__(self, measure: Callable[[int], float], rows: list[int], layers: int):
        self.measure, self.rows, self.layers = measure, rows, layers
        self.record: dict[str, dict[int, float]] = {}
        print(f"{'':34}" + "".join(f"{f'{n} rows, ms':>14}{'us a layer':>12}" for n in rows))

    def line(self, name: str, *changes: Callable[[], AbstractContextManager[Any]]) -> None:
        """Nothing is printed where a change found nothing to do."""
        found: dict[int, float] = {}
        notes = []
        for rows in self.rows:
            try:
                with ExitStack() as stack:
                    taken = [stack.enter_context(change()) for change in changes]
                    ms = self.measure(rows)
                    if not any(each == [] for each in taken):
                        found[rows] = ms
            except Exception as error:
                notes.append(f"  FAILED {name}, {rows} rows: {said(error)}")
        if found:
            self.record[name] = found
            print(f"{name:34}" + "".join(self.cell(rows, found) for rows in self.rows), flush=True)
        for note in notes:
            print(note, flush=True)

    def cell(self, rows: int, found: dict[int, float]) -> str:
        first = next(iter(self.record.values()))
        if rows not in found:
            return f"{'-':>14}{'':12}"
        more = f"{(found[rows] - first[rows]) * 1e3 / self.layers:+12.2f}" if rows in first and found is not first else f"{'':12}"
        return f"{found[rows]:14.3f}{more}"


def lines(table: Table) -> None:
    for op in PARTS:
        table.line(f"without {op.name}", partial(without, op))
    table.line("without attention, rope_kv_write", partial(without, attention), partial(without, rope_kv_write))
    for op in PRODUCTS:
        for implementation in op.implementations:
            table.line(f"{op.name} = {implementation.name}", partial(forced, op, implementation.name))
    few = [partial(forced, op, "skinny") for op in PRODUCTS[:3]]
    table.line("all of a layer's = skinny", *few)
    table.line("  the same without attention", *few, partial(without, attention))
    table.line("all of a layer's = cuBLAS's", *(partial(forced, op, BLAS[op]) for op in PRODUCTS[:3]))
    for count in (1, 2, 8, 16):
        table.line(f"AT_ONCE {count}", partial(patched, (launches, "AT_ONCE", count)))
    for count in (1, 2, 3, 4):
        both = [(launches, name, count) for name in ("PROGRAMS", "PROGRAMS_OF_FEW")]
        table.line(f"{count} programs a multiprocessor", partial(patched, *both))
    for name, values in STREAMING.items():
        for value in values:
            table.line(
                f"streaming {name} {value}", partial(patched, (streaming, name, value), (streaming, "cut", streaming.cut.__wrapped__))
            )
    for sizes in SIZES:
        chosen = launches.Sizes(*sizes)
        table.line(f"decode_sizes {sizes}", partial(patched, (launches, "decode_sizes", lambda *_, c=chosen: c)))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default="qwen2-7b", choices=sorted(path.stem for path in SHAPES.glob("*.json")))
    parser.add_argument("--rows", default="1,8", type=lambda text: [int(n) for n in text.split(",")], help="numbers of rows")
    parser.add_argument("--keys", default=600, type=int, help="keys before each row's own")
    asked = parser.parse_args()
    length = max(2048, -(-2 * asked.keys // 256) * 256)
    most = max(asked.rows)
    options = {
        "load_format": "dummy",
        "max_model_len": length,
        "max_num_seqs": most,
        "max_cudagraph_capture_size": 1,
        "num_gpu_blocks_override": most * (asked.keys // 16 + 1) + length // 16 + 1,
    }
    with LLM(SHAPES / f"{asked.model}.json", **options) as llm:
        runner = llm.engine.runner
        measure = partial(step_ms, runner, asked.keys)
        print(f"{torch.cuda.get_device_name()}, {asked.model}, {asked.keys} keys before each row")
        for rows in asked.rows:
            for op in PRODUCTS:
                op._chosen.clear()
            measure(rows)
            print(f"{rows} rows, chosen: {chosen_names()}")
        table = Table(measure, asked.rows, llm.spec.num_layers)
        table.line("all, as chosen")
        lines(table)
    timing.save("step", {"model": asked.model, "keys": asked.keys, "ms": table.record})


if __name__ == "__main__":
    main()
