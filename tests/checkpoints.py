"""Tiny random checkpoints written by Transformers, one recipe a family, and Transformers' own logits of them. Holds no tests.

Biases and norm weights are random and far from what an untrained model has, so that one left out shows. The final norm is scaled up so that the
two best logits are usually more than 0.5 apart.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

transformers.logging.set_verbosity_error()

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
}
# family -> (config class, settings beside BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 4096, "sliding_window": 10}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.7,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
}
EAGER = ("gemma2",)  # soft caps exist in Transformers' eager attention alone

_made: dict[str, Path] = {}


def make(family: str, tmp_path: Path, **overrides: Any) -> Path:
    """Folder of a checkpoint of this family with these config keys changed (None: key removed). Each is built once a session."""
    key = json.dumps([family, overrides], sort_keys=True)
    if key not in _made or not _made[key].exists():
        name, own = FAMILIES[family]
        settings = {k: v for k, v in {**BASE, **own, **overrides}.items() if v is not None}
        config = getattr(transformers, name)(**settings)
        torch.manual_seed(len(key))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        shake(model)
        folder = Path(tmp_path) / f"{family}-{len(_made)}"
        model.save_pretrained(folder)
        _made[key] = folder
    return _made[key]


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Values with some spread everywhere; see the module's head."""
    stored_minus_1 = float(model.config.model_type.startswith("gemma"))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.5)
        elif parameter.dim() == 1:  # norm weights
            scale = 4.0 if name == "model.norm.weight" else 1.0
            parameter.uniform_(0.5, 1.5).mul_(scale).sub_(stored_minus_1)
        else:
            parameter.normal_(0, 0.12)


@functools.lru_cache(maxsize=4)
def reference_model(path: Path, rope_length: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' model of a checkpoint. rope_length: fix length-dependent rotary frequencies for this length."""
    config = transformers.AutoConfig.from_pretrained(path)
    attention = "eager" if config.model_type in EAGER else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    if rope_length is not None:
        rotary = model.model.rotary_emb
        rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](config, None, seq_len=rope_length)
        rotary.rope_type = "default"  # no more updates from the positions
    return model


@torch.no_grad()
def reference_logits(path: Path, ids: list[int], rope_length: int | None = None, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Transformers' logits at every position, float32 [T, V], its arithmetic in dtype."""
    return reference_model(path, rope_length, dtype)(torch.tensor([ids])).logits[0].float().numpy()
