"""Cost tables against what real steps record, for every family and way to hold weights; and against arithmetic done by hand."""

from dataclasses import replace

import checkpoints
import pytest
import transformers

from flatout import LLM, SamplingParams
from flatout.config import ModelConfig
from flatout.kernels import native
from flatout.kernels.op import Cost
from flatout.ledger.roofs import DATA_SHEETS, data_sheet
from flatout.ledger.table import CostTable, OpBytes, Roof, StepShape, shape_of
from flatout.modelfile.hf_spec import spec_from_hf
from flatout.modelfile.sources import resolve_model
from flatout.modelfile.spec import ModelSpec
from flatout.models.load import kept_packed
from flatout.runner.clock import StepClock
from flatout.runner.costs import cost_table

NOWHERE = Roof("nowhere", ())


def table_of(spec: ModelSpec, **changed) -> CostTable:
    options = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "packed": {}, "runs_on": "cuda", **changed}
    return cost_table(spec, name="tested", roof=NOWHERE, **options)


def decode(contexts: list[int], windows=(None,)) -> StepShape:
    """A step in which each of these contexts, its new token included, gets one more token."""
    keys = tuple(sum(min(length, window or length) for length in contexts) for window in windows)
    return StepShape(len(contexts), len(contexts), keys, keys, keys, len(contexts), len(contexts))


# -- against real steps ------------------------------------------------------------------------------------------------

WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "narrow KV": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
}


def config_folder(family: str, tmp_path, **overrides):
    name, own = checkpoints.FAMILIES[family]
    settings = {k: v for k, v in {**checkpoints.BASE, **own, **overrides}.items() if v is not None}
    getattr(transformers, name)(
        **settings, architectures=[ARCHITECTURES.get(family, name.replace("TextConfig", "Config").replace("Config", "ForCausalLM"))]
    ).save_pretrained(tmp_path)
    return tmp_path


CHOICE = ("greedy", "remember")  # the sampler's, after the logits
ARCHITECTURES = {"gemma3": "Gemma3ForCausalLM"}


def recorded_steps(llm: LLM, monkeypatch) -> list[tuple[StepShape, Cost, list[str]]]:
    """Shape of each step of a few requests whose prompts go in chunks beside decoding, with the ops up to its logits and their cost."""
    calls, record = [], StepClock.record

    def watched(self, op, args):
        calls.append((op.name, op.cost(*args)))
        record(self, op, args)

    monkeypatch.setattr(StepClock, "record", watched)
    runner, steps = llm.engine.runner, []
    launch = runner.launch

    def launched(plan):
        timed = launch(plan)()  # so that the calls are this plan's
        shape = shape_of(plan.starts, plan.counts, plan.samples, llm.engine.costs.windows)
        steps.append((shape, sum((cost for _, cost in calls), Cost()), [name for name, _ in calls]))
        calls.clear()
        return lambda: timed

    runner.launch = launched
    prompts = [[5 + i] * n for i, n in enumerate((45, 1, 3, 30))]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    return steps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_table_costs_steps_as_their_ops_do(family, way, tmp_path, monkeypatch):
    if way != "float32" and way != "bfloat16" and not native.available():
        pytest.skip("needs the native library")
    folder = config_folder(family, tmp_path)
    options = {"load_format": "dummy", "enforce_eager": True, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}
    try:
        llm = LLM(str(folder), **options, kv_cache_memory_bytes=1 << 20, **WAYS[way])
    except ValueError as refused:
        assert way == "narrow KV" and "--kv-cache-dtype" in str(refused)  # heads that the library does not attend
        pytest.skip(str(refused))
    with llm:
        steps, table = recorded_steps(llm, monkeypatch), llm.engine.costs
    assert {shape.sampled == shape.tokens for shape, *_ in steps} == {True, False}
    assert any(shape.sampled == 0 for shape, *_ in steps)
    for shape, cost, ops in steps:
        calls = [table.ops[i] for i in table.sequence if shape.rows(table.ops[i].rows)]
        assert len(calls) == table.calls(shape)
        assert ops == [op.name for op in calls if op.name not in CHOICE]
        choice = sum((op.cost(shape) for op in calls if op.name in CHOICE), OpBytes())
        assert table.cost(shape) == OpBytes(cost.weights, cost.kv, cost.activations, cost.flops) + choice


# -- against arithmetic done by hand -----------------------------------------------------------------------------------


def spec_of(**config) -> ModelSpec:
    return spec_from_hf(config, None, where="tested", notices=[])


QWEN2_7B = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944,
    num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6,
    hidden_act="silu", rope_theta=1e6, tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False,
)  # fmt: skip


def test_qwen2_7b_by_hand():
    table, context = table_of(spec_of(**QWEN2_7B)), 1000
    cost = table.cost(decode([context]))
    # a layer: q (28 heads), k and v (4 each) of 128 dims with biases, o, gate and up, down, two norms; bfloat16
    qkv, o, gate_up, down = (3584 + 512 + 512) * 3584, 3584 * 3584, 2 * 18944 * 3584, 3584 * 18944
    layer = qkv + 4608 + o + gate_up + down + 2 * 3584
    head, final_norm, embedding_row = 152064 * 3584, 3584, 3584
    assert cost.weights == 2 * (28 * layer + head + final_norm + embedding_row)
    assert cost.weights - 2 * embedding_row == 14_141_238_272  # 14.14 GB
    # each layer reads keys and values of the context, the new token's included, after it has written those
    assert cost.kv == 28 * (2 * 1000 * 512 * 2 + 2 * 512 * 2)
    # 2 a weight; a norm 4 an element, a bias none, rope 3, the residual's sum 2, the gate 5; attention 4 a pair and query element
    products = 2 * (28 * (qkv + o + gate_up + down) + head)
    around = 28 * (2 * 4 * 3584 + 3 * (28 + 4) * 128 + 2 * 2 * 3584 + 5 * 18944) + 4 * 3584
    assert cost.flops == products + around + 28 * 4 * context * 3584
    # read and written once: 2 bytes an element, ids and slots 8, logits 4
    embedding, rope_row = 2 * 3584 + 8, 2 * 2 * 256 + 8
    into_heads = 2 * (3584 + 4608) + 2 * (4096 + 512 + 256) + 8 + 2 * 3584  # the product; heads, values, cos and sin; queries back
    attention, onto = 2 * 2 * 3584, 2 * (2 * 3584 + 3584)
    feed_forward = 2 * (3584 + 18944) + 2 * (2 * 3584 + 18944)
    logits = 2 * 3584 + 4 * 152064 + (4 * 152064 + 8) + 24  # head, greedy, and the id kept for the next step
    assert cost.activations == embedding + rope_row + 28 * (into_heads + attention + onto + feed_forward) + logits


def test_a_prompt_of_qwen2_7b_leaves_only_keys_in_the_last_layer():
    table, tokens = table_of(spec_of(**QWEN2_7B)), 512
    pairs = tokens * (tokens + 1) // 2
    shape = StepShape(tokens, 1, (tokens,), (pairs,), (tokens,), 1)
    qkv, rest = 4608 * 3584, 3584 * 3584 + 3 * 18944 * 3584
    products = 2 * (tokens * (28 * qkv + 27 * rest) + rest + 152064 * 3584)
    around = tokens * (28 * (4 * 3584 + 3 * 32 * 128) + 27 * (4 * 3584 + 4 * 3584 + 5 * 18944))
    around += 8 * 3584 + 5 * 18944 + 4 * 3584  # the last layer's one row, and the final norm
    attention = 4 * 3584 * (27 * pairs + tokens)
    assert table.cost(shape).flops == products + around + attention
    # nobody asks for its tokens: neither the rest of the last layer nor the head is read
    silent = StepShape(tokens, 0, (tokens,), (pairs,), (0,), 1)
    assert table.cost(shape).weights - table.cost(silent).weights == 2 * (rest + 3584 + 152064 * 3584 + 3584)


MIXTRAL_8X7B = dict(
    architectures=["MixtralForCausalLM"], model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5,
    hidden_act="silu", rope_theta=1e6, tie_word_embeddings=False, torch_dtype="bfloat16", sliding_window=None,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip


@pytest.mark.parametrize("batch", [1, 4])
def test_mixtral_8x7b_by_hand(batch):
    cost = table_of(spec_of(**MIXTRAL_8X7B)).cost(decode([300] * batch))
    qkv, o, router, expert = (4096 + 1024 + 1024) * 4096, 4096 * 4096, 8 * 4096, 3 * 4096 * 14336
    met = {1: 2.0, 4: 8 * (1 - 0.75**4)}[batch]  # distinct experts of 8, of which each token has 2: 5.47 of 4 tokens
    layer = 2 * (qkv + o + router + 2 * 4096) + round(met * 2 * expert)
    assert cost.weights == 32 * layer + 2 * (32000 * 4096 + 4096 + batch * 4096)
    assert cost.kv == batch * 32 * (300 + 1) * 2 * 1024 * 2
    token = 2 * (qkv + o + router + 2 * expert)  # products with both experts' weights
    token += 4 * 4096 + 3 * 40 * 128 + 4 * 300 * 4096 + 2 * 4096  # norm, rope, attention, onto the stream
    token += 4 * 4096 + 5 * 8 + 2 * (5 * 14336 + 2 * 4096) + 2 * 4096  # norm, routing, gates and weighed sums, onto the stream
    assert cost.flops == batch * (32 * token + 2 * 32000 * 4096 + 4 * 4096)


GEMMA2_2B = dict(
    architectures=["Gemma2ForCausalLM"], model_type="gemma2", vocab_size=256000, hidden_size=2304, intermediate_size=9216,
    num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh", rope_theta=1e4, torch_dtype="bfloat16", sliding_window=4096, query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip


def test_gemma2_2b_by_hand():
    table = table_of(spec_of(**GEMMA2_2B))
    assert table.windows == (None, 4096)
    cost = table.cost(decode([6000, 100], table.windows))
    # the head is the embedding; each block has a norm before and after it
    layer = (2048 + 1024 + 1024) * 2304 + 2304 * 2048 + 3 * 9216 * 2304 + 4 * 2304
    assert cost.weights == 2 * (26 * layer + 256000 * 2304 + 2304 + 2 * 2304)
    # every other layer sees the last 4,096 positions
    full, window = 6000 + 100, 4096 + 100
    assert cost.kv == 2 * 1024 * 2 * (13 * full + 13 * window + 26 * 2)
    products = 2 * 2 * (26 * (layer - 4 * 2304) + 256000 * 2304)
    around = 2 * (2304 + 26 * (4 * 4 * 2304 + 3 * 12 * 256 + 5 * 9216 + 2 * 2 * 2304) + 4 * 2304 + 3 * 256000)  # scaled in, capped out
    assert cost.flops == products + around + 4 * 2048 * 13 * (full + window)


LLAMA_1B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192,
    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5,
    hidden_act="silu", rope_theta=5e5, tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip


def test_llama_1b_in_4_bits_by_hand():
    packed = {f"layers.{i}.{name}": 4 for i in range(16) for name in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")} | {"head": 8}
    table = table_of(spec_of(**LLAMA_1B), packed=packed, dtype="float32", runs_on="cpu")
    cost = table.cost(decode([50]))
    elements = (2048 + 512 + 512) * 2048 + 2048 * 2048 + 3 * 8192 * 2048
    # 32 weights: 16 bytes with a scale and a minimum, or 32 with a scale; norms and the embedding's row in float32
    assert cost.weights == 16 * (elements * 20 // 32 + 4 * 2 * 2048) + 128256 * 2048 * 34 // 32 + 4 * 2048 + 4 * 2048
    assert cost.kv == 16 * (50 + 1) * 2 * 512 * 2
    assert {op.dtype for op in table.ops if op.name.startswith("packed")} == {"int8"}


@pytest.mark.parametrize(("kind", "head"), [("float8_e4m3fn", 128), ("int8", 132)])  # int8 with a scale of 4 bytes for each token and head
def test_a_cache_of_8_bits_is_half_of_one_of_16(kind, head):
    spec, shape = spec_of(**QWEN2_7B), decode([1000, 2000])
    wide, narrow = table_of(spec), table_of(spec, kv_dtype=kind)
    assert narrow.cost(shape) == replace(wide.cost(shape), kv=wide.cost(shape).kv * head // 256)
    assert narrow.kv_bytes_token == 28 * 2 * 4 * head


def test_gguf_projections_cost_what_the_file_holds(default_model):
    source = resolve_model(ModelConfig(model=str(default_model)))
    table = table_of(source.spec, packed=kept_packed(source), dtype="float32", runs_on="cpu")
    # 30 layers of 576, projections in Q4_1, a tied head in Q8_0
    held = 30 * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536) * 20 // 32 + 49152 * 576 * 34 // 32
    assert table.cost(decode([7])).weights == held + 4 * (30 * 2 * 576 + 576 + 576)


# -- roofs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H200", "H200"), ("h200", "H200"), ("NVIDIA H200 NVL", "H200 NVL"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("NVIDIA A100 80GB PCIe", "A100 80GB"), ("a100", "A100 80GB"), ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("NVIDIA L4", "L4"), ("L40S", "L40S"),
    ],
)  # fmt: skip
def test_gpus_are_found_by_what_drivers_and_users_call_them(name, sheet):
    assert data_sheet(name).name == sheet


def test_an_unknown_gpu_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match="'H300' is not known; known: B200, H200"):
        data_sheet("H300")


def test_sheets_have_no_slip_of_a_digit():
    for sheet in DATA_SHEETS:
        assert 50 <= sheet.bfloat16 / sheet.bandwidth <= 420, sheet.name  # operations a byte
        assert sheet.int8 in (0, pytest.approx(2 * sheet.bfloat16, rel=0.02), pytest.approx(4 * sheet.bfloat16, rel=0.02)), sheet.name
        assert 6 << 20 <= sheet.cache < 200 << 20 and 8 << 30 < sheet.memory < 200 << 30, sheet.name
