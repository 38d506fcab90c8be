"""Starting and stopping: binds the port, starts the engine's child process, serves until a signal, and leaves nothing behind.

serve() is the way in, for cli/. It keeps the table of served models (one for now). The child's own side is child.py's, HTTP is app.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import msgspec
import uvicorn

from flatout.config import Config, ConfigError, ServerConfig
from flatout.modelfile.sources import ModelSource, resolve_model
from flatout.server.app import make_app
from flatout.server.child import Call, Start, tell
from flatout.server.engines import ServedModel
from flatout.server.mailbox import FrontMailbox, Shutdown
from flatout.text.chat import ChatTemplate
from flatout.text.tokenizer import load_tokenizer

ENGINE = "flatout.engine:Engine"
# From a stop signal to the last process gone stays under 5 s: open requests may end, then hear an error, then the engine may leave.
REQUESTS_GRACE, ERRORS_GRACE, ENGINE_GRACE = 1.5, 0.5, 1.0
LAST_WORDS_SECONDS = 2.0  # for the line of a process that ended to close, where it ever had one

T = TypeVar("T")


def serve(config: Config, server: ServerConfig, engine: str = ENGINE) -> int:
    """Serve one model over HTTP until SIGINT or SIGTERM. `engine` (module:class) is what the child runs.

    Returns the exit code: 0 after a stop; 1 when the engine did not start, its reason printed as the last line.
    Raises ConfigError (also for an address that can't be had, before any model is touched) and ModelFileError.
    """
    with bind(server.host, server.port) as listener:
        return asyncio.run(_serve(config, server, engine, listener))


MENDS = {
    errno.EADDRINUSE: "it is in use; give another --port, or stop what holds it",
    errno.EACCES: "this user may not use it; give a --port of 1024 or more",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another --host",
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming the flags."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host} --port {port}: no such address ({error})") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)  # now: two servers may both bind, only one may listen
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: {MENDS.get(error.errno or 0, str(error))}") from None
    return listener


class EngineProcess:
    """One engine's child process. `ended(reason)` is called on the loop once it is gone, whoever ended it, and all that it sent is delivered."""

    def __init__(self, mailbox: FrontMailbox, key: str, engine: str, ended: Callable[[str], None]):
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)  # the child finds the modules that this process finds
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flatout.server.child"], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        self.gone = asyncio.Event()
        self._mailbox, self._ended = mailbox, ended
        self.tell(Call(mailbox.endpoint, key, engine))
        self._burial = asyncio.create_task(self._bury())

    def tell(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died, and _watch reports that
            tell(self.process.stdin, message)

    async def stop(self, patience: float) -> None:
        """Wait for the child to leave, `patience` seconds at most, then make it."""
        for force in (self.process.terminate, self.process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), patience)
                return
            force()
            patience = ENGINE_GRACE
        await self.gone.wait()

    async def _bury(self) -> None:
        code = await _in_thread(self.process.wait)
        self.gone.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._mailbox.lines_closed.acquire(), LAST_WORDS_SECONDS)
        self._mailbox.drain()
        self._ended(_obituary(code))


def _obituary(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the engine process was killed (SIGKILL); unless somebody did that, the machine ran out of memory"
    if code < 0:
        return f"the engine process died of {signal.Signals(-code).name}"
    return f"the engine process ended with exit code {code}"


class RequestLog:
    """Lines for standard error, written by a thread of their own: a terminal or a pipe that blocks holds up no request."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """Lines that don't get out within a second are lost."""
        self._lines.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            print(line, file=sys.stderr, flush=True)


class _Http(uvicorn.Server):
    """uvicorn without signal handlers of its own: a stop is the engine's too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: Config, server: ServerConfig, engine: str, listener: socket.socket) -> int:
    began = time.monotonic()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    mailbox = FrontMailbox()
    model = ServedModel(server.served_model_name or config.model.model, key="engine-0", mailbox=mailbox)
    log = RequestLog()
    if server.enable_log_requests:
        model.log = log.write
    models = {model.name: model}
    engines = {m.key: m for m in models.values()}
    mailbox.listen(lambda key, message: engines[key].deliver(message))
    http = _Http(uvicorn.Config(make_app(models, config, server), lifespan="off", log_config=None, access_log=False))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    child = EngineProcess(mailbox, model.key, engine, ended=model.down)
    loading = asyncio.create_task(_load(model, config, child))
    stopped = asyncio.create_task(stop.wait())
    failure = None
    try:
        await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading  # raises what it raised
            failure = model.trouble
            if failure is None:
                _announce(model, listener, time.monotonic() - began)
                await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
    finally:
        await _stop_http(http, serving, model)
        model.send(Shutdown())
        await child.stop(patience=0 if model.facts is None else ENGINE_GRACE)  # while it loads, it does not listen
        mailbox.close()
        log.close()
    if failure is not None:
        print(f"flatout: error: {failure}", file=sys.stderr)
    return 1 if failure else 0


async def _stop_http(http: uvicorn.Server, serving: asyncio.Task[None], model: ServedModel) -> None:
    """Open requests may end; those that don't hear why; clients that don't even read are cut off."""
    http.should_exit = True  # nothing new from here on; idle connections close
    await asyncio.wait({serving}, timeout=REQUESTS_GRACE)
    model.down("the server is shutting down")
    await asyncio.wait({serving}, timeout=ERRORS_GRACE)
    for connection in list(http.server_state.connections):
        connection.transport.abort()
    await asyncio.wait({serving}, timeout=ERRORS_GRACE)


async def _load(model: ServedModel, config: Config, child: EngineProcess) -> None:
    """The files, then the text tools here and the engine there. The engine's own failure becomes model.trouble."""
    source = await _in_thread(lambda: resolve_model(config.model))
    child.tell(Start(config))
    await _in_thread(lambda: _load_text(model, config, source))
    await model.settled.wait()
    model.open()


def _load_text(model: ServedModel, config: Config, source: ModelSource) -> None:
    if source.tokenizer is not None:
        model.tokenizer = load_tokenizer(source.tokenizer)
        model.template = ChatTemplate.for_model(model.tokenizer, config.model.chat_template)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run it in a daemon thread: unlike an executor's, a download in progress does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return await result


def _announce(model: ServedModel, listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    for line in [*model.start_lines, *(model.tokenizer.notices if model.tokenizer else [])]:
        print(line, file=sys.stderr)
    print(f"ready: {model.name} at http://{host}:{port}/v1 after {seconds:.1f} s", file=sys.stderr, flush=True)
