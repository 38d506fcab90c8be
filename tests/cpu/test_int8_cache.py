"""Keys and values as int8: what a head becomes, attention to it on every instruction set against float64, its bytes, and whole models that keep it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_rows import case_of, plan_of, spec_of
from checkpoints import make
from hypothesis import given, settings
from hypothesis import strategies as st
from test_identity import preempting

from flatout import LLM, SamplingParams
from flatout.attention import sdpa
from flatout.attention.sdpa import TorchBackend
from flatout.cli.figures import kv_head_bytes
from flatout.doctor.selfcheck import ROUNDED, selfcheck
from flatout.kernels import native
from flatout.kernels.attention import InPlace, Pieces, attention
from flatout.kernels.kv import LEAST, head_dim, pack, stored, unpack
from flatout.kernels.rope import rope_kv_write

needs_library = pytest.mark.skipif(not native.available(), reason="the native library was not built")
NEW = 12


# -- what a head becomes -------------------------------------------------------------------------------------------------------


def test_a_head_is_codes_and_their_scale():
    torch.manual_seed(0)
    values = torch.randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    held = pack(values, torch.int8)
    assert held.shape == (50, 3, 68) and held.dtype == torch.int8 and head_dim(held) == 64
    scale = values.abs().amax(-1, keepdim=True).double() / 127
    assert ((unpack(held, torch.float64) - values.double()).abs() <= scale * 0.500001).all()
    assert held[..., :64].abs().amax(-1).eq(127).all(), "the largest value has the largest code"


def test_ties_go_to_even_and_the_smallest_to_zero():
    row = torch.tensor([127.0, 0.5, 1.5, -2.5])
    assert unpack(pack(row, torch.int8), torch.float32).tolist() == [127.0, 0.0, 2.0, -2.0]
    assert unpack(pack(torch.full((4,), LEAST * 100), torch.int8), torch.float32).eq(0).all()
    assert unpack(pack(torch.zeros(4), torch.int8), torch.float32).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_head_alone(bad):
    values = torch.randn(2, 3, 16)
    values[1, 2, 7] = bad
    found = unpack(pack(values, torch.int8), torch.float32)
    assert found[1, 2].isnan().all() and found.isnan().sum() == 16


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_writes_the_same_bytes(isa, dtype):
    torch.manual_seed(1)
    for heads, kv_heads, dim in ((9, 3, 64), (4, 2, 80), (2, 1, 16), (3, 1, 256)):
        fused = (torch.randn(20, heads + 2 * kv_heads, dim) * torch.logspace(-35, 30, 20)[:, None, None]).to(dtype)
        fused[3], fused[4, heads, 2], fused[5, heads + kv_heads, 1] = 0, math.nan, math.inf
        slots, found = torch.randperm(40)[:20], []
        for run in (rope_kv_write.reference, native.rotate):
            rows, caches = fused.clone(), [torch.zeros(40, kv_heads, stored(dim, torch.int8), dtype=torch.int8) for _ in "kv"]
            run(rows[:, : heads + kv_heads], rows[:, heads + kv_heads :], *caches, slots, None, None, None, None, 1e-5, 0.0)
            found.append(caches)
        for one, other in zip(*found):
            assert torch.equal(one[..., :dim], other[..., :dim])
            assert torch.equal(*(unpack(part, torch.float32).nan_to_num(7.0) for part in (one, other)))


# -- attention -----------------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_shape(isa, dtype):
    """Single queries where keys lie, chunks beside them; on a cache whose other slots are NaN."""
    draw = np.random.default_rng(3)
    for seed in range(12):
        kv_heads, group, dim = int(draw.integers(1, 4)), int(draw.integers(1, 9)), int(draw.choice([16, 48, 64, 80, 128, 256]))
        window, softcap = [None, None, 1, 7, 300][draw.integers(5)], float(draw.choice([0, 0, 30]))
        lengths = [int(draw.choice([1, 15, 16, 17, 63, 64, 65, 300])) for _ in range(draw.integers(1, 5))]
        rows = [(length - 1, 1) for length in lengths] + ([(3, 4)] if seed % 3 == 0 else [])
        found = []
        for threads in (1, 2):
            native.set_threads(threads)
            case = case_of(rows, spec_of(kv_heads * group, kv_heads, dim, window, softcap), dtype, seed=seed, cache=torch.int8)
            work = plan_of(case.spec, rows, case.table, dtype, cache=torch.int8)
            assert isinstance(work.arrangement, InPlace)
            found.append(case.run(attention, work))
            case.holds(found[-1])
        assert torch.equal(*found), "whatever the threads"


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 70))), min_size=1, max_size=5),
    heads=st.sampled_from(((1, 1), (4, 2), (9, 3), (14, 2), (18, 2))),
    dim=st.sampled_from((16, 20, 32, 64, 96)),
    window=st.sampled_from((None, None, 1, 5, 64)),
    softcap=st.sampled_from((0.0, 0.0, 2.0)),
    consecutive=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    library=st.booleans(),
    seed=st.integers(0, 9),
)
def test_steps_of_every_shape(rows, heads, dim, window, softcap, consecutive, dtype, library, seed):
    """As planned, by the library or as without it, and by the reference: float32 stays float32 in every one of them."""
    case = case_of(rows, spec_of(*heads, dim, window, softcap), dtype, consecutive, seed, cache=torch.int8)
    with pytest.MonkeyPatch.context() as patch:
        if not library:
            patch.setattr(sdpa, "in_place_runs", lambda *_: False)
            patch.setattr(native, "has_tiles", lambda: False)
        work = plan_of(case.spec, rows, case.table, dtype, cache=torch.int8)
        assert library or isinstance(work.arrangement, Pieces)
        for run in (attention, attention.reference):
            case.holds(case.run(run, work))


@pytest.mark.skipif(not native.has_tiles(), reason="needs AMX and the native library")
@pytest.mark.parametrize("seed", range(30))
def test_chunks_by_tiles(seed):
    """Float32 queries within a few roundings of float32; bfloat16 ones as other caches' are."""
    rng = np.random.default_rng(seed)
    count, before = int(rng.choice([1, 2, 31, 32, 33, 64, 65, 130])), int(rng.choice([0, 1, 31, 100, 300]))
    kv_heads, group, dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 8])), int(rng.choice([32, 64, 96, 256]))
    dtype = torch.bfloat16 if seed % 3 == 2 else torch.float32
    spec = spec_of(kv_heads * group, kv_heads, dim, [None, None, 1, 32, 70, 1000][seed % 6])
    case = case_of([(before, count)], spec, dtype, bool(seed % 2), seed, cache=torch.int8)
    slots = torch.from_numpy((case.table[0][:, None] * 4 + np.arange(4)).reshape(-1)[: before + count]).long()
    where = (int(slots[0]), int(slots[0]) + before + count) if seed % 2 else slots
    found = []
    for threads in (1, 3):
        native.set_threads(threads)
        out = torch.full(case.expected.shape, math.nan, dtype=dtype)
        native.chunk(out, case.q, case.k_cache, case.v_cache, where, spec.layers[0].window, spec.softmax_scale)
        assert (out.double() - case.expected).abs().max() < (6e-6 if dtype == torch.float32 else 0.03)
        found.append(out)
    native.set_threads(1)
    assert torch.equal(*found), "whatever the threads"


@needs_library
def test_a_row_has_the_same_bits_alone_and_in_company(isa):
    rows = [(599, 1), (9, 1), (300, 1)]
    spec = spec_of(6, 2, 64, None)
    case = case_of(rows, spec, torch.float32, cache=torch.int8)
    native.set_threads(2)
    together = case.run(attention, plan_of(spec, rows, case.table, torch.float32, cache=torch.int8))
    for index, row in enumerate(rows):
        work = plan_of(spec, [row], case.table[index : index + 1], torch.float32, cache=torch.int8)
        alone = torch.empty_like(together[:1])
        attention(alone, case.q[index : index + 1], case.k_cache, case.v_cache, work, spec.softmax_scale, 0.0)
        assert torch.equal(alone[0], together[index])


# -- bytes ---------------------------------------------------------------------------------------------------------------------


def test_what_it_takes_is_counted():
    """Blocks, an op's cost and the figures agree on dim + 4 bytes for a head's key or value."""
    rows, spec = [(19, 1), (3, 4)], spec_of(4, 2, 64, None)
    backend = TorchBackend(spec, 16, torch.float32)
    ((k_cache, v_cache),) = backend.allocate_kv(spec, 3, 16, torch.int8, torch.device("cpu"))
    assert backend.kv_bytes_per_block(spec, 16, torch.int8) * 3 == k_cache.nbytes + v_cache.nbytes == 3 * 16 * 2 * 2 * 68
    case = case_of(rows, spec, torch.float32, cache=torch.int8)
    work = plan_of(spec, rows, case.table, torch.float32, cache=torch.int8)
    cost = attention.cost(case.expected, case.q, case.k_cache, case.v_cache, work, 1.0, 0.0)
    assert cost.kv == 27 * 2 * 2 * 68 and cost.flops == 4 * (20 + 4 + 5 + 6 + 7) * 4 * 64
    qk, value = torch.zeros(5, 6, 64), torch.zeros(5, 2, 64)
    written = rope_kv_write.cost(qk, value, case.k_cache, case.v_cache, torch.arange(5), None, None, None, None, 1e-5, 0.0)
    assert written.kv == 5 * 2 * 2 * 68


# -- models --------------------------------------------------------------------------------------------------------------------

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(5, 250, n).tolist() for n in (40, 3, 17, 24)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("int8_cache"))


def build(checkpoint, **options) -> LLM:
    given = {"dtype": "float32", "kv_cache_dtype": "int8", "block_size": 8, "max_num_seqs": 8, "max_model_len": 128, "device": "cpu"}
    return LLM(str(checkpoint), **{**given, **options})


def tokens_of(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each prompt by itself, whole, without a prefix cache or captured steps."""
    with build(checkpoint, enable_prefix_caching=False, async_scheduling=False, enforce_eager=True) as llm:
        return [tokens_of(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("preempt", [False, True], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 11}, {"enforce_eager": True}], ids=["whole", "chunked", "eager"])
def test_the_same_tokens_whatever_the_steps(checkpoint, alone, options, preempt):
    """In float32: in chunks, in company, from the prefix cache, after a preemption, by programs or op by op."""
    with build(checkpoint, **options) as llm:
        with preempting(llm, preempt):
            results = llm.generate(PROMPTS, [GREEDY] * len(PROMPTS))
        assert tokens_of(results) == alone
        assert (results[0].preemptions > 0) == preempt
        again = llm.generate(PROMPTS[:1], GREEDY)
        assert tokens_of(again) == alone[:1] and again[0].cached_tokens == 32


def test_the_pool_holds_more_and_says_of_what(checkpoint):
    pools, lines = {}, {}
    for kind in ("int8", "float32"):
        with build(checkpoint, kv_cache_dtype=kind, kv_cache_memory_bytes=1 << 20) as llm:
            pools[kind], lines[kind] = llm.facts.pool_tokens, "\n".join(llm.start_lines)
            dim, heads, layers = llm.spec.head_dim, llm.spec.num_kv_heads, llm.spec.num_layers
            assert pools[kind] == (1 << 20) // (8 * 2 * layers * heads * kv_head_bytes(llm)) * 8
            assert kv_head_bytes(llm) == (dim + 4 if kind == "int8" else 4 * dim)
    assert pools["int8"] > 2 * pools["float32"]
    assert "GiB of int8 with a scale for each token and head" in lines["int8"] and "GiB of float32 (" in lines["float32"]


def test_selfcheck_shows_its_error(checkpoint):
    outcome = selfcheck(
        {"model": str(checkpoint), "dtype": "float32", "kv_cache_dtype": "int8", "max_model_len": 128, "device": "cpu"}, most=2
    )
    said = outcome.to_json()
    assert said["arithmetic"]["kv_cache_dtype"] == "int8" and said["limits"]["max_error_share"] == ROUNDED.error
    assert 1e-5 < said["total"]["logit_error_rms_share"] < ROUNDED.error and not said["greedy"]["promised"]
