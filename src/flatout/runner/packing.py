"""Which projections a config keeps in 4 or 8 bits: those of a GGUF file, or any model's that are rounded while loading.

Decides from names and shapes; nothing is read or rounded here (models/load.py). Called by build.py and doctor/predict.py.
"""

from __future__ import annotations

import torch

from flatout.config import ROUNDED, Config, ConfigError
from flatout.kernels import native
from flatout.modelfile.sources import ModelSource
from flatout.modelfile.spec import ModelSpec
from flatout.models.decoder import Decoder
from flatout.models.load import kept_packed, rounded_packed


def packed_projections(config: Config, source: ModelSource, spec: ModelSpec, able: bool | None = None) -> tuple[dict[str, int], str]:
    """Bits by name, for Decoder(packed=...), of a resolved config; and what --quantization leaves as it was, in words, or "".

    able: whether the machine multiplies what a GGUF file packs; None: this one. ConfigError: gguf was asked of a model that is no GGUF file.
    """
    model = config.model
    if model.quantization == "gguf":
        if source.gguf is None:
            raise ConfigError(f"--quantization: gguf keeps the weights of a GGUF file, and {source.name} is none; leave it out")
        return kept_packed(source) if (native.available() if able is None else able) else {}, ""
    if model.quantization not in ROUNDED:
        return {}, ""
    dtype = getattr(torch, model.dtype)
    shapes = Decoder(spec, dtype=dtype, device=torch.device("meta"), max_tokens=1, max_logits=1, max_model_len=1)
    packed, left = rounded_packed(shapes.destinations(), spec, ROUNDED[model.quantization])
    lacking = "; ".join(f"{count} x {what}" for what, count in left.items())
    return packed, f"--quantization {model.quantization} leaves in {model.dtype}: {lacking}" if left else ""
