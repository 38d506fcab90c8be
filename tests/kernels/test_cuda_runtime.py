"""kernels/gpu/cuda.py without a GPU: structures, what a launch hands to the driver, tensor maps, machine code on disk; real compiling where NVRTC is."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cuda_programs
import pytest
import torch

pytest.importorskip("triton")

from flatout.kernels.gpu import ahead, cuda, hopper, streaming
from flatout.kernels.gpu.cuda import CudaError, Kernel, Program, tensor_map

CPU = torch.device("cpu")
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 201: b"CUDA_ERROR_INVALID_CONTEXT"}


class Driver:
    """Keeps what it is asked. `codes`: answers to the next launches."""

    def __init__(self):
        self.launches: list[SimpleNamespace] = []
        self.encoded: list[tuple] = []
        self.codes: list[int] = []
        self.context = 5
        self.sizes: tuple[int, ...] = ()  # of the parameters that a launch reads

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert extra is None
        config = config._obj
        attributes = {a.id: tuple(a.value) for a in config.attributes[: config.count]}
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes)]
        launch = SimpleNamespace(grid=tuple(config.grid), block=tuple(config.block), shared=config.shared, stream=config.stream)
        launch.attributes, launch.values, launch.addresses, launch.function = attributes, values, list(parameters), function.value
        launch.config = ctypes.addressof(config)
        self.launches.append(launch)
        return self.codes.pop(0) if self.codes else 0

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
        assert ctypes.cast(at, ctypes.c_void_p).value % 128 == 0
        self.encoded.append((dtype, rank, address.value, *sizes, *strides, *box, *steps, interleave, swizzle, promotion, fill))
        ctypes.memmove(at, bytes(range(len(self.encoded), len(self.encoded) + 128)), 128)
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = NAMES.get(code)
        return 0 if code in NAMES else 1

    def cuGetErrorString(self, code, text):
        text._obj.value = b"in other words" if code in NAMES else None
        return 0 if code in NAMES else 1

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, handle, device):
        handle._obj.value = 40 + device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(cuda, "_maps", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device + len(made.launches), raising=False)
    return made


# ---------------------------------------------------------------- launching


def test_structures_lie_as_in_cuda_h():
    """Sizes and offsets that a C compiler gave for cuda.h of CUDA 13.0; no call takes them apart otherwise on a machine without a GPU."""
    config, attribute = cuda._Config, cuda._Attribute
    offsets = [getattr(config, field).offset for field, _ in config._fields_]
    assert (ctypes.sizeof(config), offsets) == (56, [0, 12, 24, 32, 40, 48])
    assert (ctypes.sizeof(attribute), attribute.id.offset, attribute.value.offset, attribute.value.size) == (72, 0, 8, 64)


def test_parameters_are_as_the_kernel_reads_them(driver):
    kernel = Kernel(ctypes.c_void_p(3), "ipfmpim", 0)
    driver.sizes = (4, 8, 4, 128, 8, 4, 128)
    x, maps = torch.zeros(4), (bytes(range(128)), bytes(range(100, 228)))
    for n in (-(2**31), -1, 0, 7, 2**31 - 1):
        kernel.launch(1, 32, 0, (n, x, 0.5, maps[0], None, n, maps[1]))
        whole = struct.pack("=i", n)
        address, half, null = struct.pack("=Q", x.data_ptr()), struct.pack("=f", 0.5), bytes(8)
        assert driver.launches[-1].values == [whole, address, half, maps[0], null, whole, maps[1]]
    addresses = driver.launches[-1].addresses
    assert all(a % 8 == 0 for a in addresses) and addresses[3] % 128 == addresses[6] % 128 == 0
    assert all(launch.function == 3 and launch.addresses == addresses for launch in driver.launches)


@pytest.mark.parametrize(
    ("args", "error"), [((2**31, 1.0), struct.error), ((1.5, 1.0), struct.error), ((1, 1e39), OverflowError), ((1,), ValueError), ((1, 1.0, 2), ValueError)]
)  # fmt: skip
def test_an_argument_that_does_not_fit_queues_nothing(driver, args, error):
    kernel = Kernel(ctypes.c_void_p(3), "if", 0)
    with pytest.raises(error):
        kernel.launch(1, 32, 0, args)
    assert not driver.launches
    kernel.launch(1, 32, 0, (1, 1.0))  # and the kernel is not left locked
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("grid", "cluster", "pdl", "size", "attributes"),
    [
        (5, 1, False, (5, 1, 1), {}),
        ((5, 6), (1, 1), True, (5, 6, 1), {6: (1,)}),
        ((4, 3, 2), 2, False, (4, 3, 2), {4: (2, 1, 1)}),
        (8, (2, 2, 1), True, (8, 1, 1), {4: (2, 2, 1), 6: (1,)}),
    ],
)
def test_a_launch_has_its_sizes_and_attributes(driver, grid, cluster, pdl, size, attributes):
    Kernel(ctypes.c_void_p(3), "", 2).launch(grid, 384, 200_000, (), cluster=cluster, pdl=pdl)
    launch = driver.launches[0]
    assert (launch.grid, launch.block, launch.shared, launch.stream) == (size, (384, 1, 1), 200_000, 1002)
    assert {k: v[: len(attributes[k])] for k, v in launch.attributes.items()} == attributes
    assert all(not any(v[len(attributes[k]) :]) for k, v in launch.attributes.items())


def test_launches_alike_share_a_structure_and_ask_for_the_stream(driver):
    kernel = Kernel(ctypes.c_void_p(3), "", 0)
    for grid in (5, 5, 6, 5):
        kernel.launch(grid, 32, 0, (), pdl=True)
    first, second, other, last = driver.launches
    assert first.config == second.config == last.config != other.config
    assert [launch.stream for launch in driver.launches] == [1000, 1001, 1002, 1003]
    assert last.grid == (5, 1, 1) and last.attributes == first.attributes


def test_an_error_says_call_and_cause(driver):
    kernel = Kernel(ctypes.c_void_p(3), "", 0)
    driver.codes = [1]
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\), in other words"):
        kernel.launch(1, 32, 0, ())
    driver.codes = [9999]
    with pytest.raises(CudaError, match=r"unknown error \(9999\)"):
        kernel.launch(1, 32, 0, ())


def test_a_thread_without_a_context_gets_torchs(driver):
    driver.context, driver.codes = None, [201]
    Kernel(ctypes.c_void_p(3), "", 1).launch(1, 32, 0, ())
    assert driver.context == 141 and len(driver.launches) == 2
    driver.codes = [201, 201]  # it has one, and that is wrong: said once, not tried for ever
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        Kernel(ctypes.c_void_p(3), "", 1).launch(1, 32, 0, ())
    assert driver.context == 141


# ---------------------------------------------------------------- tensor maps


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, 6), (torch.float32, 7), (torch.bfloat16, 9)])
def test_a_map_says_what_the_matrix_is(driver, dtype, number):
    matrix = torch.zeros(40, 64, dtype=dtype)[3:, :24]
    item = dtype.itemsize
    made = tensor_map(matrix, 16, 64 // item)
    assert driver.encoded == [(number, 2, matrix.data_ptr(), 24, 37, 64 * item, 64 // item, 16, 1, 1, 0, 3, 2, 0)]
    assert made == bytes(range(1, 129))
    tensor_map(matrix, 256, 256, swizzle=0)
    assert driver.encoded[1][6:8] == (256, 256) and driver.encoded[1][-3] == 0


def test_maps_are_made_once(driver):
    matrix = torch.zeros(32, 64, dtype=torch.bfloat16)
    first = tensor_map(matrix, 16, 64)
    assert tensor_map(matrix.view(32, 64), 16, 64) is first and len(driver.encoded) == 1
    others = [
        (matrix, 8, 64), (matrix, 16, 32), (matrix, 16, 64, 0), (matrix[1:], 16, 64), (matrix[:16], 16, 64), (matrix[:, :32], 16, 64),
        (matrix[::2], 16, 64), (matrix.view(torch.float16), 16, 64),
    ]  # fmt: skip
    made = {tensor_map(*other) for other in others}
    assert len(made | {first}) == len(others) + 1 == len(driver.encoded)
    with pytest.raises(ValueError):  # the same address and rows, other neighbours
        tensor_map(torch.as_strided(matrix, (32, 32), (64, 2)), 16, 64)


def test_maps_kept_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(cuda, "_MAPS", 3)
    matrix = torch.zeros(32, 64, dtype=torch.bfloat16)
    for rows in range(1, 12):
        tensor_map(matrix, rows, 64)
        assert 1 <= len(cuda._maps) <= 3


@pytest.mark.parametrize(
    ("matrix", "box", "said"),
    [
        (torch.zeros(8, 64, dtype=torch.int32), (8, 32), "int32"),
        (torch.zeros(8, 64), (8, 32, 96), "swizzle of 96"),
        (torch.zeros(64), (8, 32), "matrix"),
        (torch.zeros(0, 64), (8, 32), "matrix"),
        (torch.zeros(64, 8).t(), (8, 32), "side by side"),
        (torch.zeros(8, 66)[:, :64], (8, 32), "multiples of 16 bytes"),
        (torch.zeros(8, 64)[:, 1:], (8, 32), "multiples of 16 bytes"),
        (torch.zeros(8, 64), (8, 64), "box of 8 rows of 64 columns, 256 bytes"),
        (torch.zeros(8, 64), (8, 3), "12 bytes"),
        (torch.zeros(8, 64), (0, 32), "at most 256"),
        (torch.zeros(8, 64), (257, 32), "at most 256"),
        (torch.zeros(8, 512), (8, 260, 0), "at most 256"),
    ],
)
def test_what_cannot_be_fetched_is_refused(driver, matrix, box, said):
    with pytest.raises(ValueError, match=said):
        tensor_map(matrix, *box)
    assert not driver.encoded and not cuda._maps


# ---------------------------------------------------------------- machine code on disk


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Stands for NVRTC; what it was asked to compile."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def make(source, options):
        asked.append((source, tuple(options)))
        return f"code of {source} {options}".encode()

    monkeypatch.setattr(Program, "folder", tmp_path / "cuda")
    monkeypatch.setattr(cuda, "_compiled", make)
    monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "13.0")
    return asked


def test_a_variant_is_compiled_once(compiled, tmp_path):
    program = Program(lambda N, **_: f"text for {N}", "f", "", options=("--use_fast_math",))
    first = program.compile("sm_90a", (("N", 2), ("M", 3)))
    options = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--use_fast_math", "-DM=3", "-DN=2")
    assert compiled == [("text for 2", options)]
    again = Program(lambda N, **_: f"text for {N}", "f", "", options=("--use_fast_math",))
    assert again.compile("sm_90a", (("M", 3), ("N", 2))) == first and len(compiled) == 1
    (file,) = (tmp_path / "cuda").iterdir()
    assert file.suffix == ".cubin" and file.read_bytes().startswith(first)


def test_what_differs_is_another_file(compiled, monkeypatch, tmp_path):
    plain = ("text", "f", "")
    Program(*plain).compile("sm_90a", (("N", 1),))
    Program(*plain).compile("sm_90a", (("N", 2),))
    Program(*plain).compile("sm_100a", (("N", 1),))
    Program(*plain, options=("-G",)).compile("sm_90a", (("N", 1),))
    Program("texts", "f", "").compile("sm_90a", (("N", 1),))
    monkeypatch.setattr(cuda, "_nvrtc_version", lambda: "13.1")
    Program(*plain).compile("sm_90a", (("N", 1),))
    assert len(compiled) == 6 == len(list((tmp_path / "cuda").iterdir()))


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:40], lambda b: b[:5] + b"?" + b[6:], lambda b: b + b"\0"])
def test_a_damaged_file_is_made_again(compiled, tmp_path, damage):
    program = Program("text", "f", "")
    whole = program.compile("sm_90a", ())
    (file,) = (tmp_path / "cuda").iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert program.compile("sm_90a", ()) == whole and len(compiled) == 2
    assert file.read_bytes() == good and list((tmp_path / "cuda").iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_no_error(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(Program, "folder", tmp_path / "file" / "cuda")
    assert Program("text", "f", "").compile("sm_90a", ()) == Program("text", "f", "").compile("sm_90a", ())
    assert len(compiled) == 2


def test_a_write_that_fails_leaves_nothing(compiled, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no space")

    monkeypatch.setattr(cuda.os, "replace", refuse)
    Program("text", "f", "").compile("sm_90a", ())
    assert list((tmp_path / "cuda").iterdir()) == []


def test_threads_load_a_variant_once(monkeypatch):
    loads = []

    def load(self, device, variant):
        loads.append(variant)
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(Program, "_load", load)
    program, got = Program("text", "f", ""), []
    threads = [threading.Thread(target=lambda n=n: got.append((n % 2, program.get(CPU, N=n % 2)))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loads) == [(("N", 0),), (("N", 1),)] and len(set(got)) == 2


def test_architectures(monkeypatch):
    for capability, name in (((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")):
        monkeypatch.setattr(cuda, "facts", lambda device, c=capability: SimpleNamespace(capability=c))
        assert cuda._architecture(CPU) == name


# ---------------------------------------------------------------- noted and compiled ahead


def test_noted_variants_are_compiled_in_other_processes(compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    monkeypatch.setattr(cuda, "_architecture", lambda device: "sm_90a")
    program, other = Program(lambda N, **_: f"text {N}", "f", ""), Program("other", "g", "")
    with ahead.collect() as wanted:
        assert program.get(CPU, N=1) is None and program.get(CPU, N=2) is None and program.get(CPU, N=1) is None
        assert other.get(CPU) is None
    assert getattr(cuda._here, "noted", None) is None and len(wanted.kernels) == 3 and not compiled
    assert ahead.compile_all(wanted, 2) == 0
    assert not compiled, "children compiled, not this process"
    assert len(list((tmp_path / "cuda").iterdir())) == 3
    for variant in (1, 2):
        program.compile("sm_90a", (("N", variant),))
    other.compile("sm_90a", ())
    assert not compiled, "all of it is found on disk"


def test_a_process_that_cannot_compile_is_told(compiled, monkeypatch, capfd):
    monkeypatch.setattr(ahead, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))

    def fail(source, options):
        raise CudaError("an error in the text")

    monkeypatch.setattr(cuda, "_compiled", fail)
    with ahead.collect() as wanted:
        Program("text", "f", "").get(CPU)
    assert ahead.compile_all(wanted, 2) == 1
    assert "an error in the text" in capfd.readouterr().err


def test_noting_ends_with_an_error():
    with pytest.raises(KeyError), cuda.noting():
        raise KeyError
    assert getattr(cuda._here, "noted", None) is None


# ---------------------------------------------------------------- what is there and what is not


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:7"])
def test_nothing_is_available_without_cuda(device):
    assert cuda.available(torch.device(device)) is False


@pytest.mark.parametrize("lacking", ["nothing", "driver", "compiler", "capability"])
def test_available_needs_all_of_it(monkeypatch, lacking):
    cuda.available.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "facts", lambda device: SimpleNamespace(capability=(8, 0) if lacking == "capability" else (9, 0)))
    monkeypatch.setattr(cuda, "_driver", lambda: None if lacking == "driver" else Driver())

    def compiled(source, options):
        if lacking == "compiler":
            raise CudaError("no builtins")
        return b"code"

    monkeypatch.setattr(cuda, "_compiled", compiled)
    try:
        assert cuda.available(torch.device("cuda", 0)) is (lacking == "nothing")
    finally:
        cuda.available.cache_clear()


def test_without_libraries_a_call_says_so(monkeypatch):
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    monkeypatch.setattr(cuda, "_driver", lambda: None)
    with pytest.raises(CudaError, match="NVRTC was not found"):
        cuda._compiled("", [])
    with pytest.raises(CudaError, match="cuCtxGetCurrent: no driver"):
        cuda.enter(0)


# ---------------------------------------------------------------- NVRTC itself

INSTALLED = [str(p) for place in sys.path if place for p in sorted(Path(place).glob("nvidia/*/lib/libnvrtc.so.1[2-9]"))]


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    """NVRTC of any wheel on the path: torch's own build may be one without CUDA."""
    if not INSTALLED:
        pytest.skip("NVRTC is not installed (package nvidia-cuda-nvrtc)")
    monkeypatch.setattr(Program, "folder", tmp_path / "cuda")
    monkeypatch.setattr(cuda, "_nvrtc_names", lambda: ["/nowhere/libnvrtc.so.13", *INSTALLED])
    cuda._nvrtc.cache_clear()
    cuda._nvrtc_version.cache_clear()
    yield
    cuda._nvrtc.cache_clear()
    cuda._nvrtc_version.cache_clear()


@pytest.mark.parametrize("name", list(cuda_programs.ALL))
def test_kernels_compile(nvrtc, name):
    program, macros = cuda_programs.ALL[name]
    code = program.compile("sm_90a", tuple(macros.items()))
    assert code.startswith(b"\x7fELF") and f".text.{program.name}".encode() in code
    begin = time.perf_counter()
    assert program.compile("sm_90a", tuple(macros.items())) == code
    assert time.perf_counter() - begin < 0.02, "from disk"


PLAIN = {"NORM": 0, "GATE": 0, "ADD": 0, "WIDE": 0, "BF16": 1}
FORMS = [PLAIN | given for given in ({"NORM": 1}, {"NORM": 1, "GATE": 2}, {"ADD": 1, "BF16": 0}, {"WIDE": 1})]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tiles, warps, stages, rows", [(2, 1, 6, 16), (4, 8, 4, 8), (6, 1, 6, 8), (6, 8, 4, 16)])
def test_streaming_products_compile(nvrtc, form, tiles, warps, stages, rows):
    macros = {"TILES": tiles, "WARPS": warps, "STAGES": stages, "ROWS": rows} | form
    assert streaming.PROGRAM.compile("sm_90a", tuple(macros.items())).startswith(b"\x7fELF")


@pytest.mark.parametrize("gate, add, cluster", [(1, 0, 1), (0, 1, 4)])
def test_hopper_products_compile(nvrtc, gate, add, cluster):
    macros = {"TN": 144, "WGS": 2, "STAGES": 4, "CLUSTER": cluster, "GATE": gate, "ADD": add, "BF16": 1}
    assert hopper.PROGRAM.compile("sm_90a", tuple(macros.items())).startswith(b"\x7fELF")


def test_a_mistake_is_shown_where_it_is(nvrtc, tmp_path):
    program = Program('extern "C" __global__ void f(int* y) {\n  *y = WRONG;\n}', "f", "p")
    with pytest.raises(
        CudaError, match=r"(?s)NVRTC_ERROR_COMPILATION.*sm_90a.*-DN=1.*kernel.cu\(2\): error: identifier \"WRONG\" is undefined"
    ):
        program.compile("sm_90a", (("N", 1),))
    assert not (tmp_path / "cuda").exists()
    with pytest.raises(CudaError, match="sm_1a"):
        program.compile("sm_1a", (("WRONG", 1),))
    assert program.compile("sm_90a", (("WRONG", 1),)).startswith(b"\x7fELF")


def test_a_device_that_could_do_more_is_told_so(monkeypatch):
    import triton

    from flatout.kernels import gpu
    from flatout.kernels.gpu import blaslt, device

    hopper, ada = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(device, "facts", lambda d: device.Facts((9, 0) if d == hopper else (8, 9), 132, 1 << 17, True))
    monkeypatch.setattr(cuda, "available", lambda d: False)
    monkeypatch.setattr(blaslt, "available", lambda: True)
    monkeypatch.setattr(triton, "__version__", "3.6.7")
    (line,) = gpu.lacking(hopper)
    assert "no NVRTC was found" in line and "nvidia-cuda-nvrtc" in line
    assert gpu.lacking(ada) == []
    monkeypatch.setattr(cuda, "available", lambda d: True)
    assert gpu.lacking(hopper) == []
    monkeypatch.setattr(blaslt, "available", lambda: False)
    (line,) = gpu.lacking(ada)
    assert "no cuBLASLt" in line
    monkeypatch.setattr(blaslt, "available", lambda: True)
    monkeypatch.setattr(triton, "__version__", "3.60.0")
    (line,) = gpu.lacking(ada)
    assert "Triton 3.60.0" in line and "Triton 3.6.x alone" in line
