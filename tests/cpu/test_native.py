"""The native CPU library against float64 on every instruction set of this machine; the bits of a row; the pool; sanitizers.

The truth is native_reference.py's. What the ops make of it is test_packed.py's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import native_reference as reference
import numpy as np
import pytest
import torch
from native_cases import GATES, TYPES, check, rows_of
from native_reference import make_weight

from flatout.kernels import native

COMPILER = shutil.which("g++") or shutil.which("clang++")
if COMPILER and not native.available():  # else a library that does not compile would only be fewer tests
    pytest.fail(f"{native.lacking()[0]}; {COMPILER} is here: pip install -v -e . says why", pytrace=False)
pytestmark = pytest.mark.skipif(not native.available(), reason="the native library was not built: no C++ compiler at installation")


@pytest.fixture(autouse=True)
def one_thread_after() -> Iterator[None]:
    yield
    native.set_threads(1)


def packed(weight: reference.Weight) -> torch.Tensor:
    return torch.from_numpy(weight.packed)


CASES = [
    # rows, outputs, columns; gate, types of x and out, columns between rows
    *((m, 16 * (1 + m % 5), 32 * (1 + m % 7), GATES[m % 4], "float32", "float32", 0) for m in range(1, 41)),
    (1, 960, 576, None, "bfloat16", "bfloat16", 0),
    (5, 192, 576, "silu", "bfloat16", "bfloat16", 8),
    (7, 576, 1536, None, "bfloat16", "float32", 3),
    (16, 48, 2048, "gelu_tanh", "float32", "bfloat16", 5),
    (33, 64, 96, "gelu", "bfloat16", "bfloat16", 1),
]


@pytest.mark.parametrize("kind", [4, 8])
def test_products_are_the_references(isa, kind):
    """Every tile height and gate, with and without bias, norm and residual, while the threads change."""
    rng = np.random.default_rng(kind)
    for number, (m, n, k, gate, x_type, out_type, pad) in enumerate(CASES):
        native.set_threads((1, 2, 3, 8)[number % 4])
        lines = 2 * n if gate else n
        weight = make_weight(rng, kind, lines, k)
        x = rows_of(rng, m, k, x_type, pad)
        out = rows_of(rng, m, n, out_type, pad) if n > 16 else torch.ones(m, n, dtype=TYPES[out_type])
        bias = rng.normal(size=lines).astype(np.float32) if number % 3 else None
        norm = (rng.normal(size=k).astype(np.float32), 1e-5, float(number % 2)) if number % 5 < 3 else None
        add, scale = number % 7 < 4, (1.0, 0.25)[number % 2]
        truth = reference.product(x.float().numpy(), weight, bias, norm, gate, out.double().numpy() if add else None, scale)
        native.product(
            out, x, packed(weight), kind,
            None if bias is None else torch.from_numpy(bias),
            (torch.from_numpy(norm[0]), *norm[1:]) if norm else None,
            gate, add, scale,
        )  # fmt: skip
        check(out, truth)


@pytest.mark.parametrize("kind", [4, 8])
def test_values_are_unpacked_exactly(isa, kind):
    rng = np.random.default_rng(3)
    for lines, columns, threads in [(16, 32, 1), (48, 96, 2), (960, 576, 3)]:
        native.set_threads(threads)
        weight = make_weight(rng, kind, lines, columns)
        for dtype in TYPES.values():
            wide = torch.full((lines, columns + 8), 7.0, dtype=dtype)
            native.dequantise(wide[:, :columns], packed(weight), kind)
            assert torch.equal(wide[:, :columns], torch.from_numpy(weight.values.astype(np.float32)).to(dtype))
            assert (wide[:, columns:] == 7).all()


def one_to_one(columns: int) -> reference.Weight:
    """Kind 8, each output an element of x."""
    codes = np.full((columns, columns), 128)
    np.fill_diagonal(codes, 129)
    return reference.pack(8, codes, np.ones((columns, columns // 32), np.float16), None)


def test_rows_are_rounded_exactly(isa):
    """x / d to the nearest, ties to even, to the last bit; whatever its size, but for rows so small that they count as zero."""
    rng = np.random.default_rng(4)
    k = 64
    x = (rng.normal(size=(400, k)) * 10.0 ** rng.integers(-28, 36, (400, 1))).astype(np.float32)
    x[0] = np.linspace(-127, 127, k) // 1 / 2  # d = 0.5: integers
    x[1, :32] = np.arange(32) + 0.5
    x[1, 31] = 127  # d = 1: ties
    out = torch.empty(x.shape)
    native.product(out, torch.from_numpy(x), packed(one_to_one(k)), 8)
    np.testing.assert_array_equal(out.double().numpy(), reference.rounded_rows(x, 0)[0].astype(np.float32))
    tiny = torch.full((3, k), 1e-38)
    tiny[1], tiny[2] = 1e-42, 0
    native.product(out[:3], tiny, packed(one_to_one(k)), 8)
    assert (out[:3] == 0).all()


def test_extremes_are_exact(isa):
    """The largest codes and rows meet: no sum of integers may saturate."""
    for kind, low, high in [(4, 0, 15), (8, 0, 255)]:
        for code in (low, high):
            weight = reference.pack(
                kind, np.full((16, 64), code), np.ones((16, 2), np.float16), np.zeros((16, 2), np.float16) if kind == 4 else None
            )
            for sign in (1, -1):
                out = torch.empty(1, 16)
                native.product(out, torch.full((1, 64), 127.0 * sign), packed(weight), kind)
                assert (out == 64 * 127 * sign * (code if kind == 4 else code - 128)).all()


@pytest.mark.parametrize("kind", [4, 8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(isa, kind, bad):
    rng = np.random.default_rng(5)
    weight = packed(make_weight(rng, kind, 64, 96))
    x = rows_of(rng, 6, 96)
    clean, out = torch.empty(6, 64), torch.empty(6, 64)
    native.product(clean, x, weight, kind)
    x[2, 40] = bad
    for norm in (None, (torch.ones(96), 1e-5, 0.0)):
        native.product(out, x, weight, kind, norm=norm)
        assert not out[2].isfinite().any()
        assert out[[0, 1, 3, 4, 5]].isfinite().all()
    native.product(out, x, weight, kind)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], clean[others])
    for gate in GATES[1:]:
        narrow = torch.empty(6, 32)
        native.product(narrow, x, weight, kind, gate=gate)
        assert not narrow[2].isfinite().any()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", [4, 8])
def test_a_rows_bits_depend_on_nothing_else(isa, kind, gate):
    """Alone, in a batch of any height, among any number of threads."""
    rng = np.random.default_rng(6)
    k, n = 288, 208
    weight = packed(make_weight(rng, kind, 2 * n if gate else n, k))
    x = rows_of(rng, 40, k)
    norm = (torch.from_numpy(rng.normal(size=k).astype(np.float32)), 1e-6, 1.0)
    alone = torch.empty(40, n)
    for r in range(40):
        native.product(alone[r : r + 1], x[r : r + 1], weight, kind, norm=norm, gate=gate)
    for threads in (1, 2, 3, 8):
        assert native.set_threads(threads) == threads
        for m in range(1, 41) if threads == 2 else (1, 16, 29, 40):
            out = torch.empty(m, n)
            native.product(out, x[40 - m :], weight, kind, norm=norm, gate=gate)
            assert torch.equal(out, alone[40 - m :])


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(7)
    weight = packed(make_weight(rng, 4, 32, 64))
    x, out = torch.zeros(2, 64), torch.zeros(2, 32)
    for bad in (
        lambda: native.product(out, x, weight, 8),
        lambda: native.product(out[:, :16], x, weight, 4),
        lambda: native.product(out, x, weight, 4, gate="silu"),
        lambda: native.product(out[:1], x, weight, 4),
        lambda: native.product(out, x.repeat(1, 2)[:, ::2], weight, 4),
        lambda: native.product(out, x, weight, 4, bias=torch.zeros(16)),
        lambda: native.product(out, x, weight, 4, norm=(torch.zeros(32), 0.0, 0.0)),
        lambda: native.dequantise(torch.zeros(32, 32), weight, 4),
    ):
        with pytest.raises(ValueError, match=r"does not fit|needs"):
            bad()
    with pytest.raises(KeyError):
        native.product(out, x.double(), weight, 4)
    with pytest.raises(ValueError, match="declines"):
        native.product(out, x, weight, 4, bias=torch.zeros(32, dtype=torch.float16))
    assert not native.use_isa("mmx")
    native.product(out[:0], x[:0], weight, 4)


def test_a_missing_library_is_told_with_its_mend(monkeypatch):
    assert native.available() and native.lacking() == []
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_FILE", Path("nowhere.so"))
    assert not native.available() and native._load() is None
    (line,) = native.lacking()
    assert "was not built" in line and "compiler" in line
    with pytest.raises(RuntimeError, match="was not built"):
        native.isa()


# ---------------------------------------------------------------- the pool


class Work:
    """A product long enough to be shared out, and its right answer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(8)
        self.weight = packed(make_weight(rng, 4, 1024, 512))
        self.x = rows_of(rng, 9, 512)
        native.set_threads(1)
        self.truth = self()

    def __call__(self) -> torch.Tensor:
        out = torch.empty(9, 1024)
        native.product(out, self.x, self.weight, 4)
        return out

    def right(self, times: int) -> bool:
        return all(torch.equal(self(), self.truth) for _ in range(times))


def test_two_python_threads_take_turns():
    work, answers = Work(), []
    native.set_threads(3)
    threads = [threading.Thread(target=lambda: answers.append(work.right(200))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for count in (2, 1, 4, 3):
        native.set_threads(count)  # while they work
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert answers == [True] * 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own():
    """Also when another thread was in the middle of a product, whose lock the child inherits."""
    work = Work()
    native.set_threads(3)
    assert work.right(20)
    stop = threading.Event()
    beside = threading.Thread(target=lambda: [work() for _ in iter(stop.is_set, True)])
    beside.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                right = work.right(20)
                os._exit(0 if right and len(os.listdir("/proc/self/task")) >= 3 else 1)
            end = time.monotonic() + 20
            while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.005)
            if done == (0, 0):
                os.kill(child, 9)
                os.waitpid(child, 0)
            assert done == (child, 0)
    finally:
        stop.set()
        beside.join()
    assert work.right(20)


def test_idle_workers_sleep():
    work = Work()
    native.set_threads(4)
    assert work.right(20)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
    assert work.right(20)  # and wake


def test_the_process_ends_with_workers_about():
    code = "from flatout.kernels import native; native.set_threads(3); import sys; sys.exit(7)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7


SANITIZERS = {"address,undefined": {}, "thread": {"TSAN_OPTIONS": "die_after_fork=0"}}


def test_sanitizers_find_nothing(tmp_path):
    """Every kernel of every instruction set under the address, undefined behaviour and thread sanitizers; both are built at once."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = Path(native.__file__).parent
    sources = [Path(__file__).with_name("native_driver.cpp"), *sorted(folder.glob("*.cpp"))]
    flags = ["-std=c++17", "-O1", "-g", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-sanitize-recover=all", "-pthread"]
    builds = {}
    for number, kind in enumerate(SANITIZERS):
        program = tmp_path / str(number)
        command = [COMPILER, *flags, f"-fsanitize={kind}", f"-I{folder}", *map(str, sources), "-o", str(program)]
        builds[kind] = program, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for kind, (program, build) in builds.items():
        _, errors = build.communicate()
        if build.returncode and "cannot find" in errors:
            pytest.skip(f"this compiler has no {kind} sanitizer")
        assert build.returncode == 0, errors
        run = subprocess.run([str(program)], capture_output=True, text=True, env=os.environ | SANITIZERS[kind], timeout=120)
        if "unexpected memory mapping" in run.stderr:
            pytest.skip("this kernel's address space layout is not for the thread sanitizer")
        assert run.returncode == 0 and run.stdout == "done\n", run.stdout + run.stderr[-4000:]
