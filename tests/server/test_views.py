"""What dashboard, `flatout top` and `flatout doctor report` are made from, without a browser: /ledger for viewers, the page, the verbs and their errors."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import Served, error, free_port, strict, wait_for

from flatout.cli import main
from flatout.cli.top import spark
from flatout.ledger.ledger import PARTS
from flatout.ledger.words import ALWAYS
from flatout.ledger.words import PARTS as WORDS
from flatout.server.dashboard import page, report


@pytest.fixture(scope="module")
def own(start: Callable[..., Served]) -> Served:
    return start(env={"SCRIPT_STEP_SECONDS": "0.01"}, max_num_seqs=2)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    return lambda *argv: (main(list(argv)), *capsys.readouterr())


@pytest.fixture
def stranger() -> Iterator[str]:
    """The URL of a server that is none of flatout's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def view(served: Served, query: str = "") -> dict[str, Any]:
    return strict(served.http.get(f"/ledger{query}").text)["models"]["script"]


def test_every_part_has_a_name() -> None:
    assert set(WORDS) == set(PARTS) and set(ALWAYS) <= set(PARTS)


def test_the_page_needs_nobody_else(own: Served) -> None:
    reply = own.http.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", reply.text), "it loads nothing"
    assert "/*STYLE*/" not in reply.text and "/*SCRIPT*/" not in reply.text and "/*WORDS*/" not in reply.text


def test_texts_can_not_leave_a_report() -> None:
    evil = "</script><script>alert(1)</script>"
    html = report({"models": {evil: {}}}).decode()
    assert evil not in html and html.count("</script>") == page().decode().count("</script>")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', html)
    assert found and json.loads(found[1]) == {"models": {evil: {}}}


def test_what_a_viewer_gets(own: Served) -> None:
    own.complete(max_tokens=130)  # 1.3 s
    wait_for(lambda: view(own)["state"]["in_flight"] == 0 and len(view(own)["series"]["points"]) >= 2, 10)
    whole = view(own)
    points = whole["series"]["points"]
    seconds = [point["second"] for point in points]
    assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))
    assert sum(point["sampled"] for point in points) >= 60
    settled = whole["series"]["settled"]
    brief = view(own, f"?since={settled}")
    assert brief["series"]["points"][0]["second"] == settled and "table" not in brief and "start" not in brief["windows"]
    (request,) = [r for r in whole["requests"] if r["completion_tokens"] == 130]
    assert request["end"] == "length" and sum(request["parts_ms"].values()) == pytest.approx(request["total_ms"], abs=0.05)
    assert request["age_ms"] >= request["total_ms"]
    latency = whole["latency"]
    assert latency["ttft"]["count"] >= 1 and latency["tpot"]["p50"] <= latency["tpot"]["p90"] <= latency["tpot"]["p99"]
    assert latency["tpot"]["p50"] >= 10
    assert error(own.http.get("/ledger?since=x"))["param"] == "since"


def test_a_running_request_is_seen(own: Served) -> None:
    raw = own.connect({"prompt": "ABC", "max_tokens": 2000, "ignore_eos": True})
    wait_for(lambda: any(r["end"] == "" and r["completion_tokens"] > 2 for r in view(own, "?since=1")["requests"]), 10)
    raw.close()
    own.wait_idle()
    wait_for(lambda: view(own, "?since=1")["requests"][0]["end"] == "abort", 10)


def test_top_once(own: Served, run: Callable[..., tuple[int, str, str]]) -> None:
    own.complete(max_tokens=20)
    code, out, err = run("top", "--once", "--url", f"http://127.0.0.1:{own.port}")
    assert (code, err) == (0, "")
    assert out.startswith("script at http://127.0.0.1") and "0 running, 0 waiting, 0 in flight" in out
    assert re.search(r"TTFT +[\d.]+ m?s +p90", out) and "no load" in out and "0 of 2 used" in out
    assert "no ceilings are known here" in out, "a script has no costs"
    assert re.search(r"\d cores?: \d+% busy", out)


def test_top_and_report_say_what_is_wrong(
    own: Served, stranger: str, run: Callable[..., tuple[int, str, str]], start: Callable[..., Served], tmp_path: Path
) -> None:
    locked = start(server={"api_key": "secret"})
    for verb in (["top", "--once"], ["doctor", "report", "-o", str(tmp_path / "r.html")]):
        for url, says in (
            (f"http://127.0.0.1:{free_port()}", "--url: .*nobody answers"),
            (stranger, f"is no flatout server .*doctor --url {stranger}"),
            (f"http://127.0.0.1:{locked.port}", "--api-key: "),
            ("ftp://x", "--url: .*http://HOST:PORT"),
        ):
            code, out, err = run(*verb, "--url", url)
            assert code == 2 and out == "" and re.search(says, err) and err.count("\n") == 1
        mine = f"http://127.0.0.1:{own.port}"
        assert re.search(r"--model: 'scrip' is not served \(did you mean script\?\)", run(*verb, "--url", mine, "--model", "scrip")[2])
    assert not (tmp_path / "r.html").exists()
    assert "--interval" in run("top", "--interval", "0", "--url", mine)[2]
    assert "is the page itself" in run("doctor", "report", "-o", "a.json", "--json", "--url", mine)[2]
    code, out, err = run("top", "--once", "--url", f"http://127.0.0.1:{locked.port}", "--api-key", "secret")
    assert code == 0 and "secret" not in out


def test_report_writes_both(own: Served, run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    own.complete(max_tokens=5)
    code, _, err = run(
        "doctor", "report", "--url", f"http://127.0.0.1:{own.port}/v1", "-o", str(tmp_path / "r.html"), "--json", str(tmp_path / "f.json")
    )
    assert code == 0 and err.count("wrote ") == 2
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["url"] == f"http://127.0.0.1:{own.port}" and found["models"]["script"]["totals"]["requests"] >= 1
    assert (tmp_path / "r.html").read_bytes() == report(found)


def test_sparks() -> None:
    assert spark([0, 1, 2, 4, 8], 30) == " ▁▂▄█" and spark([], 30) == "" and spark([0, 0], 30) == "  "
    assert len(spark(list(range(60)), 30)) == 30
