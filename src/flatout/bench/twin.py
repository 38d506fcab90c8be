"""Twin: the model of a loaded LLM in Transformers, to be measured against.

A folder is loaded by Transformers itself; a GGUF file's and random weights are taken from our decoder (Transformers' own GGUF load takes
20 s), so that both compute with the same numbers. Transformers is imported here alone, when a Twin is made. Called by compare.py.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from flatout.config import ConfigError
from flatout.modelfile.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.layers.destination import Destination
    from flatout.llm import LLM

# families that Transformers writes like Llama
FAMILIES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
NAMES = {  # canonical name (or its segment) -> Transformers' name
    "embed": "embed_tokens",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.down": "mlp.down_proj",
}
SEGMENTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}


class Twin:
    """`same_weights` is false where random weights of a family beyond FAMILIES could not be handed over: speeds compare, tokens do not.

    Raises ConfigError where Transformers is missing or a GGUF file's family is not one of FAMILIES.
    """

    def __init__(self, llm: LLM):
        try:
            import transformers
        except ImportError:
            raise ConfigError("bench compare: Transformers is not installed; pip install transformers") from None
        import torch

        transformers.logging.set_verbosity_error()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        source, auto = llm.engine.source, transformers.AutoModelForCausalLM
        dtype, device = getattr(torch, llm.config.model.dtype), llm.config.device.device
        model: Any
        self.same_weights = True
        if source.kind == "hf":
            model = auto.from_pretrained(source.files[0].parent, dtype=dtype)
        elif source.kind == "dummy":
            model = auto.from_config(transformers.AutoConfig.from_pretrained(source.files[0]), dtype=dtype)
            self.same_weights = llm.spec.family in FAMILIES
            if self.same_weights:
                _fill(model, llm)
        else:
            model = auto.from_config(_config(transformers, llm.spec), dtype=dtype)
            _fill(model, llm)
        self.model = model.to(device).eval()
        self.model.generation_config.eos_token_id = None  # full output length
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
        """Greedy ids of each prompt (all of one length), and the clock at each step's end."""
        import torch

        times: list[float] = []

        def clock(ids: Tensor, scores: Any) -> Tensor:
            if ids.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.tensor(prompts, device=self.model.device)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, stopping_criteria=[clock]
            )
        return out[:, ids.shape[1] :].tolist(), times


def _config(transformers: Any, spec: ModelSpec) -> Any:
    """Transformers' config of a plain decoder."""
    if spec.family not in FAMILIES or len(spec.ropes) != 1 or spec.ropes[0].kind != "default":
        raise ConfigError(
            f"--model: of GGUF files bench compare takes {', '.join(FAMILIES)} with plain rope; give the model's folder instead"
        )
    return getattr(transformers, FAMILIES[spec.family])(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].base},
        tie_word_embeddings=spec.tie_embeddings,
        bos_token_id=spec.bos_id,
        eos_token_id=None,
    )


def _fill(model: Any, llm: LLM) -> None:
    """Our weights into Transformers' model; ConfigError unless every parameter of both has its counterpart."""
    wrong = [key for keys in model.load_state_dict(_weights(llm.engine.runner.decoder.destinations()), strict=False) for key in keys]
    if set(wrong) - ({"lm_head.weight"} if llm.spec.tie_embeddings else set()):
        raise ConfigError(f"--model: Transformers' {type(model).__name__} does not fit {llm.facts.model}: {', '.join(wrong)}")


def _weights(destinations: dict[str, Destination]) -> dict[str, Tensor]:
    """Our parameters under Transformers' names, fused projections taken apart, packed ones unpacked."""
    made: dict[str, Tensor] = {}
    for name, destination in destinations.items():
        path, kind = name.rsplit(".", 1)
        value = destination.values()
        layer, inside = re.fullmatch(r"(layers\.\d+\.)?(.*)", path).groups(default="")  # type: ignore[union-attr]  # matches everything
        if destination.segments:
            for segment, (first, end) in destination.segments.items():
                made[f"model.{layer}{SEGMENTS[segment]}.{kind}"] = value[first * destination.lines : end * destination.lines]
        else:
            theirs = NAMES.get(inside, inside)
            made[f"lm_head.{kind}" if path == "head" else f"model.{layer}{theirs}.{kind}"] = value
    if "embed.weight" not in destinations:  # it reads the head's
        made["model.embed_tokens.weight"] = made["lm_head.weight"]
    return made
