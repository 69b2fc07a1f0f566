"""Register tiles of the matrix product: R groups of rows by T tokens, built as LLVM IR.

One weight load serves T tokens and one activation load serves R groups. Each output element is the same sequence of
operations for every R and T: blocks in order, an exact integer dot product, one multiplication and one or two fused
multiply-adds. That is why a token's result does not depend on the batch it ran in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gapless.kernels.cpu.abi import ROUNDER_BITS, XD_BYTES
from gapless.kernels.cpu.mem import I8, I16, I32, I64
from gapless.kernels.cpu.packing import PAIR_GROUPS, Layout, PackedShape
from gapless.kernels.cpu.vec import F32, ISA, VF, VI, VL, const_vi, half_to_f32, llvm_call, load_at, splat, store_at

VBYTES = VL * 4
VB = ir.VectorType(I8, VBYTES)
VH = ir.VectorType(I16, VBYTES // 2)

# Tokens of the main tile, and of the smaller ones that finish a batch, by the registers of the target.
TOKEN_TILES = (8, 4, 2, 1) if VL == 16 else (4, 2, 1)


def c64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


class Dot:
    """Sums of four byte products, accumulated over the runs of a block, on top of ``ROUNDER_BITS``."""

    def __init__(self, b: Any, unsigned_weights: bool) -> None:
        self.b = b
        self.unsigned = unsigned_weights  # values 0..15, else signed bytes (stored with +128 for VNNI)
        self.narrow = ISA.dot == "maddubs" and unsigned_weights  # 8 * 2 * 15 * 127 fits 16 bits

    def zero(self, x_offset: Any) -> Any:
        if self.narrow:
            return ir.Constant(VH, [0] * (VBYTES // 2))
        if ISA.dot.startswith("vnni") and not self.unsigned:
            return splat(self.b, x_offset)
        return const_vi(ROUNDER_BITS)

    def weight(self, raw: Any) -> Any:
        """What the tile keeps of a weight vector, once for all tokens."""
        if ISA.dot == "maddubs" and not self.unsigned:
            return raw, llvm_call(self.b, "llvm.abs.v32i8", VB, raw, ir.Constant(ir.IntType(1), 0))
        return raw, None

    def add(self, acc: Any, weight: Any, x: Any) -> Any:
        """``acc`` + dot of a kept weight vector with four broadcast activations (as one i32 scalar splat)."""
        b, (raw, magnitude) = self.b, weight
        if ISA.dot.startswith("vnni"):
            name = f"llvm.x86.avx512.vpdpbusd.{VBYTES * 8}"
            return llvm_call(b, name, VI, acc, b.bitcast(raw, VI), x)
        xb = b.bitcast(x, VB)
        if self.narrow:
            return b.add(acc, llvm_call(b, "llvm.x86.avx2.pmadd.ub.sw", VH, raw, xb))
        if ISA.dot == "maddubs":
            signed = llvm_call(b, "llvm.x86.avx2.psign.b", VB, xb, raw)
            pairs = llvm_call(b, "llvm.x86.avx2.pmadd.ub.sw", VH, magnitude, signed)
            return b.add(acc, self._widen_pairs(pairs))
        return b.add(acc, self._portable(raw, xb))

    def finish(self, acc: Any) -> Any:
        """ROUNDER plus the sum, as float32."""
        total = self.b.add(self._widen_pairs(acc), const_vi(ROUNDER_BITS)) if self.narrow else acc
        return self.b.bitcast(total, VF)

    def _widen_pairs(self, pairs: Any) -> Any:
        ones = ir.Constant(VH, [1] * (VBYTES // 2))
        return llvm_call(self.b, "llvm.x86.avx2.pmadd.wd", VI, pairs, ones)

    def _portable(self, w: Any, x: Any) -> Any:
        b = self.b
        wide = ir.VectorType(I32, VBYTES)
        products = b.mul(b.sext(w, wide), b.sext(x, wide))
        n = VBYTES
        while n > VL:
            n //= 2
            pick = lambda k, m=n: ir.Constant(ir.VectorType(I32, m), [2 * i + k for i in range(m)])  # noqa: E731
            undef = ir.Constant(products.type, ir.Undefined)
            products = b.add(b.shuffle_vector(products, undef, pick(0)), b.shuffle_vector(products, undef, pick(1)))
        return products


def loop(b: Any, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """``for i in range(count)`` (count >= 1) with loop-carried values in registers."""
    entry = b.block
    loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(I64)
    i.add_incoming(c64(0), entry)
    phis = [b.phi(v.type) for v in initial]
    for phi, v in zip(phis, initial, strict=True):
        phi.add_incoming(v, entry)
    results = body(i, phis)
    following = b.add(i, c64(1))
    i.add_incoming(following, b.block)
    for phi, v in zip(phis, results, strict=True):
        phi.add_incoming(v, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return results


def opaque(b: Any, value: Any) -> Any:
    """``value``, of which the optimiser knows nothing."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False)


class RowPlaces:
    """Addresses of a tile's rows as a processor adds them up in a load: base + 1, 2 or 4 strides + constant.

    Left to itself the optimiser makes each row's address from the one before by an instruction of its own.
    """

    def __init__(self, b: Any, first: Any, stride: Any) -> None:
        self._b, self._first, self._stride = b, first, stride
        self._stride3 = opaque(b, b.mul(stride, c64(3)))

    def at(self, offset: Any, n_rows: int) -> list[Any]:
        """Addresses ``offset`` bytes into the rows."""
        b, stride = self._b, self._stride
        low = opaque(b, b.add(self._first, offset))
        if n_rows == 1:
            return [low]
        high = opaque(b, b.add(low, self._stride3)) if n_rows > 3 else low
        places = [
            low, b.add(low, stride), b.add(low, b.shl(stride, c64(1))), high, b.add(low, b.shl(stride, c64(2))),
            b.add(high, b.shl(stride, c64(1))), b.add(high, self._stride3), b.add(high, b.shl(stride, c64(2))),
        ]  # fmt: skip
        return places[:n_rows]


def _write(b: Any, accs: list[Any], n_tokens: int, n_groups: int, y: Any, ystride: Any, add: Any, bias: Any) -> None:
    """Store the tile, or add it to what is there; with a bias where its address is not 0."""
    with_bias, plain = b.append_basic_block("bias"), b.append_basic_block("write")
    before = b.block
    b.cbranch(b.icmp_signed("!=", bias, c64(0)), with_bias, plain)
    b.position_at_end(with_bias)
    biased = list(accs)
    for r in range(n_groups):
        v = load_at(b, b.add(bias, c64(r * VBYTES)), VF)
        for t in range(n_tokens):
            biased[r * n_tokens + t] = b.fadd(accs[r * n_tokens + t], v)
    b.branch(plain)
    b.position_at_end(plain)
    merged = []
    for old, new in zip(accs, biased, strict=True):
        phi = b.phi(VF)
        phi.add_incoming(old, before)
        phi.add_incoming(new, with_bias)
        merged.append(phi)
    adding, storing, done = (b.append_basic_block(n) for n in ("add", "store", "end"))
    b.cbranch(b.icmp_signed("!=", add, c64(0)), adding, storing)
    for block, accumulate in ((adding, True), (storing, False)):
        b.position_at_end(block)
        for t in range(n_tokens):
            row = b.add(y, b.mul(ystride, c64(t)))
            for r in range(n_groups):
                addr, v = b.add(row, c64(r * VBYTES)), merged[r * n_tokens + t]
                store_at(b, b.fadd(load_at(b, addr, VF), v) if accumulate else v, addr)
        b.branch(done)
    b.position_at_end(done)


_TILE_ARGS = 10  # w, x, x_stride, xd, xd_stride, y, y_stride, add, bias, depth
PREFETCH_BYTES = 8192  # how far ahead of the loads weights are fetched


def quantised_tile(layout: Layout, n_tokens: int) -> Any:
    """``tile(w, x, x_stride, xd, xd_stride, y, y_stride, add, bias, n_blocks)`` on one pair of groups at ``w``."""
    bits = 4 if layout == "q4" else 8
    has_min = layout != "q8"
    n_groups = PAIR_GROUPS
    shape = PackedShape(layout, PAIR_GROUPS * VL, 32, VL)
    pairs = [(r, t) for r in range(n_groups) for t in range(n_tokens)]

    def emit(b: Any, args: list[Any]) -> None:
        w, x, xs, xd, xds, y, ys, add, bias, n = args
        xrows, drows = RowPlaces(b, x, xs), RowPlaces(b, xd, xds)

        def body(i: Any, accs: list[Any]) -> list[Any]:
            dot = Dot(b, unsigned_weights=bits == 4)
            block = b.add(w, b.mul(i, c64(shape.block_bytes)))
            _prefetch(b, block, shape.block_bytes)
            quants = [b.add(block, c64(r * shape.quant_bytes)) for r in range(n_groups)]
            xb = xrows.at(b.mul(i, c64(32)), n_tokens)
            db = drows.at(b.mul(i, c64(XD_BYTES)), n_tokens)
            offsets = [load_at(b, b.add(d, c64(8)), I32, 4) for d in db]
            sums = {(r, t): dot.zero(offsets[t]) for r, t in pairs}

            def run(vectors: list[Any], k: int) -> None:
                kept = [dot.weight(v) for v in vectors]
                for t in range(n_tokens):
                    xv = splat(b, load_at(b, b.add(xb[t], c64(4 * k)), I32, 4))
                    for r in range(n_groups):
                        sums[r, t] = dot.add(sums[r, t], kept[r], xv)

            for j in range(bits):
                raw = [load_at(b, b.add(q, c64(VBYTES * j)), VB, 32) for q in quants]
                if bits == 8:
                    run(raw, j)
                else:
                    nibble = ir.Constant(VB, [15] * VBYTES)
                    run([b.and_(v, nibble) for v in raw], j)
                    shifted = [b.lshr(b.bitcast(v, VH), ir.Constant(VH, [4] * (VBYTES // 2))) for v in raw]
                    run([b.and_(b.bitcast(v, VB), nibble) for v in shifted], j + 4)

            half_vector = ir.VectorType(I16, VL)
            scales = b.add(block, c64(n_groups * shape.quant_bytes))
            out = list(accs)
            for r in range(n_groups):
                s = b.add(scales, c64(r * shape.n_halves * VL * 2))
                d = half_to_f32(b, load_at(b, s, half_vector, 16))
                m = half_to_f32(b, load_at(b, b.add(s, c64(VL * 2)), half_vector, 16)) if has_min else None
                for t in range(n_tokens):
                    scale = splat(b, load_at(b, db[t], F32, 4))
                    rounder = splat(b, load_at(b, b.add(db[t], c64(12)), F32, 4))
                    value = llvm_call(b, f"llvm.fma.v{VL}f32", VF, dot.finish(sums[r, t]), scale, rounder)
                    acc = llvm_call(b, f"llvm.fma.v{VL}f32", VF, value, d, accs[r * n_tokens + t])
                    if m is not None:
                        total = splat(b, load_at(b, b.add(db[t], c64(4)), F32, 4))
                        acc = llvm_call(b, f"llvm.fma.v{VL}f32", VF, total, m, acc)
                    out[r * n_tokens + t] = acc
            return out

        zeros = [ir.Constant(VF, [0.0] * VL) for _ in pairs]
        _write(b, loop(b, n, zeros, body), n_tokens, n_groups, y, ys, add, bias)

    return _tile_intrinsic(emit)


def float_tile(layout: Layout, n_tokens: int) -> Any:
    """As ``quantised_tile``; ``x`` is float32, ``xd`` is unused and the depth is inputs."""
    n_groups = PAIR_GROUPS
    element = {"f32": 4, "f16": 2, "bf16": 2}[layout]

    def emit(b: Any, args: list[Any]) -> None:
        w, x, xs, _xd, _xds, y, ys, add, bias, n = args
        xrows = RowPlaces(b, x, xs)

        def body(i: Any, accs: list[Any]) -> list[Any]:
            row = b.add(w, b.mul(i, c64(n_groups * VL * element)))
            _prefetch(b, row, n_groups * VL * element)
            weights = [_load_float(b, b.add(row, c64(r * VL * element)), layout) for r in range(n_groups)]
            xv = [splat(b, load_at(b, place, F32, 4)) for place in xrows.at(b.mul(i, c64(4)), n_tokens)]
            return [
                llvm_call(b, f"llvm.fma.v{VL}f32", VF, xv[t], weights[r], accs[r * n_tokens + t])
                for r in range(n_groups)
                for t in range(n_tokens)
            ]

        zeros = [ir.Constant(VF, [0.0] * VL)] * (n_groups * n_tokens)
        _write(b, loop(b, n, zeros, body), n_tokens, n_groups, y, ys, add, bias)

    return _tile_intrinsic(emit)


def _prefetch(b: Any, addr: Any, n_bytes: int) -> None:
    """Fetch the cache lines that the loop will read PREFETCH_BYTES later."""
    ptr = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [ptr, I32, I32, I32])
    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, n_bytes, 64):
        at = b.inttoptr(b.add(addr, c64(PREFETCH_BYTES + line)), ptr)
        b.call(fn, [at, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])


def _load_float(b: Any, addr: Any, layout: str) -> Any:
    if layout == "f32":
        return load_at(b, addr, VF)
    halves = load_at(b, addr, ir.VectorType(I16, VL))
    if layout == "f16":
        return half_to_f32(b, halves)
    return b.bitcast(b.shl(b.zext(halves, VI), const_vi(16)), VF)


def _tile_intrinsic(emit: Callable[[Any, list[Any]], None]) -> Any:
    @intrinsic
    def tile(typingctx, w, x, xs, xd, xds, y, ys, add, bias, n):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            emit(builder, list(args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * _TILE_ARGS), codegen

    return tile
