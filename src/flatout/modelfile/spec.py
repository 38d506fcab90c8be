"""ModelSpec: what a decoder-only model is, in one vocabulary for every family. Data only.

hf_spec.py and gguf_spec.py fill it from Hugging Face config keys and from GGUF metadata; nothing else reads those.
models/decoder.py builds the network from it, core/ and runner/memory.py size the cache by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


class ModelFileError(ValueError):
    """A model file, config or name that cannot be used; the message names the file or key and the mend. One line, whatever names a file holds."""

    def __init__(self, message: str):
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, half-split layout (GPT-NeoX style). Frequencies are made from this once, at load.

    `kind`: default, linear, dynamic, yarn, llama3, longrope. For dynamic and longrope, which depend on the sequence's length,
    the length is fixed at load (`length`: filled in from --max-model-len) so that cached keys stay valid.
    """

    base: float
    dim: int  # rotated dims of a head (partial rotary: less than head_dim)
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the correction range to whole dims
    attention_factor: float | None = None  # scales cos and sin; None: what the kind prescribes
    mscale: float | None = None
    mscale_all_dim: float | None = None
    long_factor: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    length: int = 0  # dynamic, longrope: the sequence length the frequencies are made for


@dataclass(frozen=True)
class LayerSpec:
    """What differs between layers."""

    window: int | None = None  # sliding window in tokens (a token sees itself and window-1 before it); None: full
    rope: int | None = 0  # index into ModelSpec.ropes; None: no position encoding (NoPE layers)
    moe: bool = False


@dataclass(frozen=True)
class MoESpec:
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk: bool  # the chosen experts' weights are scaled to sum to 1
    shared_intermediate_size: int = 0  # always-on expert beside them; 0: none
    shared_gate: bool = False  # its output is scaled by sigmoid(x . gate)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose KV lives and dies alike."""

    kind: str  # "full" | "window" | "state"
    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer. Sizes are in elements, positions in tokens."""

    architecture: str  # the checkpoint's own word: "LlamaForCausalLM", or "llama" from a GGUF file
    family: str  # llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe phi3 gemma2 gemma3 smollm3 granite olmo2
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_position: int  # context length the file promises, scaling included
    norm_eps: float
    activation: str = "silu"  # "silu" | "gelu_tanh" | "gelu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # gemma: weights are stored minus 1, so 1.0
    pre_norm: bool = True  # a norm before attention and mlp (false: OLMo 2)
    post_norm: bool = False  # a norm on the output of attention and of mlp, before the residual add (Gemma, OLMo 2)
    qk_norm: str = ""  # "" | "head" (each head by itself, weight [head_dim]) | "full" (whole projection, weight [heads*head_dim])
    attn_scale: float = 0.0  # multiplies q.k; 0: head_dim ** -0.5
    attn_softcap: float = 0.0  # 0: off
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies attention and mlp output before the residual add (Granite)
    logit_scale: float = 1.0  # multiplies the logits (Granite stores a divisor: 1 / it)
    moe: MoESpec | None = None
    dtype: str = "bfloat16"  # the checkpoint's own
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # every end id: config, generation config, tokenizer metadata
    pad_id: int | None = None
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)  # from generation_config.json, vLLM's names
    quantization: dict[str, object] = field(default_factory=dict)  # quantization_config as found, untouched

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.attn_scale or self.head_dim**-0.5

    @property
    def num_parameters(self) -> int:
        """Elements of all matrices; norms and biases, under a thousandth of a model, are left out."""
        hidden, m = self.hidden_size, self.moe
        attention = 2 * hidden * (self.q_size + self.kv_size)
        dense = 3 * hidden * self.intermediate_size
        experts = 3 * hidden * (m.num_experts * m.intermediate_size + m.shared_intermediate_size) if m else 0
        experts += hidden * (m.num_experts + m.shared_gate) if m else 0
        sparse = sum(layer.moe for layer in self.layers)
        heads = 1 if self.tie_embeddings else 2
        return heads * self.vocab_size * hidden + self.num_layers * attention + (self.num_layers - sparse) * dense + sparse * experts

    def cache_groups(self) -> list[CacheGroup]:
        """Layers by window, full first."""
        by_window: dict[int | None, list[int]] = {}
        for i, layer in enumerate(self.layers):
            by_window.setdefault(layer.window, []).append(i)
        order = sorted(by_window, key=lambda w: (w is not None, w or 0))
        return [CacheGroup("full" if w is None else "window", tuple(by_window[w]), w) for w in order]

    def for_length(self, max_model_len: int) -> ModelSpec:
        """The spec with the length-dependent rope kinds fixed for this context length."""
        return replace(self, ropes=tuple(replace(r, length=max_model_len) for r in self.ropes))
