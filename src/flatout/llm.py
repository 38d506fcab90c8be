"""LLM: the offline front door. Prompts in, finished texts (or streamed deltas) out, over an engine in this process.

Names and results are those of vLLM's LLM. Text work happens here while the device computes the next step. torch is imported with the first LLM, not
with this file. Used by people's scripts, cli/ and bench/.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

from flatout.config import DEFAULT_MODEL, Config
from flatout.modelfile.sources import resolve_model
from flatout.request import FinishReason, Output, PositionLogprobs, Request, RequestError, SamplingParams, Timing
from flatout.text.prepare import Prompt, default_params, prepare
from flatout.text.sequence import SequenceText
from flatout.text.tokenizer import Tokenizer, load_tokenizer
from flatout.torch_import import import_torch, torch_ahead

if TYPE_CHECKING:
    from flatout.text.chat import ChatTemplate

Message = dict[str, Any]
AT_ONCE = 4096  # prompt tokens: some 50 ms of a 7B model on an H200


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `token_ids` include the end id; `logprobs[i]` maps token id -> Logprob at position i, the chosen token first."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache, first sample
    miss_reason: str = ""
    preemptions: int = 0
    timing: Timing | None = None  # of the first sample

    @property
    def num_cached_tokens(self) -> int:
        return self.cached_tokens


@dataclass(slots=True)
class StreamDelta:
    """What came since the last one. The last delta of a sample has finish_reason set."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    timing: Timing | None = None


@dataclass(slots=True)
class _Live:
    """One sequence between its admission and its last token."""

    request: Request
    text: SequenceText | None  # None without a tokenizer: ids only
    deltas: deque[StreamDelta] | None  # of the request, where it is streamed
    prompt_ids: list[int] = field(default_factory=list)  # a copy for the caller, made with the first output: the device is at work then
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    first: Output | None = None
    timing: Timing | None = None
    error: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def push(self, output: Output) -> None:
        """Take a step's output. Ids behind a stop string are dropped."""
        reason, stop_reason, ids, text = output.finish_reason, output.stop_reason, output.token_ids, ""
        if self.first is None:
            self.first, self.prompt_ids = output, list(self.request.prompt_ids)
        elif reason is None and self.text is None and self.deltas is None and not output.logprobs:
            self.token_ids += ids  # one more id and nothing else: nearly all of a large batch
            return
        if self.text is not None:
            delta = self.text.push(ids, reason)
            text, ids, reason = delta.text, delta.token_ids, delta.finish_reason
            stop_reason = delta.stop_reason if delta.stop_reason is not None else stop_reason
        self.token_ids += ids
        self.logprobs += (output.logprobs or [])[: len(ids)]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.error, self.finish_reason, self.stop_reason = output.error, reason, stop_reason
        if reason is not None:
            self.timing = output.timing
            if output.finish_reason is None:  # ended by a stop string, which the engine does not know yet
                self.timing = Timing.of(self.request, time.monotonic())
        if self.deltas is not None:
            self.deltas.append(StreamDelta(self.request.index, text, ids, reason, stop_reason, self.first.cached_tokens, self.timing))

    def check(self) -> None:
        """Raise if the engine failed on it: a cut answer must not pass for a whole one."""
        if self.finish_reason == FinishReason.ERROR:
            raise RuntimeError(f"request {self.request.id}: {self.error}")


class LLM:
    """`LLM("org/name" | folder | file.gguf | "smollm2", **options)`; options are the fields of flatout.config.Config, by name.

    Not thread-safe. Raises ConfigError, ModelFileError (at load) and RequestError (a request that cannot be served as asked).
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Any):
        config = Config.make(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options)
        laps = [time.perf_counter()]
        with torch_ahead():
            source = resolve_model(config.model)
            laps.append(time.perf_counter())
            self.tokenizer: Tokenizer | None = load_tokenizer(source)
            laps.append(time.perf_counter())
        import_torch()
        from flatout.engine import Engine

        laps.append(time.perf_counter())
        files, tokenizer, imports = (end - begin for begin, end in itertools.pairwise(laps))
        self.engine = Engine(config, source, {"files": files, "tokenizer": tokenizer, "imports": imports})
        self.config, self.spec, self.facts = self.engine.config, self.engine.spec, self.engine.facts
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()
        self._live: dict[tuple[str, int], _Live] = {}
        self.start_lines = self.engine.start_lines + (self.tokenizer.notices if self.tokenizer else [])

    # -- doors ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete each prompt (text, ids or {"prompt_token_ids": ids}); one SamplingParams for all or one each. Results in order.

        `use_tqdm` shows a progress bar on a terminal. All prompts are checked before any runs.
        """
        several = _several(prompts)
        params = self._params_for(several, sampling_params)
        if priority is not None and len(priority) != len(several):
            raise RequestError("priority", f"{len(priority)} given for {len(several)} prompts")
        if priority is not None and self.config.scheduler.scheduling_policy != "priority":
            raise RequestError("priority", "does nothing under --scheduling-policy fcfs; use --scheduling-policy priority")
        with _no_full_collection:
            prepared = [
                self._prepare(prompt, p, priority=priority[i] if priority else 0, cache_salt=cache_salt)
                for i, (prompt, p) in enumerate(zip(several, params))
            ]
            return self._run(prepared, [p if isinstance(p, str) else None for p in several], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. template_options: add_generation_prompt, continue_final_message, tools, and the template's own."""
        conversations: list[Any] = [messages] if _is_conversation(messages) or not messages else list(messages)
        ids = [self.chat_ids(conversation, **template_options) for conversation in conversations]
        return self.generate(ids, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Generator[StreamDelta, None, None]:
        """Deltas of one request as they come (a list of messages is a chat). It is checked now, starts with the first delta asked for,
        and is aborted when the iterator is closed."""
        if template_options and not _is_conversation(prompt):
            raise RequestError(next(iter(template_options)), "is for chat templates; the prompt is not a list of messages")
        one: Any = self.chat_ids(prompt, **template_options) if _is_conversation(prompt) else prompt
        requests = self._prepare(one, sampling_params or self.default_params())
        for request in requests:
            request.prompt_ids = list(request.prompt_ids)  # the caller may change its own between two deltas
        return self._deltas_of(requests)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._need_tokenizer().encode(text, add_special_tokens)

    def chat_ids(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation as the model's template writes it."""
        if self._template is None:
            from flatout.text.chat import ChatTemplate

            self._template = ChatTemplate.for_model(self._need_tokenizer(), self.config.model.chat_template)
        return self._template.encode(list(messages), self.facts, **template_options)

    def default_params(self, **fields: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json) under the given fields."""
        return default_params(self.facts, **fields)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default_params()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("prompt", f"{self.facts.model} was loaded without a tokenizer; give token ids, or --tokenizer")
        return self.tokenizer

    def _params_for(self, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None:
            params = self.default_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        each = list(params) if isinstance(params, Sequence) else [params]
        if not all(isinstance(p, SamplingParams) for p in each):
            raise RequestError("sampling_params", f"must be a SamplingParams or a list of them, got {params!r}")
        if len(each) != len(prompts):
            raise RequestError("sampling_params", f"{len(each)} given for {len(prompts)} prompts")
        return each

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str = "") -> list[Request]:
        return prepare(
            str(next(self._ids)),
            prompt,
            params,
            self.tokenizer,
            self.facts,
            arrival=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )

    def _lives_of(self, requests: list[Request], deltas: deque[StreamDelta] | None = None) -> list[_Live]:
        def text_of(request: Request) -> SequenceText | None:
            return SequenceText(self.tokenizer, request.params, request.prompt_ids) if self.tokenizer else None

        return [_Live(request, text_of(request), deltas) for request in requests]

    def _admit(self, lives: list[_Live]) -> None:
        """Whatever ends this call, _forget() undoes it."""
        self._live.update((live.request.key, live) for live in lives)
        self.engine.add([live.request for live in lives])

    def _step(self) -> tuple[int, list[_Live]]:
        """One engine step; its outputs as text. A stop string found here ends the sequence in the engine. Returns how many tokens came,
        and whose last was among them."""
        tokens = 0
        ended: list[_Live] = []
        with _interrupts_wait():
            for output in self.engine.step():
                live = self._live.get((output.id, output.index))
                if live is None or live.finish_reason is not None:
                    continue  # made by the step in flight after its stop string was found
                live.push(output)
                tokens += len(output.token_ids)
                if live.finish_reason is not None:
                    ended.append(live)
                    if output.finish_reason is None:
                        self.engine.abort(output.id, output.index, live.finish_reason, str(live.stop_reason))
        return tokens, ended

    def _run(self, prepared: list[list[Request]], texts: list[str | None], show: bool) -> list[RequestOutput]:
        done: list[list[_Live]] = []
        unfinished: set[tuple[str, int]] = set()
        # behind a first step of so many tokens the device is busy while the others are admitted and planned; by priority, all come first
        early = AT_ONCE if self.config.scheduler.scheduling_policy == "fcfs" and self.config.scheduler.async_scheduling else None
        waiting = 0
        with _progress(sum(map(len, prepared)), show) as advance:

            def step() -> None:
                before = len(unfinished)
                tokens, ended = self._step()
                unfinished.difference_update(live.request.key for live in ended)
                advance(tokens, before - len(unfinished))

            try:
                for requests in prepared:
                    done.append(self._lives_of(requests))
                    self._admit(done[-1])
                    unfinished.update(request.key for request in requests)
                    waiting += len(requests[0].prompt_ids)
                    if early is not None and waiting >= early:
                        step()
                        early = None
                while unfinished:
                    step()
            finally:
                for lives in done:
                    self._forget(lives)
        return [self._result(lives, text) for lives, text in zip(done, texts)]

    def _deltas_of(self, requests: list[Request]) -> Generator[StreamDelta, None, None]:
        queue: deque[StreamDelta] = deque()
        unfinished, lives = len(requests), self._lives_of(requests, queue)
        try:
            self._admit(lives)
            while unfinished:
                while not queue:
                    with _no_full_collection:
                        self._step()
                delta = queue.popleft()
                lives[delta.index].check()
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._forget(lives)

    def _forget(self, lives: list[_Live]) -> None:
        """Drop a request's; what of it still runs is aborted."""
        for live in lives:
            self._live.pop(live.request.key, None)
            if live.finish_reason is None:
                self.engine.abort(*live.request.key)

    def _result(self, lives: list[_Live], prompt: str | None) -> RequestOutput:
        for live in lives:
            live.check()
        leader = lives[0]
        assert leader.first is not None
        prompt_logprobs = leader.prompt_logprobs
        return RequestOutput(
            request_id=leader.request.id,
            prompt=prompt,
            prompt_token_ids=leader.prompt_ids,
            prompt_logprobs=None if prompt_logprobs is None else [None if p is None else self._alternatives(p) for p in prompt_logprobs],
            outputs=[self._completion(live) for live in lives],
            cached_tokens=leader.first.cached_tokens,
            miss_reason=leader.first.miss_reason,
            preemptions=sum(live.request.preemptions for live in lives),
            timing=leader.timing,
        )

    def _completion(self, live: _Live) -> CompletionOutput:
        wanted = live.request.params.logprobs is not None
        return CompletionOutput(
            index=live.request.index,
            text=live.text.text if live.text else "",
            token_ids=live.token_ids,
            logprobs=[self._alternatives(p) for p in live.logprobs] if wanted else None,
            cumulative_logprob=sum(p.chosen.logprob for p in live.logprobs) if wanted else None,
            finish_reason=live.finish_reason,
            stop_reason=live.stop_reason,
        )

    def _alternatives(self, position: PositionLogprobs) -> dict[int, Logprob]:
        tokens = {t.token_id: t for t in (position.chosen, *position.top)}
        return {i: Logprob(t.logprob, t.rank, self.tokenizer.token_text(i) if self.tokenizer else None) for i, t in tokens.items()}


def _several(prompts: Any) -> list[Prompt]:
    """A single prompt (text, a mapping, or a list of ids) as a list of one."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError("prompts", f"must be a prompt or several, got {prompts!r}")
    several = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C is heard when the step is taken, so that none is left half committed and the LLM stays usable. A second one does not wait."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # a handler not of Python's; signals go elsewhere
        yield
        return
    caught: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signum)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)


class _NoFullCollection:
    """Python's garbage collector looks at young objects only: a full pass takes 100 to 180 ms in a process that holds torch, while the device
    runs dry. One that falls due comes when the run is over: the last of them, where several threads drive an LLM each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._runs:
                self._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], 2**31 - 1)
            self._runs += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._runs -= 1
            if not self._runs:
                gc.set_threshold(*self._before)


_no_full_collection = _NoFullCollection()  # of this process, which has one collector


def _is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], dict)


class _progress:
    """A bar with sequences done and tok/s on a terminal (rich); nothing elsewhere."""

    def __init__(self, total: int, show: bool):
        self.bar = None
        self.tokens, self.begin = 0, time.perf_counter()
        if show and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress
            except ImportError:
                print("progress bars need rich: pip install 'flatout[term]'", file=sys.stderr)
                return
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("generating", total=total)

    def __enter__(self) -> Any:
        if self.bar:
            self.bar.start()
        return self.advance

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, tokens: int, finished: int) -> None:
        self.tokens += tokens
        if self.bar:
            rate = self.tokens / (time.perf_counter() - self.begin)
            self.bar.update(self.task, advance=finished, description=f"{rate:,.0f} tok/s")
