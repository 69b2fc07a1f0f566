"""What attention does to one row at a time: soft cap, softmax of a split, joining of splits.

Scores are in units of ln 2, so that weights are powers of two: 2^(score / ln 2) = e^score. The state of a row is two
float32: the maximum of its scores and the sum of 2^(score - maximum). The maximum is -inf where the row has seen
nothing yet. A NaN among the scores makes the sum NaN, and so the row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from gapless.kernels.cpu.mem import fma_f32, ld_f32, st_f32
from gapless.kernels.cpu.vec import (
    VF,
    VI,
    VL,
    const_vf,
    const_vi,
    llvm_call,
    op,
    vadd,
    vdiv,
    vexp,
    vf32,
    vfma,
    vhmax,
    vhsum,
    viota,
    vload,
    vlt_i32_mask,
    vmax,
    vmul,
    vselect,
    vsplat,
    vsplat_i32,
    vstore,
    vsub,
)

jit = njit(error_model="numpy", nogil=True)

NEG_INF = float("-inf")
NAN = float("nan")
STATE_BYTES = 8
LOG2_E = math.log2(math.e)

# Minimax of 2^r on |r| <= 1/2 in relative error (2e-9; the value at 0 is exact), from the second-highest power down.
_POWER_6 = 1.534581242594869e-4
_POWERS = (
    1.339993090368807e-3,
    9.618489071726799e-3,
    5.550328642129898e-2,
    0.2402264624834061,
    0.6931471824645996,
    1.0,
)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer


def _exp2(b: Any, x: Any) -> Any:
    """2^x for x <= 0, relative error below 1e-7: x = n + r, |r| <= 1/2. 0 below -125; NaN stays NaN."""
    shifted = b.fadd(x, const_vf(_ROUND))
    r = b.fsub(x, b.fsub(shifted, const_vf(_ROUND)))
    p = const_vf(_POWER_6)
    for c in _POWERS:
        p = llvm_call(b, f"llvm.fma.v{VL}f32", VF, p, r, const_vf(c))
    exponent = b.add(b.sub(b.bitcast(shifted, VI), b.bitcast(const_vf(_ROUND), VI)), const_vi(127))
    power = b.fmul(p, b.bitcast(b.shl(exponent, const_vi(23)), VF))
    return b.select(b.fcmp_ordered("<", x, const_vf(-125.0)), const_vf(0.0), power)


vexp2 = op(vf32, (vf32,), _exp2)


@jit
def clear(at, n):  # type: ignore[no-untyped-def]
    """Zero ``n`` floats, a multiple of VL."""
    for i in range(0, n, VL):
        vstore(at + 4 * i, vsplat(np.float32(0.0)))


@jit
def clear_state(state):  # type: ignore[no-untyped-def]
    """Nothing seen."""
    st_f32(state, np.float32(NEG_INF))
    st_f32(state + 4, np.float32(0.0))


@jit
def cap_scores(s, n, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(s / cap) of ``n`` scores, in units of ln 2: tanh(z) = 1 - 2 / (1 + e^2z)."""
    one = vsplat(np.float32(1.0))
    two = vsplat(np.float32(2.0))
    factor = vsplat(np.float32(2.0) / cap)
    limit = vsplat(cap * np.float32(LOG2_E))
    for i in range(0, n, VL):
        e = vexp(vmul(vload(s + 4 * i), factor))
        vstore(s + 4 * i, vmul(limit, vsub(one, vdiv(two, vadd(one, e)))))


@jit
def mask_scores(s, n, low, high):  # type: ignore[no-untyped-def]
    """-inf outside of [low, high)."""
    lowest = vsplat_i32(low - 1)
    end = vsplat_i32(high)
    masked = vsplat(np.float32(NEG_INF))
    for i in range(0, n, VL):
        at = viota(i)
        v = vselect(vlt_i32_mask(lowest, at), vload(s + 4 * i), masked)
        vstore(s + 4 * i, vselect(vlt_i32_mask(at, end), v, masked))


@jit
def soften(s, n, low, high, state):  # type: ignore[no-untyped-def]
    """Scores to weights 2^(s - max), 0 outside of [low, high); writes the state.

    ``n`` scores count from the split's start, as the bounds do.
    """
    if high <= 0 or low >= n:
        clear(s, n)
        clear_state(state)
        return
    if low > 0 or high < n:
        mask_scores(s, n, low, high)
    top = vsplat(np.float32(NEG_INF))
    for i in range(0, n, VL):
        top = vmax(vload(s + 4 * i), top)
    largest = vhmax(top)
    if largest == np.float32(NEG_INF):
        # Scores were seen, and none of them is a number.
        st_f32(state, np.float32(0.0))
        st_f32(state + 4, np.float32(NAN))
        return
    vm = vsplat(largest)
    total = vsplat(np.float32(0.0))
    for i in range(0, n, VL):
        w = vexp2(vsub(vload(s + 4 * i), vm))
        vstore(s + 4 * i, w)
        total = vadd(total, w)
    st_f32(state, largest)
    st_f32(state + 4, vhsum(total))


@jit
def join(state, acc, part_state, part, dim):  # type: ignore[no-untyped-def]
    """Join a split's state and accumulator of ``dim`` floats to those of the splits before it."""
    m = ld_f32(part_state)
    if m == np.float32(NEG_INF):
        return
    before = ld_f32(state)
    if before == np.float32(NEG_INF):
        st_f32(state, m)
        st_f32(state + 4, ld_f32(part_state + 4))
        for i in range(0, dim, VL):
            vstore(acc + 4 * i, vload(part + 4 * i))
        return
    top = max(before, m)
    va = vexp2(vsplat(before - top))
    vb = vexp2(vsplat(m - top))
    st_f32(state, top)
    st_f32(state + 4, fma_f32(ld_f32(state + 4), vhmax(va), ld_f32(part_state + 4) * vhmax(vb)))
    for i in range(0, dim, VL):
        vstore(acc + 4 * i, vfma(vload(acc + 4 * i), va, vmul(vload(part + 4 * i), vb)))


@jit
def write_row(state, acc, y, dim):  # type: ignore[no-untyped-def]
    """The accumulator over the sum of weights: ``dim`` floats."""
    inverse = np.float32(1.0) / ld_f32(state + 4)
    whole = dim // VL * VL
    for i in range(0, whole, VL):
        vstore(y + 4 * i, vmul(vload(acc + 4 * i), vsplat(inverse)))
    for i in range(whole, dim):
        st_f32(y + 4 * i, ld_f32(acc + 4 * i) * inverse)


@jit
def scale_row(x, y, dim, padded, scale):  # type: ignore[no-untyped-def]
    """``dim`` floats times a factor, then zeros up to ``padded``."""
    whole = dim // VL * VL
    vs = vsplat(scale)
    for i in range(0, whole, VL):
        vstore(y + 4 * i, vmul(vload(x + 4 * i), vs))
    for i in range(whole, dim):
        st_f32(y + 4 * i, ld_f32(x + 4 * i) * scale)
    for i in range(dim, padded):
        st_f32(y + 4 * i, np.float32(0.0))
