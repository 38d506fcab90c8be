"""launch(): a Triton kernel with operands like those of an earlier launch, past Triton's own look-up.

Triton 3.6 looks at every operand anew and builds a key of text: some 25 us a launch, of which a prompt makes 150, each layer with the same
numbers. Called by the launchers of this package; Triton itself launches what was not met yet, in its interpreter, and in other versions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

_MOST = 8192  # launches remembered
TRITON = "3.6."  # the versions whose compiled kernels are started as here
_KNOWN_VERSION = triton.__version__.startswith(TRITON)
_known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_here = threading.local()  # idle: inside without_launches()


@contextmanager
def without_launches() -> Iterator[None]:
    """Inside, in this thread, kernels are compiled but none is launched, met before or not: what they would read may never be written."""
    before = getattr(_here, "idle", False)
    _here.idle = True
    try:
        yield
    finally:
        _here.idle = before


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **form: Any) -> None:
    """kernel[grid](*operands, **form). operands: every parameter that is no constexpr, in order; form: the constexprs, which come after them,
    and Triton's options."""
    if getattr(_here, "idle", False):
        kernel.warmup(*operands, grid=grid, **form)
        return
    # what Triton compiles for: a tensor's type and whether it begins at a multiple of 16; of an integer whether it is 1, of 16, of 32 bits
    device = operands[0].get_device()
    key = (
        id(kernel),  # its own hash asks for its source's
        device,
        # 1, 1.0 and True are equal as parts of a key, and compiled apart
        tuple([(o.dtype, o.data_ptr() & 15) if isinstance(o, Tensor) else o if o.__class__ is int else (o, o.__class__) for o in operands]),
        tuple([(name, o, o.__class__) for name, o in form.items()]),
    )
    known = _known.get(key)
    if known is None:
        compiled = kernel[grid](*operands, **form)
        if compiled is not None and _KNOWN_VERSION:
            if len(_known) >= _MOST:
                _known.clear()
            constants = tuple(form[name] for name in kernel.arg_names[len(operands) :])
            _known[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants, kernel)
        return
    run, function, metadata, constants, _ = known
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(*grid, *(1,) * (3 - len(grid)), stream, function, metadata, None, None, None, *operands, *constants)
