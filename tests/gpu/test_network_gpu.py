"""The network on CUDA: attention by variable-length flash and by explicit scores, and families against the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_rows import check
from checkpoints import FAMILIES, make
from network import Sequence, load

from flatout.kernels.attention import Pieces, Varlen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
ROWS = {
    "decode": [(n, 1) for n in (0, 1, 7, 40, 500)],
    "prompts": [(0, 1), (0, 9), (0, 130)],
    "mixed": [(300, 1), (0, 65), (17, 30), (0, 1), (63, 1)],
}


@pytest.fixture(autouse=True)
def exact_float32():
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", (None, 1, 33, 1000))
@pytest.mark.parametrize("heads", ((4, 4, 64), (14, 2, 80), (9, 3, 64), (8, 1, 256), (28, 4, 128)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_attention(rows, window, heads, dtype):
    work = check(ROWS[rows], *heads, window, 0.0, False, dtype, device=CUDA)
    assert isinstance(work.arrangement, Pieces if dtype == torch.float32 else Varlen)


@pytest.mark.parametrize("case", ((20, 0.0), (64, 3.0), (256, 3.0)), ids=str)
def test_attention_that_flash_cannot_do(case):
    """Odd head sizes and soft caps."""
    work = check(ROWS["mixed"], 6, 2, case[0], 33, case[1], False, torch.bfloat16, device=CUDA)
    assert isinstance(work.arrangement, Pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    """float32 as on the CPU; bfloat16 near it."""
    path = make(family, tmp_path)
    ids = np.random.default_rng(2).integers(3, 256, 60).tolist()
    expected = load(path).forced(ids)
    exact, rough = load(path, device=CUDA), load(path, device=CUDA, dtype=torch.bfloat16)
    for chunks in ([], [20, 1, 1, 30]):
        np.testing.assert_allclose(exact.forced(ids, chunks), expected, rtol=0, atol=1e-3)
        assert np.sqrt(np.mean((rough.forced(ids, chunks) - expected) ** 2)) < 0.1 * expected.std()
    crowd = [(Sequence(), ids[:n]) for n in (60, 1, 17)]
    for logits, (_, row) in zip(exact.step(crowd), crowd):
        np.testing.assert_allclose(logits, expected[: len(row)], rtol=0, atol=1e-3)
