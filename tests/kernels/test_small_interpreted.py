"""The small kernels in Triton's interpreter: norms, gate, logits, rows, rope, decode inputs, greedy; edges of their tiles, odd sizes, every dtype."""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import small_kernels as small
import torch

from flatout.kernels.gpu import greedy as gpu_greedy
from flatout.kernels.gpu import inputs as gpu_inputs
from flatout.kernels.gpu.norm import norm_launch
from flatout.kernels.gpu.rope import heads_launch
from flatout.kernels.gpu.rows import column_blocks
from flatout.kernels.inputs import decode_inputs, remember
from flatout.kernels.op import Cost

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has them compiled")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 8), (33, 24), (70, 60), (2, 127), (5, 128), (1, 129), (9, 576), (1, 3584)])
def test_rms_norm(rows, width):
    for seed, (dtype, offset, in_place) in enumerate(product(small.DTYPES, (0.0, 1.0), (False, True))):
        small.check_norm(CPU, rows, width, dtype, offset, in_place, seed)


@pytest.mark.parametrize("width", [60, 1024])
def test_rms_norm_at_the_edges_of_a_program(width):
    _, _, together, _ = norm_launch(50, width)
    for rows in {max(1, together - 1), together, together + 1}:
        small.check_norm(CPU, rows, width, torch.float32, 0.0, True, rows)


def test_rms_norm_of_weights_wider_than_its_rows():
    x, weight, out = torch.randn(2, 40).half(), torch.randn(40), torch.empty(2, 40).half()
    small.triton(small.rms_norm)(out, x, weight, 1e-5, 0.0)
    small.close(out, small.normed(x, weight, 1e-5, 0.0), 2)


def test_rms_norm_of_zeros_is_zero():
    out = torch.full((2, 24), small.POISON)
    small.triton(small.rms_norm)(out, torch.zeros(2, 24), torch.ones(24), 1e-5, 0.0)
    assert (out == 0).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 60), (2, 1023), (2, 1024), (2, 1025), (1, 2500)])
def test_elementwise(rows, width):
    for seed, dtype in enumerate(small.DTYPES):
        for activation in ("silu", "gelu", "gelu_tanh"):
            small.check_gate(CPU, rows, width, dtype, activation, seed)
        for scale, softcap in ((1.0, 0.0), (0.3, 0.0), (1.0, 30.0), (2.0, 5.0)):
            small.check_finish(CPU, rows, width, dtype, scale, softcap, seed)
        for scale in (1.0, 0.4):
            small.check_add(CPU, rows, width, dtype, scale, seed)
            small.check_rows(CPU, rows, width, dtype, scale, seed)


def test_elementwise_in_long_runs():
    """Enough rows for the longer of the two runs of columns."""
    assert column_blocks(40, 2100, 4)[1] == 2048 and column_blocks(4, 2100, 4)[1] == 1024
    small.check_gate(CPU, 40, 2100, torch.float32, "silu", 0)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_extreme_gates():
    gate_up = torch.tensor([[200.0, -200.0, 0.0, 1e-4, -1e-4, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    gate = gate_up[0, :6].double()
    for activation in ("silu", "gelu", "gelu_tanh"):
        out = torch.empty(1, 6)
        small.triton(small.gate_mul)(out, gate_up, activation)
        exact = {"silu": gate * torch.sigmoid(gate)}.get(
            activation, torch.nn.functional.gelu(gate, approximate="tanh" if "_" in activation else "none")
        )
        torch.testing.assert_close(out[0].double(), exact, rtol=2e-6, atol=1e-30)


SHAPES = [  # queries, keys, dim, of it rotated
    (1, 1, 16, 16),
    (4, 2, 20, 20),
    (5, 1, 24, 8),
    (9, 3, 64, 64),
    (7, 1, 80, 80),
    (14, 2, 96, 24),
    (2, 2, 112, 112),
    (28, 4, 128, 128),
    (3, 3, 64, 0),
    (2, 1, 256, 64),
    (2, 1, 192, 192),
    (17, 1, 18, 14),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), SHAPES)
def test_rope_kv_write(heads, kv_heads, dim, rotary):
    for seed, (dtype, kind) in enumerate(product(small.DTYPES, ((False, 0.0), (True, 0.0), (True, 1.0)))):
        small.check_rope(CPU, (1, 2, 3)[seed % 3], heads, kv_heads, dim, rotary, *kind, dtype, seed)


def test_rope_of_many_tokens():
    """Enough for the coarser of its two launches."""
    assert heads_launch(70, 9, 16, 4)[0] == 16 and heads_launch(30, 9, 16, 4)[0] == 8
    small.check_rope(CPU, 70, 6, 3, 16, 16, True, 0.0, torch.float32, 0)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 20])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_decode_inputs(rows, block_size, monkeypatch):
    monkeypatch.setattr(gpu_inputs, "BLOCK", 8)
    for run in (small.triton(decode_inputs), decode_inputs.reference):
        for seed, (diffs, used) in enumerate([(0, 0), (1, 0), (1, 1), (7, 3), (8, 8), (17, 9), (24, 17)]):
            small.check_decode_inputs(run, CPU, rows, diffs, used, 11, 5, block_size, seed)


def test_a_row_reads_the_block_that_its_step_brings():
    """The diff of the very column that the row's position is in."""
    tables = torch.zeros(3, 4, dtype=torch.int32)
    staged = torch.tensor([1, 5, 35, 2, 2, 2, 9], dtype=torch.int32)  # slot 2, position 35: column 2 becomes block 9
    out = [torch.zeros(1, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)]
    for run in (small.triton(decode_inputs), decode_inputs.reference):
        tables.zero_()
        run(*out, tables, staged, torch.zeros(3, dtype=torch.int64), 16)
        assert [int(o) for o in out] == [5, 35, 36, 9 * 16 + 3, 2]


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 20])
def test_remember(rows, monkeypatch):
    monkeypatch.setattr(gpu_inputs, "BLOCK", 8)
    for run in (small.triton(remember), remember.reference):
        for dtype in (torch.int32, torch.int64):
            small.check_remember(run, CPU, rows, dtype, rows)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 127, 128, 129, 700])
def test_greedy(width, monkeypatch):
    monkeypatch.setattr(gpu_greedy, "BLOCK", 64)
    monkeypatch.setattr(gpu_greedy, "LEAST", 64)
    for rows in (1, 40) if width == 129 else (1, 10):  # 40: too many to split
        small.check_greedy(CPU, rows, width, rows)


def test_launches_cover_every_row():
    """Parts of rows, runs of columns and tiles of rows, from their sizes alone."""
    for rows, width, sms in product((1, 2, 7, 64, 256, 1024, 3000), (1, 2047, 2048, 2049, 50_257, 152_064, 262_144), (4, 132)):
        parts, share = gpu_greedy.parts_launch(rows, width, sms)
        assert share % gpu_greedy.BLOCK == 0 and (parts - 1) * share < width <= parts * share
        assert rows * parts <= max(rows, 8 * sms + rows)
        programs, block, warps = column_blocks(rows, width, sms)
        assert programs * block >= rows * width and warps in (1, 2, 4)
        programs, block, together, warps = norm_launch(rows, min(width, 16_384))
        assert programs == -(-rows // together) and warps in (1, 2, 4, 8, 16) and block >= min(width, 16_384)


def test_costs_by_hand():
    outs = [torch.empty(8, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)]
    tables, last = torch.empty(20, 30, dtype=torch.int32), torch.empty(20, dtype=torch.int64)
    staged = torch.empty(1 + 3 * 8 + 3 * 5, dtype=torch.int32)
    # five outputs, the staged array, and of each row a block and a last id
    assert decode_inputs.cost(*outs, tables, staged, last, 16) == Cost(activations=8 * (3 * 8 + 2 * 4) + 4 * 40 + 8 * (4 + 8))
    assert remember.cost(last, outs[4], outs[0]) == Cost(activations=8 * (4 + 8 + 8))


def test_they_are_for_cuda():
    x, ids = torch.zeros(2, 2, 8), torch.zeros(2, dtype=torch.int64)
    operands = {
        small.rms_norm: (x[0], x[0], x[0, 0], 1e-5, 0.0),
        small.add: (x[0], x[0], 1.0),
        small.gate_mul: (x[0], x[0], "silu"),
        small.finish_logits: (x[0], x[0], 1.0, 0.0),
        small.embedding: (x[0], ids, x[0], 1.0),
        small.gather_rows: (x[0], x[0], ids),
        small.rope_kv_write: (x, x[:, 1:], x[:, 1:], x[:, 1:], ids, None, None, None, None, 1e-5, 0.0),
        small.greedy: (ids, x[0]),
        remember: (ids, ids, ids),
        decode_inputs: (ids, ids, ids, ids, ids, ids, ids, ids, 16),
    }
    for op, some in operands.items():
        assert not next(i for i in op.implementations if i.name == "triton").accepts(*some)


def test_the_first_kernel_of_a_step_waits_before_it_lets_others_begin():
    """gpu/attention_decode.py reads lengths and tables before it waits: they are there because of this order."""
    from flatout.kernels.gpu import embedding

    text = inspect.getsource(embedding._gather.fn)
    assert 0 < text.index("gdc_wait()") < text.index("gdc_launch_dependents()")
