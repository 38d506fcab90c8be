"""An engine with a script instead of a model, for the server's tests: token t is always followed by next_token(t).

It has the API of flatout.engine.Engine, runs in the child process, and knows slots, queueing, aborts, stop ids, logit_bias, logprobs and a
cache of whole blocks, so that everything the server says can be foretold. Environment: SCRIPT_STEP_SECONDS slows its steps, SCRIPT_GAUGES
names a file where it writes who runs and waits, SCRIPT_FAIL makes its start fail.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from flatout.config import Config, ConfigError
from flatout.request import FinishReason, ModelFacts, Output, PositionLogprobs, Request, RequestError, Timing, TokenLogprob
from flatout.step import StepRecord

BLOCK = 16
CONTEXT = 2048
POOL = 1024  # tokens; a prompt over it is the engine's own refusal
CRASH, HICCUP, NAP, BROKEN = 666, 667, 668, 669  # seeds: the engine dies, one request's step fails, a step takes 5 s, steps fail for good
FLOOR = -math.inf  # of banned tokens


def next_token(token: int) -> int:
    """Ids of the tests' tokenizer are bytes: ABC goes on with DEF, around the printable characters; a new line begins with a."""
    return {10: 97, 126: 32}.get(token, (token + 1) % 256)


class ScriptedEngine:
    def __init__(self, config: Config):
        if os.environ.get("SCRIPT_FAIL") == "config":
            raise ConfigError("--dtype: the script says no; use --dtype auto")
        if os.environ.get("SCRIPT_FAIL") == "bug":
            raise RuntimeError("the script broke\nin two lines")
        if os.environ.get("SCRIPT_FAIL") == "exit":
            os._exit(7)
        folder = Path(config.model.model)
        self.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        generation = json.loads((folder / "generation_config.json").read_text())
        eos = generation.pop("eos_token_id")
        self.facts = ModelFacts(
            model=config.model.model,
            vocab_size=self.vocab_size,
            max_model_len=CONTEXT,
            pool_tokens=CONTEXT,  # the door knows nothing of the smaller pool: what it lets through the engine refuses
            block_size=BLOCK,
            eos_ids=(eos,),
            sampling_defaults=generation,
        )
        self.start_lines = ["a script, no model"]
        self.costs = None
        self.settings = {"max_num_seqs": config.scheduler.max_num_seqs or 64, "device": "cpu"}
        self.records: deque[StepRecord] = deque()
        self.counts = {"steps": 0, "prefix_queries": 0, "prefix_hits": 0}
        self.failure: Exception | None = None
        self.pause = float(os.environ.get("SCRIPT_STEP_SECONDS", "0"))
        self.slots = config.scheduler.max_num_seqs or 64
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.gauges = os.environ.get("SCRIPT_GAUGES")
        self.told: tuple[int, int] | None = None
        self._tell()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, requests: list[Request]) -> None:
        if len(requests[0].prompt_ids) > POOL:
            raise RequestError("prompt", f"{len(requests[0].prompt_ids)} tokens are over the pool's {POOL}")
        for request in requests:
            asked = request.params.max_tokens
            request.limit = min(CONTEXT, len(request.prompt_ids) + (CONTEXT if asked is None else asked))
            request.cached_tokens = self._cached(request)
            request.miss_reason = "" if request.cached_tokens else "too short"
            self.counts["prefix_queries"] += len(request.prompt_ids)
            self.counts["prefix_hits"] += request.cached_tokens
        self.waiting += requests
        self._tell()

    def abort(self, id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT, stop_reason: str | None = None) -> None:
        self.running = [r for r in self.running if r.id != id or index not in (None, r.index)]
        self.waiting = [r for r in self.waiting if r.id != id or index not in (None, r.index)]
        self._tell()

    def mark(self, stage: str) -> None:
        pass

    def deep(self, steps: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        waiting = {"slots": len(self.waiting)} if self.waiting else {}
        return {
            "running": len(self.running),
            "waiting": waiting,
            "blocks_used": len(self.running),
            "blocks_total": self.slots,
            **self.counts,
        }

    def step(self) -> list[Output]:
        begin = time.perf_counter()
        if self.pause:
            time.sleep(self.pause)
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.pop(0)
            request.first_scheduled = time.monotonic()
            request.waited = {"slots": request.first_scheduled - request.arrival}
            self.running.append(request)
        rows = len(self.running)
        outputs = [self._advance(request) for request in self.running]
        self.counts["steps"] += 1
        now = time.perf_counter()
        self.records.append(
            StepRecord(self.counts["steps"], begin, now, now - begin, {}, device_s=now - begin, tokens=rows, rows=rows, sampled=rows)
        )
        self.running = [r for r in self.running if r.finish_reason is None]
        self._tell()
        return outputs

    def close(self) -> None:
        pass

    def _advance(self, request: Request) -> Output:
        params, first = request.params, not request.output_ids
        if request.seed == CRASH:
            raise RuntimeError("the script crashed")
        if request.seed == BROKEN:
            self.failure = RuntimeError("the device is gone")
        if request.seed in (HICCUP, BROKEN):
            request.finish_reason = FinishReason.ERROR
            return Output(request.id, request.index, [], finish_reason=FinishReason.ERROR, error="the step failed: hiccup")
        if request.seed == NAP:
            time.sleep(5)
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None and request.index == 0:
            ids = request.prompt_ids
            prompt_logprobs = [None, *(self._logprobs(a, b, params.prompt_logprobs) for a, b in itertools.pairwise(ids))]
        ids, logprobs = [], []
        if request.num_tokens < request.limit:
            last = (request.output_ids or request.prompt_ids)[-1]
            token = self._choose(request, last)
            ids = [token]
            request.output_ids.append(token)
            if params.logprobs is not None:
                logprobs = [self._logprobs(last, token, params.logprobs)]
            over = len(request.output_ids) >= params.min_tokens
            if over and token in request.eos_ids and not params.ignore_eos:
                request.finish_reason = FinishReason.STOP
            elif over and token in (params.stop_token_ids or ()):
                request.finish_reason, request.stop_reason = FinishReason.STOP, token
        if request.finish_reason is None and request.num_tokens >= request.limit:
            request.finish_reason = FinishReason.LENGTH
        return Output(
            request.id,
            request.index,
            ids,
            logprobs=logprobs or None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            miss_reason=request.miss_reason,
            timing=self._timing(request) if first or request.finish_reason else None,
        )

    def _timing(self, request: Request) -> Timing:
        request.first_token = request.first_token or time.monotonic()
        finished = time.monotonic() if request.finish_reason else 0.0
        return Timing(request.arrival, request.first_scheduled, request.first_token, finished, request.waited, 1)

    def _choose(self, request: Request, last: int) -> int:
        forced = [t for t, bias in (request.params.logit_bias or {}).items() if bias >= 100]
        return forced[0] if forced else next_token(last)

    def _logprobs(self, last: int, token: int, count: int) -> PositionLogprobs:
        """The scripted token has -0.1, the k-th token after it -k, every fifth of them minus infinity."""
        best = next_token(last)
        ranked = [
            TokenLogprob((best + k) % self.vocab_size, -0.1 if k == 0 else FLOOR if k % 5 == 0 else -float(k), k + 1) for k in range(21)
        ]
        ranked.sort(key=lambda t: -t.logprob)
        chosen = next((t for t in ranked if t.token_id == token), TokenLogprob(token, -50.0, 300))
        return PositionLogprobs(chosen, ranked[:count])

    def _cached(self, request: Request) -> int:
        ids, cached = request.prompt_ids, 0
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = (request.cache_salt, tuple(ids[:end]))
            if key in self.seen and cached == end - BLOCK and end < len(ids):
                cached = end
            self.seen.add(key)
        return cached

    def _tell(self) -> None:
        now = (len(self.running), len(self.waiting))
        if self.gauges and now != self.told:
            self.told = now
            temporary = Path(self.gauges + ".new")
            temporary.write_text(json.dumps({"running": now[0], "waiting": now[1], "pid": os.getpid()}))
            temporary.replace(self.gauges)
