"""kernels/gpu/cuda.py on CUDA: parameters, tensor maps, clusters, dependent launches, graphs, threads; with the kernels of cuda_programs.py."""

from __future__ import annotations

import struct
import threading

import cuda_programs as programs
import pytest
import torch

pytest.importorskip("triton")

from flatout.kernels.gpu.ahead import collect
from flatout.kernels.gpu.cuda import CudaError, Program, available, tensor_map

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and available(CUDA)), reason="needs an sm_90 device, its driver and NVRTC"),
]


def kernel(program, **macros):
    made = program.get(CUDA, **macros)
    assert made is not None
    return made


def random(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(CUDA)


def axpy(y, x, bias, a, n=None):
    kernel(programs.AXPY).launch((8,), 128, 0, (y, x, bias, y.numel() if n is None else n, a))


@pytest.mark.parametrize("n", [1, 127, 1024, 5000])
def test_pointers_numbers_and_null(n):
    x, y, bias = random(n), random(n + 3)[3:], random(n)
    before = y.clone()
    axpy(y, x, None, 0.5)
    assert torch.equal(y, x * 0.5 + before)
    axpy(y, x, bias, -2.0, n=n // 2)
    assert torch.equal(y[: n // 2], (x * -2.0 + bias)[: n // 2]) and torch.equal(y[n // 2 :], (x * 0.5 + before)[n // 2 :])


def test_a_variant_is_loaded_once():
    assert kernel(programs.AXPY) is kernel(programs.AXPY)
    assert kernel(programs.AXPY, UNUSED=1) is not kernel(programs.AXPY)
    with pytest.raises(struct.error):
        axpy(random(4), random(4), None, 1.0, n=1 << 31)
    with pytest.raises(CudaError, match="identifier"):
        Program('extern "C" __global__ void f() { wrong; }', "f", "").get(CUDA)


@pytest.mark.parametrize("grid", [(4,), (6, 2), (2, 3, 4)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_grid_and_cluster(grid, cluster):
    across, down, deep = (*grid, 1, 1)[:3]
    out = torch.full((deep, down, across, 4), -1, dtype=torch.int32, device=CUDA)
    kernel(programs.PLACE).launch(grid, 1, 0, (out,), cluster=cluster)
    z, y, x = torch.meshgrid(*(torch.arange(n) for n in (deep, down, across)), indexing="ij")
    assert torch.equal(out.cpu(), torch.stack((torch.full_like(x, cluster), x, y, z), -1).int())


def test_a_launch_the_device_refuses_says_why():
    out = torch.empty(64, dtype=torch.int32, device=CUDA)
    with pytest.raises(CudaError, match="cuLaunchKernelEx: CUDA_ERROR_INVALID"):
        kernel(programs.PLACE).launch(3, 4096, 0, (out,))
    kernel(programs.PLACE).launch(3, 1, 0, (out,))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("swizzle", [128, 0])
@pytest.mark.parametrize("cluster", [1, 2])
def test_boxes_are_fetched_with_zeros_outside(dtype, swizzle, cluster):
    rows, columns, height = 37, 104, 16
    matrix = random(50, 128, dtype=dtype)[5 : 5 + rows, 8 : 8 + columns]
    item = matrix.element_size()
    width = 128 // item
    fetch = kernel(programs.BOX, ROWS=height, BYTES=128, SWIZZLE=int(swizzle == 128), CLUSTER=cluster)
    around = torch.zeros(rows + 2 * height, columns + 2 * width, dtype=dtype, device=CUDA)
    around[height : height + rows, width : width + columns] = matrix
    shared = height * 128 + 1024
    for row, column in ((0, 0), (3, 8), (rows - 5, 0), (8, columns - 8), (rows - 1, columns - 8), (-4, -8), (rows, 0), (0, columns)):
        out = torch.full((cluster, height, width), 9.0, dtype=dtype, device=CUDA)
        args = (7, tensor_map(matrix, height // cluster, width, swizzle), out, row, column, 0.5)
        fetch.launch(cluster, 128, shared, args, cluster=cluster)
        expected = around[height + row : 2 * height + row, width + column : 2 * width + column]
        assert torch.equal(out, expected.expand(cluster, -1, -1)), (row, column)


def test_tensor_cores_read_swizzled_boxes():
    a, b = random(64, 64, dtype=torch.bfloat16), random(8, 64, dtype=torch.bfloat16)
    out = torch.full((64, 8), float("nan"), device=CUDA)
    kernel(programs.PRODUCT).launch(1, 128, 72 * 128 + 1024, (tensor_map(a, 64, 64), tensor_map(b, 8, 64), out))
    torch.testing.assert_close(out.double(), a.double() @ b.double().t(), rtol=1e-5, atol=1e-4)


def test_all_of_the_shared_memory_may_be_asked_for():
    from flatout.kernels.gpu.device import facts

    out = torch.empty(4, dtype=torch.int32, device=CUDA)
    kernel(programs.PLACE).launch(1, 32, facts(CUDA).shared_memory, (out,))
    assert out.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_dependent_launches_follow_each_other(pdl, captured):
    n, turns = 100_000, 60
    y = torch.zeros(n, dtype=torch.int32, device=CUDA)
    add = kernel(programs.NEXT)

    def run():
        for _ in range(turns):
            add.launch(-(-n // 256), 256, 0, (y, n), pdl=pdl)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        assert not y.any(), "captured, not run"
        run = graph.replay
    for turn in range(1, 4):
        run()
        assert (y == turn * turns).all()


def test_a_graph_keeps_the_parameters_of_its_launches():
    n = 1000
    x, y, z = random(n), torch.zeros(n, device=CUDA), torch.zeros(n, device=CUDA)
    kernel(programs.AXPY)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        axpy(y, x, None, 1.0)
        axpy(z, y, None, 2.0)
    axpy(torch.zeros(n, device=CUDA), x, x, 77.0)  # other parameters in between
    for turn in range(1, 4):
        graph.replay()
        torch.testing.assert_close(y, x * turn)
    torch.testing.assert_close(z, x * 12)


def test_launches_go_to_the_current_stream():
    n = 1 << 20
    x, y = random(n), torch.zeros(n, device=CUDA)
    kernel(programs.AXPY)
    assert not y.any()  # both kernels are loaded now: neither takes longer below than the sleep
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        axpy(y, x, None, 1.0)
    assert not y.any(), "the side stream is still asleep, and this one does not wait for it"
    side.synchronize()
    assert torch.equal(y, x)


def test_threads_launch_what_they_ask_for():
    """Each thread's first act on the device is a launch: none of them has a context of its own yet."""
    n, threads = 4096, 8
    x, outs, failures = random(n), [torch.zeros(n, device=CUDA) for _ in range(threads)], []

    def work(i):
        try:
            for _ in range(50):
                axpy(outs[i], x, x, float(i))
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures
    for i, out in enumerate(outs):
        torch.testing.assert_close(out, x * i + x)


def test_collected_launches_are_left_out():
    with collect() as wanted:
        assert programs.AXPY.get(CUDA) is None
        assert programs.BOX.get(CUDA, ROWS=8, BYTES=64, SWIZZLE=0, CLUSTER=1) is None
    assert len(wanted.kernels) == 2
    assert (CUDA, (("ROWS", 8), ("BYTES", 64), ("SWIZZLE", 0), ("CLUSTER", 1))) not in programs.BOX._kernels
    assert all(make().startswith(b"\x7fELF") for make in wanted.kernels.values())
