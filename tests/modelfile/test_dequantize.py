"""GGUF block types, bit for bit against the gguf library."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flatout.kernels.blocks import PACKED
from flatout.modelfile.gguf import TYPES, GGUFFile
from flatout.quant.gguf import CHUNK, PLAIN, SUPPORTED, dequantize

BYTES = {t.name: (t.block, t.nbytes) for t in TYPES.values()}


def theirs(raw: np.ndarray, kind: str) -> np.ndarray:
    _block, nbytes = BYTES[kind]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw.reshape(-1, nbytes), gguf.GGMLQuantizationType[kind]).reshape(-1)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Also for infinities and NaN, whose payload does not matter."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def test_what_is_supported():
    assert set(SUPPORTED) == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}
    for kind, packed in PACKED.items():
        assert (packed.elements, packed.layout.itemsize) == BYTES[kind]


@pytest.mark.parametrize("kind", SUPPORTED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bytes_mean_what_the_library_says(kind, data):
    """Every bit pattern, among them scales that are infinite or NaN."""
    blocks = data.draw(st.integers(1, 6))
    raw = data.draw(hnp.arrays(np.uint8, blocks * BYTES[kind][1]))
    with np.errstate(all="ignore"):
        found = dequantize(raw, kind, (blocks * BYTES[kind][0],)).numpy()
    assert same_bits(found, theirs(raw, kind))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_tensors_longer_than_a_chunk(kind):
    block, nbytes = BYTES[kind]
    rows = CHUNK // 256 + 3
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, rows * 256 // block * nbytes, dtype=np.uint8)  # small bytes: finite halves
    found = dequantize(raw, kind, (rows, 256))
    assert found.shape == (rows, 256)
    assert same_bits(found.view(-1).numpy(), theirs(raw, kind))
    if kind in PLAIN:
        return
    assert torch.equal(dequantize(raw, kind, (rows, 256), torch.bfloat16), found.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["IQ4_XS", "Q2_K", "Q3_K", "MXFP4"])
def test_other_types_are_refused_with_a_list(kind):
    with pytest.raises(ValueError, match=f"type {kind} is not supported; supported: F32, .*Q6_K"):
        dequantize(np.zeros(BYTES[kind][1], np.uint8), kind, (BYTES[kind][0],))


def test_the_default_model_bit_for_bit(default_model):
    file = GGUFFile(default_model)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        t = file.tensors[name]
        assert same_bits(dequantize(t.data, t.type.name, t.shape).view(-1).numpy(), theirs(np.array(t.data), t.type.name)), name
