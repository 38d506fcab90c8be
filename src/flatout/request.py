"""What a user asks for and how one sequence of it stands: SamplingParams, Request, Status, FinishReason, Output. Data only.

Nothing here acts: admission and stepping are core/'s, text is text/'s. Field names and meanings are vLLM's.
Called by everything from the HTTP protocol to the scheduler.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

MAX_LOGPROBS = 20  # most alternatives a request may ask for per position, as in the OpenAI API and vLLM's default
MAX_STOPS = 16  # stop strings a request may give
MAX_STOP_CHARS = 1024  # the longest stop string: longer ones would hold back that much text
MAX_N = 128


class RequestError(ValueError):
    """A request that cannot be served as asked. `field` names the offending parameter."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


# reasons of waiting (Request.waited) that are no shortage: no plan was made meanwhile, and: it ran before and lost its blocks
NEXT_PLAN, PREEMPTED = "next plan", "preempted"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, the context limit or the pool
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # the engine failed on this request


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # lost its blocks; waits to be recomputed, loses nothing
    FINISHED = 3


def int32_bytes(ids: Sequence[int]) -> bytes:
    """The ids as int32, end to end: what is hashed and copied in place of Python ints. 21 ns an id; struct.error for one that is none."""
    return struct.pack(f"{len(ids)}i", *ids)


def _number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(name, f"must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        raise RequestError(
            name,
            f"must be {'over' if open_low else 'at least'} {low:g}"
            + (f" and at most {high:g}" if high != math.inf else "")
            + f", got {value!r}",
        )
    return value


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(name, f"must be at least {low}" + (f" and at most {high}" if high is not None else "") + f", got {value}")
    return value


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens; names, defaults and meanings are vLLM's.

    Applied in the order of vLLM's V1 sampler: logit_bias, penalties, masks, temperature, min_p, top_k, top_p. `temperature=0` is greedy.
    `logprobs` are those of the raw model output, before any of it. Raises RequestError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # looks at prompt and output; > 1 discourages
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False  # the model's own end ids do not stop; stop_token_ids given here still do
    max_tokens: int | None = 16  # an upper bound; None: as far as the context allows
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.top_k = max(_integer("top_k", self.top_k, -1), 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        self.stop = self._stops(self.stop)
        self.stop_token_ids = self._ids("stop_token_ids", self.stop_token_ids)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is over max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError("logit_bias", f"must map token ids to numbers, got {type(self.logit_bias).__name__}")
            bias = {}
            for key, value in self.logit_bias.items():
                try:
                    token = int(key)
                except (TypeError, ValueError):
                    raise RequestError("logit_bias", f"key {key!r} is not a token id") from None
                bias[token] = float(_number(f"logit_bias[{key}]", value, -100.0, 100.0))
            self.logit_bias = bias or None
        self.allowed_token_ids = self._ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids", "must not be empty: nothing could be sampled")
        words = self.bad_words
        if words is not None and not (isinstance(words, list) and all(isinstance(w, str) and w for w in words)):
            raise RequestError("bad_words", "must be a list of non-empty strings")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"must be true or false, got {getattr(self, name)!r}")

    @staticmethod
    def _stops(stop: Any) -> list[str] | None:
        """None and [] mean no stop string; an empty string would match everywhere and is refused."""
        if stop is None:
            return None
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
            raise RequestError("stop", "must be a string or a list of strings")
        if any(not s for s in stops):
            raise RequestError("stop", "an empty stop string would match everywhere; leave it out")
        if len(stops) > MAX_STOPS:
            raise RequestError("stop", f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        if any(len(s) > MAX_STOP_CHARS for s in stops):
            raise RequestError("stop", f"a stop string may have at most {MAX_STOP_CHARS} characters")
        return list(stops) or None

    @staticmethod
    def _ids(name: str, ids: Any) -> list[int] | None:
        if ids is None:
            return None
        if not isinstance(ids, list | tuple | set | frozenset):
            raise RequestError(name, "must be a list of token ids")
        return [_integer(f"{name}[{i}]", t, 0) for i, t in enumerate(ids)]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Every id named here exists in the model. Called at admission, when the vocabulary is known."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise RequestError(name, f"token id {token} is outside the vocabulary of {vocab_size}")

    def but(self, **changes: Any) -> SamplingParams:
        """A changed and newly checked copy."""
        return replace(self, **changes)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


@dataclass(slots=True)
class ModelFacts:
    """What the door must know of a loaded model to judge a request: every limit learned at load."""

    model: str  # the name it was loaded by
    vocab_size: int
    max_model_len: int  # tokens, prompt and output
    pool_tokens: int  # tokens that the whole KV pool holds
    block_size: int
    eos_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. A user's request with n > 1 becomes n of these that share their prompt's blocks.

    `prompt_ids` and `output_ids` are plain ints; `output_ids` holds committed tokens only. What the scheduler keeps
    (slot, blocks, counts) lives here because it must survive preemption, and is written by core/ alone.
    """

    id: str  # the user's request
    prompt_ids: list[int]
    params: SamplingParams
    index: int = 0  # which of the n samples
    seed: int = 0  # always set: unseeded requests get one at the door
    eos_ids: frozenset[int] = frozenset()  # the model's end ids; unused when params.ignore_eos
    bad_words_ids: list[list[int]] = field(default_factory=list)  # params.bad_words as token ids, made at the door
    arrival: float = 0.0  # seconds, the engine's clock
    priority: int = 0  # lower first, as in vLLM
    cache_salt: str = ""  # requests share cached blocks only under the same salt
    kind: str = "generate"
    prompt_bytes: bytes = b""  # int32_bytes(prompt_ids), made here unless whoever checked the ids brings it

    # -- kept by core/ --------------------------------------------------------------------------------------------
    status: Status = Status.WAITING
    slot: int = -1
    output_ids: list[int] = field(default_factory=list)
    limit: int = 0  # most tokens, prompt and output together, that this sequence may reach
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks, as far as published or looked up
    cached_tokens: int = 0  # prompt tokens shared at first admission, cached or being computed; kept if the request starts over
    miss_reason: str = ""  # why no more of the prompt was cached
    preemptions: int = 0
    waited: dict[str, float] = field(default_factory=dict)  # seconds in the queue, by reason (core/waits.py)
    chunks: int = 0  # steps that computed more than its newest token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string; None for an end id
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_bytes = self.prompt_bytes or int32_bytes(self.prompt_ids)

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.index)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(slots=True)
class TokenLogprob:
    """One token's raw log-probability and its rank in the vocabulary (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(slots=True)
class PositionLogprobs:
    """Logprobs at one position: the chosen token first, then the `top` n in falling order (which may hold it again)."""

    chosen: TokenLogprob
    top: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Timing:
    """Seconds on the engine's clock, the monotonic one that all processes of a machine share; differences are what users see."""

    arrival: float
    first_scheduled: float
    first_token: float
    finished: float  # 0: not yet
    waited: dict[str, float] = field(default_factory=dict)  # Request's
    chunks: int = 0

    @classmethod
    def of(cls, request: Request, finished: float | None = None) -> Timing:
        """As it is by now, or would be had it finished then."""
        end = request.finished if finished is None else finished
        return cls(request.arrival, request.first_scheduled, request.first_token, end, dict(request.waited), request.chunks)


@dataclass(slots=True)
class Output:
    """What one step gave one sequence: goes from the engine to the text side. Ids only, never text."""

    id: str
    index: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # with the first Output; entry 0 is None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    miss_reason: str = ""
    preemptions: int = 0
    timing: Timing | None = None  # with the first Output and with the last
    error: str = ""  # why, when finish_reason is "error"
