"""Servers whose start takes a tenth of the usual: one process imports torch and the engine once, and forks a front, which forks its engine.

Run as a script by fault_cases.py:Servers; reads a JSON line for each server wanted ({"config", "server", "fault", "log"}), answers with its process id.
A fault's patches (faults.py) are made in the forked process alone that they concern.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any


class Forked:
    """What launch.py needs of subprocess.Popen, for an engine process that is forked rather than started anew."""

    fault: Any = None

    def __init__(self, *_command: Any, **_options: Any):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.stdin = os.fdopen(read, "r")
            _leave(_engine)
        os.close(read)
        os.set_inheritable(write, False)
        self.stdin = os.fdopen(write, "wb")
        self.returncode: int | None = None

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _engine() -> int:
    from flatout.server import child

    if Forked.fault is not None:
        Forked.fault.engine()
    return child.main()


def _front(order: dict[str, Any]) -> int:
    from faults import FAULTS

    from flatout.config import Config, ServerConfig
    from flatout.server import launch

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    Forked.fault = FAULTS[order["fault"]]()
    Forked.fault.model = order["config"]["model"]
    launch.subprocess.Popen = Forked  # type: ignore[assignment, misc]
    Forked.fault.front()
    return launch.serve(Config.make(**order["config"]), ServerConfig(**order["server"]))


def _leave(work: Any) -> None:
    """End this process with what work() returns."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    import flatout.engine
    import flatout.server.child
    import flatout.server.launch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # fronts are nobody's to wait for
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                os.close(0)
                os.open(os.devnull, os.O_RDONLY)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _leave(lambda order=order: _front(order))
            print(pid, flush=True)


if __name__ == "__main__":
    assert subprocess  # launch.py's is replaced
    main()
