"""kernels/upload.py on CUDA: what arrives is what was sent, however many are on their way behind a busy device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from flatout.kernels.upload import ALIGNED, BUFFERS, DTYPES, upload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def some(seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = [(draw.integers(0, 2000),), (draw.integers(0, 50), 3), (1,), (0,)]
    return [draw.integers(0, 100, shape).astype(dtype) for shape in shapes for dtype in DTYPES]


def sent_behind_a_busy_device(device: torch.device, seeds: range, stream: torch.cuda.Stream) -> None:
    busy = torch.randn(4096, 4096, device=device)
    with torch.cuda.stream(stream):
        kept = []
        for seed in seeds:
            busy = busy @ busy * 1e-2
            arrays = some(seed)
            kept.append((arrays, upload(device, [a.copy() for a in arrays])))
        for arrays, tensors in kept:
            for array, tensor in zip(arrays, tensors, strict=True):
                assert tensor.dtype == DTYPES[array.dtype] and tensor.shape == array.shape
                assert tensor.data_ptr() % ALIGNED == 0 or not tensor.numel()
                assert np.array_equal(tensor.cpu().numpy(), array)


def test_many_on_their_way():
    device = torch.device("cuda", torch.cuda.current_device())
    sent_behind_a_busy_device(device, range(6 * BUFFERS), torch.cuda.current_stream())


def test_threads_do_not_share_buffers():
    device = torch.device("cuda", torch.cuda.current_device())
    failed = []

    def run(first: int) -> None:
        try:
            sent_behind_a_busy_device(device, range(first, first + 3 * BUFFERS), torch.cuda.Stream(device))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_nothing_is_waited_for():
    device = torch.device("cuda", torch.cuda.current_device())
    upload(device, [np.zeros(4096)])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(BUFFERS):
            upload(device, [np.zeros(1000), np.ones(3, np.int32)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
