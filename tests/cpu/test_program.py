"""Programs: captured steps as data for the native library; and the ops around a step that it does, against their references on every instruction set."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from checkpoints import make

from flatout import LLM
from flatout.kernels import native
from flatout.kernels.blocks import PACKED
from flatout.kernels.embedding import embedding, gather_rows, quantised_embedding
from flatout.kernels.inputs import FROM_DEVICE, decode_inputs, remember
from flatout.kernels.op import Cost, op
from flatout.kernels.packed import BYTES, unpacked
from flatout.kernels.program import capture
from flatout.kernels.sampling import greedy
from flatout.quant.gguf import dequantize
from flatout.request import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native library")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def native_run(op):
    """Its implementation by the native library: other files may have registered more."""
    return next(i.run for i in op.implementations if i.native and i.name == "native")


@op(cost=lambda out, x: Cost())
def doubled(out, x) -> None:
    out.copy_(2 * x)


def test_a_program_does_again_what_its_ops_do():
    """Native calls in blocks, others between them, in order, on what the buffers then hold; nothing is done at the capture."""
    source, ids = torch.arange(12.0).view(4, 3), torch.tensor([2, 0])
    first, second, third = (torch.full((2, 3), -1.0) for _ in range(3))

    def run() -> None:
        gather_rows(first, source, ids)
        gather_rows(second, first, order)
        doubled(third, second)
        gather_rows(first, third, order)

    order = torch.tensor([1, 0])
    program = capture(run)
    assert (first == -1).all() and (third == -1).all()
    assert [len(part.ops) for part in program.parts] == [2, 1, 1]
    for rows in ([2, 0], [3, 3], [0, 1]):
        ids.copy_(torch.tensor(rows))
        program()
        assert torch.equal(third, 2 * source[ids][order]) and torch.equal(first, 2 * source[ids])
    timed = program.timed()
    assert [o.name for o, _, _ in timed] == ["gather_rows", "gather_rows", "doubled", "gather_rows"]
    assert all(seconds > 0 for _, _, seconds in timed) and timed[2][1][0] is third


def test_a_call_that_is_refused_ends_the_program_and_is_named():
    out, ids = torch.zeros(1, 3), torch.tensor([0])
    program = capture(lambda: [gather_rows(out, torch.ones(2, 3), ids) for _ in range(3)])
    program()
    ids.fill_(2)
    with pytest.raises(RuntimeError, match="declines call 0 of 3 in a program: gather"):
        program()


def test_only_the_capturing_thread_is_captured():
    out, elsewhere, ids = torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([1])

    def run() -> None:
        thread = threading.Thread(target=lambda: gather_rows(elsewhere, torch.ones(2, 3), ids))
        thread.start()
        thread.join()
        gather_rows(out, torch.ones(2, 3), ids)

    program = capture(run)
    assert (elsewhere == 1).all() and (out == 0).all() and len(program.parts) == 1


def test_a_step_of_packed_weights_is_one_call(default_model):
    """And gives the tokens of steps op by op, alone and in company, beside a prompt that is still being read."""
    prompts = [[3 + 7 * i % 900 for i in range(n)] for n in (5, 40, 300, 17, 90)]
    found = []
    for options in ({"enforce_eager": True}, {}):
        with LLM(str(default_model), quantization="gguf", max_num_batched_tokens=64, max_model_len=1024, **options) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)])
            found.append([llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in prompts])
            decodes = llm.engine.runner.executor.decodes
            assert (decodes is None) == bool(options)
    assert found[0] == found[2] and found[1] == found[3]
    (part,) = decodes.steps[1].both.parts
    names = part.run.names()
    assert names[-2:] == ["greedy", "remember"] and len(part.ops) == len(names)
    layers = llm.spec.num_layers
    assert names.count("attention") == names.count("rotate") == layers and names.count("product") == 4 * layers + 1
    assert names[0] == "inputs" and len(names) == 6 * layers + 6


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen2_moe"])
def test_families_run_as_programs(family, tmp_path):
    """What the library has no kernel for stays Python's, between blocks: the tokens are those of steps op by op."""
    prompts, found = [[5, 9, 2, 7], [8] * 30], []
    for options in ({"enforce_eager": True}, {}):
        with LLM(make(family, tmp_path), dtype="float32", max_model_len=96, **options) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]
    parts = llm.engine.runner.executor.decodes.steps[2].forward.parts
    assert any(isinstance(part.run, native.Block) for part in parts) and not all(isinstance(part.run, native.Block) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 257])
def test_rows(isa, dtype, width):
    source = torch.randn(9, width + 3, dtype=dtype)[:, :width]
    ids, out = torch.tensor([8, 0, 3, 3]), torch.full((4, width + 5), float("nan"), dtype=dtype)
    native_run(gather_rows)(out[:, :width], source, ids)
    assert torch.equal(out[:, :width], source[ids]) and out[:, width:].isnan().all()
    scale = float(torch.tensor(55.43, dtype=dtype))
    expected = torch.empty(4, width, dtype=dtype)
    embedding.reference(expected, ids, source.contiguous(), scale)
    native_run(embedding)(out[:, :width], ids, source, scale)
    assert torch.equal(out[:, :width], expected) and out[:, width:].isnan().all()
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match="none of the 9 rows"):
            native.gather(out[:1, :width], source, torch.tensor([wrong]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*PACKED, "4", "8"])
def test_rows_of_a_quantised_table(isa, dtype, kind):
    """To the bit: reference and kernel, and as a table of floats gives them."""
    draw, ids = np.random.default_rng(0), torch.tensor([31, 0, 7, 7, 16])
    if kind in PACKED:
        blocks = draw.integers(0, 256, 32 * 512 // PACKED[kind].elements * PACKED[kind].layout.itemsize, dtype=np.uint8)
        for part in {"d", "m"} & set(PACKED[kind].layout.names):
            blocks.view(PACKED[kind].layout)[part] = draw.normal(size=32 * 512 // PACKED[kind].elements)
        table, plain = torch.from_numpy(blocks).view(32, -1), dequantize(blocks, kind, (32, 512), dtype)
    else:
        table = torch.from_numpy(draw.integers(0, 60, (2, 16, BYTES[int(kind)]), dtype=np.uint8))
        plain, kind = unpacked(table).to(dtype), ""
    for scale in (1.0, float(torch.tensor(55.43, dtype=dtype))):
        expected, found, made = (torch.full((5, 515), float("nan"), dtype=dtype)[:, :512] for _ in range(3))
        torch.mul(plain[ids], scale, out=expected)
        quantised_embedding.reference(found, ids, table, kind, scale)
        native_run(quantised_embedding)(made, ids, table, kind, scale)
        assert torch.equal(found, expected) and torch.equal(made, expected)
    with pytest.raises(IndexError, match="none of the 32 lines"):
        native_run(quantised_embedding)(made[:1], torch.tensor([32]), table, kind, 1.0)
    cost = quantised_embedding.cost(made, ids, table, kind, 1.0)
    assert cost.weights == 5 * table.nbytes // 32 and cost.activations == 5 * 512 * dtype.itemsize + 5 * 8


@pytest.mark.parametrize("width", [1, 7, 16, 1023, 1024, 1025, 49152])
def test_greedy(isa, width):
    logits = torch.randn(6, width + 1)[:, :width]
    logits[1] = float("-inf")
    logits[2] = float("nan")
    logits[3, width // 2] = float("inf")
    logits[4, width - 1] = logits[4].max() + 1
    logits[5] = 3.0
    if width > 2:
        logits[0, :2] = torch.tensor([float("nan"), 9.0])
        logits[3, width - 1] = torch.finfo(torch.float32).max  # no less than what stands for infinity
    ids = torch.full((6,), -1)
    native.greedy(ids, logits)
    highest = torch.finfo(torch.float32).max
    expected = torch.nan_to_num(logits, nan=-highest, posinf=highest, neginf=-math.inf).numpy().argmax(1)
    assert ids.tolist() == expected.tolist()
    assert greedy.chosen(ids, logits) is native_run(greedy)


def test_inputs_and_remember():
    """Diffs that count and others, ids from the host and the slots' own; what does not fit is refused with nothing done."""
    slots, columns, block, rows, room = 5, 4, 16, 3, 4
    rng = np.random.default_rng(1)
    for _ in range(50):
        table = torch.from_numpy(rng.integers(0, 90, (slots, columns), dtype=np.int32))
        last = torch.from_numpy(rng.integers(0, 1000, slots))
        places, picked = rng.integers(0, columns * block, rows), rng.permutation(slots)[:rows]
        ids = np.where(rng.random(rows) < 0.5, FROM_DEVICE, rng.integers(0, 1000, rows))
        cells = rng.permutation(slots * columns)[:room]
        count = int(rng.integers(0, room + 1))
        staged = torch.from_numpy(
            np.concatenate([[count], ids, places, picked, cells // columns, cells % columns, rng.integers(90, 99, room)]).astype(np.int32)
        )
        made = []
        for run in (decode_inputs.reference, native_run(decode_inputs)):
            kinds = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)
            outs, tables = [torch.zeros(rows, dtype=kind) for kind in kinds], table.clone()
            run(*outs, tables, staged, last, block)
            made.append([*outs, tables])
        assert all(torch.equal(a, b) for a, b in zip(*made))
        rows_of, ids_of = made[0][4], torch.from_numpy(rng.integers(0, 9, rows))
        both = [last.clone(), last.clone()]
        remember.reference(both[0], rows_of, ids_of)
        native_run(remember)(both[1], rows_of, ids_of)
        assert torch.equal(*both)
    for place, value in (
        (0, room + 1),
        (1 + rows, columns * block),
        (1 + 2 * rows, slots),
        (1 + 3 * rows, -1),
        (1 + 3 * rows + room, columns),
    ):
        wrong, tables = staged.clone(), table.clone()
        wrong[0] = room
        wrong[place] = value
        with pytest.raises(IndexError, match="outside of the tables"):
            native_run(decode_inputs)(*outs, tables, wrong, last, block)
        assert torch.equal(tables, table)
    with pytest.raises(IndexError, match="none of the 5"):
        native.remember(last, torch.tensor([5], dtype=torch.int32), torch.tensor([1]))
