"""How a config keeps a model's weights: which projections in 4 or 8 bits, of a GGUF file or rounded while loading, and the embedding beside them.

Decides from names and shapes; nothing is read or rounded here (models/load.py). Called by build.py and doctor/predict.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flatout.config import ROUNDED, Config, ConfigError
from flatout.kernels import native
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import kept_embedding, kept_packed, rounded_packed


@dataclass(frozen=True)
class Kept:
    """packed, embedding: as the Decoder takes them. left: what --quantization leaves as it was, in words."""

    packed: dict[str, int] = field(default_factory=dict)
    embedding: str = ""
    left: str = ""


def kept_weights(config: Config, source: ModelSource, spec: ModelSpec, able: bool | None = None) -> Kept:
    """Of a resolved config. able: whether the machine multiplies what a GGUF file packs; None: this one. ConfigError: gguf was asked of a model that
    is no GGUF file."""
    model = config.model
    if model.quantization == "gguf":
        if source.gguf is None:
            raise ConfigError(f"--quantization: gguf keeps the weights of a GGUF file, and {source.name} is none; leave it out")
        if not (native.available() if able is None else able):
            return Kept()
        packed = kept_packed(source)
        return Kept(packed, kept_embedding(source, packed))
    if model.quantization not in ROUNDED:
        return Kept()
    dtype = getattr(torch, model.dtype)
    shapes = Decoder(spec, dtype=dtype, device=torch.device("meta"), max_tokens=1, max_logits=1, max_model_len=1)
    packed, left = rounded_packed(shapes.destinations(), spec, ROUNDED[model.quantization])
    lacking = "; ".join(f"{count} x {what}" for what, count in left.items())
    return Kept(packed, left=f"--quantization {model.quantization} leaves in {model.dtype}: {lacking}" if left else "")
