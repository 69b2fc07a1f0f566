"""Attention over a paged cache: tiles of queries against splits of history, and merges of splits.

History is cut into splits at multiples of SPLIT_TOKENS positions. A row's split yields a maximum, a sum and an
accumulator by one sequence of operations, and splits are joined in order by one formula, wherever and by whomever
each was computed. Positions that a row does not see have the weight 0 exactly. So a row's result does not depend on
the tile, the chunk or the threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gapless.kernels.cpu.abi import (
    AHEAD_PAGES,
    ATT_HEAD_BYTES,
    ATT_HEAD_DIM,
    ATT_HEADS,
    ATT_KV_HEADS,
    ATT_PAGE_BYTES,
    ATT_PARTIALS,
    ATT_POOL,
    ATT_Q,
    ATT_Q_STRIDE,
    ATT_SCALE,
    ATT_SCRATCH,
    ATT_SCRATCH_STRIDE,
    ATT_SOFTCAP,
    ATT_WINDOW,
    ATT_Y,
    ATT_Y_STRIDE,
    MERGE_HEAD,
    MERGE_PARTIAL,
    MERGE_ROW,
    MERGE_SPLITS,
    MERGE_WORDS,
    MERGES,
    N_MERGES,
    N_UNITS,
    PAGE_TOKENS,
    PARTIAL_HEAD_BYTES,
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
from gapless.kernels.cpu.attention_rows import (
    LOG2_E,
    STATE_BYTES,
    cap_scores,
    clear,
    clear_state,
    join,
    scale_row,
    soften,
    write_row,
)
from gapless.kernels.cpu.attention_tiles import (
    ELEMENT_BYTES,
    SCORE_PAGES,
    SCORE_ROWS,
    score_rows,
    score_tile,
    value_rows,
    value_tile,
    value_vectors,
    widen,
)
from gapless.kernels.cpu.mem import bits_f32, ld_f32, ld_i32, ld_i64, st_f32, st_i64
from gapless.kernels.cpu.rope import KERNELS as ROPE_KERNELS
from gapless.kernels.cpu.vec import VL, vload, vmul, vstore

jit = njit(error_model="numpy", nogil=True)
inline = njit(error_model="numpy", nogil=True, inline="always")

SPLIT_PAGES = SPLIT_TOKENS // PAGE_TOKENS
SCORE_BYTES = SPLIT_TOKENS * 4  # of a row
WIDEN_ROWS = SCORE_ROWS[0]  # with more rows than this a page is widened once, for all of them


class History(NamedTuple):
    """The cached pages of one KV head that a unit reads: pages ``first .. end`` of its span."""

    pool: int  # address of the head in page 0
    page_bytes: int
    pages: int  # address of int32[]
    first: int
    end: int


class Tile(NamedTuple):
    """Rows of a unit: consecutive queries, each with the heads of a group."""

    row: int  # of the first query in the step
    head: int  # KV head
    position: int  # of the first query
    queries: int
    group: int
    dim: int  # padded


class Scratch(NamedTuple):
    """Addresses in one thread's scratch, each for all rows of a unit."""

    q: int
    scores: int
    wide: int  # keys or values of two pages in float32
    acc: int
    states: int
    part: int  # accumulators and states of one split
    part_states: int
    ahead: int  # addresses of the blocks whose lines are fetched


@inline
def padded_dim(op):  # type: ignore[no-untyped-def]
    return (ld_i64(op + 8 * ATT_HEAD_DIM) + 15) // 16 * 16


@inline
def group_of(op):  # type: ignore[no-untyped-def]
    return ld_i64(op + 8 * ATT_HEADS) // ld_i64(op + 8 * ATT_KV_HEADS)


@inline
def page_at(history, page):  # type: ignore[no-untyped-def]
    return history.pool + ld_i32(history.pages + 4 * page) * history.page_bytes


@jit
def look_ahead(history, page, end, within, ahead):  # type: ignore[no-untyped-def]
    """Write down where the blocks to be fetched lie: byte ``within`` of the pages from ``page`` on, before ``end``."""
    for i in range(AHEAD_PAGES):
        st_i64(ahead + 8 * i, page_at(history, min(page + i, end - 1)) + within)


@jit
def tile_of(op, step, unit):  # type: ignore[no-untyped-def]
    span = ld_i64(step + 8 * SPANS) + ld_i64(unit + 8 * UNIT_SPAN) * SPAN_WORDS * 8
    query = ld_i64(unit + 8 * UNIT_QUERY)
    row = ld_i64(span + 8 * SPAN_ROW) + query
    position = ld_i64(span + 8 * SPAN_START) + query
    queries = ld_i64(unit + 8 * UNIT_QUERIES)
    return Tile(row, ld_i64(unit + 8 * UNIT_HEAD), position, queries, group_of(op), padded_dim(op))


@jit
def history_of(op, step, unit):  # type: ignore[no-untyped-def]
    """What the unit's queries see of its splits, in whole splits from below and to the last position from above."""
    span = ld_i64(step + 8 * SPANS) + ld_i64(unit + 8 * UNIT_SPAN) * SPAN_WORDS * 8
    position = ld_i64(span + 8 * SPAN_START) + ld_i64(unit + 8 * UNIT_QUERY)
    end = min(position + ld_i64(unit + 8 * UNIT_QUERIES), ld_i64(unit + 8 * UNIT_SPLIT_HI) * SPLIT_TOKENS)
    window = ld_i64(op + 8 * ATT_WINDOW)
    seen = max(position + 1 - window, 0) // SPLIT_TOKENS if window != 0 else 0
    first = max(ld_i64(unit + 8 * UNIT_SPLIT_LO), seen) * SPLIT_PAGES
    pool = ld_i64(op + 8 * ATT_POOL) + ld_i64(unit + 8 * UNIT_HEAD) * ld_i64(op + 8 * ATT_HEAD_BYTES)
    pages = ld_i64(span + 8 * SPAN_PAGES)
    return History(pool, ld_i64(op + 8 * ATT_PAGE_BYTES), pages, first, (end + PAGE_TOKENS - 1) // PAGE_TOKENS)


@jit
def scratch_of(op, tid):  # type: ignore[no-untyped-def]
    """As ``kv.scratch_bytes`` counts it."""
    rows = max(QUERY_ROWS, group_of(op))
    row_bytes = padded_dim(op) * 4
    q = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
    scores = q + rows * row_bytes
    wide = scores + rows * SCORE_BYTES
    acc = wide + 2 * PAGE_TOKENS * row_bytes
    part = acc + rows * row_bytes
    states = part + rows * row_bytes
    part_states = states + rows * STATE_BYTES
    return Scratch(q, scores, wide, acc, states, part, part_states, part_states + rows * STATE_BYTES)


@jit
def gather_queries(op, tile, q):  # type: ignore[no-untyped-def]
    """Rows (query, head of the group), padded and scaled: scores shall be in units of ln 2 unless a cap comes first."""
    dim = ld_i64(op + 8 * ATT_HEAD_DIM)
    scale = bits_f32(ld_i64(op + 8 * ATT_SCALE))
    if bits_f32(ld_i64(op + 8 * ATT_SOFTCAP)) == np.float32(0.0):
        scale *= np.float32(LOG2_E)
    for i in range(tile.queries):
        x = ld_i64(op + 8 * ATT_Q) + (tile.row + i) * ld_i64(op + 8 * ATT_Q_STRIDE) + tile.head * tile.group * dim * 4
        for g in range(tile.group):
            scale_row(x + g * dim * 4, q, dim, tile.dim, scale)
            q += tile.dim * 4


@jit
def soften_rows(op, tile, split, n, s, states):  # type: ignore[no-untyped-def]
    """The scores of ``n`` positions of a split to weights, for each row what it sees."""
    cap = bits_f32(ld_i64(op + 8 * ATT_SOFTCAP))
    window = ld_i64(op + 8 * ATT_WINDOW)
    for i in range(tile.queries):
        seen_to = tile.position + i + 1 - split * SPLIT_TOKENS
        seen_from = seen_to - window if window != 0 else 0
        for _ in range(tile.group):
            if cap != np.float32(0.0):
                cap_scores(s, n, cap)
            soften(s, n, seen_from, seen_to, states)
            s += SCORE_BYTES
            states += STATE_BYTES


@jit
def scale_columns(s, n_rows, scales):  # type: ignore[no-untyped-def]
    """Multiply 16 columns of all rows by the scales of an int8 page."""
    for i in range(0, PAGE_TOKENS, VL):
        v = vload(scales + 4 * i)
        for r in range(n_rows):
            at = s + r * SCORE_BYTES + 4 * i
            vstore(at, vmul(vload(at), v))


@jit
def write_tile(op, tile, states, acc):  # type: ignore[no-untyped-def]
    dim = ld_i64(op + 8 * ATT_HEAD_DIM)
    for i in range(tile.queries):
        y = ld_i64(op + 8 * ATT_Y) + (tile.row + i) * ld_i64(op + 8 * ATT_Y_STRIDE) + tile.head * tile.group * dim * 4
        for g in range(tile.group):
            write_row(states, acc, y + g * dim * 4, dim)
            states += STATE_BYTES
            acc += tile.dim * 4


@jit
def write_partial(op, partial, state, acc, dim):  # type: ignore[no-untyped-def]
    out = ld_i64(op + 8 * ATT_PARTIALS) + partial * (PARTIAL_HEAD_BYTES + dim * 4)
    st_f32(out, ld_f32(state))
    st_f32(out + 4, ld_f32(state + 4))
    for i in range(0, dim, VL):
        vstore(out + PARTIAL_HEAD_BYTES + 4 * i, vload(acc + 4 * i))


def _products(kind: str, *, fetch: bool) -> tuple[Any, Any]:
    """Products of all rows with the keys of one page or two, and with values side by side."""
    size = ELEMENT_BYTES[kind]
    two_pages = score_tile(kind, SCORE_PAGES, fetch=fetch)
    one_page = score_tile(kind, 1, fetch=fetch)
    values_of = value_tile(kind, fetch=fetch)

    @jit
    def score(q, n_rows, dim, k0, k1, out, ahead, start):  # type: ignore[no-untyped-def]
        """Of two pages, or of one where both addresses are the same."""
        r = 0
        while r < n_rows:
            rows = score_rows(n_rows - r)
            at = out + r * SCORE_BYTES
            if k0 != k1:
                two_pages(rows, q + r * dim * 4, dim * 4, k0, k1, dim, at, SCORE_BYTES, ahead, start)
            else:
                one_page(rows, q + r * dim * 4, dim * 4, k0, k0, dim, at, SCORE_BYTES, ahead, start)
            r += rows

    @jit
    def mix(p, n_rows, v, dim, acc, n, ahead, start):  # type: ignore[no-untyped-def]
        """acc += weights of ``n`` positions times their values."""
        d = 0
        while d < dim:
            vectors = value_vectors((dim - d) // VL)
            r = 0
            while r < n_rows:
                rows = value_rows(n_rows - r)
                weights = p + r * SCORE_BYTES
                at = acc + (r * dim + d) * 4
                column = d * size
                values_of(
                    rows, vectors, weights, SCORE_BYTES, v + column, dim, at, dim * 4, n, ahead, start + column
                )  # fmt: skip
                r += rows
            d += vectors * VL

    return score, mix


_WIDE_PRODUCTS = _products("f32", fetch=False)


def _split(kind: str) -> Any:
    size = ELEMENT_BYTES[kind]
    score, mix = _products(kind, fetch=True)
    score_wide, mix_wide = _WIDE_PRODUCTS
    widened = widen(kind)
    is_int8 = kind == "i8"
    may_widen = kind != "f32"

    @jit
    def score_pages(history, tile, first, n_pages, scratch):  # type: ignore[no-untyped-def]
        numbers = tile.dim * PAGE_TOKENS
        n_rows = tile.queries * tile.group
        page = 0
        while page < n_pages:
            two = SCORE_PAGES == 2 and page + 1 < n_pages
            k0 = page_at(history, first + page)
            k1 = page_at(history, first + page + 1) if two else k0
            out = scratch.scores + page * PAGE_TOKENS * 4
            block = page % AHEAD_PAGES
            if block == 0:
                look_ahead(history, first + page, first + n_pages, numbers * size, scratch.ahead)
            if may_widen and n_rows > WIDEN_ROWS:
                w1 = scratch.wide + numbers * 4 if two else scratch.wide
                widened(k0, scratch.wide, numbers)
                if two:
                    widened(k1, w1, numbers)
                score_wide(scratch.q, n_rows, tile.dim, scratch.wide, w1, out, scratch.ahead, 0)
            else:
                score(scratch.q, n_rows, tile.dim, k0, k1, out, scratch.ahead, block * numbers * size)
            if is_int8:
                scale_columns(out, n_rows, k0 + 2 * numbers)
                if two:
                    scale_columns(out + PAGE_TOKENS * 4, n_rows, k1 + 2 * numbers)
            page += 2 if two else 1

    @jit
    def mix_widened(history, tile, first, n, scratch, acc):  # type: ignore[no-untyped-def]
        """``n`` positions of a split, two pages at a time."""
        numbers = tile.dim * PAGE_TOKENS
        n_rows = tile.queries * tile.group
        for j in range(0, n, 2 * PAGE_TOKENS):
            n_here = min(n - j, 2 * PAGE_TOKENS)
            for i in range(0, n_here, PAGE_TOKENS):
                block = page_at(history, first + (j + i) // PAGE_TOKENS)
                n_page = min(n_here - i, PAGE_TOKENS)
                widened(block + numbers * size, scratch.wide + i * tile.dim * 4, n_page * tile.dim)
                if is_int8:
                    scale_columns(scratch.scores + 4 * (j + i), n_rows, block + 2 * numbers + 4 * PAGE_TOKENS)
            mix_wide(scratch.scores + 4 * j, n_rows, scratch.wide, tile.dim, acc, n_here, scratch.ahead, 0)

    @jit
    def mix_stored(history, tile, first, n, scratch, acc, after):  # type: ignore[no-untyped-def]
        """``n`` positions of a split; fetches the keys of ``after``, which are needed next."""
        numbers = tile.dim * PAGE_TOKENS
        n_rows = tile.queries * tile.group
        for j in range(0, n, PAGE_TOKENS):
            page = j // PAGE_TOKENS
            block = page_at(history, first + page)
            v = block + numbers * size
            if is_int8:
                scale_columns(scratch.scores + 4 * j, n_rows, block + 2 * numbers + 4 * PAGE_TOKENS)
            block = page % AHEAD_PAGES
            if block == 0:
                look_ahead(after, after.first + page, after.end, 0, scratch.ahead)
            start = block * numbers * size
            mix(scratch.scores + 4 * j, n_rows, v, tile.dim, acc, min(n - j, PAGE_TOKENS), scratch.ahead, start)

    @jit
    def split_rows(op, history, tile, split, scratch, states, acc, after):  # type: ignore[no-untyped-def]
        """States and accumulators of one split, for all rows of a tile."""
        first = split * SPLIT_PAGES
        n = min(tile.position + tile.queries - split * SPLIT_TOKENS, SPLIT_TOKENS)
        n_pages = (n + PAGE_TOKENS - 1) // PAGE_TOKENS
        score_pages(history, tile, first, n_pages, scratch)
        soften_rows(op, tile, split, n_pages * PAGE_TOKENS, scratch.scores, states)
        clear(acc, tile.queries * tile.group * tile.dim)
        if may_widen and tile.queries * tile.group > WIDEN_ROWS:
            mix_widened(history, tile, first, n, scratch, acc)
        else:
            mix_stored(history, tile, first, n, scratch, acc, after)

    return split_rows


def _attention(kind: str) -> Any:
    split_rows = _split(kind)

    @jit
    def joined_splits(op, tile, history, after, scratch):  # type: ignore[no-untyped-def]
        """All splits of a tile, joined in order, to its rows of the output."""
        n_rows = tile.queries * tile.group
        first = history.first // SPLIT_PAGES
        for split in range(first, (history.end + SPLIT_PAGES - 1) // SPLIT_PAGES):
            rest = History(history.pool, history.page_bytes, history.pages, (split + 1) * SPLIT_PAGES, history.end)
            following = rest if rest.first < rest.end else after
            states = scratch.states if split == first else scratch.part_states
            acc = scratch.acc if split == first else scratch.part
            split_rows(op, history, tile, split, scratch, states, acc, following)
            if split == first:
                continue
            for r in range(n_rows):
                at = r * tile.dim * 4
                state = r * STATE_BYTES
                join(scratch.states + state, scratch.acc + at, states + state, acc + at, tile.dim)
        write_tile(op, tile, scratch.states, scratch.acc)

    @jit
    def partial_splits(op, tile, history, unit, after, scratch):  # type: ignore[no-untyped-def]
        """Each split of a query by itself to the partials; splits before the window as not seen."""
        lo = ld_i64(unit + 8 * UNIT_SPLIT_LO)
        for split in range(lo, ld_i64(unit + 8 * UNIT_SPLIT_HI)):
            if split * SPLIT_PAGES >= history.first:
                split_rows(op, history, tile, split, scratch, scratch.states, scratch.acc, after)
            partial = ld_i64(unit + 8 * UNIT_PARTIAL) + (split - lo) * tile.group
            for r in range(tile.group):
                state = scratch.states + r * STATE_BYTES
                if split * SPLIT_PAGES < history.first:
                    clear_state(state)
                write_partial(op, partial + r, state, scratch.acc + r * tile.dim * 4, tile.dim)

    def attention(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
        """Units are dealt to the threads in turn: neighbours cost about the same."""
        scratch = scratch_of(op, tid)
        units = ld_i64(step + 8 * UNITS)
        n_units = ld_i64(step + 8 * N_UNITS)
        for i in range(tid, n_units, n_threads):
            unit = units + i * UNIT_WORDS * 8
            tile = tile_of(op, step, unit)
            history = history_of(op, step, unit)
            following = unit + n_threads * UNIT_WORDS * 8 if i + n_threads < n_units else unit
            after = history_of(op, step, following)
            gather_queries(op, tile, scratch.q)
            if ld_i64(unit + 8 * UNIT_PARTIAL) < 0:
                joined_splits(op, tile, history, after, scratch)
            else:
                partial_splits(op, tile, history, unit, after, scratch)

    return attention


def attention_merge(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Join the splits of rows whose history was shared out."""
    group = group_of(op)
    true_dim = ld_i64(op + 8 * ATT_HEAD_DIM)
    dim = padded_dim(op)
    stride = PARTIAL_HEAD_BYTES + dim * 4
    state = ld_i64(op + 8 * ATT_SCRATCH) + tid * ld_i64(op + 8 * ATT_SCRATCH_STRIDE)
    acc = state + PARTIAL_HEAD_BYTES
    items = ld_i64(step + 8 * N_MERGES) * group
    for item in range(items * tid // n_threads, items * (tid + 1) // n_threads):
        merge = ld_i64(step + 8 * MERGES) + item // group * MERGE_WORDS * 8
        first = ld_i64(op + 8 * ATT_PARTIALS) + (ld_i64(merge + 8 * MERGE_PARTIAL) + item % group) * stride
        clear_state(state)
        for split in range(ld_i64(merge + 8 * MERGE_SPLITS)):
            part = first + split * group * stride
            join(state, acc, part, part + PARTIAL_HEAD_BYTES, dim)
        y = ld_i64(op + 8 * ATT_Y) + ld_i64(merge + 8 * MERGE_ROW) * ld_i64(op + 8 * ATT_Y_STRIDE)
        write_row(state, acc, y + (ld_i64(merge + 8 * MERGE_HEAD) * group + item % group) * true_dim * 4, true_dim)


KERNELS: dict[str, tuple[Any, int]] = {
    **ROPE_KERNELS,
    "attention_merge": (attention_merge, 4),
    **{f"attention_{kind}": (_attention(kind), 4) for kind in ELEMENT_BYTES},
}
