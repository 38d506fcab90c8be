"""Tiny random checkpoints for tests: every family as Transformers writes it, and the same weights as GGUF. Not a test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import k_quants
import numpy as np
import torch
import transformers as tf
from gguf.tensor_mapping import get_tensor_name_map

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": (tf.MistralConfig, {"sliding_window": 16}),
    "mixtral": (tf.MixtralConfig, {"num_local_experts": 4}),
    "qwen2": (tf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2_moe": (tf.Qwen2MoeConfig, {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (tf.Qwen3MoeConfig, {**MOE, "num_experts": 4, "norm_topk_prob": True}),
    "phi3": (tf.Phi3Config, {"pad_token_id": 0, "eos_token_id": 2}),
    "gemma2": (tf.Gemma2Config, {"head_dim": 16, "sliding_window": 16}),
    "gemma3": (tf.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6}),
    "smollm3": (tf.SmolLM3Config, {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "granite": (
        tf.GraniteConfig,
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "olmo2": (tf.Olmo2Config, {"eos_token_id": 2}),
}


def config_of(family: str, **changes: Any) -> Any:
    kind, options = FAMILIES[family]
    return kind(**{**SIZES, **options, **changes})


def model_of(config: Any) -> Any:
    """A model with random weights, norms and biases far from what a fresh model has."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.rand_like(p) + (0.0 if "bias" in name else 0.5))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def change_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps({**config, **changes}))


# -- GGUF -----------------------------------------------------------------------------------------------------------------

GGUF_ARCH = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def _pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama-like models: halves become interleaved pairs."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def quantised(value: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [rows, bytes] of float32 [rows, columns]."""
    if kind.endswith("_K"):
        return k_quants.quantised(value, kind)
    return gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind]).view(np.uint8)


def write_gguf(model: Any, path: Path, *, types: dict[str, str] | None = None, **extra: Any) -> Path:
    """The model as llama.cpp's converter would write it. `types`: part of a tensor's name -> quantised type. `extra`: more metadata."""
    config, family = model.config, model.config.model_type.removesuffix("_text")
    arch = GGUF_ARCH.get(family, family)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    w.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    w.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(config.num_experts_per_tok)
    if family in ("gemma2", "gemma3"):
        w.add_sliding_window(config.sliding_window)
    if family == "granite":
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    w.add_eos_token_id(2)
    w.add_bos_token_id(1)
    for key, value in extra.items():
        name = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            w.add_tensor(f"{name}.weight", value)
        elif isinstance(value, str):
            w.add_string(name, value)
        elif isinstance(value, bool):
            w.add_bool(name, value)
        elif isinstance(value, int):
            w.add_uint32(name, value)
        elif isinstance(value, float):
            w.add_float32(name, value)
        else:
            w.add_array(name, value)
    for name, value in _gguf_tensors(model, family, arch).items():
        kind = next((t for part, t in (types or {}).items() if part in name), "F32")
        if kind == "F32":
            w.add_tensor(name, value)
        else:
            raw_type = gguf.GGMLQuantizationType[kind]
            w.add_tensor(name, quantised(value, kind), raw_dtype=raw_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _gguf_tensors(model: Any, family: str, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    dense = get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)  # for the dense layers of a mixed MoE model
    found: dict[str, np.ndarray] = {}
    for name, p in model.state_dict().items():
        value = p.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            value = _pairs(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        if ".experts." in name:
            layer = name.split(".")[2]
            if name.endswith("gate_up_proj"):
                half = value.shape[1] // 2
                found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = (
                    np.ascontiguousarray(value[:, :half]),
                    np.ascontiguousarray(value[:, half:]),
                )
            else:
                found[f"blk.{layer}.ffn_down_exps.weight"] = value
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias")) or dense.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        found[ours] = np.ascontiguousarray(value)
    return found
