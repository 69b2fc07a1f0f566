"""Operations on rows: embedding, norms, quantisation, soft cap. A thread takes a run of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    OP_ROWS,
    ROW_GROUP_BYTES,
    ROW_SCALAR,
    ROW_SCALES,
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
from gapless.kernels.cpu.packing import BLOCK
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


def _embed(read: Any) -> Any:
    def embed(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        row, count = rows_of(op, step)
        width = ld_i64(op + 8 * ROW_WIDTH)
        scale = bits_f32(ld_i64(op + 8 * ROW_SCALAR))
        for t in range(row + count * tid // n_threads, row + count * (tid + 1) // n_threads):
            token = ld_i32(ld_i64(ld_i64(step + 8 * TOKEN_IDS) + 8 * t))
            group = ld_i64(op + 8 * ROW_X) + token // VL * ld_i64(op + 8 * ROW_GROUP_BYTES)
            scales = group + ld_i64(op + 8 * ROW_SCALES)
            y = target_row(op, t)
            for i in range(width):
                st_f32(y + 4 * i, read(group, scales, token % VL, i) * scale)
            for i in range(width, padded(width)):
                st_f32(y + 4 * i, np.float32(0.0))

    return embed


@inline
def _byte_offset(lane, i, block_bytes):  # type: ignore[no-untyped-def]
    """Of input i of a lane: blocks, runs of four inputs, lanes."""
    return i // BLOCK * block_bytes + i % BLOCK // 4 * (4 * VL) + 4 * lane + i % 4


@inline
def _read_q4(group, scales, lane, i):  # type: ignore[no-untyped-def]
    pair = ld_u8(group + _byte_offset(lane, i // BLOCK * BLOCK + i % 16, 16 * VL))
    quant = pair & 15 if i % BLOCK < 16 else pair >> 4
    at = scales + (i // BLOCK * 2 * VL + lane) * 2
    return np.float32(quant) * f16_bits_f32(ld_u16(at)) + f16_bits_f32(ld_u16(at + 2 * VL))


@inline
def _read_q8(group, scales, lane, i):  # type: ignore[no-untyped-def]
    at = group + _byte_offset(lane, i, 32 * VL)
    quant = ld_u8(at) - BIASED if BIASED != 0 else ld_i8(at)
    return np.float32(quant) * f16_bits_f32(ld_u16(scales + (i // BLOCK * VL + lane) * 2))


@inline
def _read_q8m(group, scales, lane, i):  # type: ignore[no-untyped-def]
    stored = group + _byte_offset(lane, i, 32 * VL)
    quant = ld_u8(stored) - BIASED if BIASED != 0 else ld_i8(stored)
    at = scales + (i // BLOCK * 2 * VL + lane) * 2
    return np.float32(quant) * f16_bits_f32(ld_u16(at)) + f16_bits_f32(ld_u16(at + 2 * VL))


@inline
def _read_f32(group, scales, lane, i):  # type: ignore[no-untyped-def]
    return ld_f32(group + 4 * (i * VL + lane))


@inline
def _read_f16(group, scales, lane, i):  # type: ignore[no-untyped-def]
    return f16_bits_f32(ld_u16(group + 2 * (i * VL + lane)))


@inline
def _read_bf16(group, scales, lane, i):  # type: ignore[no-untyped-def]
    return bits_f32(ld_u16(group + 2 * (i * VL + lane)) << 16)


_READERS = {
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
KERNELS |= {f"embed_{layout}": (_embed(read), 4) for layout, read in _READERS.items()}
