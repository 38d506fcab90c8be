"""Selfcheck: the arithmetic that would serve a model against its float32 twin (exact.py), and greedy tokens against themselves.

Logits are taken where they are served from: whole prompts, then decode steps alone and in company, captured ones as captured. The served model
is measured and let go before the twin is loaded. No printing. Called by cli/doctor/selfcheck.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatout import __version__
from flatout.config import Config, ConfigError
from flatout.doctor.compare import Figures, Position, finite, positions
from flatout.doctor.exact import Exact, extend, logits_of
from flatout.doctor.prompts import PROMPTS
from flatout.kernels import native
from flatout.request import Request, SamplingParams
from flatout.step import StepPlan

if TYPE_CHECKING:
    from flatout.llm import LLM, RequestOutput
    from flatout.modelfile.sources import ModelSource
    from flatout.modelfile.spec import ModelSpec

CHECKED = 24  # positions of a prompt's chunk whose logits are compared, evenly apart
DECODED = 6  # tokens at each prompt's end that are given one by one, in decode steps
GREEDY_PROMPTS, GREEDY_TOKENS = 6, 12
CUT = 8  # tokens: the budget under which prompts come in many chunks
PROMPT, ALONE, TOGETHER = KINDS = "prompt", "decode alone", "decode together"  # of steps


@dataclass(frozen=True)
class Limits:
    """What passes. A share of the logits' spread, and the exact margin from which a choice must be the same."""

    error: float  # rms over all prompts, of each kind of step. A single position may be far off: the first of a text is, in bfloat16
    margin: float  # logits


# The default model on a CPU: float32 4e-6, bfloat16 0.07 and no flip over 0.4, 4 and 8-bit weights 0.06 and none over 0.3
EXACT = Limits(1e-4, 0.01)
ROUNDED = Limits(0.15, 1.0)


@dataclass(frozen=True)
class Prompt:
    name: str
    ids: list[int]

    @property
    def chunk(self) -> int:
        """Tokens that come as a whole; the others one by one."""
        return max(1, len(self.ids) - DECODED)

    @property
    def checked(self) -> list[int]:
        """Tokens of the chunk, rising."""
        return np.unique(np.linspace(0, self.chunk - 1, CHECKED).round().astype(int)).tolist()

    @property
    def decoded(self) -> list[int]:
        return list(range(self.chunk, len(self.ids)))


@dataclass(frozen=True)
class Run:
    """Greedy tokens of some prompts another way than each whole, alone and captured."""

    name: str
    same: int
    of: int
    first: str | None  # the first difference in words

    def to_json(self) -> dict[str, Any]:
        return {"run": self.name, "same_prompts": self.same, "of_prompts": self.of, "first_difference": self.first}


@dataclass
class Served:
    """What remains of the served model when it is gone."""

    source: ModelSource
    spec: ModelSpec
    config: Config
    lines: list[str]  # what its load said
    prompts: list[Prompt]
    logits: list[dict[str, Tensor]]  # a prompt's, by kind of step: float32 [N, V]
    weights: dict[str, Tensor] | None  # of a model of random weights, which no file holds
    runs: list[Run] = field(default_factory=list)
    promised: bool = False
    seconds: float = 0.0


@dataclass
class Selfcheck:
    """The outcome; `positions` by prompt, in the prompts' order."""

    served: Served
    limits: Limits
    positions: dict[str, list[Position]]
    twin_device: str
    twin_seconds: float

    def figures(self, name: str | None = None, kind: str | None = None) -> Figures | None:
        """Of one prompt or all, one kind of step or all; None: no such positions."""
        several = [p for prompt in ([name] if name else self.positions) for p in self.positions[prompt] if kind in (None, p.kind)]
        return Figures.of(several) if several else None

    @property
    def failures(self) -> list[str]:
        """Why it doesn't pass, a sentence each."""
        said = []
        for kind in KINDS:
            figures = self.figures(kind=kind)
            if figures and not figures.rms <= self.limits.error:
                off = f"{figures.rms:.2%} of their spread" if finite(figures.rms) is not None else "not finite"
                said.append(f"{kind}: the logits' error is {off}; {self.limits.error:.2%} passes")
        for name, several in self.positions.items():
            if sure := next((p for p in several if p.flipped and p.margin > self.limits.margin), None):
                said.append(
                    f"{name}, {sure.kind}: after token {sure.token} another choice than the exact one, which leads by {sure.margin:.2f}"
                )
        if self.served.promised:
            said += [f"greedy tokens, {run.name}: {run.first}" for run in self.served.runs if run.first]
        return said

    def to_json(self) -> dict[str, Any]:
        """Holds no text of a prompt. Units are in the names; shares are of the standard deviation of the exact logits."""
        served = self.served
        return {
            "model": served.source.name,
            "flatout": __version__,
            "passed": not self.failures,
            "failures": self.failures,
            "arithmetic": arithmetic(served.config),
            "limits": {"max_error_share": self.limits.error, "max_flip_margin_logits": self.limits.margin},
            "total": _json(self.figures()),
            "by_step": {kind: _json(self.figures(kind=kind)) for kind in KINDS},
            "prompts": [
                {
                    "name": p.name,
                    "tokens": len(p.ids),
                    **(_json(self.figures(p.name)) or {}),
                    "by_position": [
                        {
                            "step": at.kind,
                            "token": at.token,
                            "logit_error_rms_share": finite(at.rms),
                            "kl_nats": finite(at.kl),
                            "flipped": at.flipped,
                        }
                        for at in self.positions[p.name]
                    ],
                }
                for p in served.prompts
            ],
            "greedy": {"promised": served.promised, "runs": [run.to_json() for run in served.runs]},
            "twin": {"dtype": "float32", "device": self.twin_device},
            "load": served.lines,
            "served_seconds": served.seconds,
            "twin_seconds": self.twin_seconds,
        }


def selfcheck(options: dict[str, Any], *, max_error: float | None = None, most: int = len(PROMPTS)) -> Selfcheck:
    """Load the model as `options` (Config's) would serve it, measure, let it go, load the twin, compare. most: of the prompts.

    Raises ConfigError and ModelFileError as a load does, ConfigError too where the twin does not fit.
    """
    served = _serve(options, most)
    gc.collect()  # its memory, before the twin asks for as much and more
    begin = time.perf_counter()
    config = served.config
    assert config.model.max_model_len
    longest = max(len(p.ids) for p in served.prompts)
    twin = Exact(served.source, served.spec, config.model.max_model_len, longest, config.device.device, served.weights)
    served.weights = None
    found = {}
    exact = twin.logits([(p.ids, [*p.checked, *p.decoded]) for p in served.prompts])
    for prompt, logits, right in zip(served.prompts, served.logits, exact):
        chunk, decoded = right.split([len(prompt.checked), len(prompt.decoded)])
        found[prompt.name] = [
            position
            for kind, fast in logits.items()
            for position in positions(kind, *((prompt.checked, chunk) if kind == PROMPT else (prompt.decoded, decoded)), fast)
        ]
    served.logits = []
    limits = EXACT if exact_in_float32(config) else ROUNDED
    if max_error is not None:
        limits = Limits(max_error, limits.margin)
    return Selfcheck(served, limits, found, str(twin.device), time.perf_counter() - begin)


def arithmetic(config: Config) -> dict[str, str]:
    """What runs, by a resolved config."""
    model, cpu = config.model, config.device.device == "cpu"
    library = "none: torch alone" if not native.available() else native.isa() + (" and AMX" if native.has_tiles() else "")
    return {
        "device": config.device.device,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "attention": config.device.attention_backend,
        "kernels": f"native library: {library}" if cpu else "GPU",
    }


def exact_in_float32(config: Config) -> bool:
    """Nothing is rounded to anything shorter: no row, no weight, no key or value."""
    return config.model.dtype == config.cache.kv_cache_dtype == "float32" and config.model.quantization == "none"


def same_tokens_promised(config: Config) -> bool:
    """Whether a request's greedy tokens may depend on nothing but itself: README, "The same answer twice"."""
    return exact_in_float32(config) if config.device.device == "cpu" else config.device.deterministic


def _json(figures: Figures | None) -> dict[str, Any] | None:
    return figures.to_json() if figures else None


# -- the served model --------------------------------------------------------------------------------------------------


def _serve(options: dict[str, Any], most: int) -> Served:
    from flatout.llm import LLM

    begin = time.perf_counter()
    with LLM(**options) as llm:
        prompts = _prompts(llm, most)
        weights = None
        if llm.engine.source.kind == "dummy":
            weights = {name: d.tensor for name, d in llm.engine.runner.decoder.destinations().items()}
        served = Served(llm.engine.source, llm.spec, llm.config, llm.start_lines, prompts, [], weights)
        served.logits = _Steps(llm).logits(prompts)  # first: its blocks are the pool's, whose prefix cache is still empty
        served.promised, served.runs = same_tokens_promised(llm.config), list(_greedy_runs(llm, prompts[:GREEDY_PROMPTS]))
    served.seconds = time.perf_counter() - begin
    return served


def _prompts(llm: LLM, most: int) -> list[Prompt]:
    """The texts' ids, as long as a context holds them; without a tokenizer fixed ids of the texts' lengths in bytes."""
    facts = llm.facts
    longest = min(facts.max_model_len, facts.pool_tokens) - GREEDY_TOKENS
    if longest < 1:
        raise ConfigError(
            f"selfcheck: needs room for at least {GREEDY_TOKENS + 1} tokens; --max-model-len and the KV pool hold {longest + GREEDY_TOKENS}"
        )
    made = []
    for number, (name, text) in enumerate(list(PROMPTS.items())[:most]):
        if llm.tokenizer is not None:
            ids = llm.tokenize(text)
        else:
            ids = np.random.default_rng(number).integers(0, facts.vocab_size, len(text.encode()) // 4 + 1).tolist()
        made.append(Prompt(name, ids[:longest]))
    return made


class _Steps:
    """Drives an idle engine's executor by hand, as runner.py does, to see the logits: rows of its slots and blocks of its pool, from 0 on."""

    def __init__(self, llm: LLM):
        engine = llm.engine
        self.runner, self.blocks = engine.runner, engine.scheduler.blocks.num_blocks
        self.most, self.budget = engine.scheduler.max_num_seqs, engine.scheduler.budget

    def logits(self, prompts: Sequence[Prompt]) -> list[dict[str, Tensor]]:
        """Of each prompt, by kind of step."""
        made: list[dict[str, Tensor]] = []
        company: list[tuple[Prompt, list[int]]] = []
        given = 0
        with torch.inference_mode():
            for prompt in prompts:
                need = -(-len(prompt.ids) // self.runner.block_size)
                if company and (given + need > self.blocks or len(company) == min(self.most, self.budget)):
                    made += self._company(company)
                    company, given = [], 0
                company.append((prompt, list(range(given, given + need))))
                given += need
            return made + self._company(company)

    def _company(self, company: list[tuple[Prompt, list[int]]]) -> list[dict[str, Tensor]]:
        """Prompts whose blocks fit the pool together: row i is slot i."""
        made = [{PROMPT: self._chunk(prompt, blocks)} for prompt, blocks in company]
        for slot, (_, blocks) in enumerate(company):
            self._give(slot, blocks)
        for row, (prompt, blocks) in enumerate(company):
            if prompt.decoded:
                made[row][ALONE] = torch.cat([self._decode([(row, prompt, at, blocks)]) for at in prompt.decoded])
        collected: list[list[Tensor]] = [[] for _ in company]
        for step in range(DECODED):
            rows = [(row, p, p.decoded[step], blocks) for row, (p, blocks) in enumerate(company) if step < len(p.decoded)]
            if len(rows) > 1:
                for (row, *_), logits in zip(rows, self._decode(rows).split(1)):
                    collected[row].append(logits)
        for row, (prompt, _) in enumerate(company):
            if prompt.decoded and len(collected[row]) == len(prompt.decoded):
                made[row][TOGETHER] = torch.cat(collected[row])
        return made

    def _chunk(self, prompt: Prompt, blocks: list[int]) -> Tensor:
        """[len(checked), V]: the prompt's chunk in steps of the token budget, as where prompt logprobs are asked for."""
        pieces = []
        for low in range(0, prompt.chunk, self.budget):
            high = min(low + self.budget, prompt.chunk)
            sampled = [at - low for at in prompt.checked if low <= at < high]
            pieces.append(self._forward([(prompt.ids[low:high], low, blocks)], sampled))
        return torch.cat(pieces)

    def _forward(self, rows: list[tuple[list[int], int, list[int]]], sampled: list[int]) -> Tensor:
        runner = self.runner
        batch, host = extend(rows, sampled, runner.block_size, runner.groups, runner.device)
        return logits_of(runner.decoder, runner.executor.forward(batch, host), batch.sample_rows)

    def _give(self, slot: int, blocks: list[int]) -> None:
        plan = _plan([], [], [])
        plan.block_slots, plan.block_ids = np.full(len(blocks), slot, np.int32), np.array(blocks, np.int32)
        plan.block_columns = np.arange(len(blocks), dtype=np.int32)
        self.runner.slots.apply(plan)

    def _decode(self, rows: list[tuple[int, Prompt, int, list[int]]]) -> Tensor:
        """[R, V]: one step of a token each, captured where the runner would take a captured one. A row: slot, prompt, which token, blocks."""
        decodes = self.runner.executor.decodes
        plan = _plan([slot for slot, *_ in rows], [at for _, _, at, _ in rows], [prompt.ids[at] for _, prompt, at, _ in rows])
        staged = decodes.stage(plan) if decodes is not None else None
        if staged is None or decodes is None:
            return self._forward([([prompt.ids[at]], at, blocks) for _, prompt, at, blocks in rows], list(range(len(rows))))
        decodes.run(staged, choose=False)
        return staged.step.logits[: len(rows)].cpu().clone()


def _plan(slots: list[int], starts: list[int], ids: list[int]) -> StepPlan:
    """A decode step of these rows, which have their blocks."""
    rows = len(slots)
    return StepPlan(
        step=0,
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        counts=np.ones(rows, np.int32),
        token_ids=np.array(ids, np.int32),
        samples=np.ones(rows, bool),
        out_positions=np.zeros(rows, np.int32),
        requests=[Request("selfcheck", [0], SamplingParams(temperature=0), slot=slot) for slot in slots],
    )


# -- greedy tokens -----------------------------------------------------------------------------------------------------


def _greedy_runs(llm: LLM, prompts: Sequence[Prompt]) -> Iterator[Run]:
    """Each prompt alone is what the other runs are held against. Salts keep the prefix cache out of all but the one that is about it."""
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    scheduler, executor = llm.engine.scheduler, llm.engine.runner.executor

    def ids(results: Sequence[RequestOutput]) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in results]

    def alone(salt: str) -> list[RequestOutput]:
        return [llm.generate([p.ids], params, use_tqdm=False, cache_salt=salt)[0] for p in prompts]

    def run(name: str, tokens: list[list[int]]) -> Run:
        first = next(((p, a, b) for p, a, b in zip(prompts, base, tokens) if a != b), None)
        return Run(name, sum(a == b for a, b in zip(base, tokens)), len(base), _difference(*first) if first else None)

    base = ids(alone("alone"))
    if executor.decodes is not None:
        with _set(executor, "decodes", None):
            yield run("op by op", ids(alone("op by op")))
    again = alone("alone")
    if any(result.cached_tokens for result in again):
        yield run("prefix cached", ids(again))
    if llm.config.scheduler.enable_chunked_prefill:
        with _set(scheduler, "budget", CUT):
            yield run(f"chunks of {CUT}", ids(alone("chunks")))
    if len(prompts) > 1:
        together = llm.generate([p.ids for p in prompts], params, use_tqdm=False, cache_salt="company")
        yield run(f"{len(prompts)} together", ids(together))


def _difference(prompt: Prompt, base: list[int], other: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(base, other)) if a != b), min(len(base), len(other)))
    ids = [str(tokens[at]) if at < len(tokens) else "the end" for tokens in (base, other)]
    return f"{prompt.name}: output token {at} is {ids[1]} instead of {ids[0]}"


@contextmanager
def _set(target: Any, name: str, value: Any) -> Iterator[None]:
    """An idle engine's part with another setting, for as long as the block runs."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
