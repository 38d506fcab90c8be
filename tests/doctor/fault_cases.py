"""What test_faults.py injects, under which load, and how a verdict is had; as a script it runs one case by name and shows all that the rules saw.

PYTHONPATH=src:tests python tests/doctor/fault_cases.py slow_tokeniser
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.client.completions import Dialect, complete
from flatout.client.http import Endpoint, Reader
from flatout.client.load import Load, run_load, words
from flatout.ledger.verdict import Verdict, verdict_from
from flatout.modelfile.sources import pull

HERE = Path(__file__).parent
COPY = "a copy of the default model"
SECONDS = 4  # of load, and of the window that is judged


LOAD = Load(clients=4, seconds=60, prompt=(48, 64), output=(24, 32))


@dataclass
class Case:
    """`names`: the constraint of the first verdict."""

    names: str
    load: Callable[[Endpoint, float], Awaitable[Any]] | Load = LOAD
    fault: str = "Fault"
    config: dict[str, Any] = field(default_factory=dict)
    says: str = ""  # in its sentence or remedy
    seconds: int = SECONDS
    warm: float = 1.0  # seconds of load before the window begins
    quiet: bool = False  # it can't be told while others use the cores


class BusyMachine(Exception):
    """Others used the cores meanwhile: the case says nothing."""


class Servers:
    """Servers on demand (fault_server.py)."""

    def __init__(self, folder: Path):
        self.folder = folder
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    @contextmanager
    def server(self, fault: str, config: dict[str, Any]) -> Any:
        """The address of one."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = self.folder / f"log-{port}"
        if config.get("model") == COPY:
            config = {**config, "model": shutil.copy(pull("smollm2"), self.folder)}
        order = {
            "config": {"model": "smollm2", **config},
            "server": {"port": port, "served_model_name": "smollm2"},
            "fault": fault,
            "log": str(log),
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}", log
        finally:
            if _alive(pid):
                os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + 15
            while _alive(pid) and time.monotonic() < end:
                time.sleep(0.02)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=20)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _ready(endpoint: Endpoint, log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            if (await endpoint.get("/health")).status == 200:
                return
        except Exception:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(log.read_text() if log.exists() else "no server")


async def _judged(case: Case, url: str, log: Path) -> list[Verdict]:
    endpoint = Endpoint(url)
    try:
        await _ready(endpoint, log)
        load = case.load if not isinstance(case.load, Load) else lambda e, _s: run_load(e, Dialect("smollm2"), case.load)
        work = asyncio.ensure_future(load(endpoint, case.warm + case.seconds + 2))
        await asyncio.sleep(case.warm + case.seconds + 1)  # the second that is being filled does not count
        reply = json.loads((await endpoint.get(f"/ledger?seconds={case.seconds}", 120)).body)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert "models" in reply, f"{reply} {log.read_text()[-2000:]}"
        found = reply["models"]["smollm2"]
        if os.environ.get("FAULTS_SHOW"):
            account = found["windows"]["10s"]
            print(json.dumps({k: account[k] for k in account if k != "ops"}, indent=None, default=str))
            print(log.read_text()[-600:])
        return [verdict_from(v) for v in found["verdict"]]
    finally:
        endpoint.close()


def verdicts(servers: Servers, case: Case) -> list[Verdict]:
    """All of them but a neighbour that was really there: it is what the first verdict would rightly name on a busy machine."""
    with servers.server(case.fault, case.config) as (url, log):
        found = asyncio.run(_judged(case, url, log))
    if os.environ.get("FAULTS_SHOW"):
        print(*(f"{v.constraint} x{v.factor:.2f} {[e.shown for e in v.evidence]}" for v in found), sep="\n")
    if case.quiet and found[0].constraint != case.names and any(v.constraint == "noisy neighbour" for v in found):
        raise BusyMachine
    return [v for v in found if v.constraint == case.names or v.constraint != "noisy neighbour"]


# -- loads that client/load.py does not make --------------------------------------------------------------------------------


def asking(prompt: Callable[[int], str], clients: int = 4, tokens: int = 16, **extra: Any) -> Callable[[Endpoint, float], Awaitable[None]]:
    """So many clients, each asks with the n-th prompt once it is answered; `extra` goes into the bodies ({n} in texts becomes n)."""

    async def load(endpoint: Endpoint, seconds: float) -> None:
        counter = iter(range(1 << 30))

        async def client() -> None:
            while True:
                n = next(counter)
                more = {key: value.format(n=n) if isinstance(value, str) else value for key, value in extra.items()}
                body = {"model": "smollm2", "prompt": prompt(n), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
                await endpoint.post("/v1/completions", body)

        await asyncio.gather(*(client() for _ in range(clients)))

    return load


def fresh(n: int, length: int = 48) -> str:
    return words(length, 1.0, f"fresh {n}")


HEAD, WORD = words(400, 1.0, "a head"), words(40, 1.0, "dates").split()


async def slow_readers(endpoint: Endpoint, seconds: float) -> None:
    """Streams whose readers rest after each piece."""
    body = {"model": "smollm2", "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}

    async def client(n: int) -> None:
        while True:
            await endpoint.post("/v1/completions", {**body, "prompt": fresh(n, 16)}, reader=Reader(4.0))

    await asyncio.gather(*(client(n) for n in range(6)))


async def long_among_short(endpoint: Endpoint, seconds: float) -> None:
    short = asking(fresh, clients=3, tokens=48)

    async def long() -> None:
        for n in range(1 << 30):
            await asyncio.sleep(1.0)
            await complete(endpoint, Dialect("smollm2"), words(1900, 1.0, f"long {n}"), 4)

    await asyncio.gather(short(endpoint, seconds), long())


CASES = {
    "slow_tokeniser": Case("tokeniser bound", fault="SlowTokeniser"),
    "slow_detokeniser": Case("detokeniser bound", fault="SlowDetokeniser"),
    "sleep_in_scheduler": Case("host bound", fault="SlowScheduler", says="planning steps"),
    "sleep_in_commit": Case("host bound", fault="SlowCommit", says="taking a step's tokens in"),
    "pool_of_a_request_and_a_half": Case(
        "pool too small", Load(clients=6, seconds=60, prompt=(100, 120), output=(60, 70)), config={"num_gpu_blocks_override": 17}
    ),
    "budget_of_32": Case(
        "budget too small", Load(clients=6, seconds=60, prompt=(300, 400), output=(8, 8)), config={"max_num_batched_tokens": 32}
    ),
    "four_slots": Case(
        "slots", Load(clients=32, seconds=60, prompt=(32, 48), output=(24, 32)), config={"max_num_seqs": 4}, says="--max-num-seqs 32, now 4"
    ),
    "cache_off": Case("prefix cache off", asking(lambda n: f"{HEAD} {n}"), config={"enable_prefix_caching": False}),
    "date_first": Case("prefix heads differ", asking(lambda n: f"{WORD[n % 40]} {HEAD} {n}"), says="at token 0"),
    "salts": Case("salts split the prefix cache", asking(lambda n: f"{HEAD} {n}", cache_salt="user {n}")),
    "long_prompt_unchunked": Case(
        "long prompts stall others", long_among_short, config={"enable_chunked_prefill": False, "max_model_len": 2048}, seconds=12, warm=2.0
    ),
    "slow_readers": Case("slow clients", slow_readers, fault="SmallBuffers", warm=3.0),
    "one_thread_of_two": Case("threads unused", config={"threads": 1}, says="--threads 2", quiet=True),
    "eight_threads": Case("threads over cores", fault="ManyThreads", config={"threads": 8}, says="--threads 2, now 8"),
    "busy_neighbour": Case("noisy neighbour", fault="Neighbour", seconds=5),
    "blocking_log": Case("blocking log", asking(fresh, clients=4, tokens=4), fault="BlockingLog"),
    "cold_page_cache": Case("cold load", fault="ColdLoad", config={"model": COPY}),
    "no_warm_up": Case("cold first requests", fault="ColdFirst", warm=0.0, seconds=5),
    "grammar_compile": Case("grammar compiling", fault="GrammarCompile"),
    "logprobs_for_all": Case("logprobs", asking(fresh, clients=8, tokens=32, logprobs=20)),
    "garbage_collection": Case("stalls", fault="Garbage", says="garbage collector", seconds=5),
    "step_stalls": Case("stalls", fault="Hiccups", seconds=5),
    "page_faults": Case("page faults", fault="Faulting"),
    "rejected_drafts": Case("drafts rejected", fault="Rejected"),
    "overload": Case("overload", Load(rate=40, seconds=60, prompt=(32, 64), output=(32, 48)), seconds=6),
    "no_load": Case("no load", Load(rate=1, burstiness=0, seconds=60, prompt=(16, 16), output=(8, 8))),
}

HEALTHY = {
    "one_stream": Case("", Load(clients=1, seconds=60, prompt=(32, 32), output=(64, 64))),
    "eight_streams": Case("", Load(clients=8, seconds=60, prompt=(32, 96), output=(32, 64))),
    "prompts": Case("", Load(clients=2, seconds=60, prompt=(300, 500), output=(2, 4))),
    "shared_heads": Case("", asking(lambda n: f"{HEAD} {fresh(n, 30)}", clients=4, tokens=24)),
    "arrivals_below_capacity": Case("", Load(rate=3, seconds=60, prompt=(32, 64), output=(16, 24))),
}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        servers = Servers(Path(made))
        for name in sys.argv[1:] or [*CASES, *HEALTHY]:
            case, begin = {**CASES, **HEALTHY}[name], time.monotonic()
            found = verdicts(servers, case)
            right = (found[0].constraint == case.names) if case.names else len(found) == 1
            print(f"{'ok  ' if right else 'MISS'} {name}: {time.monotonic() - begin:.1f} s", flush=True)
            for verdict in found[: 1 if right and not os.environ.get("FAULTS_SHOW") else 4]:
                print(
                    f"     {verdict.constraint} x{verdict.factor:.2f}: {verdict.sentence}",
                    [e.what + " " + e.shown for e in verdict.evidence],
                    flush=True,
                )
        servers.close()
