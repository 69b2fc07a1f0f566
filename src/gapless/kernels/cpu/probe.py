"""What the machine can do at most: kernels that only read memory, or only multiply."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gapless.kernels.cpu.abi import PROBE_BYTES, PROBE_DATA, PROBE_OUT, PROBE_ROUNDS
from gapless.kernels.cpu.mem import I64, ld_i64
from gapless.kernels.cpu.packing import PAIR_GROUPS
from gapless.kernels.cpu.tiles import VB, VBYTES, Dot, opaque
from gapless.kernels.cpu.vec import ISA, VF, VI, llvm_call, load_at, store_at

READ_STREAMS = 8
DOT_TOKENS = 6
DOT_SUMS = PAIR_GROUPS * DOT_TOKENS  # independent: enough to hide the latency, few enough for 16 registers


def _counted(body: Any, state: list[Any], b: Any, count: Any, step: int) -> list[Any]:
    """``for i in range(0, count, step)`` over loop-carried values; count >= step."""
    entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(I64)
    phis = [b.phi(v.type) for v in state]
    results = body(i, phis)
    following = b.add(i, ir.Constant(I64, step))
    for phi, first, next_ in zip([i, *phis], [ir.Constant(I64, 0), *state], [following, *results], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(next_, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return list(results)


@intrinsic
def read_all(typingctx, data, n_bytes, out):  # type: ignore[no-untyped-def]
    """Read ``n_bytes`` (a multiple of 8 vectors) once; store a checksum so that nothing is optimised away."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        b, (start, size, target) = builder, args

        def body(i: Any, sums: list[Any]) -> list[Any]:
            at = b.add(start, i)
            return [b.xor(v, load_at(b, b.add(at, ir.Constant(I64, k * VBYTES)), VI, 4)) for k, v in enumerate(sums)]

        zeros = [ir.Constant(VI, [0] * VI.count)] * READ_STREAMS
        sums = _counted(body, zeros, b, size, READ_STREAMS * VBYTES)
        for k, v in enumerate(sums):
            store_at(b, v, b.add(target, ir.Constant(I64, k * VBYTES)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_all(typingctx, data, rounds, out):  # type: ignore[no-untyped-def]
    """``rounds`` rounds of DOT_SUMS byte dot products: PAIR_GROUPS weight vectors by DOT_TOKENS of activations, in L1.

    Where a dot product is more than one instruction, a round reads them anew from an address that is not known to be
    the last round's: products of values that no round changes would be taken out of the loop.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        b, (start, count, target) = builder, args
        dot = Dot(b, unsigned_weights=True)

        def body(i: Any, sums: list[Any]) -> list[Any]:
            data = start if ISA.dot.startswith("vnni") else opaque(b, start)
            places = [b.add(data, ir.Constant(I64, k * VBYTES)) for k in range(PAIR_GROUPS + DOT_TOKENS)]
            weights = [dot.weight(load_at(b, place, VB, 4)) for place in places[:PAIR_GROUPS]]
            xs = [load_at(b, place, VI, 4) for place in places[PAIR_GROUPS:]]
            pairs = [(weight, x) for x in xs for weight in weights]
            return [dot.add(v, *pair) for v, pair in zip(sums, pairs, strict=True)]

        sums = _counted(body, [dot.zero(None)] * DOT_SUMS, b, count, 1)
        for k, v in enumerate(sums):
            store_at(b, dot.finish(v), b.add(target, ir.Constant(I64, k * VBYTES)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_floats(typingctx, data, rounds, out):  # type: ignore[no-untyped-def]
    """The same of float32: ``rounds`` rounds of DOT_SUMS fused multiply-adds of vectors."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        b, (start, count, target) = builder, args

        def body(i: Any, sums: list[Any]) -> list[Any]:
            places = [b.add(start, ir.Constant(I64, k * VBYTES)) for k in range(PAIR_GROUPS + DOT_TOKENS)]
            values = [load_at(b, place, VF, 4) for place in places]
            pairs = [(weight, x) for x in values[PAIR_GROUPS:] for weight in values[:PAIR_GROUPS]]
            fma = f"llvm.fma.v{VF.count}f32"
            return [llvm_call(b, fma, VF, *pair, v) for v, pair in zip(sums, pairs, strict=True)]

        sums = _counted(body, [ir.Constant(VF, [0.0] * VF.count)] * DOT_SUMS, b, count, 1)
        for k, v in enumerate(sums):
            store_at(b, v, b.add(target, ir.Constant(I64, k * VBYTES)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def probe_read(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Every thread reads its share of the data, as often as asked."""
    share = ld_i64(op + 8 * PROBE_BYTES) // n_threads // (READ_STREAMS * VBYTES) * (READ_STREAMS * VBYTES)
    out = ld_i64(op + 8 * PROBE_OUT) + tid * 1024
    for _ in range(ld_i64(op + 8 * PROBE_ROUNDS)):
        read_all(ld_i64(op + 8 * PROBE_DATA) + tid * share, share, out)


def probe_multiply(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Every thread multiplies as often as asked."""
    multiply_all(ld_i64(op + 8 * PROBE_DATA), ld_i64(op + 8 * PROBE_ROUNDS), ld_i64(op + 8 * PROBE_OUT) + tid * 1024)


def probe_multiply_floats(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Every thread multiplies as often as asked."""
    multiply_floats(ld_i64(op + 8 * PROBE_DATA), ld_i64(op + 8 * PROBE_ROUNDS), ld_i64(op + 8 * PROBE_OUT) + tid * 1024)


KERNELS = {
    "probe_read": (probe_read, 4),
    "probe_multiply": (probe_multiply, 4),
    "probe_multiply_floats": (probe_multiply_floats, 4),
}
