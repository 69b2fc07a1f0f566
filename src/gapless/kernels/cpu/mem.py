"""Loads, stores and atomics on raw byte addresses (int64), for use inside compiled kernels.

Kernels take addresses instead of arrays, so their object code needs no runtime and loads without Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I64 = ir.IntType(64)
I32 = ir.IntType(32)
I16 = ir.IntType(16)
I8 = ir.IntType(8)


def _loader(element: ir.Type, result: types.Type, convert: Callable[[Any, Any], Any] | None = None) -> Any:
    @intrinsic
    def load(typingctx, addr):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            value = builder.load(builder.inttoptr(args[0], element.as_pointer()))
            value.align = 1
            return convert(builder, value) if convert else value

        return result(types.int64), codegen

    return load


def _storer(element: ir.Type, accepts: types.Type, convert: Callable[[Any, Any], Any] | None = None) -> Any:
    @intrinsic
    def store(typingctx, addr, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            value = convert(builder, args[1]) if convert else args[1]
            node = builder.store(value, builder.inttoptr(args[0], element.as_pointer()))
            node.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, accepts), codegen

    return store


ld_f32 = _loader(ir.FloatType(), types.float32)
ld_f64 = _loader(ir.DoubleType(), types.float64)
ld_i64 = _loader(I64, types.int64)
ld_i32 = _loader(I32, types.int64, lambda b, v: b.sext(v, I64))
ld_u16 = _loader(I16, types.int64, lambda b, v: b.zext(v, I64))
ld_i8 = _loader(I8, types.int64, lambda b, v: b.sext(v, I64))
ld_u8 = _loader(I8, types.int64, lambda b, v: b.zext(v, I64))

st_f32 = _storer(ir.FloatType(), types.float32)
st_f64 = _storer(ir.DoubleType(), types.float64)
st_i64 = _storer(I64, types.int64)
st_i32 = _storer(I32, types.int64, lambda b, v: b.trunc(v, I32))
st_u16 = _storer(I16, types.int64, lambda b, v: b.trunc(v, I16))
st_i8 = _storer(I8, types.int64, lambda b, v: b.trunc(v, I8))


@intrinsic
def f32_bits(typingctx, value):  # type: ignore[no-untyped-def]
    """The bits of a float32 as a non-negative int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.zext(builder.bitcast(args[0], I32), I64)

    return types.int64(types.float32), codegen


@intrinsic
def bits_f32(typingctx, value):  # type: ignore[no-untyped-def]
    """The float32 whose bits are the low 32 of an int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.trunc(args[0], I32), ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def fma_f32(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        f = ir.FloatType()
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(f, [f] * 3), "llvm.fma.f32")
        return builder.call(fn, args)

    f32 = types.float32
    return f32(f32, f32, f32), codegen


@intrinsic
def sqrt_f32(typingctx, a):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        f = ir.FloatType()
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(f, [f]), "llvm.sqrt.f32")
        return builder.call(fn, args)

    return types.float32(types.float32), codegen


@intrinsic
def atomic_add(typingctx, addr, value):  # type: ignore[no-untyped-def]
    """Add to an int64 in memory; returns what was there before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, addr):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, addr, value):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        name = {"x86": "llvm.x86.sse2.pause", "aar": "llvm.aarch64.hint"}[_triple()[:3]]
        takes = [I32] if "hint" in name else []
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), takes), name)
        builder.call(fn, [ir.Constant(I32, 1)] if takes else [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):  # type: ignore[no-untyped-def]
    """Let another thread of the machine have this core (POSIX ``sched_yield``)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(fn, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cycles(typingctx):  # type: ignore[no-untyped-def]
    """The processor's time-stamp counter."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if _triple().startswith("x86"):
            fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), "llvm.x86.rdtsc")
            return builder.call(fn, [])
        return builder.asm(ir.FunctionType(I64, []), "mrs $0, cntvct_el0", "=r", [], side_effect=True)

    return types.int64(), codegen


@intrinsic
def call_kernel(typingctx, fn, op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Call the compiled kernel at address ``fn`` (Numba's native calling convention, no result)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        ptr = I8.as_pointer()
        fnty = ir.FunctionType(I32, [ptr.as_pointer(), ptr.as_pointer(), I64, I64, I64, I64])
        ret = cgutils.alloca_once(builder, ptr)
        exc = cgutils.alloca_once(builder, ptr)
        builder.call(builder.inttoptr(args[0], fnty.as_pointer()), [ret, exc, *args[1:]])
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i, i, i), codegen


def _triple() -> str:
    from llvmlite import binding as llvm

    return str(llvm.get_process_triple())
