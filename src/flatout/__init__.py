"""flatout: an LLM inference engine and server that says what the machine is waiting for. Imports nothing heavy: names load on first use."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from flatout.llm import LLM
    from flatout.request import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from flatout.llm import LLM

        return LLM
    if name == "SamplingParams":
        from flatout.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'flatout' has no attribute {name!r}")
