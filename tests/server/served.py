"""A server process under test: how to start it, talk to it and end it; and the ids of the tests' byte tokenizer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

BOS, START, END, ADDED = 256, 257, 258, 259
VOCAB = 272
USER = [{"role": "user", "content": "hi"}]  # the script answers abcdef...


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    seconds_to_ready: float = 0.0
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def leftovers(self) -> list[Path]:
        """Mailboxes of servers that ran with this temporary folder."""
        return list(self.folder.glob("flatout-*"))

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=20)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{route}", json=body)

    def complete(self, prompt: Any = "ABC", **fields: Any) -> dict[str, Any]:
        reply = self.post("completions", prompt=prompt, **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well."""
        with self.http.stream("POST", f"/v1/{route}", json={**body, "stream": True}) as reply:
            text = reply.read().decode()
            assert reply.status_code == 200, text
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], text[-500:]
        return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]

    def gauges(self) -> dict[str, int]:
        return json.loads((self.folder / "gauges").read_text())

    def wait_idle(self, seconds: float = 3.0) -> None:
        """The engine runs and holds nothing. (Takes milliseconds; the time allowed is for crowded machines.)"""
        wait_for(lambda: self.gauges()["running"] == self.gauges()["waiting"] == 0, seconds)

    def connect(self, body: dict[str, Any], route: str = "completions") -> socket.socket:
        """A raw connection that has sent its request."""
        payload = json.dumps(body).encode()
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        raw.sendall(f"POST /v1/{route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
        return raw

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=10)


def wait_for(condition: Callable[..., bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


RUN = """
import json, os, sys
from flatout.config import Config, ConfigError, ServerConfig
from flatout.modelfile.spec import ModelFileError
from flatout.server import engines
from flatout.server.launch import serve
engines.STALL_SECONDS = float(os.environ.get("SCRIPT_STALL", engines.STALL_SECONDS))
config, server, engine = json.loads(sys.argv[1])
try:
    sys.exit(serve(Config.make(**config), ServerConfig(**server), **engine))
except (ConfigError, ModelFileError) as error:
    sys.exit(f"flatout: error: {error}")
"""


def command(config: dict[str, Any], server: dict[str, Any], engine: str | None) -> list[str]:
    options = [config, {"served_model_name": "script", **server}, {"engine": engine} if engine else {}]
    return [sys.executable, "-c", RUN, json.dumps(options)]


def healthy(served: Served) -> bool:
    assert served.process.poll() is None, served.log
    try:
        return served.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def error(reply: Any, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = strict(reply.text)
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def joined(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    texts = []
    for chunk in chunks:
        for c in chunk["choices"]:
            if c["index"] == choice:
                texts.append(c["text"] if "text" in c else c["delta"].get("content", ""))
    return "".join(texts)
