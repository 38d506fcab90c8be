"""A tiny model folder (byte tokenizer, chat template, no weights) and servers over it whose engine is scripted_engine.py's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, START, END, ADDED = 256, 257, 258, 259
VOCAB = 272
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token i is the byte i."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    character = {**{b: chr(b) for b in printable}, **{b: chr(0x100 + i) for i, b in enumerate(rest)}}
    tokenizer = Tokenizer(models.BPE({character[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<added>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "script"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "temperature": 0.5}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    gauges_file: Path
    log: Path
    model: str = "script"
    seconds_to_ready: float = 0.0
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

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
        return json.loads(self.gauges_file.read_text())

    def wait_idle(self, seconds: float = 1.0) -> None:
        """The engine runs and holds nothing."""
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


@pytest.fixture(scope="session")
def start(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """start(env={...}, server={...}, **config) -> a Served that is ready; wait=False returns at once. All are stopped in the end."""
    running: list[Served] = []

    def run(
        env: dict[str, str] | None = None,
        server: dict[str, Any] | None = None,
        engine: str | None = "scripted_engine:ScriptedEngine",
        wait: bool = True,
        **config: Any,
    ) -> Served:
        folder = tmp_path_factory.mktemp("run")
        port = free_port()
        config = {"model": str(model_folder), "load_format": "dummy", **config}
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "SCRIPT_GAUGES": str(folder / "gauges"), **(env or {})}
        begin = time.monotonic()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command(config, {"port": port, **(server or {})}, engine), env=environment, stderr=log, stdout=log, text=True
            )
        served = Served(process, port, folder / "gauges", folder / "log")
        running.append(served)
        if wait:
            wait_for(lambda: healthy(served), 30)
            served.seconds_to_ready = time.monotonic() - begin
        return served

    yield run
    for served in running:
        served.stop()


def healthy(served: Served) -> bool:
    assert served.process.poll() is None, served.log.read_text()
    try:
        return served.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def server(start: Callable[..., Served]) -> Served:
    """Shared by the tests that leave it as they found it."""
    return start()


@pytest.fixture(scope="session")
def slow(start: Callable[..., Served]) -> Served:
    """Steps of 10 ms, two sequences at a time."""
    return start(env={"SCRIPT_STEP_SECONDS": "0.01"}, max_num_seqs=2)
