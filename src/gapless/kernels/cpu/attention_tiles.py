"""Register tiles of attention, as LLVM IR: rows share each load of a key or value vector.

A row's arithmetic is the same in every tile: one fused multiply-add after the other, in the order of the dimensions
(scores) or of the positions (values).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gapless.kernels.cpu.abi import PAGE_TOKENS
from gapless.kernels.cpu.mem import I8, I16
from gapless.kernels.cpu.tiles import c64, loop
from gapless.kernels.cpu.vec import F32, VF, VI, VL, half_to_f32, llvm_call, load_at, splat, store_at

ELEMENT_BYTES = {"f32": 4, "f16": 2, "i8": 1}
PAGE_VECTORS = PAGE_TOKENS // VL  # of scores


def load_kv(b: Any, addr: Any, kind: str) -> Any:
    """VL stored keys or values as float32; int8 without its scale."""
    if kind == "f32":
        return load_at(b, addr, VF)
    if kind == "f16":
        return half_to_f32(b, load_at(b, addr, ir.VectorType(I16, VL)))
    return b.sitofp(b.sext(load_at(b, addr, ir.VectorType(I8, VL)), VI), VF)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return llvm_call(b, f"llvm.fma.v{VL}f32", VF, x, y, z)


def score_tile(kind: str, n_rows: int, n_pages: int) -> Any:
    """``tile(q, q_stride, keys0, keys1, dim, out, out_stride)``: dot products of rows with 16 keys of each page.

    ``out`` takes 16 floats for each page, one after the other.
    """
    size = ELEMENT_BYTES[kind]
    bases = [(page, part) for page in range(n_pages) for part in range(PAGE_VECTORS)]

    def emit(b: Any, q: Any, qs: Any, k0: Any, k1: Any, dim: Any, out: Any, outs: Any) -> None:
        rows = [b.add(q, b.mul(qs, c64(r))) for r in range(n_rows)]

        def body(d: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(d, c64(PAGE_TOKENS * size))
            keys = [load_kv(b, b.add(b.add((k0, k1)[p], at), c64(part * VL * size)), kind) for p, part in bases]
            values = [splat(b, load_at(b, b.add(row, b.mul(d, c64(4))), F32, 4)) for row in rows]
            return [
                fma(b, values[r], keys[c], sums[r * len(bases) + c]) for r in range(n_rows) for c in range(len(bases))
            ]

        zeros = [ir.Constant(VF, [0.0] * VL)] * (n_rows * len(bases))
        sums = loop(b, dim, zeros, body)
        for r in range(n_rows):
            for c in range(len(bases)):
                store_at(b, sums[r * len(bases) + c], b.add(b.add(out, b.mul(outs, c64(r))), c64(c * VL * 4)))

    @intrinsic
    def tile(typingctx, q, qs, k0, k1, dim, out, outs):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            emit(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def value_tile(kind: str, n_rows: int, n_vectors: int) -> Any:
    """``tile(p, p_stride, values, dim, acc, acc_stride, n)``: acc += p[row, j] * values[j] over ``n`` positions.

    Takes ``n_vectors`` vectors of the dimension ``dim`` of a page.
    """
    size = ELEMENT_BYTES[kind]

    def emit(b: Any, p: Any, ps: Any, v: Any, dim: Any, acc: Any, accs: Any, n: Any) -> None:
        rows = [b.add(p, b.mul(ps, c64(r))) for r in range(n_rows)]
        places = [
            b.add(b.add(acc, b.mul(accs, c64(r))), c64(c * VL * 4)) for r in range(n_rows) for c in range(n_vectors)
        ]

        def body(j: Any, sums: list[Any]) -> list[Any]:
            at = b.add(v, b.mul(b.mul(j, dim), c64(size)))
            values = [load_kv(b, b.add(at, c64(c * VL * size)), kind) for c in range(n_vectors)]
            weights = [splat(b, load_at(b, b.add(row, b.mul(j, c64(4))), F32, 4)) for row in rows]
            return [
                fma(b, weights[r], values[c], sums[r * n_vectors + c])
                for r in range(n_rows)
                for c in range(n_vectors)
            ]

        sums = loop(b, n, [load_at(b, place, VF) for place in places], body)
        for place, value in zip(places, sums, strict=True):
            store_at(b, value, place)

    @intrinsic
    def tile(typingctx, p, ps, v, dim, acc, accs, n):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            emit(builder, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


