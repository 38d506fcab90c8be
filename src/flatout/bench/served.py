"""Two HTTP servers under the same streaming clients, turn by turn: flatout's own and llama.cpp's (llama-server, a binary of the user's); and the same
requests given to the engine without HTTP, which tells what share of the throughput the server takes.

Output tokens per second over all clients. The clients are client/'s: they note when each piece comes, and read it afterwards. Called by compare_cpu.py,
ceiling.py and remedy.py.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from flatout.bench.llamacpp import chosen_flash_attn
from flatout.bench.processes import program, started
from flatout.bench.turns import OURS, Case
from flatout.client.completions import Dialect, complete
from flatout.client.http import Endpoint, EndpointError
from flatout.client.load import Figures
from flatout.request import SamplingParams

if TYPE_CHECKING:
    from flatout.llm import LLM

PATIENCE = 120  # seconds for a server to be ready
NAME = "model"
ALONE = "the engine alone"

FLATOUT = f"""
import json, sys
from flatout.config import Config, ServerConfig
from flatout.server.launch import serve
options, port = json.loads(sys.argv[1])
sys.exit(serve(Config.make(**options), ServerConfig(port=port, served_model_name="{NAME}")))
"""
Command = Callable[[int], list[str]]  # what starts a server on a port


def flatout_server(options: dict[str, Any]) -> Command:
    return lambda port: program(FLATOUT, options, port)


def llama_server(binary: str, file: str, threads: int, flash_attn: str, case: Case) -> Command:
    """With a slot for each client, as long as its work; continuous batching is its default. `flash_attn` as LlamaCpp has it."""
    context = case.batch * (case.prompt + case.new)
    settings = {
        "-m": file,
        "-t": threads,
        "-fa": chosen_flash_attn(flash_attn, case.new),
        "-np": case.batch,
        "-c": context,
        "--host": "127.0.0.1",
    }
    return lambda port: [binary, *(str(word) for pair in settings.items() for word in pair), "--port", str(port)]


def engine_alone(llm: LLM) -> Callable[[list[list[int]], int], None]:
    """The clients' requests at once, in this process: the work of a server without HTTP, streams and a second process. Text is made here too."""

    def run(prompts: list[list[int]], new: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True), use_tqdm=False)

    return run


def lost(rates: dict[str, float]) -> float:
    """The share of the engine's throughput that the front of our server takes; under 0 where noise hides it."""
    return 1 - rates[OURS] / rates[ALONE]


def served(
    case: Case,
    servers: dict[str, Command],
    repeats: int,
    vocab_size: int,
    alone: Callable[[list[list[int]], int], None] | None = None,
) -> dict[str, float]:
    """Median output tok/s of each server under case.batch clients, and as ALONE of what generates the same without one, if given; the first round
    warms up and does not count.

    RuntimeError, with a server's last words: it did not start. RuntimeError: an answer of another length.
    """
    rng = random.Random(case.name)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    with ExitStack() as stack:
        ports = {name: stack.enter_context(running(command)) for name, command in servers.items()}
        for _ in range(repeats + 1):
            prompts = [[rng.randrange(10, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]
            for name, port in ports.items():
                rates[name].append(asyncio.run(clients(port, prompts, case.new)).rate)
            if alone is not None:
                begin = time.perf_counter()
                alone(prompts, case.new)
                rates.setdefault(ALONE, []).append(case.batch * case.new / (time.perf_counter() - begin))
    return {name: median(each[1:]) for name, each in rates.items()}


@contextmanager
def running(command: Command) -> Iterator[int]:
    """The port of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as words, started(command(port), stdout=words, stderr=subprocess.STDOUT) as process:
        until = time.monotonic() + PATIENCE
        while not asyncio.run(_healthy(Endpoint(f"http://127.0.0.1:{port}"))):
            if process.poll() is not None or time.monotonic() > until:
                words.seek(0)
                raise RuntimeError(f"{command(port)[0]}: the server is not ready: {''.join(words.readlines()[-1:]).strip()}")
            time.sleep(0.1)
        yield port


async def _healthy(endpoint: Endpoint) -> bool:
    try:
        return (await endpoint.get("/health")).status == 200
    except EndpointError:
        return False
    finally:
        endpoint.close()


async def clients(port: int, prompts: list[list[int]], new: int) -> Figures:
    """Of one streamed completion of each prompt, all at once. RuntimeError: one is not `new` tokens."""
    endpoint = Endpoint(f"http://127.0.0.1:{port}")
    answers = await asyncio.gather(*(complete(endpoint, Dialect(NAME), prompt, new) for prompt in prompts))
    endpoint.close()
    for answer in answers:
        if answer.error or answer.tokens != new:
            got = f"{answer.error}: {answer.message}" if answer.error else f"{answer.tokens} tokens"
            raise RuntimeError(f"a server answered {got}, {new} were asked for; nothing to compare")
    return Figures.of(answers)
