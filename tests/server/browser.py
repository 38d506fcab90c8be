"""A headless Chromium for tests, driven by its DevTools protocol over a pair of pipes: no driver, no websocket, nothing to install beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Browser:
    """One tab. `complaints`: what its console and its network said was wrong; `asked`: the URLs that it asked for."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.folder = Path(tempfile.mkdtemp(prefix="browser-"))
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()

        def pipes() -> None:  # Chromium reads descriptor 3 and writes 4
            os.dup2(down_read, 103), os.dup2(up_write, 104)
            os.dup2(103, 3), os.dup2(104, 4)

        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [CHROMIUM, *FLAGS, f"--user-data-dir={self.folder / 'profile'}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=pipes, close_fds=False, start_new_session=True,
            )  # fmt: skip
        os.close(down_read), os.close(up_write)
        self._buffer, self._count = b"", 0
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._down)  # it leaves when nobody drives it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._up)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, timeout: float = 60.0, **params: Any) -> dict[str, Any]:
        """The protocol's answer. What happens meanwhile is taken in."""
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._down, json.dumps({"id": self._count, "method": method, "params": params, **session}).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            message = self._next(end)
            assert message is not None, f"{method}: no answer in {timeout} s; {(self.folder / 'log').read_text()[-2000:]}"
            if message.get("id") == self._count:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._event(message.get("method", ""), message.get("params", {}))

    def _next(self, end: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if not select.select([self._up], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            if not (piece := os.read(self._up, 1 << 16)):
                return None
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(a.get("value")) for a in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    # -- what tests do ---------------------------------------------------------------------------------------------------

    def look(self, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """The window's size, and what its user prefers."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of JavaScript, promises awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> float:
        """Until the expression is true: how long that took."""
        begin = time.monotonic()
        while not self.value(expression):
            assert time.monotonic() - begin < seconds, f"not within {seconds} s: {expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.02)
        return time.monotonic() - begin

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
