"""SIMD values for kernels written in Python: a vector of ``VL`` float32 or int32 lanes is a Numba type.

Every operation has one fixed meaning (no re-association, fused multiply-add only where written), so a value does
not depend on how the compiler arranged the loop around it. ``VL`` is fixed for a build process by its target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from gapless.kernels.cpu.isa import target
from gapless.kernels.cpu.mem import I8, I16, I32

ISA = target()
VL = ISA.lanes
F32 = ir.FloatType()
VF = ir.VectorType(F32, VL)
VI = ir.VectorType(I32, VL)


class _Vector(types.Type):
    def __init__(self, name: str, be_type: ir.VectorType) -> None:
        self.be_type = be_type
        super().__init__(name=name)


vf32 = _Vector(f"vf32x{VL}", VF)
vi32 = _Vector(f"vi32x{VL}", VI)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: _Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.be_type)


def op(result: types.Type, takes: tuple[types.Type, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic of a fixed signature from ``emit(builder, *values)``."""
    n = len(takes)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = emit(builder, *args)
        return context.get_dummy_value() if result is types.void else value

    # Numba reads the argument count from the function itself.
    if n == 1:

        @intrinsic
        def call(typingctx, a):  # type: ignore[no-untyped-def]
            return result(*takes), codegen
    elif n == 2:

        @intrinsic
        def call(typingctx, a, b):  # type: ignore[no-untyped-def]
            return result(*takes), codegen
    else:
        assert n == 3

        @intrinsic
        def call(typingctx, a, b, c):  # type: ignore[no-untyped-def]
            return result(*takes), codegen

    return call


def llvm_call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def splat(b: Any, value: Any, n: int = VL) -> Any:
    """Broadcast an IR scalar to ``n`` lanes."""
    vt = ir.VectorType(value.type, n)
    one = b.insert_element(ir.Constant(vt, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(vt, ir.Undefined), ir.Constant(ir.VectorType(I32, n), [0] * n))


def const_vf(x: float) -> ir.Constant:
    return ir.Constant(VF, [x] * VL)


def const_vi(x: int) -> ir.Constant:
    return ir.Constant(VI, [x] * VL)


def load_at(b: Any, addr: Any, ty: ir.Type, align: int = 1) -> Any:
    value = b.load(b.inttoptr(addr, ty.as_pointer()))
    value.align = align
    return value


def store_at(b: Any, value: Any, addr: Any, align: int = 1) -> None:
    node = b.store(value, b.inttoptr(addr, value.type.as_pointer()))
    node.align = align


def half_to_f32(b: Any, h: Any, n: int = VL) -> Any:
    """<n x i16> holding IEEE half floats to <n x float>, exactly, subnormals, infinities and NaN included."""
    if ISA.cpu in ("x86-64-v3", "x86-64-v4", "generic"):
        return b.fpext(b.bitcast(h, ir.VectorType(ir.HalfType(), n)), ir.VectorType(F32, n))
    # Without a conversion instruction: shift into place and rescale the exponent.
    vi = ir.VectorType(I32, n)
    c = lambda x: ir.Constant(vi, [x] * n)  # noqa: E731
    wide = b.zext(h, vi)
    body = b.bitcast(b.shl(b.and_(wide, c(0x7FFF)), c(13)), ir.VectorType(F32, n))
    scaled = b.bitcast(b.fmul(body, ir.Constant(ir.VectorType(F32, n), [2.0**112] * n)), vi)
    # The largest exponent stands for infinities and NaN, here as there.
    beyond = b.or_(b.bitcast(body, vi), c(0x7F800000))
    scaled = b.select(b.icmp_unsigned(">=", b.and_(wide, c(0x7FFF)), c(0x7C00)), beyond, scaled)
    return b.bitcast(b.or_(scaled, b.shl(b.and_(wide, c(0x8000)), c(16))), ir.VectorType(F32, n))


def f32_to_half(b: Any, v: Any, n: int = VL) -> Any:
    """<n x float> to <n x i16> half floats, to nearest even; saturates at the largest half instead of infinity."""
    vf, vi = ir.VectorType(F32, n), ir.VectorType(I32, n)
    cf = lambda x: ir.Constant(vf, [x] * n)  # noqa: E731
    ci = lambda x: ir.Constant(vi, [x] * n)  # noqa: E731
    name = f"v{n}f32"
    v = llvm_call(b, f"llvm.minnum.{name}", vf, llvm_call(b, f"llvm.maxnum.{name}", vf, v, cf(-65504.0)), cf(65504.0))
    if ISA.cpu in ("x86-64-v3", "x86-64-v4", "generic"):
        return b.bitcast(b.fptrunc(v, ir.VectorType(ir.HalfType(), n)), ir.VectorType(I16, n))
    bits = b.bitcast(v, vi)
    sign = b.and_(b.lshr(bits, ci(16)), ci(0x8000))
    mag = b.and_(bits, ci(0x7FFFFFFF))
    # Normal halves: rebias and round to even. Subnormal ones: let float addition round at 2^-24.
    odd = b.and_(b.lshr(mag, ci(13)), ci(1))
    normal = b.lshr(b.add(b.sub(mag, ci(112 << 23)), b.add(ci(0xFFF), odd)), ci(13))
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(mag, vf), cf(0.5)), vi), ci(0x3F000000))
    small = b.icmp_unsigned("<", mag, ci(113 << 23))
    return b.trunc(b.or_(b.select(small, tiny, normal), sign), ir.VectorType(I16, n))


_i64, _f32 = types.int64, types.float32
_VH = ir.VectorType(I16, VL)


def _bin(name: str) -> Callable[..., Any]:
    return lambda b, x, y: getattr(b, name)(x, y)


def _load_i8(b: Any, a: Any) -> Any:
    return b.sext(load_at(b, a, ir.VectorType(I8, VL)), VI)


def _load_bf16(b: Any, a: Any) -> Any:
    return b.bitcast(b.shl(b.zext(load_at(b, a, _VH), VI), const_vi(16)), VF)


def _store_i8(b: Any, a: Any, v: Any) -> None:
    store_at(b, b.trunc(v, ir.VectorType(I8, VL)), a)


vload = op(vf32, (_i64,), lambda b, a: load_at(b, a, VF))  # VL float32 at an address
vload_i32 = op(vi32, (_i64,), lambda b, a: load_at(b, a, VI))
vload_f16 = op(vf32, (_i64,), lambda b, a: half_to_f32(b, load_at(b, a, _VH)))  # VL halves, widened
vload_bf16 = op(vf32, (_i64,), _load_bf16)
vload_i8 = op(vi32, (_i64,), _load_i8)  # VL int8, sign-extended
vstore = op(types.void, (_i64, vf32), lambda b, a, v: store_at(b, v, a))
vstore_i32 = op(types.void, (_i64, vi32), lambda b, a, v: store_at(b, v, a))
vstore_f16 = op(types.void, (_i64, vf32), lambda b, a, v: store_at(b, f32_to_half(b, v), a))
vstore_i8 = op(types.void, (_i64, vi32), _store_i8)  # low byte of each lane

vsplat = op(vf32, (_f32,), lambda b, x: splat(b, x))
vsplat_i32 = op(vi32, (_i64,), lambda b, x: splat(b, b.trunc(x, I32)))
viota = op(vi32, (_i64,), lambda b, x: b.add(splat(b, b.trunc(x, I32)), ir.Constant(VI, list(range(VL)))))

vadd = op(vf32, (vf32, vf32), _bin("fadd"))
vsub = op(vf32, (vf32, vf32), _bin("fsub"))
vmul = op(vf32, (vf32, vf32), _bin("fmul"))
vdiv = op(vf32, (vf32, vf32), _bin("fdiv"))
vfma = op(vf32, (vf32, vf32, vf32), lambda b, x, y, z: llvm_call(b, f"llvm.fma.v{VL}f32", VF, x, y, z))  # x*y+z


def _minmax(predicate: str) -> Callable[..., Any]:
    return lambda b, x, y: b.select(b.fcmp_ordered(predicate, x, y), x, y)


vmax = op(vf32, (vf32, vf32), _minmax(">"))  # the second where the first is NaN
vmin = op(vf32, (vf32, vf32), _minmax("<"))
vabs = op(vf32, (vf32,), lambda b, x: llvm_call(b, f"llvm.fabs.v{VL}f32", VF, x))
viadd = op(vi32, (vi32, vi32), _bin("add"))
vimul = op(vi32, (vi32, vi32), _bin("mul"))
vtof = op(vf32, (vi32,), lambda b, x: b.sitofp(x, VF))  # int32 to float32
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer, ties to even


def _round_i32(b: Any, x: Any) -> Any:
    return b.sub(b.bitcast(b.fadd(x, const_vf(_ROUND)), VI), b.bitcast(const_vf(_ROUND), VI))


vround = op(vi32, (vf32,), _round_i32)  # to nearest even; for |x| < 2^22
# Lanes of the third where the two integers compare, else 0 or the fourth.
vlt_i32_mask = op(vi32, (vi32, vi32), lambda b, x, y: b.sext(b.icmp_signed("<", x, y), VI))  # -1 or 0
vgt_mask = op(vi32, (vf32, vf32), lambda b, x, y: b.sext(b.fcmp_ordered(">", x, y), VI))
vselect = op(
    vf32, (vi32, vf32, vf32), lambda b, m, x, y: b.select(b.icmp_signed("!=", m, const_vi(0)), x, y)
)  # x where the mask is not 0
vselect_i32 = op(vi32, (vi32, vi32, vi32), lambda b, m, x, y: b.select(b.icmp_signed("!=", m, const_vi(0)), x, y))
vbits = op(vi32, (vf32,), lambda b, x: b.bitcast(x, VI))
vfrombits = op(vf32, (vi32,), lambda b, x: b.bitcast(x, VF))


def _tree(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Reduce lanes pairwise: lane i with lane i + n/2, then n/4, ...: one fixed order."""

    def emit(b: Any, v: Any) -> Any:
        n = VL
        while n > 1:
            n //= 2
            idx = lambda lo, m: ir.Constant(ir.VectorType(I32, m), list(range(lo, lo + m)))  # noqa: E731
            undef = ir.Constant(v.type, ir.Undefined)
            v = combine(b, b.shuffle_vector(v, undef, idx(0, n)), b.shuffle_vector(v, undef, idx(n, n)))
        return b.extract_element(v, ir.Constant(I32, 0))

    return emit


vhsum = op(_f32, (vf32,), _tree(lambda b, x, y: b.fadd(x, y)))
vhmax = op(_f32, (vf32,), _tree(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y)))
vhsum_i32 = op(_i64, (vi32,), lambda b, v: b.sext(_tree(lambda c, x, y: c.add(x, y))(b, v), ir.IntType(64)))


def _exp(b: Any, x: Any) -> Any:
    """e^x, relative error below 2e-7: x = n ln2 + r, |r| <= ln2/2, degree-6 polynomial (Cephes expf). 0 below -87.3."""
    fma = lambda p, q, r: llvm_call(b, f"llvm.fma.v{VL}f32", VF, p, q, r)  # noqa: E731
    low = b.fcmp_ordered("<", x, const_vf(-87.33654))
    x = b.select(b.fcmp_ordered(">", x, const_vf(88.3762)), const_vf(88.3762), x)
    x = b.select(low, const_vf(0.0), x)
    shifted = fma(x, const_vf(1.44269504088896341), const_vf(_ROUND))
    n = b.fsub(shifted, const_vf(_ROUND))
    r = fma(n, const_vf(-0.693359375), x)
    r = fma(n, const_vf(2.12194440e-4), r)
    p = const_vf(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, const_vf(c))
    p = fma(p, b.fmul(r, r), b.fadd(r, const_vf(1.0)))
    two_n = b.shl(b.add(b.sub(b.bitcast(shifted, VI), b.bitcast(const_vf(_ROUND), VI)), const_vi(127)), const_vi(23))
    return b.select(low, const_vf(0.0), b.fmul(p, b.bitcast(two_n, VF)))


vexp = op(vf32, (vf32,), _exp)


@njit(inline="never")
def exp_f32(x):  # type: ignore[no-untyped-def]
    """Scalar e^x with exactly the arithmetic of ``vexp``."""
    return vhmax(vexp(vsplat(x)))


def _half_bits(b: Any, x: Any) -> Any:
    lanes = splat(b, b.trunc(x, I16))
    return b.extract_element(half_to_f32(b, lanes), ir.Constant(I32, 0))


f16_bits_f32 = op(_f32, (_i64,), _half_bits)  # the float32 of a half's bits


def _store_half(b: Any, a: Any, x: Any) -> None:
    lanes = f32_to_half(b, splat(b, x))
    store_at(b, b.extract_element(lanes, ir.Constant(I32, 0)), a)


st_f16 = op(types.void, (_i64, _f32), _store_half)  # one float32 as a half
