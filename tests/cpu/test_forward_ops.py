"""A forward is a flat list of ops: nothing else computes, and on meta tensors the list tells bytes and FLOPs before a weight exists."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make
from network import Network, Sequence, build, load
from paths import DATA
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.attention.sdpa import TorchBackend
from flatout.batch import ForwardBatch, HostBatch
from flatout.kernels.op import Recorder, recording
from flatout.modelfile.hf_spec import spec_from_hf
from flatout.modelfile.spec import LayerSpec, ModelSpec, RopeSpec

META = torch.device("meta")


class OnlyViews(TorchDispatchMode):
    """Refuses tensor operations outside an op, views aside."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self.views = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.recorder.inside:
            assert func.is_view, f"{func} outside an op"
            self.views += 1
        return func(*args, **(kwargs or {}))


def run_pure(network: Network, rows: list) -> Recorder:
    batch, host = network.batch(rows)
    network.backend.plan(batch, host)
    with recording() as recorder, OnlyViews(recorder) as mode:
        hidden = network.decoder.forward(batch)
        network.decoder.logits(hidden, batch.sample_rows)
    assert mode.views
    return recorder


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_forward_calls_only_ops_and_views(tmp_path, family):
    network = load(make(family, tmp_path))
    sequence = Sequence()
    run_pure(network, [(sequence, list(range(3, 14)))])
    sequence.length = 11
    recorder = run_pure(network, [(Sequence(), [5]), (sequence, [6, 7])])
    assert {"embedding", "rope_kv_write", "attention", "gather_rows"} <= {e.op for e in recorder.entries}


def test_the_purity_check_can_fail(tmp_path):
    network = load(make("llama", tmp_path))
    embed = network.decoder.embed
    network.decoder.embed = lambda out, ids: (embed(out, ids), out.mul_(1.0))
    with pytest.raises(AssertionError, match=r"mul_.*outside an op"):
        run_pure(network, [(Sequence(), [5])])


def price(spec: ModelSpec, rows: list[tuple[int, int]], dtype=torch.bfloat16, block_size: int = 16) -> Recorder:
    """The ops of a step on meta tensors; rows: (cached before, new), the last token of each sampled."""
    decoder = build(spec, max_model_len=4096, dtype=dtype, device=META, max_tokens=2048)
    backend = TorchBackend(spec, block_size)
    decoder.bind(backend.allocate_kv(spec, 600, block_size, dtype, META))
    q_lens, kv_lens = (np.array(x, np.int32) for x in zip(*((new, before + new) for before, new in rows)))
    table = np.zeros((len(rows), kv_lens.max() // block_size + 1), np.int32)

    def meta(n: int, dtype=torch.int64):
        return torch.empty(n, dtype=dtype, device=META)

    tokens, groups = int(q_lens.sum()), len(spec.cache_groups())
    batch = ForwardBatch(
        meta(tokens),
        meta(tokens),
        meta(len(rows) + 1, torch.int32),
        meta(len(rows), torch.int32),
        (torch.empty(table.shape, dtype=torch.int32, device=META),) * groups,
        meta(len(rows), torch.int32),
        (meta(tokens),) * groups,
        meta(len(rows)),
    )
    backend.plan(batch, HostBatch(q_lens, kv_lens, (table,) * groups))
    with recording(execute=False) as recorder:
        decoder.logits(decoder.forward(batch), batch.sample_rows)
    return recorder


def tiny(window: int | None = None, **overrides) -> ModelSpec:
    """2 layers, hidden 32, 4 heads on 2 of 8 dims, intermediate 48, vocabulary 100."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48}
    return ModelSpec(
        "x",
        "llama",
        layers=(LayerSpec(), LayerSpec(window=window)),
        ropes=(RopeSpec(base=10000.0, dim=8),),
        max_position=4096,
        norm_eps=1e-5,
        **{**sizes, **overrides},
    )


PRODUCTS = ("linear", "linear_add", "norm_linear", "norm_gated")
# parameters of one layer's products (qkv, o, gate and up, down), of all norms, of the head
LAYER, NORMS, HEAD = 32 * (32 + 16 + 16) + 32 * 32 + 32 * 96 + 48 * 32, 5 * 32, 3200


@pytest.mark.parametrize("rows", ([(0, 1)], [(40, 1), (7, 1), (0, 1)], [(0, 20), (33, 10), (5, 1)]), ids=("one", "decode", "mixed"))
@pytest.mark.parametrize("window", (None, 8))
def test_cost_of_a_step_by_hand(rows, window):
    recorder = price(tiny(window), rows)
    total = recorder.total()
    tokens, sampled = sum(new for _, new in rows), len(rows)
    assert total.weights == 2 * (2 * LAYER + NORMS + HEAD + tokens * 32)  # and the embedding's rows
    seen = [[min(before + new, limit + new - 1) for before, new in rows] for limit in (10**9, window or 10**9)]
    assert total.kv == 2 * 2 * 16 * (2 * tokens + sum(map(sum, seen)))  # k and v written in 2 layers, read as far as a query sees
    pairs = sum(min(p + 1, limit) for limit in (10**9, window or 10**9) for before, new in rows for p in range(before, before + new))
    products = 2 * (tokens * 2 * LAYER + sampled * HEAD)
    attention = 4 * pairs * 32
    by_op = {
        name: sum(e.cost.flops for e in recorder.entries if e.op in ops)
        for name, ops in {"products": PRODUCTS, "attention": ("attention",)}.items()
    }
    beside = 2 * tokens * (2 * (4 * 32 + 2 * 32) + 5 * 48) + 4 * sampled * 32  # norms, additions to the stream, gates
    assert by_op == {"products": products + beside, "attention": attention}
    qkv = next(e for e in recorder.entries if e.op in PRODUCTS)
    assert qkv.cost.activations == 2 * tokens * (32 + 64)


def test_qwen2_7b_reads_14_gigabytes_a_token():
    spec = spec_from_hf(json.loads((DATA / "qwen2-7b.json").read_text()))
    recorder = price(spec, [(512, 1)])
    products = sum(e.cost.weights for e in recorder.entries if e.op in PRODUCTS)
    biases, norms = 28 * (3584 + 2 * 512), 57 * 3584
    assert products == 2 * (28 * (3584 * 4608 + 3584 * 3584 + 3 * 3584 * 18944) + biases + norms + 152064 * 3584)
    embedding_row = 2 * 3584
    assert recorder.total().weights == products + embedding_row
    assert round((recorder.total().weights - embedding_row) / 1e9, 2) == 14.14
    assert recorder.total().kv == 56 * 1024 * (513 + 1)


def test_weight_bytes_are_those_that_a_step_reads():
    """All of the head, and of an embedding that is not the head a few rows."""
    for tied in (False, True):
        assert build(tiny(tie_embeddings=tied), device=META).weight_bytes() == 4 * (2 * LAYER + NORMS + HEAD)
