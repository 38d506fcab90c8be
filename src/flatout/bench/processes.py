"""What a bench measures outside of its own process: starts to the first token, and work beside a neighbour that keeps a core busy.

Every process started here is ended here. Called by compare_cpu.py and served.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

LONGEST = 600  # seconds that a neighbour stays, should nobody end it
PATIENCE = 10  # seconds for a process to leave when it is told to

SPIN = f"""
import time
end = time.monotonic() + {LONGEST}
print("busy", flush=True)
while time.monotonic() < end: pass
"""
IMPORT = """
import importlib, json, sys
importlib.import_module(*json.loads(sys.argv[1]))
print("imported", flush=True)
"""
FLATOUT = """
import json, sys
from flatout import LLM, SamplingParams
options, ids = json.loads(sys.argv[1])
with LLM(**options) as llm:
    print(next(llm.stream(ids, SamplingParams(temperature=0.0, max_tokens=1))).token_ids, flush=True)
"""
LLAMACPP = """
import json, sys
from flatout.bench.llamacpp import LlamaCpp
file, threads, flash_attn, ids = json.loads(sys.argv[1])
print(LlamaCpp(file, threads, flash_attn).generate([ids], 1)[0], flush=True)
"""


def program(code: str, *arguments: Any) -> list[str]:
    """The command that runs `code` in this Python, its arguments as one JSON list in sys.argv[1]."""
    return [sys.executable, "-P", "-c", code, json.dumps(arguments)]


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process, with the modules that this one finds; told to end at the end, if it has not ended by itself."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    process = subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": path}, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that spins all the while. RuntimeError: it did not."""
    with started(program(SPIN), stdout=subprocess.PIPE) as process:
        _first_line(process)
        yield
        if process.poll() is not None:
            raise RuntimeError("the busy neighbour ended before the work beside it was done")


def starts(commands: Mapping[str, list[str]], repeats: int) -> dict[str, float]:
    """Median seconds from each process's start to its first line, turn by turn; the first round only fills the file cache.

    RuntimeError: one ended without a line.
    """
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):
        for name, command in commands.items():
            begin = time.perf_counter()
            with started(command, stdout=subprocess.PIPE) as process:
                _first_line(process)
                seconds[name].append(time.perf_counter() - begin)
    return {name: median(each[1:]) for name, each in seconds.items()}


def _first_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"{process.args!r} ended with exit code {process.wait()} before it said anything")
