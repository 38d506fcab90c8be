"""ModelSpec from a Hugging Face config.json: which keys each family reads, what Transformers assumes for a key left out.

The only reader of config.json and generation_config.json keys; hf_rope.py reads the rotary ones. A key that cannot be honoured is
refused by name. No files are opened here and no torch is needed. Called by sources.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.modelfile.hf_rope import reach, rope_of
from flatout.modelfile.keys import Keys
from flatout.modelfile.spec import LayerSpec, ModelFileError, ModelSpec, MoESpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
MAX_LAYERS = 10_000  # more is garbage
DTYPES = ("float32", "float16", "bfloat16")
# generation_config.json's names for sampling defaults -> SamplingParams'
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

Windows = list[int | None]


def _no_windows(c: Keys) -> Windows:
    return [None] * c.integer("num_hidden_layers")


def _one_window(c: Keys) -> Windows:
    """Mistral, Mixtral, Phi-3: the same window in every layer, or none."""
    return [c.optional_integer("sliding_window")] * c.integer("num_hidden_layers")


def _by_layer_types(c: Keys, default: Callable[[int], bool]) -> Windows:
    """`layer_types` where the file has it, else `default(layer)` says which layers have the window."""
    layers, window = c.integer("num_hidden_layers"), c.optional_integer("sliding_window")
    types = c.get("layer_types")
    if types is None:
        return [window if default(i) else None for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise c.error("layer_types", f"must list one entry for each of the {layers} layers")
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise c.error("layer_types", f"{t!r} is not supported; supported: full_attention, sliding_attention")
    return [window if t == "sliding_attention" else None for t in types]


def _switched(default: Callable[[Keys, int], bool]) -> Callable[[Keys], Windows]:
    """Qwen and SmolLM3: no window at all unless use_sliding_window is true, whatever else the file says."""

    def windows(c: Keys) -> Windows:
        return _by_layer_types(c, lambda i: default(c, i)) if c.flag("use_sliding_window") else _no_windows(c)

    return windows


def _nope(c: Keys) -> list[bool]:
    """SmolLM3's layers without position encoding: no_rope_layers says 1 where a layer does rotate."""
    layers, rotates = c.integer("num_hidden_layers"), c.get("no_rope_layers")
    if rotates is None:
        every = c.integer("no_rope_layer_interval")
        return [(i + 1) % every == 0 for i in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers:
        raise c.error("no_rope_layers", f"must list 0 or 1 for each of the {layers} layers")
    return [not r for r in rotates[:layers]]


def _moe_layers(c: Keys) -> list[bool]:
    step, dense = c.integer("decoder_sparse_step"), c.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise c.error("mlp_only_layers", f"must be a list of layer numbers, got {dense!r}")
    return [i not in dense and (i + 1) % step == 0 for i in range(c.integer("num_hidden_layers"))]


def _experts(c: Keys) -> str:
    """Mixtral's key in files of either spelling (Transformers takes both)."""
    return "num_experts" if c.get("num_local_experts") is None else "num_local_experts"


def _mixtral(c: Keys) -> dict[str, Any]:
    return {"moe": MoESpec(c.integer(_experts(c)), c.integer("num_experts_per_tok"), c.integer("intermediate_size"), norm_topk=True)}


def _qwen2_moe(c: Keys) -> dict[str, Any]:
    moe = MoESpec(
        c.integer(_experts(c)),
        c.integer("num_experts_per_tok"),
        c.integer("moe_intermediate_size"),
        norm_topk=c.flag("norm_topk_prob"),
        shared_intermediate_size=c.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {"moe": moe, "qkv_bias": c.flag("qkv_bias")}


def _qwen3_moe(c: Keys) -> dict[str, Any]:
    moe = MoESpec(
        c.integer(_experts(c)), c.integer("num_experts_per_tok"), c.integer("moe_intermediate_size"), norm_topk=c.flag("norm_topk_prob")
    )
    return {"moe": moe, "qk_norm": "head", **_attention_bias(c)}


def _attention_bias(c: Keys) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(c: Keys) -> dict[str, Any]:
    return {**_attention_bias(c), "mlp_bias": c.flag("mlp_bias")}


def _gemma(c: Keys) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise c.error("use_bidirectional_attention", "true makes this an encoder; only causal models are supported")
    return {
        **_attention_bias(c),
        "norm_offset": 1.0,
        "post_norm": True,
        "attn_scale": c.number("query_pre_attn_scalar") ** -0.5,
        "attn_softcap": c.optional_number("attn_logit_softcapping") or 0.0,
        "logit_softcap": c.optional_number("final_logit_softcapping") or 0.0,
        "embed_scale": c.integer("hidden_size") ** 0.5,
    }


def _granite(c: Keys) -> dict[str, Any]:
    return {
        **_llama(c),
        "attn_scale": c.number("attention_multiplier"),
        "embed_scale": c.number("embedding_multiplier"),
        "residual_scale": c.number("residual_multiplier"),
        "logit_scale": 1.0 / c.number("logits_scaling"),
    }


@dataclass(frozen=True)
class Family:
    """How one family's config.json is read. `defaults` are Transformers' own for keys that a file may leave out."""

    defaults: Mapping[str, Any]
    fields: Callable[[Keys], dict[str, Any]]  # ModelSpec fields beyond the sizes
    windows: Callable[[Keys], Windows] = _no_windows
    moe_layers: Callable[[Keys], list[bool]] = field(default=lambda c: [False] * c.integer("num_hidden_layers"))
    nope: Callable[[Keys], list[bool]] = field(default=lambda c: [False] * c.integer("num_hidden_layers"))


_COMMON = {
    "num_key_value_heads": None,  # null: as many as num_attention_heads
    "head_dim": None,  # null: hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_QWEN_MOE = {"sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1, "norm_topk_prob": False}

FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA_IDS, _llama),
    "mistral": Family({**_LLAMA_IDS, "num_key_value_heads": 8, "sliding_window": 4096}, lambda c: {}, _one_window),
    "mixtral": Family(
        {**_LLAMA_IDS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        _mixtral,
        _one_window,
        moe_layers=lambda c: [True] * c.integer("num_hidden_layers"),
    ),
    "qwen2": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        lambda c: {"qkv_bias": True},
        _switched(lambda c, i: i >= c.integer("max_window_layers", low=0)),
    ),
    "qwen2_moe": Family(
        {**_QWEN_MOE, "num_key_value_heads": 16, "qkv_bias": True},
        _qwen2_moe,
        _switched(lambda c, i: i % 2 == 0 and i < c.integer("max_window_layers", low=0)),
        _moe_layers,
    ),
    "qwen3": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        lambda c: {"qk_norm": "head", **_attention_bias(c)},
        _switched(lambda c, i: i >= c.integer("max_window_layers", low=0)),
    ),
    "qwen3_moe": Family(
        {**_QWEN_MOE, "num_key_value_heads": 4},
        _qwen3_moe,
        lambda c: _one_window(c) if c.flag("use_sliding_window") else _no_windows(c),
        _moe_layers,
    ),
    "phi3": Family(
        {
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        lambda c: {},
        _one_window,
    ),
    "gemma2": Family(
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma,
        lambda c: _by_layer_types(c, lambda i: i % 2 == 0),
    ),
    "gemma3": Family(
        {  # the hub's Gemma 3 configs leave out every size that is the class's own
            **_GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        lambda c: {**_gemma(c), "qk_norm": "head"},
        lambda c: _by_layer_types(c, lambda i: (i + 1) % c.integer("sliding_window_pattern") != 0),
    ),
    "smollm3": Family(
        {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
        },
        _llama,
        _switched(lambda c, i: _nope(c)[i]),
        nope=_nope,
    ),
    "granite": Family(
        {**_LLAMA_IDS, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        _granite,
    ),
    "olmo2": Family(
        {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1},
        lambda c: {"qk_norm": "full", "pre_norm": False, "post_norm": True, **_attention_bias(c)},
    ),
}

# config.json's "architectures" -> family; the second table serves configs without that key
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}


def spec_from_hf(
    config: dict[str, Any], generation_config: dict[str, Any] | None = None, *, where: str = "config.json", notices: list[str] | None = None
) -> ModelSpec:
    """The model that a config.json describes.

    `where` is the path shown in errors. What is read but has no effect is told in `notices`.
    Raises ModelFileError naming the key: missing, of the wrong kind, or asking for what is not supported.
    """
    architecture = _architecture(config, where)
    name = ARCHITECTURES[architecture]
    family = FAMILIES[name]
    outer = Keys(config, where, _COMMON)
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise outer.error("text_config", "must be an object")
    c = Keys(text, where if text is config else f"{where}, text_config", {**_COMMON, **family.defaults})

    if c.integer("num_hidden_layers") > MAX_LAYERS:
        raise c.error("num_hidden_layers", f"must be at most {MAX_LAYERS}")
    heads, hidden = c.integer("num_attention_heads"), c.integer("hidden_size")
    kv_heads = c.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise c.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = c.optional_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise c.error("head_dim", f"must be given, since num_attention_heads {heads} does not divide hidden_size {hidden}")
        head_dim = hidden // heads
    windows, nope, moe = family.windows(c), family.nope(c), family.moe_layers(c)

    told: list[str] = [] if notices is None else notices
    if name == "llama" and c.get("sliding_window") is not None:
        told.append(f"{where}: sliding_window is ignored, as Transformers does for {architecture}")
    of_kind = {sliding: rope_of(c, name, head_dim, sliding=sliding, notices=told) for sliding in sorted({w is not None for w in windows})}
    used = [None if without else of_kind[window is not None] for window, without in zip(windows, nope)]
    ropes = list(dict.fromkeys(r for r in used if r is not None))
    context = c.integer("max_position_embeddings")
    if name != "gemma3":  # whose configs promise the scaled length already
        context = max((reach(r, context) for r in ropes), default=context)
    layers = [
        # a window no shorter than the context is no window
        LayerSpec(window if window is not None and window < context else None, None if rope is None else ropes.index(rope), sparse)
        for window, rope, sparse in zip(windows, used, moe, strict=True)
    ]

    act = c.text("hidden_activation" if name.startswith("gemma") else "hidden_act")
    if act not in ACTIVATIONS:
        raise c.error("hidden_act", f"{act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    generation = Keys(generation_config or {}, f"{where.removesuffix('config.json')}generation_config.json", {})
    return ModelSpec(
        architecture=architecture,
        family=name,
        vocab_size=c.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=c.integer("intermediate_size"),
        layers=tuple(layers),
        ropes=tuple(ropes),
        max_position=context,
        norm_eps=c.number("rms_norm_eps"),
        activation=ACTIVATIONS[act],
        tie_embeddings=(outer if "tie_word_embeddings" in config else c).flag("tie_word_embeddings"),
        dtype=declared_dtype(config, where) or "float32",
        bos_id=_single_id(outer, c, "bos_token_id"),
        eos_ids=_end_ids(outer, c, generation),
        pad_id=_single_id(outer, c, "pad_token_id"),
        sampling_defaults=_sampling(generation),
        quantization=dict(config.get("quantization_config") or text.get("quantization_config") or {}),
        **family.fields(c),
    )


def _architecture(config: dict[str, Any], where: str) -> str:
    named = config.get("architectures")
    names = named if isinstance(named, list) and named else [MODEL_TYPES.get(str(config.get("model_type")))]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    if names == [None] and config.get("model_type") is None:
        raise ModelFileError(
            f"{where}: neither 'architectures' nor 'model_type' is there, so the kind of model is unknown; is it a model's config?"
        )
    shown = config.get("model_type") if names == [None] else ", ".join(map(str, names))
    raise ModelFileError(f"{where}: architecture {shown!r} is not supported; supported: {', '.join(ARCHITECTURES)}")


def declared_dtype(config: dict[str, Any], where: str = "config.json") -> str:
    """The dtype that the config names; "" when it names none (the weights know then)."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(values.get(key) or "").removeprefix("torch.")
            if name in DTYPES:
                return name
            if name:
                raise ModelFileError(f"{where}: {key}: {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return ""


def _ids(c: Keys, key: str) -> list[int]:
    """One id, a list of ids or null; negative ids mean none."""
    found = c.values.get(key)
    ids = found if isinstance(found, list) else [found]
    if any(not (i is None or (isinstance(i, int) and not isinstance(i, bool))) for i in ids):
        raise c.error(key, f"must be a token id or a list of them, got {found!r}")
    return [i for i in ids if i is not None and i >= 0]


def _single_id(outer: Keys, c: Keys, key: str) -> int | None:
    found = [*_ids(outer, key), *_ids(c, key)]
    if not found and key not in outer.values and key not in c.values:
        found = [c.defaults[key]]
    return found[0] if found else None


def _end_ids(outer: Keys, c: Keys, generation: Keys) -> tuple[int, ...]:
    """Every end id that any of the files names. The family's own serves only where no file has the key: it may be a word in this vocabulary."""
    key = "eos_token_id"
    files = (outer, c, generation)
    found = {i for file in files for i in _ids(file, key)}
    if not any(key in file.values for file in files) and c.defaults[key] is not None:
        found = {c.defaults[key]}
    return tuple(sorted(found))


def _sampling(generation: Keys) -> dict[str, float | int]:
    """The file's values as they are, whatever do_sample says (as vLLM does)."""
    return {ours: generation.any_number(theirs) for theirs, ours in SAMPLING.items() if generation.values.get(theirs) is not None}
