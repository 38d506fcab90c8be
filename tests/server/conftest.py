"""A tiny model folder (byte tokenizer, chat template, no weights) and servers over it whose engine is scripted_engine.py's."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import BOS, END, VOCAB, Served, command, free_port, healthy, wait_for
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "SCRIPT_GAUGES": str(folder / "gauges"), **(env or {})}
        begin = time.monotonic()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command(config, {"port": port, **(server or {})}, engine), env=environment, stderr=log, stdout=log, text=True
            )
        served = Served(process, port, folder)
        running.append(served)
        if wait:
            wait_for(lambda: healthy(served), 120)
            served.seconds_to_ready = time.monotonic() - begin
        return served

    yield run
    for served in running:
        served.stop()
        assert not served.leftovers


@pytest.fixture(scope="session")
def server(start: Callable[..., Served]) -> Served:
    """Shared by the tests that leave it as they found it."""
    return start()


@pytest.fixture(scope="session")
def slow(start: Callable[..., Served]) -> Served:
    """Steps of 10 ms, two sequences at a time."""
    return start(env={"SCRIPT_STEP_SECONDS": "0.01"}, max_num_seqs=2)
