"""A flatout server's own verdict, read from its /ledger, with no probing; and the same of a server that is started here and given a load.

What limits it is judged there, by ledger/rules.py over its ledger. Called by cli/doctor/url.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.client.completions import learn
from flatout.client.http import Endpoint, EndpointError
from flatout.client.load import Figures, Load, run_load, sized
from flatout.config import flag_of
from flatout.ledger.ledger import SECONDS_KEPT
from flatout.ledger.verdict import Verdict, verdict_from

WARM = 2.0  # seconds of load before those that are judged, and
TAIL = 1.0  # after them: the second that is being filled is told with the next
START = 600.0  # the most that a start may take


async def live(endpoint: Endpoint, seconds: int, model: str | None = None) -> dict[str, list[Verdict]] | None:
    """By model, over the last seconds (at most SECONDS_KEPT); None: it is no flatout server, or an older one. Raises EndpointError."""
    reply = await endpoint.get(f"/ledger?seconds={max(1, min(seconds, SECONDS_KEPT))}", 15.0)
    if reply.status in (401, 403):
        raise EndpointError(f"http {reply.status}", reply.complaint)
    try:
        found = json.loads(reply.body)["models"] if reply.status == 200 else {}
        verdicts = {name: [verdict_from(v) for v in each["verdict"]] for name, each in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if verdicts and model is not None and model not in verdicts:
        raise EndpointError("no model", f"{model!r} is not served there; it has {', '.join(verdicts)}")
    return {name: each for name, each in verdicts.items() if model in (None, name)} or None


@contextmanager
def served(options: Mapping[str, Any], log: Path) -> Iterator[str]:
    """The address of `flatout serve` with these Config options, started here on a free port and stopped in the end. What it says goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [word for name, value in options.items() if name != "model" for word in _flag(name, value)]
    command = [sys.executable, "-m", "flatout", "serve", *([options["model"]] if "model" in options else []), *flags, "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--no-enable-log-requests"], stdout=file, stderr=file)
    try:
        asyncio.run(_ready(f"http://127.0.0.1:{port}", process, log))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def loaded(url: str, load: Load, seconds: int) -> tuple[list[Verdict], Figures]:
    """The verdict on the server at `url` over so many seconds of the load (Load.seconds is set here), and what clients saw meanwhile."""
    endpoint = Endpoint(url)
    try:
        dialect, _ = await learn(endpoint, next(iter(await live(endpoint, 1) or {})))
        dialect = await sized(endpoint, dialect, load.seed) or dialect
        answers: list[Any] = []
        work = asyncio.ensure_future(run_load(endpoint, dialect, load, answers.append))
        await asyncio.wait({work}, timeout=WARM + seconds + TAIL)
        found = await live(endpoint, seconds)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        if found is None:
            raise EndpointError("no ledger", "the server that was started tells no verdict")
        return next(iter(found.values())), Figures.of(answers)
    finally:
        endpoint.close()


async def _ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    endpoint = Endpoint(url)
    try:
        for _ in range(int(START / 0.1)):
            if process.poll() is not None:
                last = log.read_text().strip().rpartition("\n")[2] or f"exit code {process.returncode}"
                raise EndpointError("start", last.removeprefix("flatout: error: "))
            try:
                if (await endpoint.get("/health")).status == 200:
                    return
            except EndpointError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)
        raise EndpointError("start", f"not ready within {START:.0f} s")
    finally:
        endpoint.close()


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(name) if value else "--no-" + flag_of(name).removeprefix("--")]
    return [flag_of(name), str(value)]
