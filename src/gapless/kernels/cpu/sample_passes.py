"""The passes over one row of logits that the compiled sampler is made of.

``sampling_reference`` gives their meaning. A row is copied to scratch as ``x``: float32, cleaned (NaN and values
below -1e30 become -inf, values above 1e30 become 1e30) and padded with -inf to whole blocks, so that no pass has a
tail. ``n`` is the padded length. Sums of weights are exact in float64, so their order is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from gapless.kernels import sampling_reference as ref
from gapless.kernels.cpu.mem import I32, I64, f32_bits, ld_f32, ld_f64, ld_i64, st_f32, st_f64, st_i64
from gapless.kernels.cpu.sample_record import SAMPLE_BLOCK as BLOCK
from gapless.kernels.cpu.vec import (
    VF,
    VI,
    VL,
    _Vector,
    const_vf,
    const_vi,
    llvm_call,
    op,
    splat,
    vf32,
    vgt_mask,
    vhmax,
    vhsum_i32,
    vi32,
    viadd,
    viota,
    vload,
    vlt_i32_mask,
    vmax,
    vselect,
    vselect_i32,
    vsplat,
    vsplat_i32,
    vstore,
)

jit = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)

LARGEST = ref.LARGEST
NEG_INF = float("-inf")

VD = ir.VectorType(ir.DoubleType(), VL)
vf64 = _Vector(f"vf64x{VL}", VD)


def _clean(b: Any, x: Any) -> Any:
    top = b.select(b.fcmp_ordered(">", x, const_vf(LARGEST)), const_vf(LARGEST), x)
    return b.select(b.fcmp_ordered(">=", x, const_vf(-LARGEST)), top, const_vf(NEG_INF))


def _weight(b: Any, x: Any, largest: Any, inverse: Any) -> Any:
    """``sampling_reference.exp_weights((x - largest) * inverse)``: each product and sum is rounded."""
    z = b.fmul(b.fsub(x, largest), inverse)
    z = b.select(b.fcmp_ordered(">", z, const_vf(ref.LOWEST_Z)), z, const_vf(ref.LOWEST_Z))
    rounding = const_vf(ref.ROUND_TO_INT)
    shifted = b.fadd(b.fmul(z, const_vf(ref.LOG2_E)), rounding)
    n = b.fsub(shifted, rounding)
    r = b.fsub(z, b.fmul(n, const_vf(ref.LN2_HIGH)))
    r = b.fsub(r, b.fmul(n, const_vf(ref.LN2_LOW)))
    p = const_vf(ref.EXP_POLYNOMIAL[0])
    for coefficient in ref.EXP_POLYNOMIAL[1:]:
        p = b.fadd(b.fmul(p, r), const_vf(coefficient))
    p = b.fadd(b.fadd(b.fmul(p, b.fmul(r, r)), r), const_vf(1.0))
    exponent = b.sub(b.bitcast(shifted, VI), b.bitcast(rounding, VI))
    w = b.fmul(p, b.bitcast(b.shl(b.add(exponent, const_vi(127)), const_vi(23)), VF))
    shift = const_vf(ref.QUANTUM_SHIFT)
    return b.select(b.fcmp_ordered("<", w, shift), b.fsub(b.fadd(w, shift), shift), w)


def _lane_sum(b: Any, v: Any) -> Any:
    total = b.extract_element(v, ir.Constant(I32, 0))
    for lane in range(1, VL):
        total = b.fadd(total, b.extract_element(v, ir.Constant(I32, lane)))
    return total


def _mask_bits(b: Any, mask: Any) -> Any:
    lanes = b.icmp_signed("!=", mask, const_vi(0))
    return b.zext(b.bitcast(lanes, ir.IntType(VL)), I64)


vclean = op(vf32, (vf32,), _clean)
vweight = op(vf32, (vf32, vf32, vf32), _weight)
vsplat_f64 = op(vf64, (types.float64,), lambda b, x: splat(b, x))
vaccumulate = op(vf64, (vf64, vf32), lambda b, acc, w: b.fadd(acc, b.fpext(w, VD)))
vhsum_f64 = op(types.float64, (vf64,), _lane_sum)
veq_mask = op(vi32, (vf32, vf32), lambda b, x, y: b.sext(b.fcmp_ordered("==", x, y), VI))
vior = op(vi32, (vi32, vi32), lambda b, x, y: b.or_(x, y))
vmask_bits = op(types.int64, (vi32,), _mask_bits)  # bit i: lane i is not 0
_FALSE = ir.Constant(ir.IntType(1), 0)
trailing_zeros = op(types.int64, (types.int64,), lambda b, x: llvm_call(b, "llvm.cttz.i64", I64, x, _FALSE))
bits_i64_f64 = op(types.float64, (types.int64,), lambda b, x: b.bitcast(x, ir.DoubleType()))
bits_f64_i64 = op(types.int64, (types.float64,), lambda b, x: b.bitcast(x, I64))


@jit
def clean(x):  # type: ignore[no-untyped-def]
    """One float32 cleaned as ``vclean`` does it."""
    return vhmax(vclean(vsplat(x)))


@jit
def copy_row(logits, vocab, x, n):  # type: ignore[no-untyped-def]
    """Clean ``vocab`` logits into ``x``, pad it to ``n``; returns the largest."""
    whole = vocab // VL * VL
    best = vsplat(np.float32(NEG_INF))
    for i in range(0, whole, VL):
        v = vclean(vload(logits + 4 * i))
        vstore(x + 4 * i, v)
        best = vmax(v, best)
    largest = vhmax(best)
    for i in range(whole, vocab):
        value = clean(ld_f32(logits + 4 * i))
        st_f32(x + 4 * i, value)
        largest = max(value, largest)
    for i in range(vocab, n):
        st_f32(x + 4 * i, np.float32(NEG_INF))
    return largest


@jit
def row_max(x, n):  # type: ignore[no-untyped-def]
    """The largest of ``n`` values, n a multiple of BLOCK; NaN is passed over."""
    a = vsplat(np.float32(NEG_INF))
    b = a
    c = a
    d = a
    for i in range(0, n, 4 * VL):
        at = x + 4 * i
        a = vmax(vload(at), a)
        b = vmax(vload(at + 4 * VL), b)
        c = vmax(vload(at + 8 * VL), c)
        d = vmax(vload(at + 12 * VL), d)
    return vhmax(vmax(vmax(a, b), vmax(c, d)))


@jit
def weigh(x, n, largest, inverse, w, sums):  # type: ignore[no-untyped-def]
    """Write the weights, and the sum of each block; returns the sum of all."""
    vm = vsplat(largest)
    vt = vsplat(inverse)
    total = 0.0
    for start in range(0, n, BLOCK):
        a = vsplat_f64(0.0)
        b = a
        for i in range(start, start + BLOCK, 2 * VL):
            v0 = vweight(vload(x + 4 * i), vm, vt)
            v1 = vweight(vload(x + 4 * i + 4 * VL), vm, vt)
            vstore(w + 4 * i, v0)
            vstore(w + 4 * i + 4 * VL, v1)
            a = vaccumulate(a, v0)
            b = vaccumulate(b, v1)
        part = vhsum_f64(a) + vhsum_f64(b)
        st_f64(sums + start // BLOCK * 8, part)
        total += part
    return total


@jit
def total_weight(x, n, largest):  # type: ignore[no-untyped-def]
    """The sum of weights at temperature 1."""
    vm = vsplat(largest)
    vt = vsplat(np.float32(1.0))
    a = vsplat_f64(0.0)
    b = a
    for i in range(0, n, 2 * VL):
        a = vaccumulate(a, vweight(vload(x + 4 * i), vm, vt))
        b = vaccumulate(b, vweight(vload(x + 4 * i + 4 * VL), vm, vt))
    return vhsum_f64(a) + vhsum_f64(b)


@jit
def count_above(x, n, bound):  # type: ignore[no-untyped-def]
    vb = vsplat(bound)
    a = vsplat_i32(0)
    b = a
    for i in range(0, n, 2 * VL):
        a = viadd(a, vgt_mask(vload(x + 4 * i), vb))
        b = viadd(b, vgt_mask(vload(x + 4 * i + 4 * VL), vb))
    return -vhsum_i32(viadd(a, b))


@jit
def mass_above(x, w, n, bound):  # type: ignore[no-untyped-def]
    """How many values exceed ``bound``, and the sum of their weights."""
    vb = vsplat(bound)
    zero = vsplat(np.float32(0.0))
    a = vsplat_f64(0.0)
    b = a
    count = vsplat_i32(0)
    for i in range(0, n, 2 * VL):
        m0 = vgt_mask(vload(x + 4 * i), vb)
        m1 = vgt_mask(vload(x + 4 * i + 4 * VL), vb)
        a = vaccumulate(a, vselect(m0, vload(w + 4 * i), zero))
        b = vaccumulate(b, vselect(m1, vload(w + 4 * i + 4 * VL), zero))
        count = viadd(count, viadd(m0, m1))
    return -vhsum_i32(count), vhsum_f64(a) + vhsum_f64(b)


@jit
def keep_weights(x, w, n, bound, last_tie, min_weight, sums):  # type: ignore[no-untyped-def]
    """Set to 0 the weights of x < bound, of x == bound with id > last_tie, and those below ``min_weight``.

    Rewrites the sums of the blocks and returns the sum of all.
    """
    vb = vsplat(bound)
    vmin = vsplat(min_weight)
    zero = vsplat(np.float32(0.0))
    none = vsplat_i32(0)
    end = vsplat_i32(last_tie + 1)
    total = 0.0
    for start in range(0, n, BLOCK):
        acc = vsplat_f64(0.0)
        for i in range(start, start + BLOCK, VL):
            v = vload(x + 4 * i)
            ties = vselect_i32(vlt_i32_mask(viota(i), end), veq_mask(v, vb), none)
            kept = vselect(vior(vgt_mask(v, vb), ties), vload(w + 4 * i), zero)
            kept = vselect(vgt_mask(vmin, kept), zero, kept)
            vstore(w + 4 * i, kept)
            acc = vaccumulate(acc, kept)
        part = vhsum_f64(acc)
        st_f64(sums + start // BLOCK * 8, part)
        total += part
    return total


@jit
def draw(w, sums, n, target):  # type: ignore[no-untyped-def]
    """The first id whose cumulative weight exceeds ``target``, which is less than the sum of all."""
    below = 0.0
    start = 0
    while start + BLOCK < n:
        part = ld_f64(sums + start // BLOCK * 8)
        if below + part > target:
            break
        below += part
        start += BLOCK
    token = start
    for i in range(start, n):
        below += ld_f32(w + 4 * i)
        if below > target:
            token = i
            break
    return token


@jit
def rank_of(value):  # type: ignore[no-untyped-def]
    """An integer of 32 bits that rises with the value, in steps of one from each float32 to the next; 0 for 0."""
    bits = f32_bits(value + np.float32(0.0))  # turns -0 into +0
    return bits if bits < 0x80000000 else 0x7FFFFFFF - bits


@jit
def order_key(value, token):  # type: ignore[no-untyped-def]
    """An int64 that rises with the order (value falling, id rising)."""
    return ((-rank_of(value) - 1) << 32) | token


@jit
def collect(x, n, low, high, keys):  # type: ignore[no-untyped-def]
    """Write the order keys of low < x <= high, by rising id; returns how many."""
    vlow = vsplat(low)
    vhigh = vsplat(high)
    found = 0
    for i in range(0, n, VL):
        v = vload(x + 4 * i)
        bits = vmask_bits(vgt_mask(v, vlow))
        if bits != 0:
            bits &= ~vmask_bits(vgt_mask(v, vhigh))
            while bits != 0:
                token = i + trailing_zeros(bits)
                bits &= bits - 1
                st_i64(keys + 8 * found, order_key(ld_f32(x + 4 * token), token))
                found += 1
    return found


@jit
def nth_equal(x, n, value, rank, keys):  # type: ignore[no-untyped-def]
    """The id of the ``rank``-th (from 1) x == value; order keys up to it go to ``keys`` unless that is 0."""
    vb = vsplat(value)
    found = 0
    for i in range(0, n, VL):
        bits = vmask_bits(veq_mask(vload(x + 4 * i), vb))
        while bits != 0:
            token = i + trailing_zeros(bits)
            bits &= bits - 1
            if keys != 0:
                st_i64(keys + 8 * found, order_key(value, token))
            found += 1
            if found == rank:
                return token
    return n


@jit
def sort_keys(keys, count):  # type: ignore[no-untyped-def]
    """Sort int64 keys in place: Shell's sort, gaps in the ratio 4 to 9."""
    gap = 1
    while gap < count * 4 // 9:
        gap = gap * 9 // 4 + 1
    while gap > 0:
        for i in range(gap, count):
            key = ld_i64(keys + 8 * i)
            j = i
            while j >= gap and ld_i64(keys + 8 * (j - gap)) > key:
                st_i64(keys + 8 * j, ld_i64(keys + 8 * (j - gap)))
                j -= gap
            st_i64(keys + 8 * j, key)
        gap = gap * 4 // 9


@jit
def log_f64(value):  # type: ignore[no-untyped-def]
    """Natural logarithm of a normal positive float64, to 1e-13: 2 atanh((f - 1) / (f + 1)) + e ln 2."""
    bits = bits_f64_i64(value)
    exponent = (bits >> 52) - 1023
    f = bits_i64_f64((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    if f > 1.4142135623730951:
        f *= 0.5
        exponent += 1
    s = (f - 1.0) / (f + 1.0)
    q = s * s
    tail = 1 / 13 + q * (1 / 15 + q / 17)
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * tail)))))
    return 2.0 * s * series + np.float64(exponent) * 0.6931471805599453
