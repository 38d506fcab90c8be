"""RopeSpec from the rotary keys of a config.json, in every spelling that checkpoints have.

Old files say rope_theta beside rope_scaling {type or rope_type, ...}; Transformers 5 puts all of it into rope_parameters, for Gemma 3
one set per layer type. Frequencies are not made here. Called by hf_spec.py.
"""

from __future__ import annotations

from typing import Any

from flatout.modelfile.keys import Keys
from flatout.modelfile.spec import RopeSpec

LAYER_TYPES = ("full_attention", "sliding_attention")
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
PHI3_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}  # what early Phi-3 files called it


def rope_of(c: Keys, family: str, head_dim: int, *, sliding: bool, notices: list[str]) -> RopeSpec:
    """The rotary embedding of this family's layers (for Gemma 3: of its sliding or its full layers).

    ModelFileError names the key: an unknown kind, a missing or impossible parameter.
    """
    given, theta = _parameters(c, family, sliding)
    r = Keys(given, f"{c.where}, {'rope_parameters' if 'rope_parameters' in c.values else 'rope_scaling'}", {"rope_theta": theta})
    kind = r.get("rope_type") or r.get("type") or "default"
    if family == "phi3" and isinstance(kind, str):
        kind = PHI3_OLD_NAMES.get(kind, kind)
    if kind not in KINDS:
        raise r.error("rope_type", f"{kind!r} is not supported; supported: {', '.join(KINDS)}")

    share = r.optional_number("partial_rotary_factor") or c.optional_number("partial_rotary_factor") or 1.0
    if family != "phi3" and share != 1.0:
        if kind != "default":
            raise r.error("partial_rotary_factor", f"{share:g} is not supported with rope type {kind!r} in this family")
        notices.append(
            f"{c.where}: partial_rotary_factor {share:g} is ignored, as Transformers does for this family: whole heads are rotated"
        )
        share = 1.0
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise r.error("partial_rotary_factor", f"rotates {dim} of {head_dim} dims of a head; must be an even number of them")

    context = c.integer("max_position_embeddings")
    # beside the parameters this key outranks the one among them, as in Transformers
    original = c.optional_integer("original_max_position_embeddings") or r.optional_integer("original_max_position_embeddings") or context
    fields: dict[str, Any] = {}
    if kind in ("linear", "dynamic"):
        fields = {"factor": r.number("factor"), "original_max_position": original if kind == "linear" else context}
    elif kind == "yarn":
        fields = {
            "factor": r.optional_number("factor") or context / original,
            "original_max_position": original,
            "beta_fast": r.optional_number("beta_fast") or 32.0,
            "beta_slow": r.optional_number("beta_slow") or 1.0,
            "truncate": r.get("truncate") is not False,
            "attention_factor": r.optional_number("attention_factor"),
            "mscale": r.optional_number("mscale") if r.get("mscale") else None,
            "mscale_all_dim": r.optional_number("mscale_all_dim") if r.get("mscale_all_dim") else None,
        }
    elif kind == "llama3":
        fields = {
            "factor": r.number("factor"),
            "original_max_position": original,
            "low_freq_factor": r.number("low_freq_factor"),
            "high_freq_factor": r.number("high_freq_factor"),
        }
        if fields["low_freq_factor"] == fields["high_freq_factor"]:
            raise r.error("high_freq_factor", "must differ from low_freq_factor")
    elif kind == "longrope":
        fields = {
            "factor": r.optional_number("factor") or context / original,
            "original_max_position": original,
            "attention_factor": r.optional_number("attention_factor"),
            "short_factor": r.numbers("short_factor", dim // 2),
            "long_factor": r.numbers("long_factor", dim // 2),
        }
    return RopeSpec(base=r.number("rope_theta"), dim=dim, kind=kind, **fields)


def reach(rope: RopeSpec, context: int) -> int:
    """Positions that the scaling makes usable. llama3 and longrope files promise the scaled length already (vLLM reads them so too)."""
    return int(rope.original_max_position * rope.factor) if rope.kind in ("linear", "dynamic", "yarn") else context


def _parameters(c: Keys, family: str, sliding: bool) -> tuple[dict[str, Any], Any]:
    """The rope parameters for one kind of layer, and the base for when they do not hold it."""
    key = "rope_parameters" if c.values.get("rope_parameters") is not None else "rope_scaling"
    found = c.values.get(key) or {}
    if isinstance(found, dict) and any(t in found for t in LAYER_TYPES):
        found = found.get("sliding_attention" if sliding else "full_attention") or {}
    elif family == "gemma3" and sliding:  # one flat set of parameters is that of the full layers
        found = {}
    if not isinstance(found, dict):
        raise c.error(key, f"must be an object, got {found!r}")
    base = c.get("rope_local_base_freq" if family == "gemma3" and sliding else "rope_theta")
    return {k: v for k, v in found.items() if v is not None}, base
