"""LoadReport: what was loaded and how the model was understood, in a few lines that the user sees at start.

Data and words only. Filled by load.py, shown by engine.py.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from flatout.layers.destination import Destination
from flatout.modelfile.spec import ModelSpec, RopeSpec
from flatout.quant.packed import Packed, bits_of

# a word in a canonical name -> the part of the model it belongs to, the first that fits
PARTS = (
    ("norm", "norms"),
    ("embed", "embedding"),
    ("head", "head"),
    (".attn.", "attention"),
    (".moe.shared.", "shared expert"),
    (".moe.", "experts"),
    (".mlp.", "mlp"),
)


@dataclass(slots=True)
class LoadReport:
    name: str
    kind: str  # "hf" | "gguf" | "dummy"
    spec: ModelSpec
    files: int
    parameters: Counter[str] = field(default_factory=Counter)  # elements by dtype, as held
    packed: dict[int, list[str]] = field(default_factory=dict)  # bits -> parts with projections of so many
    packed_head: int = 0  # elements that a tied head holds packed
    embedding: int = 0  # elements that the embedding holds for itself
    nbytes: int = 0
    used: int = 0  # tensors of the checkpoint
    skipped: dict[str, list[str]] = field(default_factory=dict)  # reason -> names
    missing: int = 0  # always 0 in a report that you get to see: a missing tensor is an error
    schemes: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # part -> (stored type, how it is held)
    seconds: float = 0.0

    def add_parameters(self, name: str, destination: Destination) -> None:
        count = math.prod(destination.shape_of())
        if name == "head.weight" and self.spec.tie_embeddings:  # the embedding's, packed for itself
            self.packed_head = count
        if name == "embed.weight":
            self.embedding = count
        if destination.lines > 1:
            parts = self.packed.setdefault(bits_of(destination.tensor), [])
            parts += {_part(name)}.difference(parts)
        self.parameters[_held(destination)] += count
        self.nbytes += destination.tensor.nbytes
        if self.kind == "dummy":
            self.add_scheme(name, "random", destination)

    def add_scheme(self, name: str, stored: str, destination: Destination, change: str = "") -> None:
        """change: what else happened to its values, in words."""
        self.schemes.setdefault(_part(name), set()).add((stored, _held(destination) + (f" ({change})" if change else "")))

    def skip(self, name: str, reason: str) -> None:
        self.skipped.setdefault(reason, []).append(name)

    def lines(self) -> list[str]:
        """About ten lines of text."""
        spec = self.spec
        total = self.parameters.total() - min(self.packed_head, self.embedding)
        held = ", ".join(f"{count / 1e6:,.1f} M in {dtype}" for dtype, count in self.parameters.most_common())
        rate = f" ({self.nbytes / 1e9 / self.seconds:.1f} GB/s)" if self.seconds > 0 else ""
        lines = [
            f"model    {self.name}: {spec.architecture}, {spec.num_layers} layers, {total / 1e6:,.1f} M parameters, context {spec.max_position:,}",
            f"weights  {held}; {self.nbytes / 1e6:,.1f} MB {'made' if self.kind == 'dummy' else 'loaded'} in {self.seconds:.2f} s{rate}",
        ]
        if self.kind != "dummy":
            skipped = sum(map(len, self.skipped.values()))
            why = "".join(f"; {len(names)} x {reason}" for reason, names in self.skipped.items())
            lines.append(
                f"tensors  {self.used} used, {skipped} unused, {self.missing} missing, from {self.files} file{'s' * (self.files > 1)}{why}"
            )
        lines.append("scheme   " + "; ".join(f"{part} {_scheme(pairs)}" for part, pairs in self.schemes.items()))
        if self.packed:
            weights = "; ".join(f"{Packed(bits).name} in {', '.join(self.packed[bits])}" for bits in sorted(self.packed))
            lines.append(f"products {weights}; int8 activations, of many rows bfloat16")
        packed = ", packed" + (" for itself" if self.embedding else ", and so read by it") if self.packed_head else ""
        tied = "tied to the embedding" + packed
        lines.append(f"head     {tied if spec.tie_embeddings else 'its own'}, {spec.vocab_size:,} rows")
        heads = f"{spec.num_heads} query and {spec.num_kv_heads} key/value heads of {spec.head_dim}"
        lines.append(f"heads    {heads}" + (f", {spec.qk_norm} q/k norm" if spec.qk_norm else ""))
        for index, rope in enumerate(spec.ropes):
            lines.append(f"rope     {_rope(rope, spec.head_dim)}, {_layers([x.rope == index for x in spec.layers])}")
        if any(x.rope is None for x in spec.layers):
            lines.append(f"rope     none, {_layers([x.rope is None for x in spec.layers])}")
        for window in sorted({x.window for x in spec.layers if x.window is not None}):
            lines.append(f"window   {window:,} tokens, {_layers([x.window == window for x in spec.layers])}")
        if all(x.window is None for x in spec.layers):
            lines.append("window   none: every layer sees the whole context")
        if spec.moe is not None:
            shared = ", one shared" if spec.moe.shared_intermediate_size else ""
            lines.append(f"experts  {spec.moe.top_k} of {spec.moe.num_experts}{shared}, {_layers([x.moe for x in spec.layers])}")
        lines.append(f"end ids  {', '.join(map(str, spec.eos_ids)) or 'none'}")
        return lines


def _part(name: str) -> str:
    return next((part for word, part in PARTS if word in name), "other")


def _held(destination: Destination) -> str:
    """The type, or of quantised weights the bits that one takes with its share of the scales."""
    if destination.lines == 1 and not destination.blocks:
        return str(destination.tensor.dtype).removeprefix("torch.")
    return f"{8 * destination.tensor.nbytes / math.prod(destination.shape_of()):.1f} bits"


def _scheme(pairs: set[tuple[str, str]]) -> str:
    return ", ".join(f"{stored} -> {held}" for stored, held in sorted(pairs))


def _rope(rope: RopeSpec, head_dim: int) -> str:
    text = f"base {rope.base:,g}, {rope.dim} of {head_dim} dims"
    if rope.kind == "default":
        return text
    if rope.kind == "longrope" and rope.short_factor == rope.long_factor:
        return f"{text}, scaled per frequency by factors from the file"
    text += f", {rope.kind} x{rope.factor:g} over {rope.original_max_position:,} positions"
    return text + (f", fixed for length {rope.length:,}" if rope.kind in ("dynamic", "longrope") and rope.length else "")


def _layers(chosen: list[bool]) -> str:
    count = sum(chosen)
    return f"all {count} layers" if count == len(chosen) else f"{count} of {len(chosen)} layers"
