"""kernels/upload.py where nothing is copied; on CUDA it runs in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatout.kernels.upload import DTYPES, upload


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_shapes_stay(dtype):
    arrays = [np.arange(n).astype(dtype).reshape(shape) for n, shape in ((6, (2, 3)), (0, (0, 2)), (5, (5,)))]
    for array, tensor in zip(arrays, upload(torch.device("cpu"), arrays), strict=True):
        assert tensor.dtype == DTYPES[np.dtype(dtype)] and np.array_equal(tensor.numpy(), array)
    assert upload(torch.device("cpu"), []) == []


def test_of_every_second_element():
    (tensor,) = upload(torch.device("cpu"), [np.arange(10)[::2]])
    assert tensor.tolist() == [0, 2, 4, 6, 8] and tensor.is_contiguous()
