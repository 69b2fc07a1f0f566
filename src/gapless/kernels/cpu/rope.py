"""Norm and rotation of queries and keys, and the writing of keys and values to the paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from gapless.kernels.cpu.abi import (
    ATT_EPS,
    ATT_HEAD_BYTES,
    ATT_HEAD_DIM,
    ATT_HEADS,
    ATT_K_NORM,
    ATT_KV_HEADS,
    ATT_PAGE_BYTES,
    ATT_POOL,
    ATT_Q,
    ATT_Q_NORM,
    ATT_Q_STRIDE,
    ATT_QKV,
    ATT_QKV_STRIDE,
    ATT_ROPE,
    ATT_ROPE_HALF,
    ATT_SCRATCH,
    ATT_SCRATCH_STRIDE,
    KV_SLOTS,
    N_TOKENS,
    PAGE_TOKENS,
    POSITIONS,
)
from gapless.kernels.cpu.attention_rows import scale_row
from gapless.kernels.cpu.attention_tiles import ELEMENT_BYTES
from gapless.kernels.cpu.mem import I8, I16, I32, bits_f32, fma_f32, ld_f32, ld_i32, ld_i64, sqrt_f32, st_f32
from gapless.kernels.cpu.tiles import c64
from gapless.kernels.cpu.vec import (
    VL,
    f32_to_half,
    op,
    store_at,
    vabs,
    vadd,
    vdiv,
    vf32,
    vfma,
    vhmax,
    vhsum,
    vi32,
    vload,
    vmax,
    vmul,
    vround,
    vsplat,
    vstore,
    vsub,
)

jit = njit(error_model="numpy", nogil=True)


def _as_stored(b: Any, v: Any, kind: str) -> Any:
    if kind == "f16":
        # Saturation alone would turn a NaN into a number.
        nan = ir.Constant(ir.VectorType(I16, VL), [0x7E00] * VL)
        return b.select(b.fcmp_unordered("uno", v, v), nan, f32_to_half(b, v))
    return b.trunc(v, ir.VectorType(I8, VL)) if kind == "i8" else v


def _row(kind: str) -> Any:
    """``store(at, v)``: the lanes of ``v`` side by side."""
    takes = vi32 if kind == "i8" else vf32
    return op(types.void, (types.int64, takes), lambda b, at, v: store_at(b, _as_stored(b, v, kind), at))


def _column(kind: str) -> Any:
    """``store(at, v)``: the lanes of ``v`` PAGE_TOKENS numbers apart."""
    stride = PAGE_TOKENS * ELEMENT_BYTES[kind]

    def emit(b: Any, at: Any, v: Any) -> None:
        stored = _as_stored(b, v, kind)
        for lane in range(VL):
            store_at(b, b.extract_element(stored, ir.Constant(I32, lane)), b.add(at, c64(lane * stride)))

    return op(types.void, (types.int64, vi32 if kind == "i8" else vf32), emit)


@jit
def norm_head(x, y, dim, weight, eps):  # type: ignore[no-untyped-def]
    """x / sqrt(mean(x^2) + eps) * weight of one head."""
    total = vsplat(np.float32(0.0))
    whole = dim // VL * VL
    for i in range(0, whole, VL):
        total = vfma(vload(x + 4 * i), vload(x + 4 * i), total)
    squares = vhsum(total)
    for i in range(whole, dim):
        squares = fma_f32(ld_f32(x + 4 * i), ld_f32(x + 4 * i), squares)
    factor = np.float32(1.0) / sqrt_f32(squares / np.float32(dim) + eps)
    for i in range(0, whole, VL):
        vstore(y + 4 * i, vmul(vmul(vload(x + 4 * i), vsplat(factor)), vload(weight + 4 * i)))
    for i in range(whole, dim):
        st_f32(y + 4 * i, ld_f32(x + 4 * i) * factor * ld_f32(weight + 4 * i))


@jit
def rotate_head(x, y, dim, norm, eps, rope, half):  # type: ignore[no-untyped-def]
    """One head from ``x`` to ``y``: its norm if ``norm`` is not 0, then the rotation of pairs (i, i + half)."""
    if norm != 0:
        norm_head(x, y, dim, norm, eps)
        x = y
    for i in range(2 * half, dim):
        st_f32(y + 4 * i, ld_f32(x + 4 * i))
    whole = half // VL * VL
    for i in range(0, whole, VL):
        a = vload(x + 4 * i)
        b = vload(x + 4 * (i + half))
        cos = vload(rope + 4 * i)
        sin = vload(rope + 4 * (i + half))
        vstore(y + 4 * i, vsub(vmul(a, cos), vmul(b, sin)))
        vstore(y + 4 * (i + half), vfma(b, cos, vmul(a, sin)))
    for i in range(whole, half):
        u = ld_f32(x + 4 * i)
        v = ld_f32(x + 4 * (i + half))
        c = ld_f32(rope + 4 * i)
        s = ld_f32(rope + 4 * (i + half))
        st_f32(y + 4 * i, u * c - v * s)
        st_f32(y + 4 * (i + half), fma_f32(v, c, u * s))


@jit
def int8_scale(x, padded):  # type: ignore[no-untyped-def]
    """The largest magnitude of a head over 127; NaN where one of them is not finite."""
    top = vsplat(np.float32(0.0))
    poison = top
    for i in range(0, padded, VL):
        v = vload(x + 4 * i)
        top = vmax(vabs(v), top)
        poison = vadd(poison, vsub(v, v))
    return vhmax(top) / np.float32(127.0) + vhsum(poison)


def _store(kind: str, lanes: Any, lane_bytes: int) -> Any:
    """``store(x, padded, at, scale_at)``: a head, padded with zeros, to the cache; int8 with its scale."""

    @jit
    def store(x, padded, at, scale_at):  # type: ignore[no-untyped-def]
        if kind != "i8":
            for i in range(0, padded, VL):
                lanes(at + i * lane_bytes, vload(x + 4 * i))
            return
        scale = int8_scale(x, padded)
        st_f32(scale_at, scale)
        divisor = vsplat(scale if scale > np.float32(0.0) else np.float32(1.0))
        for i in range(0, padded, VL):
            lanes(at + i * lane_bytes, vround(vdiv(vload(x + 4 * i), divisor)))

    return store


def _rope_cache(kind: str) -> Any:
    size = ELEMENT_BYTES[kind]
    store_key = _store(kind, _column(kind), PAGE_TOKENS * size)  # into [dim][token]
    store_value = _store(kind, _row(kind), size)  # into [token][dim]

    @jit
    def cache_head(op, x, token, step, kv_head, is_value, rope, scratch):  # type: ignore[no-untyped-def]
        """Write one key, rotated, or one value of a token to its place."""
        dim = ld_i64(op + 8 * ATT_HEAD_DIM)
        padded = (dim + 15) // 16 * 16
        dim_bytes = padded * PAGE_TOKENS * size
        slot = ld_i64(ld_i64(step + 8 * KV_SLOTS) + 8 * token)
        offset = slot % PAGE_TOKENS
        page = ld_i64(op + 8 * ATT_POOL) + slot // PAGE_TOKENS * ld_i64(op + 8 * ATT_PAGE_BYTES)
        keys = page + kv_head * ld_i64(op + 8 * ATT_HEAD_BYTES)
        values = keys + dim_bytes
        scales = values + dim_bytes + 4 * offset
        scale_row(x, scratch, dim, padded, np.float32(1.0))
        if is_value:
            store_value(scratch, padded, values + offset * padded * size, scales + 4 * PAGE_TOKENS)
        else:
            half = ld_i64(op + 8 * ATT_ROPE_HALF)
            eps = bits_f32(ld_i64(op + 8 * ATT_EPS))
            rotate_head(scratch, scratch, dim, ld_i64(op + 8 * ATT_K_NORM), eps, rope, half)
            store_key(scratch, padded, keys + offset * size, scales)

    def rope_cache(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        """Threads share the heads of all tokens: queries, then keys, then values of each."""
        heads = ld_i64(op + 8 * ATT_HEADS)
        kv_heads = ld_i64(op + 8 * ATT_KV_HEADS)
        dim = ld_i64(op + 8 * ATT_HEAD_DIM)
        half = ld_i64(op + 8 * ATT_ROPE_HALF)
        eps = bits_f32(ld_i64(op + 8 * ATT_EPS))
        scratch = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
        per_token = heads + 2 * kv_heads
        items = ld_i64(step + 8 * N_TOKENS) * per_token
        for item in range(items * tid // n_threads, items * (tid + 1) // n_threads):
            t = item // per_token
            head = item % per_token
            x = ld_i64(op + 8 * ATT_QKV) + t * ld_i64(op + 8 * ATT_QKV_STRIDE) + head * dim * 4
            rope = ld_i64(op + 8 * ATT_ROPE) + ld_i32(ld_i64(step + 8 * POSITIONS) + 4 * t) * half * 8
            if head < heads:
                y = ld_i64(op + 8 * ATT_Q) + t * ld_i64(op + 8 * ATT_Q_STRIDE) + head * dim * 4
                rotate_head(x, y, dim, ld_i64(op + 8 * ATT_Q_NORM), eps, rope, half)
            else:
                is_value = head >= heads + kv_heads
                cache_head(op, x, t, step, (head - heads) % kv_heads, is_value, rope, scratch)

    return rope_cache


KERNELS = {f"rope_cache_{kind}": (_rope_cache(kind), 4) for kind in ELEMENT_BYTES}
