"""ModelSpec from a GGUF file: metadata for sizes and rope, the tensor list for what the metadata leave open (biases, tied head, experts).

Where llama.cpp fixes a number by architecture instead of storing it, the same number stands here. The only reader of GGUF model
metadata (text/ reads the tokenizer's). No torch. Called by sources.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.modelfile.gguf import GGUFFile, GGUFTensor, Metadata
from flatout.modelfile.hf_rope import reach
from flatout.modelfile.keys import Keys
from flatout.modelfile.spec import LayerSpec, ModelFileError, ModelSpec, MoESpec, RopeSpec


@dataclass(frozen=True)
class GGUFArchitecture:
    family: str
    paired_heads: bool = False  # rows of q and k lie in pairs, for interleaved rope: load.py puts them into halves
    norm_topk: bool = True


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", paired_heads=True),  # Mistral and Mixtral too
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen2moe": GGUFArchitecture("qwen2_moe", norm_topk=False),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3moe": GGUFArchitecture("qwen3_moe"),
    "phi3": GGUFArchitecture("phi3"),
    "gemma2": GGUFArchitecture("gemma2"),
    "gemma3": GGUFArchitecture("gemma3"),
    "smollm3": GGUFArchitecture("smollm3", paired_heads=True),
    "granite": GGUFArchitecture("granite", paired_heads=True),
    "olmo2": GGUFArchitecture("olmo2"),
}
WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6}  # every n-th layer is full, the others have the window
NOPE_EVERY = {"smollm3": 4}  # every n-th layer has no position encoding
ROOT_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B of each scales by hidden/heads instead of head_dim
# tokens that end a turn: files often name only one of them as the end id
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>")
CONTROL = 3  # tokenizer.ggml.token_type of a control token
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _ModelKeys(Keys):
    """Metadata under the architecture's prefix: 'rope.freq_base' is read from 'llama.rope.freq_base'. float32 values lose their tail."""

    def __init__(self, file: GGUFFile, arch: str):
        prefix = f"{arch}."
        values = {key.removeprefix(prefix): _plain(file.metadata, key) for key in file.metadata if key.startswith(prefix)}
        super().__init__(values, f"{file.path}: {arch}", {})

    def same_in_all_layers(self, key: str, default: int | None = None) -> int:
        """A size that a file may give once or per layer."""
        value = self.values.get(key, default)
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise self.error(key, "differs between layers, which is not supported")
            value = value[0]
        return Keys({} if value is None else {key: value}, self.where, {}).integer(key)


def _plain(metadata: Metadata, key: str) -> Any:
    value = metadata[key]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5 comes back from float32 as 9.99999974e-06


def architecture_of(file: GGUFFile) -> GGUFArchitecture:
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"{file.path}: general.architecture is missing; is it a model (not an adapter or a vocabulary alone)?")
    if arch not in ARCHITECTURES:
        raise ModelFileError(f"{file.path}: architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The model that a GGUF file holds. Raises ModelFileError naming the key or tensor."""
    known = architecture_of(file)
    arch, tensors = str(file.metadata["general.architecture"]), file.tensors
    c = _ModelKeys(file, arch)
    count, hidden = c.integer("block_count"), c.integer("embedding_length")
    if count > len(tensors):
        raise c.error("block_count", f"{count} layers cannot be in {len(tensors)} tensors; incomplete download? fetch the file again")
    heads = c.same_in_all_layers("attention.head_count")
    kv_heads = c.same_in_all_layers("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise c.error("attention.head_count_kv", f"{kv_heads} does not divide attention.head_count {heads}")
    head_dim = c.optional_integer("attention.key_length") or hidden // heads
    if (c.optional_integer("attention.value_length") or head_dim) != head_dim:
        raise c.error("attention.value_length", f"differs from the keys' {head_dim}, which is not supported")
    if "token_embd.weight" not in tensors:
        raise ModelFileError(f"{file.path}: tensor token_embd.weight is missing; incomplete download? fetch the file again")

    moe = _moe(file, c, known)
    family = "mixtral" if arch == "llama" and moe is not None else known.family
    sparse = [moe is not None and f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(count)]
    sliding = _sliding(c, arch, count)
    ropes_of = {s: _rope(file, c, arch, head_dim, sliding=s) for s in sorted(set(sliding))}
    rotates = c.get("rope.scaling.finetuned") is not False or arch != "granite"  # granite's switch for position encoding
    every = NOPE_EVERY.get(arch, 0)
    used = [ropes_of[s] if rotates and not (every and (i + 1) % every == 0) else None for i, s in enumerate(sliding)]
    ropes = list(dict.fromkeys(r for r in used if r is not None))
    context = c.integer("context_length")
    if arch != "gemma3":
        context = max((reach(r, context) for r in ropes), default=context)
    window = c.optional_integer("attention.sliding_window") or (4096 if arch == "gemma2" else None)
    windows = [window if s and window is not None and window < context else None for s in sliding]
    gemma, olmo = arch.startswith("gemma"), arch == "olmo2"
    return ModelSpec(
        architecture=arch,
        family=family,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=c.same_in_all_layers("feed_forward_length", moe.intermediate_size if moe else None),
        layers=tuple(LayerSpec(w, None if r is None else ropes.index(r), s) for w, r, s in zip(windows, used, sparse)),
        ropes=tuple(ropes),
        max_position=context,
        norm_eps=c.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        norm_offset=0.0,  # Gemma's + 1 is in the stored weights already
        pre_norm=not olmo,
        post_norm=gemma or olmo,
        qk_norm="full" if olmo else "head" if "blk.0.attn_q_norm.weight" in tensors else "",
        attn_scale=_attn_scale(c, arch, count, hidden, heads, head_dim),
        attn_softcap=(c.optional_number("attn_logit_softcapping") or 50.0) if arch == "gemma2" else 0.0,
        logit_softcap=(c.optional_number("final_logit_softcapping") or (30.0 if arch == "gemma2" else 0.0)) if gemma else 0.0,
        embed_scale=hidden**0.5 if gemma else c.number("embedding_scale") if arch == "granite" else 1.0,
        residual_scale=c.number("residual_scale") if arch == "granite" else 1.0,
        logit_scale=1.0 / c.number("logit_scale") if arch == "granite" else 1.0,
        moe=moe,
        dtype=_dtype(tensors),
        bos_id=_id(file, "tokenizer.ggml.bos_token_id"),
        eos_ids=_end_ids(file),
        pad_id=_id(file, "tokenizer.ggml.padding_token_id"),
        sampling_defaults={
            ours: Keys(file.metadata, str(file.path), {}).any_number(key)
            for theirs, ours in SAMPLING.items()
            if (key := f"general.sampling.{theirs}") in file.metadata
        },
    )


def _moe(file: GGUFFile, c: _ModelKeys, known: GGUFArchitecture) -> MoESpec | None:
    """Experts' sizes come from the tensors: the metadata hold them in newer files only."""
    experts = c.optional_integer("expert_count")
    if experts is None:
        return None
    if c.get("expert_gating_func") not in (None, 0, 1):
        raise c.error("expert_gating_func", f"{c.get('expert_gating_func')!r} is not supported; supported: 1 (softmax)")
    if c.get("expert_weights_scale") not in (None, 0.0, 1.0):
        raise c.error("expert_weights_scale", "is not supported")
    norm_topk = c.get("expert_weights_norm")
    stacked = next((t for n, t in file.tensors.items() if n.endswith((".ffn_gate_exps.weight", ".ffn_up_exps.weight"))), None)
    shared = next((t for n, t in file.tensors.items() if n.endswith(".ffn_gate_shexp.weight")), None)
    return MoESpec(
        num_experts=experts,
        top_k=c.integer("expert_used_count"),
        intermediate_size=stacked.shape[-2] if stacked is not None else c.same_in_all_layers("feed_forward_length"),
        norm_topk=known.norm_topk if norm_topk is None else bool(norm_topk),
        shared_intermediate_size=shared.shape[0] if shared is not None else 0,
        shared_gate=any(n.endswith(".ffn_gate_inp_shexp.weight") for n in file.tensors),
    )


def _sliding(c: _ModelKeys, arch: str, count: int) -> list[bool]:
    """Which layers look through the window."""
    pattern = c.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != count:
            raise c.error("attention.sliding_window_pattern", f"must have one entry for each of the {count} layers")
        return [bool(p) for p in pattern]
    if c.optional_integer("attention.sliding_window") is None and arch not in WINDOW_PATTERN:
        return [False] * count
    if arch == "olmo2":
        raise c.error("attention.sliding_window", "OLMo 3 is not supported; of this architecture OLMo 2 is")
    every = c.optional_integer("attention.sliding_window_pattern") or WINDOW_PATTERN.get(arch, 0)
    return [not every or (i + 1) % every != 0 for i in range(count)]


def _rope(file: GGUFFile, c: _ModelKeys, arch: str, head_dim: int, *, sliding: bool) -> RopeSpec:
    dim = c.optional_integer("rope.dimension_count") or head_dim
    if dim % 2 or dim > head_dim or (ARCHITECTURES[arch].paired_heads and dim != head_dim):
        raise c.error("rope.dimension_count", f"{dim} of a head's {head_dim} dims is not supported for this architecture")
    if arch == "gemma3" and sliding:
        return RopeSpec(base=c.optional_number("rope.freq_base_swa") or 10000.0, dim=dim)
    base = c.optional_number("rope.freq_base") or (1e6 if arch == "gemma3" else 10000.0)
    context = c.integer("context_length")
    original = c.optional_integer("rope.scaling.original_context_length") or context
    attention = c.optional_number("rope.scaling.attn_factor")
    factor = c.optional_number("rope.scaling.factor") or c.optional_number("rope.scale_linear") or 1.0
    kind = c.get("rope.scaling.type") or ("linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise c.error("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn, longrope")

    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        short, long = (_factors(file, f"rope_factors_{which}.weight", dim // 2) for which in ("short", "long"))
        stretch = context / original
        return RopeSpec(base, dim, "longrope", stretch, original, attention_factor=attention, short_factor=short, long_factor=long)
    if kind == "longrope":
        raise ModelFileError(
            f"{file.path}: tensors rope_factors_long.weight and rope_factors_short.weight are missing; fetch the file again"
        )
    if "rope_freqs.weight" in file.tensors:  # llama3 scaling, already worked out into one divisor per frequency: the same at any length
        divisors = _factors(file, "rope_freqs.weight", dim // 2)
        if kind != "none":
            raise c.error("rope.scaling.type", f"{kind!r} together with rope_freqs.weight is not supported")
        return RopeSpec(base, dim, "longrope", 1.0, context, attention_factor=1.0, short_factor=divisors, long_factor=divisors)
    if kind == "none" or factor == 1.0:
        return RopeSpec(base, dim)
    if kind == "linear":
        return RopeSpec(base, dim, "linear", factor, original)
    if attention is not None:  # multiplies what yarn itself prescribes
        attention *= 0.1 * float(np.log(factor)) + 1.0
    fast, slow = c.optional_number("rope.scaling.yarn_beta_fast") or 32.0, c.optional_number("rope.scaling.yarn_beta_slow") or 1.0
    return RopeSpec(base, dim, "yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention)


def _factors(file: GGUFFile, name: str, length: int) -> tuple[float, ...]:
    """A small float32 tensor's values."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (length,):
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise ModelFileError(f"{file.path}: tensor {name} must be F32 [{length}], is {found}; fetch the file again")
    values = tuple(np.frombuffer(tensor.data.tobytes(), "<f4").tolist())
    if not all(np.isfinite(v) and v > 0 for v in values):
        raise ModelFileError(f"{file.path}: tensor {name} holds values that are not over 0; fetch the file again")
    return values


def _attn_scale(c: _ModelKeys, arch: str, count: int, hidden: int, heads: int, head_dim: int) -> float:
    if arch == "granite":
        return c.number("attention.scale")
    if arch in ROOT_SCALE_LAYERS:
        return c.optional_number("attention.scale") or (hidden // heads if count == ROOT_SCALE_LAYERS[arch] else head_dim) ** -0.5
    return 0.0


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The floating type that most bytes are stored in; bfloat16 for quantised files, whose own dtype nothing tells."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.type.name] += tensor.data.nbytes
    return FLOAT_DTYPES.get(sizes.most_common(1)[0][0], "bfloat16") if sizes else "bfloat16"


def _id(file: GGUFFile, key: str) -> int | None:
    return Keys(file.metadata, str(file.path), {}).integer(key, low=0) if key in file.metadata else None


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    """The end ids that the file names, and the control tokens that are known to end a turn."""
    found = {_id(file, key) for key in END_KEYS if key in file.metadata}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    unknown = _id(file, "tokenizer.ggml.unknown_token_id")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        control = {tokens[i]: i for i in np.flatnonzero(kinds == CONTROL).tolist() if i != unknown}
        found |= {control[t] for t in TURN_ENDS if t in control}
    return tuple(sorted(i for i in found if i is not None))
