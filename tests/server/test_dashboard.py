"""The dashboard in a browser, over the real engine and a tiny model: live, honest, quiet in the console, readable on a phone and in both schemes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, Browser
from served import Served, wait_for

from flatout.cli import main
from flatout.server.dashboard import page

Start = Callable[..., Served]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
NO_SIDEWAYS = "document.documentElement.scrollWidth <= window.innerWidth"
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)]; return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); };
  const card = style("#ledger").backgroundColor, page = style("body").backgroundColor;
  return {text: ratio(style("#ledger").color, card), soft: ratio(style("#ledger .note").color, card), name: ratio(style("#name").color, page),
          link: ratio(style("footer a").color, page), page: light(page)};
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def tab(browser: Browser) -> Browser:
    """The browser, with a clean slate and a desk's size."""
    browser.open("about:blank")
    browser.look()
    browser.complaints.clear()
    browser.asked.clear()
    return browser


@pytest.fixture(scope="module")
def real(start: Start) -> Served:
    return start(engine=None, threads=1, max_num_seqs=2, num_gpu_blocks_override=64)


def post(served: Served, tokens: int) -> None:
    body = {"prompt": "The quick brown fox jumps over the lazy dog", "max_tokens": tokens, "ignore_eos": True}
    httpx.post(f"http://127.0.0.1:{served.port}/v1/completions", json=body, timeout=120).raise_for_status()


@contextmanager
def load(served: Served, tokens: int = 200, clients: int = 4) -> Iterator[None]:
    """Clients that ask again once answered, two more than there are slots, until the end of the block and their last answers."""
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            post(served, tokens)

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(client) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
        for each in asked:
            each.result()


def url(served: Served) -> str:
    return f"http://127.0.0.1:{served.port}/"


def test_it_comes_to_life(tab: Browser, real: Served, tmp_path: Path) -> None:
    tab.open(url(real))
    tab.wait("document.querySelector('#status').textContent === 'live, idle'")
    assert tab.value(
        "!document.querySelector('#welcome').hidden && document.querySelector('#welcome pre').textContent.includes('/v1/chat/')"
    )
    assert "Nobody waits." in tab.value("document.querySelector('#waiting').innerText")
    assert "No request yet." in tab.value("document.querySelector('#requests').innerText")
    running = "document.querySelector('#tile-load .value').textContent[0]"
    begun, ended = [], []
    for _ in range(3):  # the machine may be busy with other tests: the best of some changes counts
        with load(real):
            wait_for(lambda: real.http.get("/ledger?since=1").json()["models"]["script"]["state"]["running"] > 0, 30)
            begun.append(tab.wait(f"{running} !== '0'"))
            tab.wait("document.querySelectorAll('#requests rect[data-part=decode]').length >= 6")
        ended.append(tab.wait(f"{running} === '0' && document.querySelector('#tile-load .note').textContent.includes(' 0 in flight')"))
    assert min(begun) < 2 and min(ended) < 2, (begun, ended)
    tab.wait("document.querySelectorAll('#ledger polygon').length >= 3")  # a second has closed
    assert tab.value("document.querySelector('#welcome').hidden")
    tab.wait("document.querySelectorAll('#roof circle').length === 2")
    assert tab.value("document.querySelectorAll('#latency circle').length") >= 12
    assert tab.value("document.querySelectorAll('#requests rect[data-part=queue]').length") >= 3, "two run at a time"
    assert tab.value("document.querySelectorAll('#blocks .map i').length") == 64
    assert tab.value("!document.querySelector('#verdict').hidden && document.querySelector('#verdict .sentence').textContent.length > 10")
    table = tab.value("[...document.querySelectorAll('#ledger tbody tr')].map((r) => parseFloat(r.cells[1].textContent.replace('< ', '')))")
    assert 97 <= sum(table) <= 103, "shares of the table are of the whole"
    assert tab.complaints == []
    assert {u for u in tab.asked if not u.startswith(url(real))} <= {"about:blank"} | {u for u in tab.asked if u.startswith("data:")}


def test_ops_are_timed_when_asked(tab: Browser, real: Served) -> None:
    tab.open(url(real))
    tab.wait("document.querySelector('#time-ops') && document.querySelector('#status').dataset.is === 'live'")
    tab.value("document.querySelector('#time-ops').click()")
    wait_for(lambda: any("deep=" in u for u in tab.asked) or tab.value("1") != 1, 10)
    with load(real):
        tab.wait("document.querySelectorAll('#ops tbody tr').length > 3")
    assert tab.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_on_a_phone_and_in_both_schemes(tab: Browser, real: Served, scheme: str) -> None:
    post(real, 20)
    for width in (390, 820, 1280):
        tab.look(width, scheme=scheme)
        tab.open(url(real))
        tab.wait("document.querySelectorAll('#ledger polygon').length > 0")
        assert tab.value(NO_SIDEWAYS), f"{width} px: it scrolls sideways"
    found = tab.value(CONTRAST)
    assert (found.pop("page") > 0.5) == (scheme == "light")
    assert min(found.values()) >= 4.5, found
    assert tab.complaints == []


def test_themes_keys_and_names(tab: Browser, real: Served) -> None:
    tab.open(url(real))
    tab.wait("document.querySelectorAll('#ledger polygon').length > 0")
    dark = "getComputedStyle(document.body).colorScheme === 'dark'"
    for name in ("light", "dark"):
        tab.value("document.querySelector('#theme').click()")
        assert tab.value("document.querySelector('#theme').textContent") == f"{name} theme"
    assert tab.value(f"getComputedStyle(document.documentElement).colorScheme === 'dark' || {dark}")
    tab.open(url(real))
    assert tab.value("document.documentElement.dataset.theme") == "dark", "a choice is kept"
    tab.value("document.querySelector('#theme').click()")
    tab.wait("document.querySelectorAll('#ledger polygon').length > 0")
    tab.value("document.querySelector('#ledger .plot').focus()")
    tab.press("ArrowLeft")
    assert tab.value("document.querySelectorAll('#ledger .cursor').length") == 1
    assert re.search(r"(ago|now):", tab.value("document.querySelector('#ledger .readout').textContent"))
    assert tab.value("[...document.querySelectorAll('button, select, input')].every((e) => e.textContent || e.labels.length)")
    plots = "[...document.querySelectorAll('.plot')].filter((e) => e.firstChild).every((e) => e.getAttribute('aria-label'))"
    assert tab.value(plots), "each plot is told in words"
    assert tab.value("[...document.querySelectorAll('section')].every((s) => s.hidden || s.getAttribute('aria-label') || "
                     "document.getElementById(s.getAttribute('aria-labelledby')))")  # fmt: skip
    assert tab.complaints == []


def test_a_hidden_page_asks_nothing(tab: Browser, real: Served) -> None:
    tab.open(url(real))
    tab.wait("document.querySelector('#status').dataset.is === 'live'")
    tab.value("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true})")
    time.sleep(0.8)  # what was on its way has come
    tab.value("1")
    before = len(tab.asked)
    time.sleep(1.5)
    tab.value("1")
    assert len(tab.asked) == before
    tab.value("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    wait_for(lambda: tab.value("1") == 1 and len(tab.asked) > before, 10)


def test_the_server_goes_and_comes_back_under_a_key(tab: Browser, start: Start) -> None:
    served = start(server={"api_key": "secret"})
    tab.open(url(served))
    tab.wait("!document.querySelector('#door').hidden")
    assert tab.value("document.querySelector('#figures').hidden")
    for key, then in (
        ("wrong", "document.querySelector('#status').textContent.includes('not the server')"),
        ("secret", "document.querySelector('#door').hidden"),
    ):
        tab.value(f"document.querySelector('#key').value = '{key}'; document.querySelector('#door').requestSubmit()")
        tab.wait(then)
    tab.wait("document.querySelector('#status').dataset.is === 'live'")
    served.stop()
    tab.wait("!document.querySelector('#alert').hidden")
    assert "does not answer since" in tab.value("document.querySelector('#alert').textContent")
    assert tab.value("document.querySelector('#figures').classList.contains('stale') && !document.querySelector('#figures').hidden")


def test_a_report_is_a_page_by_itself(tab: Browser, real: Served, tmp_path: Path) -> None:
    post(real, 60)
    time.sleep(1.1)  # the second has closed
    assert main(["doctor", "report", "--url", url(real), "-o", str(tmp_path / "report.html"), "--json"]) == 0
    assert (tmp_path / "report.json").stat().st_size > 1000
    tab.open(f"file://{tmp_path}/report.html")
    tab.wait("document.querySelectorAll('#ledger polygon').length > 0")
    assert tab.value("document.querySelector('#status').textContent").startswith("report of 2")
    assert tab.value("document.querySelectorAll('svg polygon, svg polyline, svg rect').length") > 8
    assert tab.value("document.querySelector('#time-ops')") is None
    time.sleep(1.2)
    tab.value("1")
    assert [u for u in tab.asked if not u.startswith(("file:", "data:", "about:"))] == [] and tab.complaints == []
    assert page() != (tmp_path / "report.html").read_bytes()
