"""Random steps for minutes: engines with random settings serve random requests, and every answer is compared with the ops' references.

A round is one model and one engine, drawn with its seed: family or packed kind, instruction set, threads, implementations (any that accepts, mostly
native ones), budget, pool, then batches of prompts, some of which begin as earlier ones. In float32 each answer is generated again, alone, by
the references: the same tokens. Of packed weights the references score it: log-probabilities as near as rounding explains. Used by test_soak.py;
`python tests/cpu/soak.py --minutes 120 --seed 7` runs it by hand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import FAMILIES, make, shake

from flatout import LLM, SamplingParams
from flatout.kernels import native
from flatout.kernels.op import Op
from flatout.llm import RequestOutput

LENGTH = 160  # tokens of a context
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160}
K_WIDE = {**WIDE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PACKED = [(family, kind) for family in ("llama", "qwen2", "qwen3") for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")]
PROJECTIONS = ("ffn_gate.w", "ffn_up.w", "ffn_down.w", "attn_q.w", "attn_k.w", "attn_v.w", "attn_output.w", "token_embd", "output.w")
LETTERS = ["!!", *(chr(33 + i) if i < 94 else chr(80 + i) for i in range(WIDE["vocab_size"] - 1))]
WORDS: dict[str, Any] = {  # a file's tokenizer, which nothing here asks anything
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "gpt-2",
    "tokenizer__ggml__tokens": LETTERS,
    "tokenizer__ggml__merges": ["! !"],
}
# nats of a token's log-probability between an engine and the references
EXACT = 2e-4  # float32: what the order of sums explains
ROUNDED_RMS, ROUNDED = 0.15, 1.0  # packed: rows rounded to int8 where the references do, or to bfloat16 where many, and a float16 cache


@dataclass
class Tally:
    """What ran so far, and the worst of it."""

    counts: Counter[str] = field(default_factory=Counter)
    exact: float = 0.0  # largest distance of a log-probability in float32
    rounded: list[float] = field(default_factory=list)  # distances of packed rounds
    models: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        rms = float(np.sqrt(np.mean(np.square(self.rounded)))) if self.rounded else 0.0
        worst = max(self.rounded, default=0.0)
        return [
            f"{len(self.models)} models, " + ", ".join(f"{n:,} {name}" for name, n in self.counts.items()),
            f"log-probabilities: float32 at most {self.exact:.1e} off, packed {rms:.3f} rms, {worst:.2f} at most; differences: {len(self.differences)}",
            *self.differences,
        ]


@contextmanager
def references() -> Iterator[None]:
    """Inside, every op of this process runs its reference."""
    before = Op.chosen
    Op.chosen = lambda self, *args: self.reference  # type: ignore[method-assign]
    try:
        yield
    finally:
        Op.chosen = before  # type: ignore[method-assign]


@contextmanager
def any_implementation(rng: np.random.Generator) -> Iterator[None]:
    """Inside, an op takes any implementation that accepts its operands, most often a native one, and nothing is measured."""
    before = Op.chosen
    chosen: dict[tuple[Op, Any], Any] = {}

    def choose(op: Op, *args: Any) -> Any:
        key = op, op.key(*args)
        if key not in chosen:
            able = [i for i in op.implementations if i.accepts(*args)]
            ours = [i for i in able if i.native]
            pick = ours if ours and rng.random() < 0.85 else able
            chosen[key] = pick[rng.integers(len(pick))].run if pick else op.reference
        return chosen[key]

    Op.chosen = choose  # type: ignore[method-assign]
    try:
        yield
    finally:
        Op.chosen = before  # type: ignore[method-assign]


class Soak:
    """round() after round(); reports in `tally`."""

    def __init__(self, folder: Path):
        self.folder, self.tally = folder, Tally()
        self._twins: dict[str, LLM] = {}

    def round(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        packed = bool(rng.random() < 0.4)
        name, path = self._model(rng, packed)
        isa = str(rng.choice([i for i in ("avx512_vnni", "avx2", "scalar") if native.use_isa(i)]))
        native.use_isa(isa)
        options = self._options(rng, packed)
        where = f"seed {seed} ({name}, {isa})"
        with any_implementation(rng), LLM(str(path), **options) as llm:
            self._watch(llm, rng)
            heads: list[list[int]] = []
            answers: list[tuple[list[int], SamplingParams, RequestOutput]] = []
            for _ in range(rng.integers(1, 4)):
                prompts = [self._prompt(rng, heads, llm.spec.vocab_size) for _ in range(rng.integers(1, 9))]
                params = [self._params(rng) for _ in prompts]
                answers += zip(prompts, params, llm.generate(prompts, params, use_tqdm=False))
            used = llm.engine.scheduler.blocks.num_used
        if used:
            self.tally.differences.append(f"{where}: {used} blocks are not given back")
        self.tally.models.add(name)
        self.tally.counts["rounds"] += 1
        with references():
            twin = self._twin(name, path, packed)
            for number, (prompt, asked, answer) in enumerate(answers):
                if difference := (self._scored if packed else self._exact)(twin, prompt, asked, answer):
                    self.tally.differences.append(f"{where}, request {number}, {difference}")

    def close(self) -> None:
        for twin in self._twins.values():
            twin.close()

    # -- what is drawn ------------------------------------------------------------------------------------------------

    def _model(self, rng: np.random.Generator, packed: bool) -> tuple[str, Path]:
        if not packed:
            family = list(FAMILIES)[rng.integers(len(FAMILIES))]
            return family, make(family, self.folder)
        from modelfile_samples import config_of, model_of, write_gguf

        family, kind = PACKED[rng.integers(len(PACKED))]
        path = self.folder / f"{family}-{kind}.gguf"
        if not path.exists():
            config = config_of(family, **(K_WIDE if kind.endswith("K") else WIDE))
            model = model_of(config)
            shake(model)
            with torch.no_grad():  # sums of as many products stay as large
                for parameter in model.parameters():
                    parameter.mul_((64 / config.hidden_size) ** 0.5 if parameter.dim() > 1 else 1.0)
            write_gguf(model, path, types={"norm": "F32", **dict.fromkeys(PROJECTIONS, kind)}, **WORDS)
        return path.stem, path

    def _options(self, rng: np.random.Generator, packed: bool) -> dict[str, Any]:
        block, budget = int(rng.choice([1, 4, 8, 16, 32])), int(rng.integers(5, 97))
        return {
            **({"quantization": "gguf", "kv_cache_dtype": str(rng.choice(["float16", "float32"]))} if packed else {"dtype": "float32"}),
            "device": "cpu",
            "threads": int(rng.integers(1, 3)),
            "block_size": block,
            "max_model_len": LENGTH,
            "max_num_batched_tokens": budget,
            "max_num_seqs": int(rng.integers(1, min(budget, 16) + 1)),
            "num_gpu_blocks_override": -(-int(rng.integers(LENGTH, 2 * LENGTH)) // block),
            "enable_prefix_caching": bool(rng.random() < 0.85),
            "async_scheduling": bool(rng.random() < 0.7),
            "enforce_eager": bool(rng.random() < 0.15),
        }

    def _prompt(self, rng: np.random.Generator, heads: list[list[int]], vocab_size: int) -> list[int]:
        """Some begin as one before did."""
        prompt = rng.integers(5, vocab_size, rng.integers(1, 50)).tolist()
        if heads and rng.random() < 0.5:
            head = heads[rng.integers(len(heads))]
            prompt = head[: rng.integers(1, len(head) + 1)] + prompt
        heads.append(prompt[:90])
        return prompt[:110]

    def _params(self, rng: np.random.Generator) -> SamplingParams:
        common: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, 40)),
            "ignore_eos": True,
            "logprobs": 0,
            "n": int(rng.choice([1, 1, 1, 2, 3])),
        }
        if rng.random() < 0.3:
            common |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        if rng.random() < 0.5:
            return SamplingParams(temperature=0.0, **common)
        narrow = [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.7}][rng.integers(5)]
        return SamplingParams(temperature=float(rng.choice([0.5, 1.0, 1.7])), seed=int(rng.integers(1 << 30)), **narrow, **common)

    # -- what is compared ---------------------------------------------------------------------------------------------

    def _watch(self, llm: LLM, rng: np.random.Generator) -> None:
        """Count steps, and those that ran as programs; take the blocks of a running request now and then, as a full pool does."""
        counts, engine, scheduler = self.tally.counts, llm.engine, llm.engine.scheduler
        step, commit = engine.step, engine._commit

        def disturbed() -> Any:
            running = list(scheduler._running)
            if running and rng.random() < 0.03:
                scheduler._preempt(running[rng.integers(len(running))])
                counts["preemptions"] += 1
            return step()

        def counted(flight: Any) -> Any:
            counts["steps"] += 1
            counts["tokens computed"] += flight.plan.num_tokens
            counts["preemptions"] += flight.record.preempted
            return commit(flight)

        engine.step, engine._commit = disturbed, counted  # type: ignore[method-assign]
        decodes = engine.runner.executor.decodes
        if decodes is not None:
            run = decodes.run

            def as_program(*given: Any) -> None:
                counts["of them programs"] += 1
                run(*given)

            decodes.run = as_program  # type: ignore[method-assign]

    def _twin(self, name: str, path: Path, packed: bool) -> LLM:
        """The references' engine: eager, whole prompts, no prefix cache, no step ahead. Made within references()."""
        if name not in self._twins:
            kind = {"quantization": "gguf", "kv_cache_dtype": "float32"} if packed else {"dtype": "float32"}
            slow = {"enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": LENGTH}
            self._twins[name] = LLM(
                str(path), device="cpu", threads=1, max_model_len=LENGTH, max_num_seqs=4, num_gpu_blocks_override=64, **kind, **slow
            )
        return self._twins[name]

    def _exact(self, twin: LLM, prompt: list[int], asked: SamplingParams, answer: RequestOutput) -> str:
        (expected,) = twin.generate([prompt], asked, use_tqdm=False)
        self.tally.counts["tokens from the prefix cache"] += answer.cached_tokens
        for ours, theirs in zip(answer.outputs, expected.outputs, strict=True):
            self.tally.counts["answers in float32"] += 1
            off = max(np.abs(_chosen(ours) - _chosen(theirs)).tolist()) if ours.token_ids == theirs.token_ids else np.inf
            if off > EXACT:
                return f"sample {ours.index}: {ours.token_ids}, the references {theirs.token_ids}; log-probabilities {off:.1e} off"
            self.tally.exact = max(self.tally.exact, off)
        return ""

    def _scored(self, twin: LLM, prompt: list[int], asked: SamplingParams, answer: RequestOutput) -> str:
        self.tally.counts["tokens from the prefix cache"] += answer.cached_tokens
        for ours in answer.outputs:
            self.tally.counts["answers of packed weights"] += 1
            if len(ours.token_ids) != asked.max_tokens:
                return f"sample {ours.index}: {len(ours.token_ids)} of {asked.max_tokens} tokens"
            (scored,) = twin.generate([prompt + ours.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            assert scored.prompt_logprobs is not None
            found = scored.prompt_logprobs[len(prompt) :]
            expected = np.array([position[i].logprob for position, i in zip(found, ours.token_ids, strict=True) if position])
            off = np.abs(_chosen(ours) - expected)
            rms = float(np.sqrt(np.mean(off**2)))
            if not (rms <= ROUNDED_RMS * max(1.0, 3 / len(off) ** 0.5) and off.max() <= ROUNDED):
                return f"sample {ours.index}: {ours.token_ids}: log-probabilities {rms:.3f} rms, {off.max():.2f} off"
            self.tally.rounded += off.tolist()
        return ""


def _chosen(output: Any) -> np.ndarray:
    """Log-probabilities of the tokens of a sample."""
    return np.array([position[i].logprob for position, i in zip(output.logprobs, output.token_ids, strict=True)])


def soak(folder: Path, minutes: float, seed: int) -> Tally:
    """Rounds of `seed`, `seed` + 1 and so on, until the minutes are over; at least one."""
    before, end = native.isa(), time.monotonic() + 60 * minutes
    run = Soak(folder)
    try:
        while True:
            run.round(seed)
            seed += 1
            if time.monotonic() >= end:
                return run.tally
    finally:
        run.close()
        native.use_isa(before)
        native.set_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="random steps against the references")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = soak(Path(folder), args.minutes, args.seed)
    print("\n".join(tally.lines()))
    return int(bool(tally.differences))


if __name__ == "__main__":
    sys.exit(main())
