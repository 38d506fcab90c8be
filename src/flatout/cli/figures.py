"""The line of figures under an answer: TTFT, tok/s, and how that compares with what this machine's memory bandwidth allows.

A decoding step must read the weights (of the chosen experts) and the context's KV once: those bytes over the measured bandwidth are the
floor of a token at batch 1. Called by generate.py and chat.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.hardware import ceilings, detect
from flatout.modelfile.spec import ModelSpec
from flatout.request import Timing

if TYPE_CHECKING:
    from flatout.llm import LLM

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Figures:
    """One finished answer in numbers."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache
    tokens: int
    timing: Timing

    @property
    def ttft(self) -> float:
        """Seconds from the request's arrival to its first token."""
        return self.timing.first_token - self.timing.arrival

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 where there were fewer than two."""
        seconds = self.timing.finished - self.timing.first_token
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0

    def line(self, llm: LLM) -> str:
        """As shown to the user. Measures this machine's bandwidth if that was never done (1-2 s)."""
        parts = [f"{self.tokens} token{'s' * (self.tokens != 1)}", f"TTFT {self.ttft * 1e3:.0f} ms"]
        if self.rate:
            parts += [f"{self.rate:.1f} tok/s", self._share(llm)]
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        parts += self._fewer_threads(llm)
        return " · ".join(parts)

    def _fewer_threads(self, llm: LLM) -> list[str]:
        """Said where its last steps, one a token, had fewer threads than were asked for (runner/threads.py)."""
        asked = llm.config.device.threads or 0
        used = [record.threads for record in list(llm.engine.records)[-self.tokens :]]
        fewer = [n for n in used if 0 < n < asked]
        return [f"{min(fewer)} of {asked} threads in {len(fewer) / len(used):.0%} of its steps: the cores were shared"] if fewer else []

    def _share(self, llm: LLM) -> str:
        hardware = detect(llm.config.device.device)
        element = ELEMENT_BYTES[llm.config.model.dtype]
        context = self.prompt_tokens + self.tokens // 2
        needed = weights_read(llm.spec, llm.engine.weight_bytes, element) + kv_read(llm.spec, context, kv_head_bytes(llm))
        roof = ceilings(hardware).reading(needed)
        if self.rate * needed > roof.median:  # nothing beats the roof: it was measured in a busy moment
            roof = ceilings(hardware, refresh=True).reading(needed)
        most = roof.median / needed
        measured = "" if roof.settled else " (measured on a busy machine)"
        return f"{100 * self.rate / most:.0f} % of the {most:,.0f} tok/s that {roof.median / 1e9:,.0f} GB/s of memory bandwidth allow{measured}"


def weights_read(spec: ModelSpec, weight_bytes: int, element: int) -> int:
    """Bytes of parameters that one token at batch 1 must read, of those that a step may (Decoder.weight_bytes): not experts that are not chosen."""
    unread = 0
    if spec.moe is not None:
        expert = 3 * spec.hidden_size * spec.moe.intermediate_size
        unread = sum(layer.moe for layer in spec.layers) * (spec.moe.num_experts - spec.moe.top_k) * expert
    return weight_bytes - unread * element


def kv_head_bytes(llm: LLM) -> int:
    """Bytes of a token's key, or value, of one head in the KV cache."""
    held = llm.config.cache.kv_cache_dtype
    return llm.spec.head_dim * ELEMENT_BYTES[held] + (4 if held == "int8" else 0)  # its scale


def kv_read(spec: ModelSpec, context: int, head_bytes: int) -> int:
    """Bytes of KV cache that one token with this context must read; head_bytes: of a token's key, or value, of one head."""
    per_layer = 2 * spec.num_kv_heads * head_bytes
    return sum(per_layer * min(context, layer.window or context) for layer in spec.layers)
