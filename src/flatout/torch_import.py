"""torch's import, the longest part of a start: its library is mapped beside what needs no torch, and the import itself makes no garbage.

Nothing of ours is imported here, and torch only when it is asked for. Called by llm.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

LIBRARY = "libtorch_cpu.so"  # 0.3 s of the import are its relocations and the pages they touch


@contextmanager
def torch_ahead() -> Iterator[None]:
    """Inside, a thread maps torch's library, without Python's lock; the import then finds it. Nothing happens where that cannot be: the import tells."""
    thread = threading.Thread(target=_map_library, name="torch-ahead", daemon=True)
    if sys.platform == "linux" and "torch" not in sys.modules:
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _map_library() -> None:
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return
    file = os.path.join(found.submodule_search_locations[0], "lib", LIBRARY)
    if os.path.isfile(file):
        dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL(file) would hold Python's lock meanwhile
        dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        dlopen(os.fsencode(file), os.RTLD_LAZY)


def import_torch() -> None:
    """The first time without garbage collection, which would look through torch's 240,000 objects again and again (0.14 to 0.17 s), and once more at
    every full pass later: they stay for good, and are left out from then on."""
    if "torch" in sys.modules:
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
