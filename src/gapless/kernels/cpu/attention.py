"""Attention over a paged cache: rotation and cache writes, tiles of queries against splits of history, merges.

History is cut into splits at multiples of SPLIT_TOKENS positions. A row's split yields a maximum, a sum and an
accumulator by one sequence of operations, and splits are joined in order by one formula, wherever and by whomever
each was computed. Positions that a row does not see have the weight 0 exactly. So a row's result does not depend on
the tile, the chunk or the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    ATT_EPS,
    ATT_HEAD_BYTES,
    ATT_HEAD_DIM,
    ATT_HEADS,
    ATT_K_NORM,
    ATT_KV_HEADS,
    ATT_PAGE_BYTES,
    ATT_PARTIALS,
    ATT_POOL,
    ATT_Q,
    ATT_Q_NORM,
    ATT_Q_STRIDE,
    ATT_QKV,
    ATT_QKV_STRIDE,
    ATT_ROPE,
    ATT_ROPE_HALF,
    ATT_SCALE,
    ATT_SCRATCH,
    ATT_SCRATCH_STRIDE,
    ATT_SOFTCAP,
    ATT_WINDOW,
    ATT_Y,
    ATT_Y_STRIDE,
    KV_SLOTS,
    MERGE_HEAD,
    MERGE_PARTIAL,
    MERGE_ROW,
    MERGE_SPLITS,
    MERGE_WORDS,
    MERGES,
    N_MERGES,
    N_TOKENS,
    N_UNITS,
    PAGE_TOKENS,
    PARTIAL_HEAD_BYTES,
    POSITIONS,
    QUERY_ROWS,
    SPAN_PAGES,
    SPAN_ROW,
    SPAN_START,
    SPAN_WORDS,
    SPANS,
    SPLIT_TOKENS,
    UNIT_HEAD,
    UNIT_PARTIAL,
    UNIT_QUERIES,
    UNIT_QUERY,
    UNIT_SPAN,
    UNIT_SPLIT_HI,
    UNIT_SPLIT_LO,
    UNIT_WORDS,
    UNITS,
)
from gapless.kernels.cpu.attention_tiles import ELEMENT_BYTES, score_tile, value_tile
from gapless.kernels.cpu.mem import bits_f32, fma_f32, ld_f32, ld_i32, ld_i64, sqrt_f32, st_f32, st_i8
from gapless.kernels.cpu.vec import (
    VL,
    exp_f32,
    st_f16,
    vadd,
    vdiv,
    vexp,
    vfma,
    vgt_mask,
    vhmax,
    vhsum,
    viota,
    vload,
    vlt_i32_mask,
    vmax,
    vmul,
    vround,
    vselect,
    vsplat,
    vsplat_i32,
    vstore,
    vstore_f16,
    vstore_i8,
    vsub,
)

jit = njit(error_model="numpy", nogil=True)
inline = njit(error_model="numpy", nogil=True, inline="always")

NEG_INF = float("-inf")
SPLIT_PAGES = SPLIT_TOKENS // PAGE_TOKENS
SCORE_ROWS = 8 if VL == 16 else 4
VALUE_ROWS = 4 if VL == 16 else 2
VALUE_VECTORS = 4


@inline
def padded_dim(dim):  # type: ignore[no-untyped-def]
    return (dim + 15) // 16 * 16


# --- rotation and cache writes


@jit
def rotate_head(x, y, dim, norm, eps, rope, half):  # type: ignore[no-untyped-def]
    """One head from ``x`` to ``y``: its norm if ``norm`` is not 0, then the rotation of pairs (i, i + half)."""
    if norm != 0:
        total = vsplat(np.float32(0.0))
        whole = dim // VL * VL
        for i in range(0, whole, VL):
            total = vfma(vload(x + 4 * i), vload(x + 4 * i), total)
        squares = vhsum(total)
        for i in range(whole, dim):
            squares = fma_f32(ld_f32(x + 4 * i), ld_f32(x + 4 * i), squares)
        factor = np.float32(1.0) / sqrt_f32(squares / np.float32(dim) + eps)
        for i in range(dim):
            st_f32(y + 4 * i, ld_f32(x + 4 * i) * factor * ld_f32(norm + 4 * i))
        x = y
    for i in range(2 * half, dim):
        st_f32(y + 4 * i, ld_f32(x + 4 * i))
    whole = half // VL * VL
    for i in range(0, whole, VL):
        a = vload(x + 4 * i)
        b = vload(x + 4 * (i + half))
        cos = vload(rope + 4 * i)
        sin = vload(rope + 4 * (i + half))
        vstore(y + 4 * i, vsub(vmul(a, cos), vmul(b, sin)))
        vstore(y + 4 * (i + half), vfma(b, cos, vmul(a, sin)))
    for i in range(whole, half):
        u = ld_f32(x + 4 * i)
        v = ld_f32(x + 4 * (i + half))
        c = ld_f32(rope + 4 * i)
        s = ld_f32(rope + 4 * (i + half))
        st_f32(y + 4 * i, u * c - v * s)
        st_f32(y + 4 * (i + half), fma_f32(v, c, u * s))


@jit
def int8_scale(x, dim):  # type: ignore[no-untyped-def]
    """The largest magnitude of a zero-padded head over 127."""
    top = np.float32(0.0)
    for i in range(dim):
        top = max(top, abs(ld_f32(x + 4 * i)))
    return top * np.float32(1.0 / 127.0)


def _rope_cache(kind: str) -> Any:
    size = ELEMENT_BYTES[kind]

    @jit
    def store_key(x, dim, keys, scales, offset):  # type: ignore[no-untyped-def]
        """A column of the page's [dim][token] keys."""
        inverse = np.float32(1.0)
        if kind == "i8":
            scale = int8_scale(x, dim)
            st_f32(scales + 4 * offset, scale)
            inverse = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
        for i in range(dim):
            at = keys + (i * PAGE_TOKENS + offset) * size
            value = ld_f32(x + 4 * i)
            if kind == "f32":
                st_f32(at, value)
            elif kind == "f16":
                st_f16(at, value)
            else:
                st_i8(at, np.int64(np.rint(value * inverse)))

    @jit
    def store_value(x, dim, values, scales, offset):  # type: ignore[no-untyped-def]
        """A row of the page's [token][dim] values; ``x`` is padded with zeros to 16."""
        row = values + offset * padded_dim(dim) * size
        inverse = vsplat(np.float32(1.0))
        if kind == "i8":
            scale = int8_scale(x, dim)
            st_f32(scales + 4 * offset, scale)
            inverse = vsplat(np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0))
        for i in range(0, padded_dim(dim), VL):
            v = vload(x + 4 * i)
            if kind == "f32":
                vstore(row + 4 * i, v)
            elif kind == "f16":
                vstore_f16(row + 2 * i, v)
            else:
                vstore_i8(row + i, vround(vmul(v, inverse)))

    def rope_cache(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        """Threads share the heads of all tokens: queries, then keys, then values of each."""
        heads = ld_i64(op + 8 * ATT_HEADS)
        kv_heads = ld_i64(op + 8 * ATT_KV_HEADS)
        dim = ld_i64(op + 8 * ATT_HEAD_DIM)
        dim_bytes = padded_dim(dim) * PAGE_TOKENS * size
        half = ld_i64(op + 8 * ATT_ROPE_HALF)
        eps = bits_f32(ld_i64(op + 8 * ATT_EPS))
        scratch = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
        per_token = heads + 2 * kv_heads
        items = ld_i64(step + 8 * N_TOKENS) * per_token
        for i in range(dim, padded_dim(dim)):
            st_f32(scratch + 4 * i, np.float32(0.0))
        for item in range(items * tid // n_threads, items * (tid + 1) // n_threads):
            t = item // per_token
            head = item % per_token
            x = ld_i64(op + 8 * ATT_QKV) + t * ld_i64(op + 8 * ATT_QKV_STRIDE) + head * dim * 4
            rope = ld_i64(op + 8 * ATT_ROPE) + ld_i32(ld_i64(step + 8 * POSITIONS) + 4 * t) * half * 8
            if head < heads:
                y = ld_i64(op + 8 * ATT_Q) + t * ld_i64(op + 8 * ATT_Q_STRIDE) + head * dim * 4
                rotate_head(x, y, dim, ld_i64(op + 8 * ATT_Q_NORM), eps, rope, half)
                continue
            slot = ld_i64(ld_i64(step + 8 * KV_SLOTS) + 8 * t)
            kv_head = (head - heads) % kv_heads
            page = ld_i64(op + 8 * ATT_POOL) + slot // PAGE_TOKENS * ld_i64(op + 8 * ATT_PAGE_BYTES)
            keys = page + kv_head * ld_i64(op + 8 * ATT_HEAD_BYTES)
            scales = keys + 2 * dim_bytes
            if head < heads + kv_heads:
                rotate_head(x, scratch, dim, ld_i64(op + 8 * ATT_K_NORM), eps, rope, half)
                store_key(scratch, dim, keys, scales, slot % PAGE_TOKENS)
            else:
                for i in range(dim):
                    st_f32(scratch + 4 * i, ld_f32(x + 4 * i))
                store_value(scratch, dim, keys + dim_bytes, scales + 4 * PAGE_TOKENS, slot % PAGE_TOKENS)

    return rope_cache


# --- a split of history against a tile of rows


@jit
def cap_scores(s, n, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(s / cap) of ``n`` scores: tanh(z) = 1 - 2 / (1 + e^2z)."""
    one = vsplat(np.float32(1.0))
    two = vsplat(np.float32(2.0))
    factor = vsplat(np.float32(2.0) / cap)
    for i in range(0, n, VL):
        e = vexp(vmul(vload(s + 4 * i), factor))
        vstore(s + 4 * i, vmul(vsplat(cap), vsub(one, vdiv(two, vadd(one, e)))))


@jit
def soften(s, n, low, high, state):  # type: ignore[no-untyped-def]
    """Scores to weights exp(s - max), 0 outside of [low, high); writes max and sum to ``state``.

    ``n`` scores count from the split's start, as the bounds do; a row that sees none has the max -inf.
    """
    lowest = vsplat_i32(low - 1)
    end = vsplat_i32(high)
    masked = vsplat(np.float32(NEG_INF))
    top = masked
    for i in range(0, n, VL):
        at = viota(i)
        v = vload(s + 4 * i)
        v = vselect(vlt_i32_mask(lowest, at), v, masked)
        v = vselect(vlt_i32_mask(at, end), v, masked)
        vstore(s + 4 * i, v)
        top = vmax(v, top)
    largest = vhmax(top)
    st_f32(state, largest)
    if largest == np.float32(NEG_INF):
        for i in range(0, n, VL):
            vstore(s + 4 * i, vsplat(np.float32(0.0)))
        st_f32(state + 4, np.float32(0.0))
        return
    vm = vsplat(largest)
    total = vsplat(np.float32(0.0))
    for i in range(0, n, VL):
        w = vexp(vsub(vload(s + 4 * i), vm))
        vstore(s + 4 * i, w)
        total = vadd(total, w)
    st_f32(state + 4, vhsum(total))


@jit
def join(state, acc, part_state, part, dim, first):  # type: ignore[no-untyped-def]
    """Join one split's max, sum and accumulator to the running ones. ``first``: nothing has been joined yet."""
    m = ld_f32(part_state)
    if m == np.float32(NEG_INF):
        return first
    if first:
        st_f32(state, m)
        st_f32(state + 4, ld_f32(part_state + 4))
        for i in range(0, dim, VL):
            vstore(acc + 4 * i, vload(part + 4 * i))
        return False
    before = ld_f32(state)
    top = max(before, m)
    a = exp_f32(before - top)
    b = exp_f32(m - top)
    st_f32(state, top)
    st_f32(state + 4, fma_f32(ld_f32(state + 4), a, ld_f32(part_state + 4) * b))
    va = vsplat(a)
    vb = vsplat(b)
    for i in range(0, dim, VL):
        vstore(acc + 4 * i, vfma(vload(acc + 4 * i), va, vmul(vload(part + 4 * i), vb)))
    return False


@jit
def write_row(state, acc, y, dim):  # type: ignore[no-untyped-def]
    """The accumulator over the sum of weights: ``dim`` floats."""
    inverse = np.float32(1.0) / ld_f32(state + 4)
    whole = dim // VL * VL
    for i in range(0, whole, VL):
        vstore(y + 4 * i, vmul(vload(acc + 4 * i), vsplat(inverse)))
    for i in range(whole, dim):
        st_f32(y + 4 * i, ld_f32(acc + 4 * i) * inverse)


STATE_BYTES = 8


def _attention(kind: str) -> Any:
    size = ELEMENT_BYTES[kind]
    score_many_2 = score_tile(kind, SCORE_ROWS, 2)
    score_many_1 = score_tile(kind, SCORE_ROWS, 1)
    score_three_2 = score_tile(kind, 3, 2)
    score_one_2 = score_tile(kind, 1, 2)
    score_one_1 = score_tile(kind, 1, 1)
    value_many = value_tile(kind, VALUE_ROWS, VALUE_VECTORS)
    value_one = value_tile(kind, 1, VALUE_VECTORS)
    value_many_1 = value_tile(kind, VALUE_ROWS, 1)
    value_one_1 = value_tile(kind, 1, 1)

    @jit
    def score_pages(q, n_rows, dim, k0, k1, two, out):  # type: ignore[no-untyped-def]
        """Dot products of all rows with the keys of one page or two."""
        qs = dim * 4
        outs = SPLIT_TOKENS * 4
        r = 0
        while n_rows - r >= SCORE_ROWS:
            if two:
                score_many_2(q + r * qs, qs, k0, k1, dim, out + r * outs, outs)
            else:
                score_many_1(q + r * qs, qs, k0, k1, dim, out + r * outs, outs)
            r += SCORE_ROWS
        while two and n_rows - r >= 3:
            score_three_2(q + r * qs, qs, k0, k1, dim, out + r * outs, outs)
            r += 3
        while r < n_rows:
            if two:
                score_one_2(q + r * qs, qs, k0, k1, dim, out + r * outs, outs)
            else:
                score_one_1(q + r * qs, qs, k0, k1, dim, out + r * outs, outs)
            r += 1

    @jit
    def mix_page(p, n_rows, values, dim, acc, n):  # type: ignore[no-untyped-def]
        """acc += weights of ``n`` positions times their values."""
        ps = SPLIT_TOKENS * 4
        accs = dim * 4
        step = VALUE_VECTORS * VL
        for r in range(0, n_rows - VALUE_ROWS + 1, VALUE_ROWS):
            d = 0
            while dim - d >= step:
                value_many(p + r * ps, ps, values + d * size, dim, acc + r * accs + 4 * d, accs, n)
                d += step
            while d < dim:
                value_many_1(p + r * ps, ps, values + d * size, dim, acc + r * accs + 4 * d, accs, n)
                d += VL
        for r in range(n_rows // VALUE_ROWS * VALUE_ROWS, n_rows):
            d = 0
            while dim - d >= step:
                value_one(p + r * ps, ps, values + d * size, dim, acc + r * accs + 4 * d, accs, n)
                d += step
            while d < dim:
                value_one_1(p + r * ps, ps, values + d * size, dim, acc + r * accs + 4 * d, accs, n)
                d += VL

    @jit
    def scale_columns(s, n_rows, scales):  # type: ignore[no-untyped-def]
        """Multiply 16 columns of all rows by the scales of an int8 page."""
        for i in range(0, PAGE_TOKENS, VL):
            v = vload(scales + 4 * i)
            for r in range(n_rows):
                at = s + r * SPLIT_TOKENS * 4 + 4 * i
                vstore(at, vmul(vload(at), v))

    @jit
    def split_rows(op, pages, head, split, end, q, n_rows, group, position, s, states, acc):  # type: ignore[no-untyped-def]
        """One split for rows of consecutive queries from ``position`` on; ``end``: first position that none sees."""
        dim = padded_dim(ld_i64(op + 8 * ATT_HEAD_DIM))
        dim_bytes = dim * PAGE_TOKENS * size
        pool = ld_i64(op + 8 * ATT_POOL) + head * ld_i64(op + 8 * ATT_HEAD_BYTES)
        page_bytes = ld_i64(op + 8 * ATT_PAGE_BYTES)
        start = split * SPLIT_TOKENS
        n_pages = (min(end - start, SPLIT_TOKENS) + PAGE_TOKENS - 1) // PAGE_TOKENS
        pages += split * SPLIT_PAGES * 4
        for page in range(0, n_pages, 2):
            two = page + 1 < n_pages
            k0 = pool + ld_i32(pages + 4 * page) * page_bytes
            k1 = pool + ld_i32(pages + 4 * page + 4) * page_bytes if two else k0
            out = s + page * PAGE_TOKENS * 4
            score_pages(q, n_rows, dim, k0, k1, two, out)
            if kind == "i8":
                scale_columns(out, n_rows, k0 + 2 * dim_bytes)
                if two:
                    scale_columns(out + PAGE_TOKENS * 4, n_rows, k1 + 2 * dim_bytes)
        cap = bits_f32(ld_i64(op + 8 * ATT_SOFTCAP))
        window = ld_i64(op + 8 * ATT_WINDOW)
        for r in range(n_rows):
            row = s + r * SPLIT_TOKENS * 4
            if cap != np.float32(0.0):
                cap_scores(row, n_pages * PAGE_TOKENS, cap)
            seen_to = position + r // group + 1
            seen_from = max(seen_to - window, 0) if window != 0 else 0
            soften(row, n_pages * PAGE_TOKENS, seen_from - start, seen_to - start, states + r * STATE_BYTES)
        for i in range(0, n_rows * dim, VL):
            vstore(acc + 4 * i, vsplat(np.float32(0.0)))
        for page in range(n_pages):
            block = pool + ld_i32(pages + 4 * page) * page_bytes
            weights = s + page * PAGE_TOKENS * 4
            if kind == "i8":
                scale_columns(weights, n_rows, block + 2 * dim_bytes + 4 * PAGE_TOKENS)
            n = min(end - start - page * PAGE_TOKENS, PAGE_TOKENS)
            mix_page(weights, n_rows, block + dim_bytes, dim, acc, n)

    @jit
    def gather_queries(op, row, head, n_rows, group, q):  # type: ignore[no-untyped-def]
        """Rows (query, head of the group), padded and scaled."""
        dim = ld_i64(op + 8 * ATT_HEAD_DIM)
        scale = bits_f32(ld_i64(op + 8 * ATT_SCALE))
        for r in range(n_rows):
            x = ld_i64(op + 8 * ATT_Q) + (row + r // group) * ld_i64(op + 8 * ATT_Q_STRIDE)
            x += (head * group + r % group) * dim * 4
            y = q + r * padded_dim(dim) * 4
            for i in range(dim):
                st_f32(y + 4 * i, ld_f32(x + 4 * i) * scale)
            for i in range(dim, padded_dim(dim)):
                st_f32(y + 4 * i, np.float32(0.0))

    @jit
    def unit_rows(op, step, unit, scratch):  # type: ignore[no-untyped-def]
        span = ld_i64(step + 8 * SPANS) + ld_i64(unit + 8 * UNIT_SPAN) * SPAN_WORDS * 8
        head = ld_i64(unit + 8 * UNIT_HEAD)
        query = ld_i64(unit + 8 * UNIT_QUERY)
        group = ld_i64(op + 8 * ATT_HEADS) // ld_i64(op + 8 * ATT_KV_HEADS)
        n_rows = ld_i64(unit + 8 * UNIT_QUERIES) * group
        dim = padded_dim(ld_i64(op + 8 * ATT_HEAD_DIM))
        row = ld_i64(span + 8 * SPAN_ROW) + query
        position = ld_i64(span + 8 * SPAN_START) + query
        end = position + ld_i64(unit + 8 * UNIT_QUERIES)
        window = ld_i64(op + 8 * ATT_WINDOW)
        first_seen = max(position + 1 - window, 0) // SPLIT_TOKENS if window != 0 else 0
        partial = ld_i64(unit + 8 * UNIT_PARTIAL)
        capacity = max(QUERY_ROWS, group)
        q = scratch
        s = q + capacity * dim * 4
        part = s + capacity * SPLIT_TOKENS * 4
        acc = part + capacity * dim * 4
        part_states = acc + capacity * dim * 4
        states = part_states + capacity * STATE_BYTES
        gather_queries(op, row, head, n_rows, group, q)
        pages = ld_i64(span + 8 * SPAN_PAGES)
        lo = ld_i64(unit + 8 * UNIT_SPLIT_LO)
        fresh = True
        for r in range(n_rows):
            st_f32(states + r * STATE_BYTES, np.float32(NEG_INF))
        for split in range(lo, ld_i64(unit + 8 * UNIT_SPLIT_HI)):
            hidden = split < first_seen
            if partial < 0 and hidden:
                continue
            if hidden:
                for r in range(n_rows):
                    st_f32(part_states + r * STATE_BYTES, np.float32(NEG_INF))
            else:
                split_rows(op, pages, head, split, end, q, n_rows, group, position, s, part_states, part)
            if partial < 0:
                for r in range(n_rows):
                    state = states + r * STATE_BYTES
                    fresh = ld_f32(state) == np.float32(NEG_INF)
                    join(state, acc + r * dim * 4, part_states + r * STATE_BYTES, part + r * dim * 4, dim, fresh)
            else:
                stride = PARTIAL_HEAD_BYTES + dim * 4
                for r in range(n_rows):
                    out = ld_i64(op + 8 * ATT_PARTIALS) + (partial + (split - lo) * n_rows + r) * stride
                    st_f32(out, ld_f32(part_states + r * STATE_BYTES))
                    st_f32(out + 4, ld_f32(part_states + r * STATE_BYTES + 4))
                    for i in range(0, dim, VL):
                        vstore(out + PARTIAL_HEAD_BYTES + 4 * i, vload(part + (r * dim + i) * 4))
        if partial < 0:
            true_dim = ld_i64(op + 8 * ATT_HEAD_DIM)
            for r in range(n_rows):
                y = ld_i64(op + 8 * ATT_Y) + (row + r // group) * ld_i64(op + 8 * ATT_Y_STRIDE)
                y += (head * group + r % group) * true_dim * 4
                write_row(states + r * STATE_BYTES, acc + r * dim * 4, y, true_dim)

    def attention(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        """Units are dealt to the threads in turn: neighbours cost about the same."""
        scratch = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
        units = ld_i64(step + 8 * UNITS)
        for unit in range(tid, ld_i64(step + 8 * N_UNITS), n_threads):
            unit_rows(op, step, units + unit * UNIT_WORDS * 8, scratch)

    return attention


def attention_merge(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Join the splits of rows whose history was shared out."""
    group = ld_i64(op + 8 * ATT_HEADS) // ld_i64(op + 8 * ATT_KV_HEADS)
    true_dim = ld_i64(op + 8 * ATT_HEAD_DIM)
    dim = padded_dim(true_dim)
    stride = PARTIAL_HEAD_BYTES + dim * 4
    state = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
    acc = state + PARTIAL_HEAD_BYTES
    items = ld_i64(step + 8 * N_MERGES) * group
    for item in range(items * tid // n_threads, items * (tid + 1) // n_threads):
        merge = ld_i64(step + 8 * MERGES) + item // group * MERGE_WORDS * 8
        first = ld_i64(op + 8 * ATT_PARTIALS) + (ld_i64(merge + 8 * MERGE_PARTIAL) + item % group) * stride
        fresh = True
        for split in range(ld_i64(merge + 8 * MERGE_SPLITS)):
            part = first + split * group * stride
            fresh = join(state, acc, part, part + PARTIAL_HEAD_BYTES, dim, fresh)
        y = ld_i64(op + 8 * ATT_Y) + ld_i64(merge + 8 * MERGE_ROW) * ld_i64(op + 8 * ATT_Y_STRIDE)
        write_row(state, acc, y + (ld_i64(merge + 8 * MERGE_HEAD) * group + item % group) * true_dim * 4, true_dim)


KERNELS: dict[str, tuple[Any, int]] = {"attention_merge": (attention_merge, 4)}
for _kind in ELEMENT_BYTES:
    KERNELS[f"rope_cache_{_kind}"] = (_rope_cache(_kind), 4)
    KERNELS[f"attention_{_kind}"] = (_attention(_kind), 4)
