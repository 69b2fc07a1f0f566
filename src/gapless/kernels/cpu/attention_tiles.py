"""Register tiles of attention, as LLVM IR: rows share each load of a key or value vector.

A row's arithmetic is the same in every tile: one fused multiply-add after the other, in the order of the dimensions
(scores) or of the positions (values). Each intrinsic holds tiles of several sizes and takes the size as an argument.

Tiles that read the cache itself also fetch ahead, so that the memory works while they compute: a score tile fetches
values, a value tile the keys that are needed next. The lines of four pages are fetched in turn, into the second cache:
the processor's own prefetcher, which has more lines under way than a core may ask for, then follows four pages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gapless.kernels.cpu.abi import AHEAD_PAGES, PAGE_TOKENS
from gapless.kernels.cpu.mem import I8, I16, I32, I64
from gapless.kernels.cpu.tiles import RowPlaces, c64, loop
from gapless.kernels.cpu.vec import F32, VF, VI, VL, half_to_f32, llvm_call, load_at, op, splat, store_at, vf32, vstore

ELEMENT_BYTES = {"f32": 4, "f16": 2, "i8": 1}
LINE_BYTES = 64
SECOND_CACHE = 2  # locality of a fetch, in the terms of LLVM

# Sizes by the registers of the target: 32 of 16 lanes, or 16 of 8. Largest first; a size of 1 is always there.
SCORE_ROWS = (8, 4, 3, 2, 1) if VL == 16 else (6, 4, 3, 2, 1)
SCORE_PAGES = 2 if VL == 16 else 1  # pages whose keys a score tile takes together
VALUE_ROWS = (4, 3, 2, 1)
VALUE_VECTORS = (4, 2, 1) if VL == 16 else (2, 1)


def load_kv(b: Any, addr: Any, kind: str) -> Any:
    """VL stored keys or values as float32; int8 without its scale."""
    if kind == "f32":
        return load_at(b, addr, VF)
    if kind == "f16":
        return half_to_f32(b, load_at(b, addr, ir.VectorType(I16, VL)))
    return b.sitofp(b.sext(load_at(b, addr, ir.VectorType(I8, VL)), VI), VF)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return llvm_call(b, f"llvm.fma.v{VL}f32", VF, x, y, z)


def fetch_lines(b: Any, ahead: Any, first: Any, n_bytes: int) -> None:
    """Fetch ``n_bytes`` from the ``first`` byte of AHEAD_PAGES blocks whose lines are dealt out in turn.

    ``ahead`` is the address of the blocks' addresses, which need not be mapped.
    """
    ptr = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [ptr, I32, I32, I32])
    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for byte in range(0, n_bytes, LINE_BYTES):
        line = b.lshr(b.add(first, c64(byte)), c64(LINE_BYTES.bit_length() - 1))
        block = load_at(b, b.add(ahead, b.mul(b.and_(line, c64(AHEAD_PAGES - 1)), c64(8))), I64, 8)
        within = b.mul(b.lshr(line, c64(AHEAD_PAGES.bit_length() - 1)), c64(LINE_BYTES))
        where = b.inttoptr(b.add(block, within), ptr)
        b.call(fn, [where, ir.Constant(I32, 0), ir.Constant(I32, SECOND_CACHE), ir.Constant(I32, 1)])


def choose(b: Any, key: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Run the case of that key; the last one for any other."""
    done = b.append_basic_block("chosen")
    blocks = {value: b.append_basic_block(f"case{value}") for value in cases}
    switch = b.switch(key, list(blocks.values())[-1])
    for value, block in blocks.items():
        switch.add_case(ir.Constant(I64, value), block)
        b.position_at_end(block)
        cases[value]()
        b.branch(done)
    b.position_at_end(done)


def score_tile(kind: str, n_pages: int, *, fetch: bool) -> Any:
    """``tile(rows, q, q_stride, keys0, keys1, dim, out, out_stride, ahead, from)``: dot products with 16 keys a page.

    ``rows`` is one of SCORE_ROWS. ``out`` takes 16 floats for each page, one after the other. As many bytes as the
    keys have are fetched of the blocks ``ahead``, beginning ``from`` there.
    """
    key_bytes = PAGE_TOKENS * ELEMENT_BYTES[kind]  # of one dimension
    columns = [(page, part) for page in range(n_pages) for part in range(PAGE_TOKENS // VL)]

    def emit(
        b: Any, n_rows: int, q: Any, qs: Any, k0: Any, k1: Any, dim: Any, out: Any, outs: Any, ahead: Any, start: Any
    ) -> None:
        rows = RowPlaces(b, q, qs)
        pages = (k0, k1)[:n_pages]

        def body(d: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(d, c64(key_bytes))
            if fetch:
                fetch_lines(b, ahead, b.add(start, b.mul(d, c64(n_pages * key_bytes))), n_pages * key_bytes)
            part_bytes = VL * ELEMENT_BYTES[kind]
            keys = [load_kv(b, b.add(b.add(pages[p], at), c64(part * part_bytes)), kind) for p, part in columns]
            x = [splat(b, load_at(b, place, F32, 4)) for place in rows.at(b.mul(d, c64(4)), n_rows)]
            return [fma(b, x[r], key, sums[r * len(keys) + c]) for r in range(n_rows) for c, key in enumerate(keys)]

        zeros = [ir.Constant(VF, [0.0] * VL)] * (n_rows * len(columns))
        sums = iter(loop(b, dim, zeros, body))
        for r in range(n_rows):
            row = b.add(out, b.mul(outs, c64(r)))
            for c in range(len(columns)):
                store_at(b, next(sums), b.add(row, c64(c * VL * 4)))

    @intrinsic
    def tile(typingctx, rows, q, qs, k0, k1, dim, out, outs, ahead, start):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            choose(builder, args[0], {n: partial(emit, builder, n, *args[1:]) for n in SCORE_ROWS})
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile


def value_tile(kind: str, *, fetch: bool) -> Any:
    """``tile(rows, vectors, p, p_stride, v, dim, acc, acc_stride, n, ahead, from)``: acc += p[row, j] * v[j], j < n.

    Takes one of VALUE_ROWS and one of VALUE_VECTORS of the dimension ``dim``; fetches as a score tile does.
    """
    size = ELEMENT_BYTES[kind]

    def emit(
        b: Any, n_rows: int, n_vectors: int, p: Any, ps: Any, v: Any, dim: Any, acc: Any, accs: Any, n: Any,
        ahead: Any, start: Any,
    ) -> None:  # fmt: skip
        rows = [b.add(p, b.mul(ps, c64(r))) for r in range(n_rows)]
        sums = [b.add(acc, b.mul(accs, c64(r))) for r in range(n_rows)]
        places = [b.add(row, c64(c * VL * 4)) for row in sums for c in range(n_vectors)]

        def body(j: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(b.mul(j, dim), c64(size))
            if fetch:
                fetch_lines(b, ahead, b.add(start, at), n_vectors * VL * size)
            values = [load_kv(b, b.add(b.add(v, at), c64(c * VL * size)), kind) for c in range(n_vectors)]
            weights = [splat(b, load_at(b, b.add(row, b.mul(j, c64(4))), F32, 4)) for row in rows]
            return [
                fma(b, weights[r], value, sums[r * n_vectors + c])
                for r in range(n_rows)
                for c, value in enumerate(values)
            ]

        for place, value in zip(places, loop(b, n, [load_at(b, x, VF) for x in places], body), strict=True):
            store_at(b, value, place)

    @intrinsic
    def tile(typingctx, rows, vectors, p, ps, v, dim, acc, accs, n, ahead, start):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            sizes = [(r, c) for r in VALUE_ROWS for c in VALUE_VECTORS]
            key = builder.add(builder.mul(args[0], c64(8)), args[1])
            choose(builder, key, {8 * r + c: partial(emit, builder, r, c, *args[2:]) for r, c in sizes})
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return tile


@njit(inline="always")
def score_rows(left):  # type: ignore[no-untyped-def]
    """Rows of the next score tile, of so many that are left."""
    return SCORE_ROWS[0] if left >= SCORE_ROWS[0] else min(left, 4)


@njit(inline="always")
def value_rows(left):  # type: ignore[no-untyped-def]
    return min(left, 4)


@njit(inline="always")
def value_vectors(left):  # type: ignore[no-untyped-def]
    if left >= VALUE_VECTORS[0]:
        return VALUE_VECTORS[0]
    return min(left, 2)


def _load(kind: str) -> Any:
    return op(vf32, (types.int64,), lambda b, addr: load_kv(b, addr, kind))


def widen(kind: str) -> Any:
    """``widen(source, target, n)``: ``n`` stored numbers as float32, exactly; n is a multiple of 16."""
    load = _load(kind)
    size = ELEMENT_BYTES[kind]

    @njit
    def copy(source, target, n):  # type: ignore[no-untyped-def]
        for i in range(0, n, VL):
            vstore(target + 4 * i, load(source + size * i))

    return copy
