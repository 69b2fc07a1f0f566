"""Matrix products over packed weights, for any number of rows at once.

A thread owns a run of pairs of weight groups. A pair stays in its first-level cache while all rows pass it in
register tiles; rows are taken in blocks whose activations stay in the second-level cache. See ``tiles`` for why a
row's result does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    ACT_SILU,
    LIN_ACTIVATION,
    LIN_ADD,
    LIN_BIAS,
    LIN_DEPTH,
    LIN_PAIR_BYTES,
    LIN_PAIRS,
    LIN_SCRATCH,
    LIN_SCRATCH_STRIDE,
    LIN_TOKEN_BLOCK,
    LIN_WEIGHTS,
    LIN_X,
    LIN_X_STRIDE,
    LIN_XD,
    LIN_XD_STRIDE,
    LIN_Y,
    LIN_Y_STRIDE,
    LIN_YD,
    LIN_YD_STRIDE,
    N_SAMPLES,
    N_TOKENS,
    OP_ROWS,
    ROWS_SAMPLES,
    ROWS_TOKENS,
    XD_BYTES,
)
from gapless.kernels.cpu.mem import ld_i64
from gapless.kernels.cpu.packing import BLOCK, PAIR_GROUPS
from gapless.kernels.cpu.quantise import quantise_block
from gapless.kernels.cpu.tiles import TOKEN_TILES, float_tile, quantised_tile
from gapless.kernels.cpu.vec import VL, vadd, vdiv, vexp, vload, vmul, vsplat, vstore, vsub

jit = njit(error_model="numpy", nogil=True)
inline = njit(error_model="numpy", nogil=True, inline="always")

PAIR_BYTES = PAIR_GROUPS * VL * 4  # of outputs
UNIT_PAIRS = 2 * BLOCK // (PAIR_GROUPS * VL)  # interleaved gate and up rows of 32 outputs
TILE = TOKEN_TILES[0]


@inline
def rows_of(op, step):  # type: ignore[no-untyped-def]
    """First row and number of rows of an operation."""
    rows = ld_i64(op + 8 * OP_ROWS)
    first = 0
    count = 0
    if rows == ROWS_TOKENS:
        count = ld_i64(step + 8 * N_TOKENS)
    elif rows == ROWS_SAMPLES:
        count = ld_i64(step + 8 * N_SAMPLES)
    else:
        first = ld_i64(rows)
        count = ld_i64(rows + 8)
    return first, count


def _sweep(make: Any) -> Any:
    """``sweep(op, w, x, xd, y, y_stride, add, bias, n)``: ``n`` rows against one pair of groups."""

    def runner(size: int) -> Any:
        tile = make(size)

        @inline
        def run(op, w, x, xd, y, ys, add, bias, t):  # type: ignore[no-untyped-def]
            xs = ld_i64(op + 8 * LIN_X_STRIDE)
            xds = ld_i64(op + 8 * LIN_XD_STRIDE)
            depth = ld_i64(op + 8 * LIN_DEPTH)
            tile(w, x + t * xs, xs, xd + t * xds, xds, y + t * ys, ys, add, bias, depth)

        return run

    def with_tail(size: int, following: Any) -> Any:
        run = runner(size)

        @inline
        def tail(op, w, x, xd, y, ys, add, bias, t, n):  # type: ignore[no-untyped-def]
            if n - t >= size:
                run(op, w, x, xd, y, ys, add, bias, t)
                t += size
            following(op, w, x, xd, y, ys, add, bias, t, n)

        return tail

    @inline
    def tail(op, w, x, xd, y, ys, add, bias, t, n):  # type: ignore[no-untyped-def]
        pass

    for size in reversed(TOKEN_TILES[1:]):
        tail = with_tail(size, tail)
    whole = runner(TILE)

    @jit
    def sweep(op, w, x, xd, y, ys, add, bias, n):  # type: ignore[no-untyped-def]
        t = 0
        while n - t >= TILE:
            whole(op, w, x, xd, y, ys, add, bias, t)
            t += TILE
        tail(op, w, x, xd, y, ys, add, bias, t, n)

    return sweep


def _linear(sweep: Any) -> Any:
    def linear(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        row, count = rows_of(op, step)
        pairs = ld_i64(op + 8 * LIN_PAIRS)
        weight_bytes = ld_i64(op + 8 * LIN_PAIR_BYTES)
        w = ld_i64(op + 8 * LIN_WEIGHTS)
        xs = ld_i64(op + 8 * LIN_X_STRIDE)
        xds = ld_i64(op + 8 * LIN_XD_STRIDE)
        ys = ld_i64(op + 8 * LIN_Y_STRIDE)
        add = ld_i64(op + 8 * LIN_ADD)
        bias = ld_i64(op + 8 * LIN_BIAS)
        block = ld_i64(op + 8 * LIN_TOKEN_BLOCK)
        for t in range(row, row + count, block):
            n = min(block, row + count - t)
            x = ld_i64(op + 8 * LIN_X) + t * xs
            xd = ld_i64(op + 8 * LIN_XD) + t * xds
            y = ld_i64(op + 8 * LIN_Y) + t * ys
            for pair in range(pairs * tid // n_threads, pairs * (tid + 1) // n_threads):
                at = pair * PAIR_BYTES
                b = bias + at if bias != 0 else 0
                sweep(op, w + pair * weight_bytes, x, xd, y + at, ys, add, b, n)

    return linear


@inline
def activate(v, activation):  # type: ignore[no-untyped-def]
    """silu or gelu_tanh of a vector: v * sigmoid(u), since (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    u = v
    if activation != ACT_SILU:
        cubic = vmul(vmul(v, v), vmul(v, vsplat(np.float32(0.044715))))
        u = vmul(vadd(v, cubic), vsplat(np.float32(1.5957691216057308)))  # 2 sqrt(2 / pi)
    e = vexp(vsub(vsplat(np.float32(0.0)), u))
    return vdiv(v, vadd(vsplat(np.float32(1.0)), e))


@inline
def activate_unit(op, scratch, row, unit):  # type: ignore[no-untyped-def]
    """32 outputs of one row from 64 products at ``scratch``: act(gate) * up, to int8 or to float32."""
    activation = ld_i64(op + 8 * LIN_ACTIVATION)
    y = ld_i64(op + 8 * LIN_Y) + row * ld_i64(op + 8 * LIN_Y_STRIDE)
    yd = ld_i64(op + 8 * LIN_YD)
    for i in range(0, BLOCK, VL):
        gate = vload(scratch + 8 * i)
        up = vload(scratch + 8 * i + 4 * VL)
        v = vmul(activate(gate, activation), up)
        # Without scales the output is float32; else it replaces products that have been read.
        vstore(y + 4 * (unit * BLOCK + i) if yd == 0 else scratch + 4 * i, v)
    if yd != 0:
        record = yd + row * ld_i64(op + 8 * LIN_YD_STRIDE) + unit * XD_BYTES
        quantise_block(scratch, y + unit * BLOCK, record)


def _gated(sweep: Any) -> Any:
    """Gate and up products of interleaved groups, activated and quantised while they are in the cache."""

    def gated(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        row, count = rows_of(op, step)
        units = ld_i64(op + 8 * LIN_PAIRS) // UNIT_PAIRS
        weight_bytes = ld_i64(op + 8 * LIN_PAIR_BYTES)
        w = ld_i64(op + 8 * LIN_WEIGHTS)
        xs = ld_i64(op + 8 * LIN_X_STRIDE)
        xds = ld_i64(op + 8 * LIN_XD_STRIDE)
        scratch = ld_i64(op + 8 * LIN_SCRATCH) + tid * ld_i64(op + 8 * LIN_SCRATCH_STRIDE)
        stride = 2 * BLOCK * 4
        block = ld_i64(op + 8 * LIN_TOKEN_BLOCK)
        for block_row in range(row, row + count, block):
            end = min(block_row + block, row + count)
            for unit in range(units * tid // n_threads, units * (tid + 1) // n_threads):
                for t in range(block_row, end, TILE):
                    n = min(TILE, end - t)
                    x = ld_i64(op + 8 * LIN_X) + t * xs
                    xd = ld_i64(op + 8 * LIN_XD) + t * xds
                    for k in range(UNIT_PAIRS):
                        pair = w + (unit * UNIT_PAIRS + k) * weight_bytes
                        sweep(op, pair, x, xd, scratch + k * PAIR_BYTES, stride, 0, 0, n)
                    for i in range(n):
                        activate_unit(op, scratch + i * stride, t + i, unit)

    return gated


def _kernels() -> dict[str, tuple[Any, int]]:
    kernels: dict[str, tuple[Any, int]] = {}
    for layout in ("q4", "q8", "q8m", "f32", "f16", "bf16"):
        family = quantised_tile if layout.startswith("q") else float_tile
        sweep = _sweep(lambda tokens, f=family, name=layout: f(name, tokens))
        kernels[f"linear_{layout}"] = (_linear(sweep), 4)
        kernels[f"gated_{layout}"] = (_gated(sweep), 4)
    return kernels


KERNELS = _kernels()
