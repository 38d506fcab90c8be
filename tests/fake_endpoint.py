"""An OpenAI-compatible endpoint over a made-up engine whose limits are known: a step takes `fixed + per_row * rows + prompt tokens / prefill`
seconds, rows share it up to `slots`, prompts are read `chunk` tokens at a time. Tokens are words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

PORTS = count(20_000)  # of the loop in virtual_time.py, where every one is free


@dataclass
class Fake:
    """The defaults are a sound server: batching, chunks, a prefix cache."""

    fixed: float = 0.010  # s
    per_row: float = 0.0006  # s: a burst of 32 costs three times a step of one
    crowd: float = 0.0  # share by which each row costs more beside others
    prefill: float = 20_000.0  # prompt tokens per second
    chunk: int | None = 256  # None: a prompt is read in one step, alone
    slots: int = 256
    cache: bool = True
    requests_per_second: float | None = None  # let in evenly
    refuse_over: int | None = None  # 429 beyond so many at once
    tokens_per_second: float | None = None  # of all streams
    front: float = 0.0  # s before a request's engine sees it, outside of the server's own clock
    key: str | None = None
    metrics: str | None = None  # prefix of /metrics, as vLLM's names
    routes: tuple[str, ...] = ("completions", "chat/completions")
    known: tuple[str, ...] = ("ignore_eos", "stream_options")  # optional fields
    streams: bool = True
    usage: bool = True
    context: int = 16_384
    cut: int | None = None  # hang up after so many tokens
    broken: str = ""  # an error event in the middle of each stream
    model: str = "fake"
    owner: str = "somebody"
    meta: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # what was asked

    def __post_init__(self) -> None:
        self.port = next(PORTS)

    def _fresh(self) -> None:
        self.running: list[_Row] = []
        self.waiting: list[_Row] = []
        self.seen: set[str] = set()
        self.inside = 0
        self.gate = 0.0
        self.counted = [0.0, 0]  # e2e, requests
        self.work = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Fake]:
        self._fresh()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        engine = asyncio.create_task(self._engine())
        try:
            yield self
        finally:
            engine.cancel()
            server.close()

    async def _engine(self) -> None:
        while True:
            while self.waiting and len(self.running) < self.slots:
                self.running.append(self.waiting.pop(0))
            if not self.running:
                self.work.clear()
                await self.work.wait()
                continue
            rows = [r for r in self.running if not r.unread]
            read, budget = 0, self.chunk or sum(r.unread for r in self.running)
            for row in [r for r in self.running if r.unread]:
                part = min(row.unread, budget - read)
                row.unread -= part
                read += part
            if read and self.chunk is None:
                rows = []  # prompts alone
            rows += [r for r in self.running if not r.unread and r not in rows and r.fresh]
            for row in rows:
                row.fresh = False
            crowded = 1 + self.crowd * (len(rows) > 1)
            seconds = self.fixed + self.per_row * len(rows) * crowded + read / self.prefill
            if self.tokens_per_second is not None:
                seconds = max(seconds, len(rows) / self.tokens_per_second)
            await asyncio.sleep(seconds)
            for row in rows:
                row.left -= 1
                row.out.put_nowait(row.left)
                if not row.left:
                    self.running.remove(row)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split()
                if self.key and headers.get("authorization") != f"Bearer {self.key}":
                    self._send(writer, 401, {"error": {"message": "who are you?"}})
                elif path == "/v1/models":
                    self._send(
                        writer,
                        200,
                        {"data": [{"id": self.model, "owned_by": self.owner, "max_model_len": self.context, "meta": self.meta}]},
                    )
                elif path == "/metrics" and self.metrics:
                    self._send(writer, 200, self._metrics(), "text/plain")
                elif method == "POST" and path.removeprefix("/v1/") in self.routes:
                    await self._complete(writer, json.loads(body), chat="chat" in path)
                else:
                    self._send(writer, 404, {"error": {"message": f"no such route: {path}"}})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _metrics(self) -> str:
        values = {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": 0.1,
            "of_floor": 0.8,
            "num_preemptions_total": 0,
            "e2e_request_latency_seconds_sum": self.counted[0],
            "e2e_request_latency_seconds_count": self.counted[1],
        }
        return "".join(f'# TYPE x gauge\n{self.metrics}{name}{{model_name="m, {{n}}"}} {value}\n' for name, value in values.items())

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        self.bodies.append(body)
        loop = asyncio.get_running_loop()
        unknown = [f for f in ("ignore_eos", "stream_options") if f in body and f not in self.known]
        if unknown:
            return self._send(writer, 400, {"error": {"message": f"unknown field {unknown[0]}"}})
        if body["model"] != self.model:
            return self._send(writer, 404, {"error": {"message": f"The model {body['model']!r} does not exist."}})
        if self.refuse_over is not None and self.inside >= self.refuse_over:
            return self._send(writer, 429, {"error": {"message": "too many requests"}})
        self.inside += 1
        try:
            await asyncio.sleep(self.front)
            if self.requests_per_second:
                self.gate = max(self.gate + 1 / self.requests_per_second, loop.time())
                await asyncio.sleep(self.gate - loop.time())
            await self._stream(writer, body, chat, loop.time())
        finally:
            self.inside -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool, begin: float) -> None:
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        cached = count - 1 if self.cache and str(prompt) in self.seen else 0
        self.seen.add(str(prompt))
        row = _Row(count - cached, body["max_tokens"])
        self.waiting.append(row)
        self.work.set()
        kind = "text/event-stream" if self.streams else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if chat and self.streams:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for n in range(row.left):
            await row.out.get()
            if n == self.cut:
                return writer.transport.abort()
            if self.broken and n == 2:
                self._event(writer, {"error": {"message": self.broken}})
                break
            if self.streams:
                text = {"delta": {"content": "word "}} if chat else {"text": "word "}
                self._event(writer, {"choices": [{**text, "finish_reason": "length" if n + 1 == body["max_tokens"] else None}]})
        if not self.streams:
            data = b'{"choices": [{"text": "word"}]}'
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        elif self.usage and "stream_options" in body:
            usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
            self._event(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
        if self.streams:
            self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        self.counted = [self.counted[0] + asyncio.get_running_loop().time() - begin, self.counted[1] + 1]
        return None

    @staticmethod
    def _event(writer: asyncio.StreamWriter, value: Any) -> None:
        data = b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, value: Any, kind: str = "application/json") -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


class _Row:
    def __init__(self, prompt: int, output: int):
        self.unread, self.left, self.fresh = prompt, output, True
        self.out: asyncio.Queue[int] = asyncio.Queue()
