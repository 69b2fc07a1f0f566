"""Activations to int8 in blocks of 32: what the integer dot products take."""

from __future__ import annotations

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import ROUNDER, ROUNDER_BITS
from gapless.kernels.cpu.mem import bits_f32, f32_bits, st_f32, st_i32
from gapless.kernels.cpu.packing import BLOCK
from gapless.kernels.cpu.vec import (
    VL,
    vabs,
    vhmax,
    vhsum_i32,
    viadd,
    vload,
    vmax,
    vmul,
    vround,
    vsplat,
    vsplat_i32,
    vstore_i8,
)

SCALE_MASK = 0xFFFFFFFC  # 22 significant bits

inline = njit(error_model="numpy", nogil=True, inline="always")


@inline
def quantise_block(x, y, yd):  # type: ignore[no-untyped-def]
    """32 float32 at ``x`` to int8 at ``y`` and an XD record at ``yd``: round(v / d), d = largest magnitude / 127."""
    top = vabs(vload(x))
    for i in range(VL, BLOCK, VL):
        top = vmax(vabs(vload(x + 4 * i)), top)
    largest = vhmax(top)
    inverse = np.float32(127.0) / largest if largest > np.float32(1e-30) else np.float32(0.0)
    scale = bits_f32(f32_bits(largest * np.float32(1.0 / 127.0)) & SCALE_MASK)
    vinverse = vsplat(inverse)
    total = vsplat_i32(0)
    for i in range(0, BLOCK, VL):
        q = vround(vmul(vload(x + 4 * i), vinverse))
        vstore_i8(y + i, q)
        total = viadd(total, q)
    sum_ = vhsum_i32(total)
    st_f32(yd, scale)
    st_f32(yd + 4, scale * np.float32(sum_))
    st_i32(yd + 8, ROUNDER_BITS - 128 * sum_)
    st_f32(yd + 12, np.float32(-ROUNDER) * scale)
