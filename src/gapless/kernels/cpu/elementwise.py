"""Operations on rows: embedding, norms, quantisation, soft cap. A thread takes a run of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    OP_ROWS,
    ROW_PAIR_BYTES,
    ROW_SCALAR,
    ROW_SCRATCH,
    ROW_WEIGHT,
    ROW_WIDTH,
    ROW_X,
    ROW_X_STRIDE,
    ROW_Y,
    ROW_Y_STRIDE,
    ROW_YD,
    ROW_YD_STRIDE,
    ROWS_SAMPLES,
    SAMPLE_ROWS,
    TOKEN_IDS,
    XD_BYTES,
)
from gapless.kernels.cpu.linear import rows_of
from gapless.kernels.cpu.mem import bits_f32, ld_f32, ld_i8, ld_i32, ld_i64, ld_u8, ld_u16, sqrt_f32, st_f32
from gapless.kernels.cpu.packing import BLOCK, PAIR_GROUPS, Layout, PackedShape
from gapless.kernels.cpu.quantise import quantise_block
from gapless.kernels.cpu.vec import (
    ISA,
    VL,
    f16_bits_f32,
    vadd,
    vdiv,
    vexp,
    vfma,
    vhsum,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
)

inline = njit(error_model="numpy", nogil=True, inline="always")
jit = njit(error_model="numpy", nogil=True)

SCRATCH_BYTES = 4 * BLOCK
BIASED = 128 if ISA.dot.startswith("vnni") else 0  # added to stored int8 weights


@inline
def padded(width):  # type: ignore[no-untyped-def]
    return (width + BLOCK - 1) // BLOCK * BLOCK


@inline
def source_row(op, step, t):  # type: ignore[no-untyped-def]
    """Address of the row that output row ``t`` is made from: samples gather theirs."""
    row = t
    if ld_i64(op + 8 * OP_ROWS) == ROWS_SAMPLES:
        row = ld_i32(ld_i64(step + 8 * SAMPLE_ROWS) + 4 * t)
    return ld_i64(op + 8 * ROW_X) + row * ld_i64(op + 8 * ROW_X_STRIDE)


@inline
def target_row(op, t):  # type: ignore[no-untyped-def]
    return ld_i64(op + 8 * ROW_Y) + t * ld_i64(op + 8 * ROW_Y_STRIDE)


@jit
def norm_factor(x, width, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x^2) + eps) of a zero-padded row."""
    a = vsplat(np.float32(0.0))
    b = a
    for i in range(0, padded(width), 2 * VL):
        v = vload(x + 4 * i)
        u = vload(x + 4 * i + 4 * VL)
        a = vfma(v, v, a)
        b = vfma(u, u, b)
    mean = vhsum(vadd(a, b)) / np.float32(width)
    return np.float32(1.0) / sqrt_f32(mean + eps)


def norm(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y = x * factor * weight, float32."""
    row, count = rows_of(op, step)
    width = ld_i64(op + 8 * ROW_WIDTH)
    weight = ld_i64(op + 8 * ROW_WEIGHT)
    eps = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
    for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
        x = source_row(op, step, t)
        y = target_row(op, t)
        factor = vsplat(norm_factor(x, width, eps))
        for i in range(0, padded(width), VL):
            vstore(y + 4 * i, vmul(vmul(vload(x + 4 * i), factor), vload(weight + 4 * i)))


def norm_add(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y += x * factor * weight, float32."""
    row, count = rows_of(op, step)
    width = ld_i64(op + 8 * ROW_WIDTH)
    weight = ld_i64(op + 8 * ROW_WEIGHT)
    eps = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
    for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
        x = source_row(op, step, t)
        y = target_row(op, t)
        factor = vsplat(norm_factor(x, width, eps))
        for i in range(0, padded(width), VL):
            normed = vmul(vmul(vload(x + 4 * i), factor), vload(weight + 4 * i))
            vstore(y + 4 * i, vadd(vload(y + 4 * i), normed))


def norm_quantise(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y = int8 of x * factor * weight."""
    row, count = rows_of(op, step)
    width = ld_i64(op + 8 * ROW_WIDTH)
    weight = ld_i64(op + 8 * ROW_WEIGHT)
    eps = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
    scratch = ld_i64(op + 8 * ROW_SCRATCH) + tid * SCRATCH_BYTES
    for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
        x = source_row(op, step, t)
        y = target_row(op, t)
        yd = ld_i64(op + 8 * ROW_YD) + t * ld_i64(op + 8 * ROW_YD_STRIDE)
        factor = vsplat(norm_factor(x, width, eps))
        for start in range(0, width, BLOCK):
            for i in range(0, BLOCK, VL):
                at = 4 * (start + i)
                vstore(scratch + 4 * i, vmul(vmul(vload(x + at), factor), vload(weight + at)))
            quantise_block(scratch, y + start, yd + start // BLOCK * XD_BYTES)


def quantise(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y = int8 of x."""
    row, count = rows_of(op, step)
    width = ld_i64(op + 8 * ROW_WIDTH)
    for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
        x = source_row(op, step, t)
        y = target_row(op, t)
        yd = ld_i64(op + 8 * ROW_YD) + t * ld_i64(op + 8 * ROW_YD_STRIDE)
        for start in range(0, width, BLOCK):
            quantise_block(x + 4 * start, y + start, yd + start // BLOCK * XD_BYTES)


def add(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y += x, float32."""
    row, count = rows_of(op, step)
    width = ld_i64(op + 8 * ROW_WIDTH)
    for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
        x = source_row(op, step, t)
        y = target_row(op, t)
        for i in range(0, padded(width), VL):
            vstore(y + 4 * i, vadd(vload(y + 4 * i), vload(x + 4 * i)))


def softcap(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """y = cap * tanh(y / cap) in place: tanh(z) = 1 - 2 / (1 + e^2z). Rows are cut into runs for the threads."""
    row, count = rows_of(op, step)
    chunks = padded(ld_i64(op + 8 * ROW_WIDTH)) // BLOCK
    cap = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
    vcap = vsplat(cap)
    twice = vsplat(np.float32(2.0) / cap)
    one = vsplat(np.float32(1.0))
    two = vsplat(np.float32(2.0))
    for chunk in range(count * chunks * tid // n_threads, count * chunks * (tid + 1) // n_threads):
        at = target_row(op, row + chunk // chunks) + chunk % chunks * BLOCK * 4
        for i in range(0, BLOCK, VL):
            e = vexp(vmul(vload(at + 4 * i), twice))
            vstore(at + 4 * i, vmul(vcap, vsub(one, vdiv(two, vadd(one, e)))))


def _embed(layout: Layout, read: Any) -> Any:
    shape = PackedShape(layout, PAIR_GROUPS * VL, BLOCK, VL)
    per_step = 1 if shape.is_float else BLOCK  # inputs in block_bytes
    quant_bytes = 0 if shape.is_float else shape.quant_bytes
    block_bytes, n_halves = shape.block_bytes, shape.n_halves

    def embed(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        row, count = rows_of(op, step)
        width = ld_i64(op + 8 * ROW_WIDTH)
        scale = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
        for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
            token = ld_i32(ld_i64(ld_i64(step + 8 * TOKEN_IDS) + 8 * t))
            pair = ld_i64(op + 8 * ROW_X) + token // (PAIR_GROUPS * VL) * ld_i64(op + 8 * ROW_PAIR_BYTES)
            side = token // VL % PAIR_GROUPS
            y = target_row(op, t)
            for i in range(width):
                block = pair + i // per_step * block_bytes
                halves = block + PAIR_GROUPS * quant_bytes + (side * n_halves * VL + token % VL) * 2
                st_f32(y + 4 * i, read(block + side * quant_bytes, halves, side, token % VL, i % BLOCK) * scale)
            for i in range(width, padded(width)):
                st_f32(y + 4 * i, np.float32(0.0))

    return embed


# Readers of one value: input ``i`` of a block, at a group's quants, with the row's scale and minimum at ``halves``.


@inline
def _stored(quants, lane, run, k):  # type: ignore[no-untyped-def]
    """Address of byte ``k`` of a run of four."""
    return quants + run * (4 * VL) + 4 * lane + k


@inline
def _int8_at(quants, lane, i):  # type: ignore[no-untyped-def]
    at = _stored(quants, lane, i // 4, i % 4)
    return ld_u8(at) - BIASED if BIASED != 0 else ld_i8(at)


@inline
def _read_q4(quants, halves, side, lane, i):  # type: ignore[no-untyped-def]
    pair = ld_u8(_stored(quants, lane, i % 16 // 4, i % 4))
    quant = pair & 15 if i < 16 else pair >> 4
    return np.float32(quant) * f16_bits_f32(ld_u16(halves)) + f16_bits_f32(ld_u16(halves + 2 * VL))


@inline
def _read_q8(quants, halves, side, lane, i):  # type: ignore[no-untyped-def]
    return np.float32(_int8_at(quants, lane, i)) * f16_bits_f32(ld_u16(halves))


@inline
def _read_q8m(quants, halves, side, lane, i):  # type: ignore[no-untyped-def]
    scaled = np.float32(_int8_at(quants, lane, i)) * f16_bits_f32(ld_u16(halves))
    return scaled + f16_bits_f32(ld_u16(halves + 2 * VL))


@inline
def _read_f32(row, halves, side, lane, i):  # type: ignore[no-untyped-def]
    return ld_f32(row + 4 * (side * VL + lane))


@inline
def _read_f16(row, halves, side, lane, i):  # type: ignore[no-untyped-def]
    return f16_bits_f32(ld_u16(row + 2 * (side * VL + lane)))


@inline
def _read_bf16(row, halves, side, lane, i):  # type: ignore[no-untyped-def]
    return bits_f32(ld_u16(row + 2 * (side * VL + lane)) << 16)


_READERS: dict[Layout, Any] = {
    "q4": _read_q4,
    "q8": _read_q8,
    "q8m": _read_q8m,
    "f32": _read_f32,
    "f16": _read_f16,
    "bf16": _read_bf16,
}

KERNELS: dict[str, tuple[Any, int]] = {
    kernel.__name__: (kernel, 4) for kernel in (norm, norm_add, norm_quantise, quantise, add, softcap)
}
KERNELS |= {f"embed_{layout}": (_embed(layout, read), 4) for layout, read in _READERS.items()}
