"""The processes: start, refusals to start, disconnects, slow readers, an engine that dies, idleness, the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served, children, command, cpu_seconds, wait_for

Start = Callable[..., Served]
LONG = {"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "ignore_eos": True}


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


# -- start --------------------------------------------------------------------------------------------------------------------


def test_not_ready_while_loading(start: Start) -> None:
    served = start(wait=False, engine="slow_start:SlowStart")

    def health() -> httpx.Response | None:
        with contextlib.suppress(httpx.TransportError):
            return served.http.get("/health")
        return None

    wait_for(lambda: health() is not None, 60)
    early = health()
    assert early and early.status_code == 503 and early.json() == {"status": "unavailable", "reason": "the model is loading"}
    for reply in (
        served.post("completions", prompt="x"),
        served.http.get("/v1/models"),
        served.post("completions", prompt="x", stream=True),
    ):
        assert reply.status_code == 503 and reply.json()["error"]["message"] == "the model is loading"
    assert "ready" not in served.log
    wait_for(lambda: served.http.get("/health").status_code == 200, 60)
    wait_for(lambda: f"ready: script at http://127.0.0.1:{served.port}/v1" in served.log, 1)
    assert served.complete(max_tokens=1)["choices"][0]["text"] == "D"
    assert served.stop() == 0


def test_starts_that_fail(start: Start, tmp_path: Path) -> None:
    """The last line says why, and the exit code is 1."""
    broken = tmp_path / "template.jinja"
    broken.write_text("{% for x in %}")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"env": {"SCRIPT_FAIL": "config"}}, "flatout: error: --dtype: the script says no; use --dtype auto"),
        ({"env": {"SCRIPT_FAIL": "bug"}}, "flatout: error: the engine failed: RuntimeError: the script broke in two lines"),
        ({"env": {"SCRIPT_FAIL": "exit"}}, "flatout: error: the engine process ended with exit code 7"),
        ({"engine": "no_such_module:Engine"}, "flatout: error: the engine failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ({"model": str(tmp_path / "nothing")}, f"flatout: error: {tmp_path}/nothing: "),
        ({"chat_template": str(broken)}, "flatout: error: chat template, line 1"),
        ({"server": {"host": "203.0.113.7"}}, "flatout: error: --host 203.0.113.7 --port {port}: this machine has no such address"),
        ({"server": {"host": "no such host"}}, "flatout: error: --host no such host --port {port}: no such address"),
        ({"server": {"port": 70000}}, "flatout: error: --port 70000: must be"),
    ]
    started = [(start(wait=False, **options), says) for options, says in cases]
    for served, says in started:
        assert served.process.wait(timeout=120) == 1
        log = served.log
        assert log.splitlines()[-1].startswith(says.format(port=served.port)), log
        assert ("Traceback" in log) == ("the engine failed" in says)  # where it is a fault of ours, it is all there


def test_b15_port_in_use(server: Served, model_folder: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(command({"model": "/nowhere"}, {"port": server.port}, None), capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        f"flatout: error: --host 127.0.0.1 --port {server.port}: it is in use; give another --port, or stop what holds it"
    ]
    assert time.monotonic() - begin < 10  # before any model is looked at


def test_another_interface(start: Start) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        served = start(wait=False, server={"host": "::1"})
        wait_for(lambda: "ready" in served.log, 60)
        assert f"http://[::1]:{served.port}/v1" in served.log
        assert httpx.get(f"http://[::1]:{served.port}/health").status_code == 200
        assert served.stop() == 0


def test_the_mailbox_is_private(start: Start, server: Served, tmp_path: Path) -> None:
    (folder,) = server.leftovers
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    long = tmp_path / ("x" * 100)  # too long for a socket's path
    long.mkdir()
    served = start(env={"TMPDIR": str(long)})
    assert served.complete(max_tokens=1)["choices"][0]["text"] == "D" and not list(long.iterdir())
    assert served.stop() == 0


# -- disconnects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), [("completions", LONG), ("chat/completions", CHAT), ("completions", {**LONG, "n": 4})])
def test_b01_a_client_that_leaves(slow: Served, route: str, body: dict[str, Any], stream: bool) -> None:
    slow.wait_idle()
    raw = slow.connect({**body, "stream": stream}, route)
    wait_for(lambda: slow.gauges()["running"] > 0, 10)
    time.sleep(0.1)
    raw.close()
    slow.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_b01_a_client_that_leaves_the_queue(slow: Served, stream: bool) -> None:
    slow.wait_idle()
    running = [slow.connect(LONG) for _ in range(2)]
    wait_for(lambda: slow.gauges()["running"] == 2, 10)
    queued = slow.connect({**LONG, "stream": stream})
    wait_for(lambda: slow.gauges()["waiting"] == 1, 10)
    queued.close()
    wait_for(lambda: slow.gauges()["waiting"] == 0, 10)
    assert slow.gauges()["running"] == 2
    for raw in running:
        raw.close()
    slow.wait_idle()


def test_b01_a_client_that_leaves_while_uploading(slow: Served) -> None:
    raw = socket.create_connection(("127.0.0.1", slow.port))
    raw.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt"')
    time.sleep(0.1)
    raw.close()
    raw = socket.create_connection(("127.0.0.1", slow.port))
    raw.sendall(b"POST /v1/completions HT")
    raw.close()
    slow.wait_idle()
    assert slow.complete(max_tokens=1)["choices"][0]["text"] == "D"
    assert slow.process.poll() is None and "Traceback" not in slow.log


def test_all_leave_at_once(slow: Served) -> None:
    raws = [slow.connect({**LONG, "stream": i % 2 == 0}) for i in range(40)]
    wait_for(lambda: slow.gauges()["waiting"] == 38, 10)
    for raw in raws:
        raw.close()
    slow.wait_idle()


def test_closing_the_clients_stream(slow: Served) -> None:
    stream = slow.client.chat.completions.create(model="script", messages=CHAT["messages"], max_tokens=2000, stream=True)
    next(iter(stream))
    stream.close()
    slow.wait_idle()


# -- slow readers -------------------------------------------------------------------------------------------------------------


def test_a_slow_reader_holds_back_only_itself(start: Start) -> None:
    served = start()
    choices, tokens = 20, 400  # 6 MB of events: more than the sockets' buffers take
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", served.port))
    payload = json.dumps({**LONG, "max_tokens": tokens, "stream": True, "n": choices, "logprobs": 20}).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload)
    wait_for(lambda: served.gauges()["running"] == choices, 10)
    assert served.complete(max_tokens=20)["usage"]["completion_tokens"] == 20
    assert served.http.get("/health", timeout=2).status_code == 200
    served.wait_idle(30)  # the engine is done with it although nobody has read
    data = bytearray()
    while b"data: [DONE]" not in data[-100:]:
        data += raw.recv(1 << 20)
    raw.close()
    body = b"".join(re.findall(rb"[0-9a-f]+\r\n(data: .*?\n\n)\r\n", data.split(b"\r\n\r\n", 1)[1], re.DOTALL)).decode()
    chunks = [c for e in body.split("\n\n") if e.startswith("data: {") for c in json.loads(e.removeprefix("data: "))["choices"]]
    assert [sum(len(c["logprobs"]["tokens"]) for c in chunks if c["index"] == i) for i in range(choices)] == [tokens] * choices
    assert len(chunks) < choices * tokens  # all of it came, and what came late was merged
    deaf = served.connect({**LONG, "max_tokens": tokens, "stream": True, "n": choices, "logprobs": 20})
    wait_for(lambda: served.gauges()["running"] == choices, 10)
    served.wait_idle(30)
    assert served.stop() == 0 and "Traceback" not in served.log
    deaf.close()


# -- the engine dies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "crashed", "broken"])
def test_b05_a_dead_engine_is_told(start: Start, how: str) -> None:
    served = start(env={"SCRIPT_STEP_SECONDS": "0.01"})
    client = served.client
    streams = [client.completions.create(model="script", prompt="ABC", max_tokens=2000, stream=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.post, "completions", **LONG)
        wait_for(lambda: served.gauges()["running"] == 4, 10)
        if how == "killed":
            os.kill(served.gauges()["pid"], signal.SIGKILL)
        else:
            pool.submit(served.post, "completions", prompt="x", seed={"crashed": 666, "broken": 669}[how])
        says = {"killed": "SIGKILL", "crashed": "RuntimeError: the script crashed", "broken": "RuntimeError: the device is gone"}[how]
        for stream in streams:
            with pytest.raises(openai.APIError, match=says):
                list(stream)
        reply = waiting.result(timeout=5)
    assert reply.status_code == 503 and says in reply.json()["error"]["message"]
    health = served.http.get("/health")
    assert health.status_code == 503 and says in health.json()["reason"]
    for answer in (
        served.http.get("/v1/models"),
        served.post("completions", prompt="x"),
        served.post("completions", prompt="x", stream=True),
    ):
        assert answer.status_code == 503
    assert served.stop() == 0


def test_a_silent_engine_is_not_healthy(start: Start) -> None:
    served = start(env={"SCRIPT_STALL": "1.5"})
    pid = served.gauges()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: served.http.get("/health").status_code == 503, 5)
        assert "silent" in served.http.get("/health").json()["reason"]
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: served.http.get("/health").status_code == 200, 3)


# -- the end ------------------------------------------------------------------------------------------------------------------


def test_stop(start: Start) -> None:
    servers = {number: start(env={"SCRIPT_STEP_SECONDS": "0.01"}) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, served in servers.items():
        engine = served.gauges()["pid"]
        assert children(served.process.pid) == [engine]
        client = served.client
        short = client.completions.create(model="script", prompt="ABC", max_tokens=50, stream=True)
        long = client.completions.create(model="script", prompt="ABC", max_tokens=2000, stream=True)
        begin = time.monotonic()
        served.process.send_signal(number)
        assert sum(1 for _ in short) >= 45  # what can end within the grace does
        with pytest.raises(openai.APIError, match="shutting down"):
            list(long)
        assert served.process.wait(timeout=5) == 0
        wait_for(lambda pid=engine: not alive(pid), 0.5)
        assert time.monotonic() - begin < 5
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port))


def test_stop_while_loading_and_in_a_long_step(start: Start) -> None:
    served = start(wait=False, engine="slow_start:SlowStart")
    wait_for(lambda: len(children(served.process.pid)) == 1, 10)
    time.sleep(0.5)
    begin = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - begin < 5
    served = start(server={"served_model_name": "long" * 100})
    raw = served.connect({**LONG, "seed": 668})
    wait_for(lambda: served.gauges()["waiting"] == 1, 10)
    begin = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - begin < 5
    raw.close()


def test_b12_the_engine_dies_with_its_front(start: Start) -> None:
    for busy in (False, True):
        served = start(env={"SCRIPT_STEP_SECONDS": "0.01"})
        raw = served.connect(LONG) if busy else None
        engine = served.gauges()["pid"]
        assert len(served.leftovers) == 1
        served.process.kill()
        served.process.wait()
        wait_for(lambda pid=engine: not alive(pid), 2)
        assert not served.leftovers
        if raw:
            raw.close()


# -- idleness -----------------------------------------------------------------------------------------------------------------


def test_idle_is_idle_and_wakes_at_once(server: Served) -> None:
    server.wait_idle()
    time.sleep(0.3)
    pids = [server.process.pid, server.gauges()["pid"]]
    before = sum(map(cpu_seconds, pids))
    time.sleep(2)
    assert sum(map(cpu_seconds, pids)) - before <= 0.04 + 0.01  # 2 % of a core each; the clock has 10 ms
    times = []
    for _ in range(5):
        time.sleep(0.2)
        begin = time.monotonic()
        server.complete(max_tokens=1)
        times.append(time.monotonic() - begin)
    assert min(times) < 0.02
