"""Architecture -> how its checkpoint names its tensors, as tables: checkpoint name -> the decoder's parameter, its part, its expert.

Canonical names are models/decoder.py's. Adding a model whose tensors are known kinds under other names means adding a table here.
No tensors are touched. Called by load.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flatout.modelfile import gguf_spec, hf_spec
from flatout.modelfile.spec import ModelSpec

NUMBER = re.compile(r"\.(\d+)(?=\.)")  # layer and expert numbers inside a tensor's name
HF_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint's tensor goes."""

    name: str  # canonical, layer number filled in
    segment: str | None = None  # "q" "k" "v" "gate" "up"; None: the whole parameter
    expert: int | None = None  # None: all experts in one tensor, or no experts
    paired_heads: bool = False  # rows lie in pairs, for interleaved rope: to be put into halves


@dataclass(frozen=True, slots=True)
class Skipped:
    reason: str


@dataclass(frozen=True)
class Names:
    """One way of naming. In `table` a layer's or expert's number reads '#'; the values are (canonical name, segment)."""

    table: Mapping[str, tuple[str, str | None]]
    skipped: tuple[tuple[re.Pattern[str], str], ...]
    prefix: re.Pattern[str] | None = None  # dropped before the look-up
    paired_heads: bool = False

    def target(self, name: str) -> Target | Skipped | None:
        """None: no tensor of a known kind."""
        for pattern, reason in self.skipped:
            if pattern.search(name):
                return Skipped(reason)
        short = self.prefix.sub("", name) if self.prefix else name
        numbers = [int(n) for n in NUMBER.findall(short)]
        found = self.table.get(NUMBER.sub(".#", short))
        if found is None:
            return None
        canonical, segment = found
        layer, expert = (*numbers, None, None)[:2]
        return Target(canonical.replace("#", str(layer)), segment, expert, self.paired_heads and segment in ("q", "k"))

    def spelling(self, canonical: str, segment: str | None, expert: int | None, present: set[str]) -> str:
        """The checkpoint's name for a part of a parameter: where several are known, in the style of the names `present` (numbers as '#')."""
        numbers = [*NUMBER.findall(canonical), "" if expert is None else str(expert)]
        pattern = NUMBER.sub(".#", canonical)
        known = [theirs for theirs, ours in self.table.items() if ours == (pattern, segment)] or [pattern]
        start = "" if self.prefix is None or known[0] == "lm_head.weight" else "model."
        best = next((name for name in known if start + name in present), known[0])
        for number in numbers:
            best = best.replace("#", number, 1)
        return start + best


def _linear(theirs: str, ours: str, segment: str | None = None) -> dict[str, tuple[str, str | None]]:
    """Weight and bias of one projection."""
    return {f"{theirs}.{part}": (f"{ours}.{part}", segment) for part in ("weight", "bias")}


def _norms(
    prefix: str, attn: str | None, attn_post: str | None, mlp: str | None, mlp_post: str | None
) -> dict[str, tuple[str, str | None]]:
    ours = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    return {f"{prefix}.{n}.weight": (f"layers.#.{o}.weight", None) for n, o in zip((attn, attn_post, mlp, mlp_post), ours) if n is not None}


def _hf_table(norms: dict[str, tuple[str, str | None]]) -> dict[str, tuple[str, str | None]]:
    table: dict[str, tuple[str, str | None]] = {
        "embed_tokens.weight": ("embed.weight", None),
        "norm.weight": ("norm.weight", None),
        "lm_head.weight": ("head.weight", None),
        **norms,
    }
    layer, ours = "layers.#", "layers.#"
    for part in ("q", "k", "v"):
        table |= _linear(f"{layer}.self_attn.{part}_proj", f"{ours}.attn.qkv", part)
    table |= _linear(f"{layer}.self_attn.qkv_proj", f"{ours}.attn.qkv")
    table |= _linear(f"{layer}.self_attn.o_proj", f"{ours}.attn.o")
    for part in ("q", "k"):
        table[f"{layer}.self_attn.{part}_norm.weight"] = (f"{ours}.attn.{part}_norm.weight", None)
    for theirs, to in ((f"{layer}.mlp", f"{ours}.mlp"), (f"{layer}.mlp.shared_expert", f"{ours}.moe.shared")):
        table |= _linear(f"{theirs}.gate_proj", f"{to}.gate_up", "gate")
        table |= _linear(f"{theirs}.up_proj", f"{to}.gate_up", "up")
        table |= _linear(f"{theirs}.gate_up_proj", f"{to}.gate_up")
        table |= _linear(f"{theirs}.down_proj", f"{to}.down")
    table[f"{layer}.mlp.shared_expert_gate.weight"] = (f"{ours}.moe.shared_gate.weight", None)
    for block in (f"{layer}.mlp", f"{layer}.block_sparse_moe"):  # Mixtral's files say the latter
        table[f"{block}.gate.weight"] = (f"{ours}.moe.router.weight", None)
        for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
            table[f"{block}.experts.#.{gate}.weight"] = (f"{ours}.moe.gate_up.weight", "gate")
            table[f"{block}.experts.#.{up}.weight"] = (f"{ours}.moe.gate_up.weight", "up")
            table[f"{block}.experts.#.{down}.weight"] = (f"{ours}.moe.down.weight", None)
        # all experts in one tensor, as Transformers 5 holds them in memory and may save them
        table[f"{block}.experts.gate_up_proj"] = (f"{ours}.moe.gate_up.weight", None)
        table[f"{block}.experts.down_proj"] = (f"{ours}.moe.down.weight", None)
    return table


def _gguf_table(norms: dict[str, tuple[str, str | None]], fused_up: bool = False) -> dict[str, tuple[str, str | None]]:
    table: dict[str, tuple[str, str | None]] = {
        "token_embd.weight": ("embed.weight", None),
        "output_norm.weight": ("norm.weight", None),
        "output.weight": ("head.weight", None),
        **norms,
    }
    block, ours = "blk.#", "layers.#"
    for part in ("q", "k", "v"):
        table |= _linear(f"{block}.attn_{part}", f"{ours}.attn.qkv", part)
    table |= _linear(f"{block}.attn_qkv", f"{ours}.attn.qkv")
    table |= _linear(f"{block}.attn_output", f"{ours}.attn.o")
    for part in ("q", "k"):
        table[f"{block}.attn_{part}_norm.weight"] = (f"{ours}.attn.{part}_norm.weight", None)
    table |= _linear(f"{block}.ffn_gate", f"{ours}.mlp.gate_up", "gate")
    table |= _linear(f"{block}.ffn_up", f"{ours}.mlp.gate_up", None if fused_up else "up")
    table |= _linear(f"{block}.ffn_down", f"{ours}.mlp.down")
    table[f"{block}.ffn_gate_inp.weight"] = (f"{ours}.moe.router.weight", None)
    table[f"{block}.ffn_gate_inp_shexp.weight"] = (f"{ours}.moe.shared_gate.weight", None)
    for part, to, segment in (("gate", "gate_up", "gate"), ("up", "gate_up", "up"), ("down", "down", None)):
        table[f"{block}.ffn_{part}_shexp.weight"] = (f"{ours}.moe.shared.{to}.weight", segment)
        table[f"{block}.ffn_{part}_exps.weight"] = (f"{ours}.moe.{to}.weight", segment)
        table[f"{block}.ffn_{part}.#.weight"] = (f"{ours}.moe.{to}.weight", segment)  # early Mixtral files: a tensor per expert
    return table


def _patterns(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(p), reason) for p, reason in pairs)


HF_SKIPPED = _patterns(
    (r"\.rotary_emb\.inv_freq$", "rope frequencies: made from the config"),
    (r"^(model\.)?(vision_tower|multi_modal_projector)\.", "vision parts: only text is served"),
)
GGUF_SKIPPED = _patterns(
    (r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$", "rope factors: applied with the frequencies"),
    (r"\.attn_rot_embd\.weight$", "rope frequencies: made from the metadata"),
)
_PLAIN = ("input_layernorm", None, "post_attention_layernorm", None)
_GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OLMO2 = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_HF_NORMS = {"gemma2": _GEMMA, "gemma3": _GEMMA, "olmo2": _OLMO2}
_GGUF_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")

# architecture, as config.json says it -> its names
HF: dict[str, Names] = {
    architecture: Names(_hf_table(_norms("layers.#", *_HF_NORMS.get(family, _PLAIN))), HF_SKIPPED, HF_PREFIX)
    for architecture, family in hf_spec.ARCHITECTURES.items()
}
# general.architecture of a GGUF file -> its names
GGUF: dict[str, Names] = {
    architecture: Names(
        _gguf_table(_norms("blk.#", *_GGUF_NORMS), fused_up=architecture == "phi3"), GGUF_SKIPPED, paired_heads=known.paired_heads
    )
    for architecture, known in gguf_spec.ARCHITECTURES.items()
}


NAMES = {**HF, **GGUF}  # the two vocabularies share no word


def names_of(spec: ModelSpec) -> Names:
    """The naming of the checkpoint that `spec` was read from."""
    return NAMES[spec.architecture]
