"""The small kernels on CUDA at real sizes: against float64; alone and in a crowd; in a captured chain of dependent launches."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    import small_kernels as small

    from flatout.kernels.inputs import FROM_DEVICE, decode_inputs, remember

CUDA = torch.device("cuda")


@pytest.mark.parametrize("width", [64, 576, 2048, 3584, 5120, 8191, 16_384])
def test_rms_norm(width):
    for seed, (dtype, offset, in_place) in enumerate(product(small.DTYPES, (0.0, 1.0), (False, True))):
        for rows in (1, 7, 300, 8000 if width < 4096 else 1100):
            small.check_norm(CUDA, rows, width, dtype, offset, in_place, seed)


@pytest.mark.parametrize("width", [255, 1024, 8192, 18_944])
def test_elementwise(width):
    for seed, (dtype, rows) in enumerate(product(small.DTYPES, (1, 7, 300, 2000))):
        for activation in ("silu", "gelu", "gelu_tanh"):
            small.check_gate(CUDA, rows, width, dtype, activation, seed)
        small.check_add(CUDA, rows, width, dtype, 0.4, seed)
        for scale, softcap in ((1.0, 0.0), (2.0, 30.0)):
            small.check_finish(CUDA, rows, width, dtype, scale, softcap, seed)


@pytest.mark.parametrize("width", [64, 100, 256, 2048, 3584])
def test_rows(width):
    for seed, (dtype, rows) in enumerate(product(small.DTYPES, (1, 7, 300, 8000))):
        small.check_rows(CUDA, rows, width, dtype, 55.5, seed)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [
        (28, 4, 128, 128),
        (32, 8, 64, 64),
        (9, 3, 64, 64),
        (14, 2, 64, 64),
        (1, 1, 16, 16),
        (32, 32, 80, 32),
        (32, 8, 96, 96),
        (24, 2, 112, 112),
        (8, 4, 256, 256),
        (16, 2, 256, 64),
        (3, 1, 18, 14),
        (64, 8, 128, 0),
    ],
)
def test_rope_kv_write(heads, kv_heads, dim, rotary):
    for seed, (dtype, kind) in enumerate(product(small.DTYPES, ((False, 0.0), (True, 0.0), (True, 1.0)))):
        for tokens in (1, 2, 65, 256, 4000):
            small.check_rope(CUDA, tokens, heads, kv_heads, dim, rotary, *kind, dtype, seed)


@pytest.mark.parametrize("rows", [1, 2, 64, 255, 1024])
def test_decode_inputs_and_remember(rows):
    for run in (small.triton(decode_inputs), decode_inputs.reference):
        for seed, (diffs, used) in enumerate([(130, 0), (130, 130), (2 * rows + 128, rows), (2176, 2100)]):
            small.check_decode_inputs(run, CUDA, rows, diffs, used, 1025, 40, 16, seed)
    for run in (small.triton(remember), remember.reference):
        for dtype in (torch.int32, torch.int64):
            small.check_remember(run, CUDA, rows, dtype, rows)


@pytest.mark.parametrize("width", [1, 1000, 49_152, 50_257, 152_064, 262_144])
def test_greedy(width):
    for rows in (1, 2, 11, 64, 300):
        small.check_greedy(CUDA, rows, width, rows)


def test_greedy_finds_a_peak_anywhere():
    """At the ends of steps, parts and rows."""
    width = 152_064
    places = [0, 1, 2047, 2048, 4095, 4096, 76_031, 76_032, 149_504, width - 2049, width - 1]
    for rows in (1, 3, 100, 1200):
        logits = torch.randn(rows, width, device=CUDA)
        ids = torch.empty(rows, dtype=torch.int64, device=CUDA)
        expected = torch.tensor([places[row % len(places)] for row in range(rows)], device=CUDA)
        for shift in range(len(places)):
            chosen = expected.roll(shift) if rows > 1 else torch.tensor([places[shift]], device=CUDA)
            kept = logits.gather(1, chosen.unsqueeze(1))
            logits.scatter_(1, chosen.unsqueeze(1), 50.0)
            small.triton(small.greedy)(ids, logits)
            logits.scatter_(1, chosen.unsqueeze(1), kept)
            assert torch.equal(ids, chosen)


def rotated(qkv, heads, kv_heads, dim, rope, weights):
    """(queries and keys, both caches) of one rope_kv_write over a copy of qkv."""
    by_head = qkv.clone().view(qkv.shape[0], heads + 2 * kv_heads, dim)
    caches = [torch.zeros(qkv.shape[0], kv_heads, dim, dtype=qkv.dtype, device=CUDA) for _ in range(2)]
    cos, sin = (part.unsqueeze(1) for part in rope.chunk(2, 1))
    slots = torch.arange(qkv.shape[0], device=CUDA)
    run = small.triton(small.rope_kv_write)
    run(by_head[:, :-kv_heads], by_head[:, -kv_heads:], *caches, slots, cos, sin, *weights, 1e-6, 0.0)
    return by_head, *caches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_alone_equals_the_row_in_a_crowd(dtype):
    """Bit for bit: few and many rows run in different launches."""
    rows, some = 6000, (0, 1, 2999, 5999)
    for width in (64, 3584):
        x, weight = small.random(0, rows, width, dtype=dtype, device=CUDA), small.random(1, width, dtype=dtype, device=CUDA)
        crowd, alone = torch.empty_like(x), torch.empty_like(x[:1])
        small.triton(small.rms_norm)(crowd, x, weight, 1e-6, 0.0)
        for i in some:
            small.triton(small.rms_norm)(alone, x[i : i + 1], weight, 1e-6, 0.0)
            assert torch.equal(alone[0], crowd[i])
    gate_up = small.random(2, rows, 2 * 8192, dtype=dtype, device=CUDA)
    crowd, alone = torch.empty(rows, 8192, dtype=dtype, device=CUDA), torch.empty(1, 8192, dtype=dtype, device=CUDA)
    for activation in ("silu", "gelu", "gelu_tanh"):
        small.triton(small.gate_mul)(crowd, gate_up, activation)
        for i in some:
            small.triton(small.gate_mul)(alone, gate_up[i : i + 1], activation)
            assert torch.equal(alone[0], crowd[i])
    for heads, kv_heads, dim in ((28, 4, 128), (32, 8, 64), (8, 4, 256), (6, 2, 96)):
        qkv = small.random(3, rows, (heads + 2 * kv_heads) * dim, dtype=dtype, device=CUDA)
        rope = small.random(4, rows, 2 * dim, dtype=dtype, device=CUDA)
        weights = [small.random(5 + i, dim, dtype=dtype, device=CUDA) for i in range(2)]
        crowd = rotated(qkv, heads, kv_heads, dim, rope, weights)
        for i in some:
            alone = rotated(qkv[i : i + 1], heads, kv_heads, dim, rope[i : i + 1], weights)
            assert all(torch.equal(one[0], all_[i]) for one, all_ in zip(alone, crowd))


class Chain:
    """Decode steps of a toy: inputs, embedding, rope rows, two layers of norm, rope with cache writes and gate, logits by a table, choice.
    Every op's operands come from the op before, so a launch that reads too early shows in the buffers."""

    VOCAB, HEADS, KV_HEADS, DIM, INNER, BLOCK, COLUMNS = 5000, 28, 4, 128, 4096, 16, 8

    def __init__(self, rows: int):
        heads, width = self.HEADS + 2 * self.KV_HEADS, self.HEADS * self.DIM
        make = {"dtype": torch.bfloat16, "device": CUDA}
        self.embed, self.qkv_rows = (small.random(i, self.VOCAB, n, **make) for i, n in enumerate((width, heads * self.DIM)))
        self.gate_rows = small.random(2, self.VOCAB, 2 * self.INNER, **make)
        self.next = small.integers(3, 0, self.VOCAB, self.VOCAB, device=CUDA)
        self.logit_rows = torch.randn(self.VOCAB, self.VOCAB, device=CUDA).scatter_(1, self.next.unsqueeze(1), 30.0)
        self.rope_table = small.random(4, self.COLUMNS * self.BLOCK, 2 * self.DIM, **make)
        self.weight, self.head_weight = small.random(5, width, **make), small.random(6, self.DIM, **make)
        slots, cells = rows + 3, (rows + 3) * self.COLUMNS
        _, self.staged, last = small.staged_step(7, rows, 2 * rows + 128, rows, slots, self.COLUMNS, self.BLOCK, CUDA)
        self.staged[1 : 1 + rows] = FROM_DEVICE
        # no block twice: two rows that write one slot would leave either's keys there
        self.staged[1 + 3 * rows :].view(3, -1)[2, :rows] = torch.arange(cells, cells + rows, device=CUDA)
        self.last, self.tables = last % self.VOCAB, torch.arange(cells, dtype=torch.int32, device=CUDA).view(slots, self.COLUMNS)
        ints = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)
        self.inputs = [torch.zeros(rows, dtype=dtype, device=CUDA) for dtype in ints]
        self.stream, self.normed = (torch.zeros(rows, width, **make) for _ in range(2))
        self.qkv, self.rope = torch.zeros(rows, heads * self.DIM, **make), torch.zeros(rows, 2 * self.DIM, **make)
        self.caches = [torch.zeros((cells + rows) * self.BLOCK, self.KV_HEADS, self.DIM, **make) for _ in range(4)]
        self.gate_up, self.act = torch.zeros(rows, 2 * self.INNER, **make), torch.zeros(rows, self.INNER, **make)
        self.logits, self.ids = torch.zeros(rows, self.VOCAB, device=CUDA), torch.zeros(rows, dtype=torch.int64, device=CUDA)

    def state(self) -> list[torch.Tensor]:
        return [
            self.last,
            self.tables,
            *self.inputs,
            self.stream,
            self.normed,
            self.qkv,
            self.rope,
            *self.caches,
            self.act,
            self.logits,
            self.ids,
        ]

    def step(self, pause=lambda: None) -> None:
        tokens, positions, _, kv_slots, table_rows = self.inputs
        by_head = self.qkv.view(self.qkv.shape[0], -1, self.DIM)
        cos, sin = (part.unsqueeze(1) for part in self.rope.chunk(2, 1))
        norms = (self.head_weight, self.head_weight, 1e-6, 0.0)
        calls = [
            (decode_inputs, *self.inputs, self.tables, self.staged, self.last, self.BLOCK),
            (small.embedding, self.stream, tokens, self.embed, 1.0),
            (small.gather_rows, self.rope, self.rope_table, positions),
        ]
        for k_cache, v_cache in (self.caches[:2], self.caches[2:]):
            calls += [
                (small.rms_norm, self.normed, self.stream, self.weight, 1e-6, 0.0),
                (small.gather_rows, self.qkv, self.qkv_rows, tokens),
                (small.add, self.qkv[:, : self.normed.shape[1]], self.normed, 1.0),
                (
                    small.rope_kv_write,
                    by_head[:, : -self.KV_HEADS],
                    by_head[:, -self.KV_HEADS :],
                    k_cache,
                    v_cache,
                    kv_slots,
                    cos,
                    sin,
                    *norms,
                ),
                (small.add, self.stream, self.qkv[:, : self.normed.shape[1]], 0.5),
                (small.gather_rows, self.gate_up, self.gate_rows, tokens),
                (small.add, self.gate_up[:, : self.normed.shape[1]], self.stream, 1.0),
                (small.gate_mul, self.act, self.gate_up, "silu"),
                (small.add, self.stream, self.act[:, : self.normed.shape[1]], 1.0),
            ]
        calls += [
            (small.gather_rows, self.logits, self.logit_rows, tokens),
            (small.greedy, self.ids, self.logits),
            (remember, self.last, table_rows, self.ids),
        ]
        for op, *operands in calls:
            small.triton(op)(*operands)
            pause()


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_a_captured_chain_equals_the_ops_one_by_one(rows):
    careful, captured = Chain(rows), Chain(rows)
    captured.logit_rows = careful.logit_rows
    expected = careful.last.clone()
    careful.step(torch.cuda.synchronize)
    captured.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
        captured.step()
    for _ in range(10):
        graph.replay()
        for _ in range(2):
            careful.step(torch.cuda.synchronize)
    for a, b in zip(captured.state(), careful.state()):
        assert torch.equal(a, b)
    slots = careful.inputs[4].long()
    for _ in range(21):
        expected[slots] = careful.next[expected[slots]]
    assert torch.equal(captured.last, expected)
