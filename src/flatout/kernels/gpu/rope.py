"""rope_kv_write in Triton: qk-norm, rotation and both cache writes in one pass.

A program takes some heads of one token; one more program a token copies its values. Registered with the op by kernels/gpu/__init__.py:load.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.gpu.device import facts
from flatout.kernels.gpu.launch import launch
from flatout.kernels.gpu.rows import FLOATS
from flatout.kernels.gpu.whole import cdiv, next_power_of_2
from flatout.kernels.rope import rope_kv_write


@triton.jit
def _rope_kv_write(
    qk,
    value,
    k_cache,
    v_cache,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    qk_stride,
    value_stride,
    cos_stride,
    sin_stride,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    blocks: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token = (tl.program_id(0) // (blocks + 1)).to(tl.int64)
    block = tl.program_id(0) % (blocks + 1)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    if block == blocks:
        kv_head = tl.arange(0, KV_BLOCK)[:, None]
        copied = (kv_head < KV_HEADS) & (column < DIM)
        if PDL:
            tl.extra.cuda.gdc_wait()
        values = tl.load(value + token * value_stride + kv_head * DIM + column, mask=copied)
        tl.store(v_cache + tl.load(slots + token) * v_stride + kv_head * DIM + column, values, mask=copied)
    else:
        head = block * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        key = head - (HEADS - KV_HEADS)  # negative: a query's
        live = (head < HEADS) & (column < DIM)
        turning = live & (column < ROTARY)
        other = (column + ROTARY // 2) % ROTARY if ROTARY else column  # the column that this one turns with
        norm = tl.where(key >= 0, k_norm, q_norm) if NORM else None
        if NORM:
            gain = tl.load(norm + column, mask=live, other=0.0).to(tl.float32) + OFFSET
            other_gain = tl.load(norm + other, mask=turning, other=0.0).to(tl.float32) + OFFSET
        if PDL:
            tl.extra.cuda.gdc_wait()
        slot = tl.load(slots + token)
        heads_at = qk + token * qk_stride + head * DIM
        x = tl.load(heads_at + column, mask=live, other=0.0).to(tl.float32)
        if ROTARY:
            y = tl.load(heads_at + other, mask=turning, other=0.0).to(tl.float32)
            # for each head again, so that a thread has what its heads need without an exchange through shared memory
            cosine = tl.load(cos + token * cos_stride + 0 * head + column, mask=turning, other=1.0).to(tl.float32)
            sine = tl.load(sin + token * sin_stride + 0 * head + column, mask=turning, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
            x *= scale * gain
            if ROTARY:
                y *= scale * other_gain
        if ROTARY:
            x = x * cosine + y * sine
            tl.debug_barrier()  # everyone has read what the next lines overwrite
        turned = x.to(qk.dtype.element_ty)
        tl.store(heads_at + column, turned, mask=live)
        tl.store(k_cache + slot * k_stride + key * DIM + column, turned, mask=live & (key >= 0))


def heads_launch(rows: int, heads: int, dim_block: int, sms: int) -> tuple[int, int]:
    """(heads a program takes, warps). Few tokens: 8 heads, a vector or two a thread, all programs on the device at once. Many: 32 heads of 128
    columns, for more loads in flight and fewer launches."""
    few = rows * cdiv(heads, 8) <= 16 * sms
    together = min(8 if few else max(8, min(32, 4096 // dim_block)), next_power_of_2(heads))
    return together, min(8, max(1, together * dim_block // (512 if few else 1024)))


def _accepts(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> bool:
    dim = qk.shape[2]
    by_head = all(weight is None or weight.shape[0] == dim for weight in (q_norm, k_norm))
    return qk.is_cuda and qk.dtype in FLOATS and k_cache.dtype == qk.dtype and dim % 2 == 0 and dim <= 256 and by_head


@rope_kv_write.implementation("triton", _accepts)
def rope_kv_write_triton(
    qk: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    device = facts(qk.device)
    rows, heads, dim = qk.shape
    kv_heads = value.shape[1]
    dim_block = next_power_of_2(dim)
    together, warps = heads_launch(rows, heads, dim_block, device.sms)
    launch(
        _rope_kv_write,
        (rows * (cdiv(heads, together) + 1),),
        qk,
        value,
        k_cache,
        v_cache,
        slots,
        cos,
        sin,
        q_norm,
        k_norm,
        qk.stride(0),
        value.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTARY=0 if cos is None or sin is None else cos.shape[2],
        NORM=q_norm is not None and k_norm is not None,
        OFFSET=offset,
        HEADS_BLOCK=together,
        KV_BLOCK=next_power_of_2(kv_heads),
        DIM_BLOCK=dim_block,
        PDL=device.pdl,
        num_warps=warps,
        launch_pdl=device.pdl,
    )
