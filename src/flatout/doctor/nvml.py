"""NVML, the NVIDIA driver's own library, by ctypes: questions and answers, and for a question it won't answer what that would need.

No package is needed for it, and no torch. What the answers mean is gpu.py's. Called by gpu.py; tests hand it a library of their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flatout.doctor.facts import NotAvailable

LIBRARY = "libnvidia-ml.so.1"
UNSUPPORTED, NO_PERMISSION = 3, 4  # nvmlReturn_t
NEEDS = {  # by nvmlReturn_t
    UNSUPPORTED: "a GPU and driver that report it",
    NO_PERMISSION: "root, or an administrator who allows it",
    9: "the NVIDIA driver loaded",
    13: "a newer NVIDIA driver",
    15: "a GPU that still answers: it is lost to the driver",
    18: "a driver and NVML library of one version: restart the machine",
}
TEXT = 96  # bytes of the longest name or UUID


class Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """A context: inside, the library is initialised. NotAvailable where there is none or it refuses."""

    def __init__(self, library: Any = None):
        """library: what has its functions as attributes; None: the driver's."""
        self._library = _driver() if library is None else library

    def __enter__(self) -> Nvml:
        self._call("nvmlInit_v2")
        return self

    def __exit__(self, *exception: object) -> None:
        self._call("nvmlShutdown")

    def number(self, function: str, *given: Any, kind: Any = ctypes.c_uint) -> int:
        """The answer of a function whose last argument is a pointer to it. NotAvailable, as of all below."""
        (value,) = self.numbers(function, *given, count=1, kind=kind)
        return value

    def numbers(self, function: str, *given: Any, count: int, kind: Any = ctypes.c_uint) -> list[int]:
        """Of one whose last `count` arguments are."""
        answers = [kind() for _ in range(count)]
        self._call(function, *given, *map(ctypes.byref, answers))
        return [answer.value for answer in answers]

    def text(self, function: str, *given: Any) -> str:
        buffer = ctypes.create_string_buffer(TEXT)
        self._call(function, *given, buffer, ctypes.c_uint(TEXT))
        return buffer.value.decode(errors="replace")

    def memory(self, device: Any) -> Memory:
        answer = Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(answer))
        return answer

    def devices(self) -> list[Any]:
        """Handles, in the driver's order."""
        made = []
        for index in range(self.number("nvmlDeviceGetCount_v2")):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            made.append(handle)
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        called = getattr(self._library, function, None)
        if called is None:
            raise NotAvailable(NEEDS[13])
        if code := called(*arguments):
            raise NotAvailable(NEEDS.get(code, f"NVML to answer {function}, which failed with code {code}"))


def _driver() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise NotAvailable(f"the NVIDIA driver ({LIBRARY})") from None
