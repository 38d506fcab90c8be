"""One streamed completion of an OpenAI-compatible endpoint: what is asked, in which dialect, and what came when.

A failure is an Answer with its kind, never an exception: a load goes on. Many at once are load.py's. Called by load.py, doctor/ and bench/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flatout.client.http import Endpoint, EndpointError, Reader, Reply

CHAT, COMPLETIONS = "chat/completions", "completions"


@dataclass(frozen=True)
class Dialect:
    """What an endpoint was found to understand. See learn()."""

    model: str
    route: str = COMPLETIONS
    ignore_eos: bool = True  # write on past the model's end token, so that lengths are as asked
    usage: bool = True  # stream_options.include_usage: token counts at the end of a stream
    tokens_per_word: float = 1.0  # of the prompts that load.py makes

    def body(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        if self.route == CHAT:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.usage:
            asked["stream_options"] = {"include_usage": True}
        return asked


@dataclass
class Answer:
    """One request's outcome; times are the event loop's, in s. `error`: the kind of failure, "" where there was none."""

    arrival: float  # when it was due; latencies count from here
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of events that brought text
    end: float = 0.0
    tokens: int = 0  # written, by `usage` where the server says so, else as many as there were events
    prompt_tokens: int = 0  # 0 where the server does not say
    cached_tokens: int | None = None  # of the prompt; None where the server does not say
    told: bool = False  # tokens are the server's count
    error: str = ""
    message: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and len(self.times) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:])]


async def complete(
    endpoint: Endpoint,
    dialect: Dialect,
    prompt: str | list[int],
    max_tokens: int,
    reader: Reader | None = None,
    timeout: float = 300.0,
    arrival: float | None = None,
) -> Answer:
    """Ask once and read to the end."""
    now = asyncio.get_running_loop().time
    answer = Answer(now() if arrival is None else arrival, now())
    try:
        reply = await endpoint.post(f"/v1/{dialect.route}", dialect.body(prompt, max_tokens), timeout, reader)
    except EndpointError as error:
        answer.error, answer.message = error.kind, str(error)
    else:
        _read(answer, reply)
    answer.end = now()
    return answer


def events(reply: Reply) -> Iterator[tuple[float, str]]:
    """(time of its last byte, data) of each event of a stream (text/event-stream), the final [DONE] too."""
    rest, data = b"", []
    for time, piece in (*reply.pieces, (reply.pieces[-1][0] if reply.pieces else 0.0, b"\n\n")):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
            elif not line and data:
                yield time, "\n".join(data)
                data = []


def _read(answer: Answer, reply: Reply) -> None:
    """Fill in what a reply says."""
    answer.sent = reply.sent
    if reply.status != 200:
        answer.error, answer.message = f"http {reply.status}", reply.complaint
        return
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        answer.error, answer.message = "no stream", f"the reply is {reply.headers.get('content-type', 'of no type')}: {reply.complaint}"
        return
    finished, usage, bare = False, None, list[float]()
    for time, data in events(reply):
        if data == "[DONE]":
            finished = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            answer.error, answer.message = "no json", f"an event of the stream is no JSON: {data[:100]}"
            return
        if event.get("error"):
            answer.error, answer.message = "stream error", json.dumps(event["error"])[:200]
            return
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            finished = finished or bool(choice.get("finish_reason"))
            (answer.times if _text(choice) else bare).append(time)
    usage = usage or {}
    if not answer.times and usage.get("completion_tokens"):
        answer.times = bare  # tokens without text: a model without a tokeniser, or one that writes nothing but special tokens
    if not finished:
        answer.error, answer.message = "cut", "the stream ended before the answer was finished"
    elif not answer.times:
        answer.error, answer.message = "no text", "the answer is empty"
    answer.tokens = len(answer.times)
    if usage:
        answer.told = bool(usage.get("completion_tokens"))
        answer.tokens = usage.get("completion_tokens") or answer.tokens
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _text(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event brings something of the answer, thoughts and tool calls included."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "reasoning", "tool_calls")))


async def learn(endpoint: Endpoint, model: str, timeout: float = 60.0) -> tuple[Dialect, Answer]:
    """The richest dialect in which the endpoint answers, and that first answer. EndpointError: it answers in none."""
    refused: Answer | None = None
    for route in (COMPLETIONS, CHAT):
        for ignore_eos, usage in ((True, True), (False, True), (False, False)):
            dialect = Dialect(model, route, ignore_eos, usage)
            answer = await complete(endpoint, dialect, "Count from one to ten, please:", 8, timeout=timeout)
            if not answer.error:
                return dialect, answer
            if answer.error not in ("http 400", "http 422"):  # not a field that it does not know
                break
        if refused is None or answer.error not in ("http 404", "http 405"):
            refused = answer
        if answer.error not in ("http 400", "http 404", "http 405", "http 422", "http 501"):  # another route would not help
            break
    assert refused is not None
    raise EndpointError(refused.error, refused.message)
