"""Routed experts: which rows go where. The products themselves are those of ``linear`` over ranges of rows.

``route`` gives each token its experts and their shares; ``dispatch`` sorts the (token, rank) pairs by expert into
one run of rows, ``top_k`` for each token of the step; ``gather`` copies activations to those rows. The products of an
expert take its part of them: their ``OP_ROWS`` is the address of the expert's pair (first row, count) in
``MOE_RANGES``, which ``dispatch`` writes in each step, so an expert without tokens costs a look at its count.
``combine`` brings the outputs back to their tokens.

A token's experts are chosen from its own scores and its outputs are summed by rank, so what else is in the step
changes nothing but the place of its rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    MOE_BYTES,
    MOE_EXPERTS,
    MOE_IDS,
    MOE_PLACES,
    MOE_RANGES,
    MOE_RENORMALIZE,
    MOE_SCORES,
    MOE_SCORES_STRIDE,
    MOE_SHARES,
    MOE_TOKENS,
    MOE_TOP_K,
    MOE_X,
    MOE_X_STRIDE,
    MOE_XD,
    MOE_XD_STRIDE,
    MOE_Y,
    MOE_Y_STRIDE,
    MOE_YD,
    MOE_YD_BYTES,
    MOE_YD_STRIDE,
    N_TOKENS,
)
from gapless.kernels.cpu.mem import ld_f32, ld_i32, ld_i64, st_f32, st_i32, st_i64
from gapless.kernels.cpu.vec import VL, vexp, vfma, vload, vmul, vsplat, vstore, vsub

jit = njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@jit
def choose_experts(scores, n, top_k, renormalize, ids, shares):  # type: ignore[no-untyped-def]
    """The ``top_k`` largest of ``n`` scores by rank, the lower id first among equals, with their softmax.

    The scores' row is overwritten, whole vectors of it.
    """
    largest = ld_f32(scores)
    for e in range(1, n):
        largest = max(largest, ld_f32(scores + 4 * e))
    for e in range(0, n, VL):
        vstore(scores + 4 * e, vexp(vsub(vload(scores + 4 * e), vsplat(largest))))
    total = np.float32(0.0)
    for e in range(n):
        total += ld_f32(scores + 4 * e)
    chosen = np.float32(0.0)
    for rank in range(top_k):
        best = 0
        for e in range(1, n):
            if ld_f32(scores + 4 * e) > ld_f32(scores + 4 * best):
                best = e
        share = ld_f32(scores + 4 * best) / total
        st_i32(ids + 4 * rank, best)
        st_f32(shares + 4 * rank, share)
        st_f32(scores + 4 * best, np.float32(-1.0))
        chosen += share
    if renormalize != 0:
        for rank in range(top_k):
            st_f32(shares + 4 * rank, ld_f32(shares + 4 * rank) / chosen)


def route(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Each token's experts and their shares."""
    count = ld_i64(step + 8 * N_TOKENS)
    top_k = ld_i64(op + 8 * MOE_TOP_K)
    for t in range(count * tid // n_threads, count * (tid + 1) // n_threads):
        choose_experts(
            ld_i64(op + 8 * MOE_SCORES) + t * ld_i64(op + 8 * MOE_SCORES_STRIDE),
            ld_i64(op + 8 * MOE_EXPERTS),
            top_k,
            ld_i64(op + 8 * MOE_RENORMALIZE),
            ld_i64(op + 8 * MOE_IDS) + 4 * t * top_k,
            ld_i64(op + 8 * MOE_SHARES) + 4 * t * top_k,
        )


def dispatch(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Rows by expert, then by token: a counting sort by the first thread."""
    if tid != 0:
        return
    n_rows = ld_i64(step + 8 * N_TOKENS) * ld_i64(op + 8 * MOE_TOP_K)
    n_experts = ld_i64(op + 8 * MOE_EXPERTS)
    ids = ld_i64(op + 8 * MOE_IDS)
    ranges = ld_i64(op + 8 * MOE_RANGES)
    for e in range(n_experts):
        st_i64(ranges + 16 * e + 8, 0)
    for i in range(n_rows):
        count = ranges + 16 * ld_i32(ids + 4 * i) + 8
        st_i64(count, ld_i64(count) + 1)
    first = 0
    for e in range(n_experts):
        st_i64(ranges + 16 * e, first)
        first += ld_i64(ranges + 16 * e + 8)
        st_i64(ranges + 16 * e + 8, 0)
    for i in range(n_rows):
        own = ranges + 16 * ld_i32(ids + 4 * i)
        row = ld_i64(own) + ld_i64(own + 8)
        st_i64(own + 8, ld_i64(own + 8) + 1)
        st_i32(ld_i64(op + 8 * MOE_PLACES) + 4 * i, row)
        st_i32(ld_i64(op + 8 * MOE_TOKENS) + 4 * row, i // ld_i64(op + 8 * MOE_TOP_K))
    st_i64(ranges + 16 * n_experts, 0)
    st_i64(ranges + 16 * n_experts + 8, n_rows)


@jit
def copy_words(source, target, n_bytes):  # type: ignore[no-untyped-def]
    for i in range(0, n_bytes, 8):
        st_i64(target + i, ld_i64(source + i))


def gather(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Copy each token's activations to its rows."""
    n_rows = ld_i64(step + 8 * N_TOKENS) * ld_i64(op + 8 * MOE_TOP_K)
    scales = ld_i64(op + 8 * MOE_XD)
    for row in range(n_rows * tid // n_threads, n_rows * (tid + 1) // n_threads):
        t = ld_i32(ld_i64(op + 8 * MOE_TOKENS) + 4 * row)
        x = ld_i64(op + 8 * MOE_X) + t * ld_i64(op + 8 * MOE_X_STRIDE)
        copy_words(x, ld_i64(op + 8 * MOE_Y) + row * ld_i64(op + 8 * MOE_Y_STRIDE), ld_i64(op + 8 * MOE_BYTES))
        if scales != 0:
            y = ld_i64(op + 8 * MOE_YD) + row * ld_i64(op + 8 * MOE_YD_STRIDE)
            copy_words(scales + t * ld_i64(op + 8 * MOE_XD_STRIDE), y, ld_i64(op + 8 * MOE_YD_BYTES))


def combine(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Sum the outputs of each token's experts by their shares, in the order of the ranks."""
    count = ld_i64(step + 8 * N_TOKENS)
    top_k = ld_i64(op + 8 * MOE_TOP_K)
    stride = ld_i64(op + 8 * MOE_X_STRIDE)
    for t in range(count * tid // n_threads, count * (tid + 1) // n_threads):
        y = ld_i64(op + 8 * MOE_Y) + t * ld_i64(op + 8 * MOE_Y_STRIDE)
        for rank in range(top_k):
            x = ld_i64(op + 8 * MOE_X) + ld_i32(ld_i64(op + 8 * MOE_PLACES) + 4 * (t * top_k + rank)) * stride
            share = vsplat(ld_f32(ld_i64(op + 8 * MOE_SHARES) + 4 * (t * top_k + rank)))
            for i in range(0, ld_i64(op + 8 * MOE_BYTES) // 4, VL):
                v = vload(x + 4 * i)
                vstore(y + 4 * i, vmul(v, share) if rank == 0 else vfma(v, share, vload(y + 4 * i)))


KERNELS = {name.__name__: (name, 4) for name in (route, dispatch, gather, combine)}
