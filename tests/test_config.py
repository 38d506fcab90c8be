"""Config: every option is judged by its annotation, by name; sizes against the machine; nothing is taken silently."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from flatout import config as config_module
from flatout.config import Config, ConfigError, ServerConfig, check_values, flag_of, resolve
from flatout.hardware import Hardware
from flatout.modelfile.spec import LayerSpec, ModelSpec, MoESpec, RopeSpec

HINTS = {name: get_args(hint) or (hint,) for group in get_type_hints(Config).values() for name, hint in get_type_hints(group).items()}
# for each kind: what a careless caller writes
WRONG = {bool: ["no", "False", 1, None], int: ["8", 2.0, True, [1]], float: ["0.5", True, (1,)], str: [5, True, b"x", ["a"]]}
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@pytest.mark.parametrize("name", HINTS)
def test_a_value_of_another_type_is_refused_by_name(name):
    kind = next(k for k in HINTS[name] if k is not type(None))
    for value in WRONG[kind]:
        with pytest.raises(ConfigError) as e:
            Config.make(**{name: value})
        assert str(e.value) == f"{flag_of(name)}: must be {WANTED[kind]}, got {value!r} ({type(value).__name__})"
    if type(None) in HINTS[name]:
        assert Config.make(**{name: None}).flat()[name] is None


@pytest.mark.parametrize("name", [name for name, kinds in HINTS.items() if str in kinds])
def test_an_empty_text_is_refused(name):
    for value in ("", "  "):
        with pytest.raises(ConfigError, match=f"{flag_of(name)}: must not be empty"):
            Config.make(**{name: value})


def test_a_whole_number_is_a_number():
    assert Config.make(gpu_memory_utilization=1).cache.gpu_memory_utilization == 1
    for value in (0, -1, 1.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--gpu-memory-utilization: must be over 0"):
            Config.make(gpu_memory_utilization=value)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads", "num_gpu_blocks_override"])
def test_counts_begin_at_one(name):
    for value in (0, -4):
        with pytest.raises(ConfigError, match=f"{flag_of(name)}: must be a whole number of at least 1, got {value}"):
            Config.make(**{name: value})


def test_numbers_of_numpy_are_told_apart_too():
    with pytest.raises(ConfigError, match=r"--max-model-len: must be a whole number, got np\.int64"):
        Config.make(max_model_len=np.int64(4))


def test_two_sizes_for_one_pool():
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override and --kv-cache-memory-bytes"):
        Config.make(num_gpu_blocks_override=4, kv_cache_memory_bytes=1 << 20)


def test_a_chat_template_that_is_nowhere(tmp_path):
    file = tmp_path / "t.jinja"
    with pytest.raises(ConfigError, match=r"--chat-template: no file .*, and it isn't Jinja text either"):
        Config.make(chat_template=str(file))
    file.write_text("{{ messages }}")
    for template in (str(file), "{{ messages }}"):
        assert Config.make(chat_template=template).model.chat_template == template


def test_settings_of_the_server():
    check_values(ServerConfig())
    with pytest.raises(ConfigError, match="--port: must be a whole number, got '80'"):
        check_values(ServerConfig(port="80"))
    with pytest.raises(ConfigError, match="--api-key: must not be empty"):
        check_values(ServerConfig(api_key=""))


# -- sizes against the machine ------------------------------------------------------------------------------------------------

GIB = 1 << 30
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=50_000,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1536,
    layers=(LayerSpec(),) * 4,
    ropes=(RopeSpec(10_000.0, 64),),
    max_position=2048,
    norm_eps=1e-5,
)
MACHINE = Hardware("cpu", "a CPU", None, 22 * GIB, 2, True)
GPU = Hardware("cuda", "a GPU", (9, 0), 140 * GIB, 16, True)
BLOCK = 2 * 4 * 256 * 16 * 2  # bytes: k and v, layers, kv size, tokens, element


def checked(machine=MACHINE, **options):
    from flatout.runner.memory import check_sizes

    given = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    check_sizes(Config.make(**{**given, **options}), SPEC, machine, BLOCK)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"kv_cache_memory_bytes": 60 * GIB},
            r"--kv-cache-memory-bytes: 64424509440 takes 60.0 GiB, but 21.9 GiB is free beside the weights",
        ),
        (
            {"kv_cache_memory_bytes": 1000},
            f"--kv-cache-memory-bytes: 1000 is less than one block of 16 tokens takes; give at least {BLOCK}",
        ),
        (
            {"num_gpu_blocks_override": 10**9},
            r"--num-gpu-blocks-override: 1000000000 takes .* GiB is free beside the weights; at most \d+ fit",
        ),
        ({"max_num_seqs": 10**9}, "--max-num-seqs: 1000000000 takes"),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}, "--max-num-seqs"),  # the budget only followed
        ({"max_num_seqs": 10**30}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 10**9}, "--max-num-batched-tokens: 1000000000 takes"),
    ],
    ids=str,
)
def test_a_size_beyond_memory_is_refused_by_its_flag(options, named):
    with pytest.raises(ConfigError, match=named) as e:
        checked(**options)
    assert "gpu-memory-utilization" not in str(e.value)


def test_sizes_that_fit_are_taken():
    checked()
    checked(kv_cache_memory_bytes=20 * GIB)
    checked(kv_cache_memory_bytes=BLOCK)
    checked(num_gpu_blocks_override=20 * GIB // BLOCK)
    checked(max_num_seqs=4096, max_num_batched_tokens=65_536)


def test_a_model_beyond_memory_is_not_blamed_on_other_settings():
    checked(replace(MACHINE, memory_bytes=50_000_000))


def test_no_room_for_the_pool_names_what_decides_there():
    from flatout.runner.memory import size_pool

    config = Config.make(device="cpu", dtype="bfloat16", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=1024)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes: no room for the KV pool .at most 25% of") as e:
        size_pool(config, SPEC, replace(MACHINE, memory_bytes=BLOCK), BLOCK, 0, lambda: 0)
    assert "gpu" not in str(e.value)


def test_an_allocation_that_fails_names_the_settings():
    import torch

    from flatout.runner.memory import memory_errors_named

    config = Config.make(device="cpu", max_num_seqs=7, max_num_batched_tokens=9)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for allocate in (lambda: np.zeros(1 << 60, np.uint8), lambda: torch.empty(1 << 60, dtype=torch.uint8), fail):
        with (
            pytest.raises(ConfigError, match=r"--max-num-seqs \(now 7\).*--max-num-batched-tokens \(now 9\)") as e,
            memory_errors_named(config),
        ):
            allocate()
        assert "\n" not in str(e.value)
    with pytest.raises(RuntimeError, match="something else"), memory_errors_named(config):
        raise RuntimeError("something else")


# -- by device ------------------------------------------------------------------------------------------------------------------


def test_what_is_for_cpus_alone():
    with pytest.raises(ConfigError, match="--quantization: gguf runs on the CPU so far; leave it out, or use --device cpu"):
        resolve(Config.make(quantization="gguf"), SPEC, GPU)
    with pytest.raises(ConfigError, match="--quantization: gguf multiplies rows of bfloat16 or float32; use --dtype bfloat16"):
        resolve(Config.make(quantization="gguf", dtype="float16"), SPEC, MACHINE)
    assert resolve(Config.make(quantization="gguf"), SPEC, MACHINE)[0].model.dtype == "float32"
    assert resolve(Config.make(quantization="gguf", dtype="bfloat16"), SPEC, MACHINE)[0].model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"--quantization: 'awq' is not one of auto, none, gguf, int8, int4"):
        Config.make(quantization="awq")


def test_keys_and_values_as_int8():
    """Beside any dtype and any weights on a CPU, by torch where there is no library; refused by name elsewhere."""

    def decided(spec=SPEC, hardware=MACHINE, native=True, **options) -> str:
        return resolve(Config.make(kv_cache_dtype="int8", **options), spec, hardware, native=native)[0].cache.kv_cache_dtype

    for options in ({}, {"dtype": "float32"}, {"dtype": "bfloat16", "native": False}, {"quantization": "int4"}):
        assert decided(**options) == "int8"
    assert decided(hardware=GPU, device="cpu") == "int8"
    with pytest.raises(ConfigError, match="--kv-cache-dtype: int8 runs on the CPU so far; leave it out, or use --device cpu"):
        decided(hardware=GPU)
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype: int8 keeps heads of a multiple of 4 dims, and this model's have 6; leave it out"
    ):
        decided(replace(SPEC, head_dim=6))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_weights_rounded_while_loading(method):
    """Any model's, on a CPU with the native library, which alone multiplies them."""

    def decided(spec=SPEC, hardware=MACHINE, native=True, **options) -> tuple[str, str, str]:
        config = resolve(Config.make(quantization=method, **options), spec, hardware, native=native)[0]
        return config.model.quantization, config.model.dtype, config.cache.kv_cache_dtype

    packed = resolve(Config.make(quantization="gguf"), SPEC, MACHINE, native=True)[0]
    assert decided() == (method, "float32", packed.cache.kv_cache_dtype) and packed.cache.kv_cache_dtype != "float32"
    assert decided(dtype="bfloat16") == (method, "bfloat16", "bfloat16")
    assert decided(hardware=GPU, device="cpu")[0] == method
    own = resolve(Config(), SPEC, MACHINE)[0].model.dtype
    assert decided(replace(SPEC, moe=MoESpec(8, 2, 64, True)))[1] == own != "float32"  # twice the bytes of the experts would buy nothing
    for wanted, options in {
        f"{method} runs on the CPU so far; leave it out, or use --device cpu": {"hardware": GPU},
        f"{method} needs the native library, which is not there; leave it out, or install a C..17 compiler": {"native": False},
        f"{method} multiplies rows of bfloat16 or float32; use --dtype bfloat16": {"dtype": "float16"},
    }.items():
        with pytest.raises(ConfigError, match=f"--quantization: {wanted}"):
            decided(**options)


def test_a_files_own_weights_are_kept_where_they_run():
    """By default on a CPU with the native library, unless a dtype is asked for; keys and values then take half of what rows do."""

    def decided(hardware=MACHINE, kept=True, native=True, **options) -> tuple[str, str, str]:
        config = resolve(Config.make(**options), SPEC, hardware, kept=kept, native=native)[0]
        return config.model.quantization, config.model.dtype, config.cache.kv_cache_dtype

    plain = resolve(Config(), SPEC, MACHINE)[0].model.dtype
    assert decided() == ("gguf", "float32", "bfloat16")
    assert decided(kept=False) == decided(native=False) == decided(quantization="none") == ("none", plain, plain)
    assert decided(dtype="float32") == ("none", "float32", "float32")
    assert decided(dtype="bfloat16", quantization="gguf") == ("gguf", "bfloat16", "bfloat16")
    assert decided(quantization="gguf", native=False) == ("gguf", "float32", "float32")
    assert decided(kv_cache_dtype="float32") == ("gguf", "float32", "float32")
    assert decided(dtype="float32", kv_cache_dtype="float16") == ("none", "float32", "float16")
    assert decided(GPU)[0] == "none" and decided(GPU, device="cpu")[0] == "gguf"
    for options, asked in (
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32", "native": False}, "bfloat16 beside --dtype float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float16"}, "float16 beside --dtype bfloat16"),
        ({"dtype": "float32", "kv_cache_dtype": "float16", "native": False}, "float16 beside --dtype float32"),
    ):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype: {asked} is not built here; leave it out"):
            decided(**options)
    with pytest.raises(ConfigError, match="--kv-cache-dtype: 'fp8' is not one of auto, bfloat16, float16, float32, int8"):
        Config.make(kv_cache_dtype="fp8")


def test_what_is_for_gpus_alone(monkeypatch):
    monkeypatch.setattr(config_module, "find_spec", lambda name: name)  # Triton is there
    with pytest.raises(ConfigError, match="--enforce-eager captures nothing"):
        Config.make(enforce_eager=True, max_cudagraph_capture_size=8)
    for options, wrong in (
        ({"deterministic": True}, "--deterministic: is for GPUs; on the CPU use --dtype float32"),
        ({"max_cudagraph_capture_size": 8}, "--max-cudagraph-capture-size: is for GPUs"),
        ({"attention_backend": "triton"}, "--attention-backend: triton needs a CUDA device"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            resolve(Config.make(**options), SPEC, MACHINE)
    with pytest.raises(ConfigError, match="--attention-backend: --deterministic needs triton"):
        resolve(Config.make(deterministic=True, attention_backend="torch"), SPEC, GPU)
    resolved, _ = resolve(Config.make(), SPEC, GPU)
    assert resolved.device.attention_backend == "triton" and resolved.device.max_cudagraph_capture_size == 1024
    assert resolve(Config.make(dtype="float32"), SPEC, GPU)[0].device.attention_backend == "torch"
    assert resolve(Config.make(enforce_eager=True), SPEC, GPU)[0].device.max_cudagraph_capture_size is None
    assert not Config().device.disable_cascade_attn and Config.make(disable_cascade_attn=True).device.disable_cascade_attn
    assert resolve(Config.make(max_num_seqs=48), SPEC, GPU)[0].device.max_cudagraph_capture_size == 48
    larger, decisions = resolve(Config.make(max_num_seqs=48, max_cudagraph_capture_size=64), SPEC, GPU)
    assert larger.device.max_cudagraph_capture_size == 48
    assert any(d.field == "max_cudagraph_capture_size" and "64 asked" in d.reason for d in decisions)
    for options in ({"dtype": "float32"}, {"attention_backend": "torch"}):
        with pytest.raises(ConfigError, match="--max-cudagraph-capture-size: only attention by triton can be captured"):
            resolve(Config.make(max_cudagraph_capture_size=8, **options), SPEC, GPU)


def test_a_gpu_without_what_the_paged_kernels_need_has_torchs_attention(monkeypatch):
    odd, old = replace(SPEC, head_dim=20), replace(GPU, capability=(7, 5), has_bfloat16=False)
    monkeypatch.setattr(config_module, "find_spec", lambda name: name)
    for spec, machine, why in ((odd, GPU, "heads of 20 dims"), (SPEC, old, "compute capability 7.5")):
        resolved, decisions = resolve(Config.make(), spec, machine)
        assert resolved.device.attention_backend == "torch" and resolved.device.max_cudagraph_capture_size is None
        assert why in next(d.reason for d in decisions if d.field == "attention_backend")
        for options in ({"attention_backend": "triton"}, {"deterministic": True}):
            with pytest.raises(ConfigError, match=why):
                resolve(Config.make(**options), spec, machine)
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--deterministic: cannot run this model: Triton is not installed"):
        resolve(Config.make(deterministic=True), SPEC, GPU)
