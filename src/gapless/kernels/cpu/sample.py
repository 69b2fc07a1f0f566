"""The compiled sampler: one row of logits, one thread, no allocation.

``sampling_reference`` says what it computes, and it chooses the very token that the reference chooses: weights are
the same float32 numbers and sums of them are exact. Rows are independent of each other and of the thread that takes
them, which is why a batch cannot change a token.
"""

from __future__ import annotations

import numpy as np

from gapless.kernels.cpu.abi import N_SAMPLES, SAMPLE_RECORDS
from gapless.kernels.cpu.mem import ld_f32, ld_f64, ld_i32, ld_i64, st_f32, st_f64, st_i32, st_i64
from gapless.kernels.cpu.sample_cuts import cut_count, cut_mass, floor_bound, top_keys
from gapless.kernels.cpu.sample_passes import (
    LARGEST,
    NEG_INF,
    clean,
    copy_row,
    count_above,
    draw,
    jit,
    keep_weights,
    log_f64,
    row_max,
    total_weight,
    weigh,
)
from gapless.kernels.cpu.sample_record import (
    BIAS,
    BIAS_IDS,
    CHOSEN,
    FREQUENCY,
    LOGITS,
    MIN_P,
    MIN_POSITION,
    N_BIAS,
    N_PROMPT,
    N_REPORTED,
    N_SUPPRESS,
    N_TOP,
    PARTIAL_WORDS,
    PARTIALS,
    POSITION,
    PRESENCE,
    REPETITION,
    REPORT,
    ROW_BYTES,
    SAMPLE_BLOCK,
    SCRATCH,
    SCRATCH_STRIDE,
    SEED,
    SUPPRESS,
    TEMPERATURE,
    TOKEN,
    TOKENS,
    TOP,
    TOP_IDS,
    TOP_K,
    TOP_P,
    VOCAB,
)
from gapless.kernels.sampling_reference import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL


@jit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """``sampling_reference.uniform``."""
    low = 0xFFFFFFFF
    k0 = seed & low
    k1 = (seed >> 32) & low
    c0 = position & low
    c1 = (position >> 32) & low
    c2 = 0
    c3 = 0
    for _ in range(PHILOX_ROUNDS):
        a = PHILOX_MULTIPLIERS[0] * c0
        b = PHILOX_MULTIPLIERS[1] * c2
        c0 = ((b >> 32) & low) ^ c1 ^ k0
        c2 = ((a >> 32) & low) ^ c3 ^ k1
        c1 = b & low
        c3 = a & low
        k0 = (k0 + PHILOX_WEYL[0]) & low
        k1 = (k1 + PHILOX_WEYL[1]) & low
    return np.float64((c1 << 21) | (c0 >> 11)) * 2.0**-53


@jit
def suppressed(record):  # type: ignore[no-untyped-def]
    """How many ids may not be chosen at this position."""
    return ld_i64(record + N_SUPPRESS) if ld_i64(record + POSITION) < ld_i64(record + MIN_POSITION) else 0


@jit
def penalised(record):  # type: ignore[no-untyped-def]
    return ld_f64(record + REPETITION) != 1.0 or ld_f64(record + PRESENCE) != 0.0 or ld_f64(record + FREQUENCY) != 0.0


@jit
def adjusted(record):  # type: ignore[no-untyped-def]
    """Whether the logits of this row are changed before anything else."""
    return penalised(record) or ld_i64(record + N_BIAS) > 0 or suppressed(record) > 0


@jit
def penalise(x, vocab, marks, record):  # type: ignore[no-untyped-def]
    """Penalties on tokens in use: count them in ``marks``, change each logit once, leave the marks zero."""
    tokens = ld_i64(record + TOKENS)
    known = ld_i64(record + POSITION)
    repetition = np.float32(ld_f64(record + REPETITION))
    presence = np.float32(ld_f64(record + PRESENCE))
    frequency = np.float32(ld_f64(record + FREQUENCY))
    for i in range(ld_i64(record + N_PROMPT), known):
        token = ld_i32(tokens + 4 * i)
        if 0 <= token < vocab:
            st_i32(marks + 4 * token, ld_i32(marks + 4 * token) + 1)
    for i in range(known):
        token = ld_i32(tokens + 4 * i)
        if 0 <= token < vocab and ld_i32(marks + 4 * token) >= 0:
            count = ld_i32(marks + 4 * token)
            value = ld_f32(x + 4 * token)
            if repetition != np.float32(1.0):
                value = value / repetition if value > np.float32(0.0) else value * repetition
            if count > 0:
                value = (value - frequency * np.float32(count)) - presence
            st_f32(x + 4 * token, clean(value))
            st_i32(marks + 4 * token, -1)
    for i in range(known):
        token = ld_i32(tokens + 4 * i)
        if 0 <= token < vocab:
            st_i32(marks + 4 * token, 0)


@jit
def adjust(x, vocab, marks, record):  # type: ignore[no-untyped-def]
    """Penalties, bias and suppression, in that order."""
    if penalised(record):
        penalise(x, vocab, marks, record)
    ids = ld_i64(record + BIAS_IDS)
    values = ld_i64(record + BIAS)
    for i in range(ld_i64(record + N_BIAS)):
        token = ld_i32(ids + 4 * i)
        if 0 <= token < vocab:
            st_f32(x + 4 * token, clean(ld_f32(x + 4 * token) + ld_f32(values + 4 * i)))
    ids = ld_i64(record + SUPPRESS)
    for i in range(suppressed(record)):
        token = ld_i32(ids + 4 * i)
        if 0 <= token < vocab:
            st_f32(x + 4 * token, np.float32(NEG_INF))


@jit
def lowest_allowed(vocab, record):  # type: ignore[no-untyped-def]
    """The lowest id that is not suppressed, 0 if all are: the token of a row without a finite logit."""
    ids = ld_i64(record + SUPPRESS)
    count = suppressed(record)
    for token in range(vocab):
        found = False
        for i in range(count):
            found |= ld_i32(ids + 4 * i) == token
        if not found:
            return token
    return 0


@jit
def filter_row(x, n, w, sums, keys, vocab, largest, total, inverse, record):  # type: ignore[no-untyped-def]
    """Drop what top_k, top_p and min_p exclude; returns the weight that is left."""
    top_k = ld_i64(record + TOP_K)
    top_p = ld_f64(record + TOP_P)
    low = floor_bound(largest, inverse)
    n_low = vocab
    bound = np.float32(NEG_INF)
    last = n
    if 0 < top_k < vocab:
        count = count_above(x, n, low)
        if count > top_k:
            bound, last, total = cut_count(x, n, w, keys, top_k, low, count, largest, top_p < 1.0)
    if top_p < 1.0:
        bound, last = cut_mass(x, n, w, keys, top_p * total, low, n_low, largest)
    return keep_weights(x, w, n, bound, last, np.float32(ld_f64(record + MIN_P)), sums)


@jit
def choose(x, n, w, sums, keys, vocab, largest, record):  # type: ignore[no-untyped-def]
    """Draw a token of a row with a finite logit and a temperature above 0."""
    inverse = np.float32(min(1.0 / ld_f64(record + TEMPERATURE), LARGEST))
    total = weigh(x, n, largest, inverse, w, sums)
    top_k = ld_i64(record + TOP_K)
    if 0 < top_k < vocab or ld_f64(record + TOP_P) < 1.0 or ld_f64(record + MIN_P) > 0.0:
        total = filter_row(x, n, w, sums, keys, vocab, largest, total, inverse, record)
    return draw(w, sums, n, uniform(ld_i64(record + SEED), ld_i64(record + POSITION)) * total)


@jit
def report(x, n, keys, token, largest, record):  # type: ignore[no-untyped-def]
    """Log-probabilities of the chosen token and of the most likely ones."""
    if largest == np.float32(NEG_INF):
        st_f64(record + CHOSEN, NEG_INF)
        st_i64(record + N_REPORTED, 0)
        return
    log_total = log_f64(total_weight(x, n, largest))
    peak = np.float64(largest)
    st_f64(record + CHOSEN, np.float64(ld_f32(x + 4 * token)) - peak - log_total)
    want = ld_i64(record + N_TOP)
    count = top_keys(x, n, keys, want, largest) if want > 0 else 0
    st_i64(record + N_REPORTED, count)
    ids = ld_i64(record + TOP_IDS)
    values = ld_i64(record + TOP)
    for i in range(count):
        top = ld_i64(keys + 8 * i) & 0xFFFFFFFF
        st_i32(ids + 4 * i, top)
        st_f64(values + 8 * i, np.float64(ld_f32(x + 4 * top)) - peak - log_total)


@jit
def argmax_range(logits, lo, hi, out):  # type: ignore[no-untyped-def]
    """To ``out``: the largest of ``logits[lo:hi]`` (float64), and the lowest id that has it or -1 (int64)."""
    best = -1
    largest = np.float32(NEG_INF)
    start = lo
    while start < hi:
        end = min(start + SAMPLE_BLOCK, hi)
        value = np.float32(NEG_INF)
        if end - start == SAMPLE_BLOCK:
            value = min(row_max(logits + 4 * start, SAMPLE_BLOCK), np.float32(LARGEST))
        else:
            for i in range(start, end):
                value = max(clean(ld_f32(logits + 4 * i)), value)
        if value > largest and value >= np.float32(-LARGEST):
            largest = value
            best = start
        start = end
    if best >= 0:
        while not ld_f32(logits + 4 * best) >= largest:
            best += 1
    st_f64(out, np.float64(largest))
    st_i64(out + 8, best)


@jit
def argmax_combine(partials, count):  # type: ignore[no-untyped-def]
    """The id of the largest of ``count`` partials, in the order of their ranges; -1 if none has one."""
    best = -1
    largest = NEG_INF
    for i in range(count):
        token = ld_i64(partials + 8 * PARTIAL_WORDS * i + 8)
        value = ld_f64(partials + 8 * PARTIAL_WORDS * i)
        if token >= 0 and value > largest:
            largest = value
            best = token
    return best


@jit
def plain_greedy(record):  # type: ignore[no-untyped-def]
    """Whether the row needs nothing but the id of its largest logit."""
    return ld_f64(record + TEMPERATURE) == 0.0 and ld_i64(record + REPORT) == 0 and not adjusted(record)


@jit
def commit(record, token):  # type: ignore[no-untyped-def]
    st_i64(record + TOKEN, token)
    st_i32(ld_i64(record + TOKENS) + 4 * ld_i64(record + POSITION), token)


@jit
def commit_nothing(vocab, record):  # type: ignore[no-untyped-def]
    """No logit was finite: report that, but leave a token that a step launched already can look up."""
    commit(record, lowest_allowed(vocab, record))
    st_i64(record + TOKEN, -1)


@jit
def sample_row_kernel(logits, vocab, record, scratch):  # type: ignore[no-untyped-def]
    """Sample float32 ``logits[vocab]`` by the SAMPLE_PARAMS at ``record``; see ``scratch_bytes``."""
    n = (vocab + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK * SAMPLE_BLOCK
    x = scratch
    w = x + 4 * n
    marks = w + 4 * n
    sums = marks + 4 * n
    keys = sums + 8 * (n // SAMPLE_BLOCK)
    if plain_greedy(record):
        argmax_range(logits, 0, vocab, keys)
        token = ld_i64(keys + 8)
        if token >= 0:
            commit(record, token)
        else:
            commit_nothing(vocab, record)
        return
    largest = copy_row(logits, vocab, x, n)
    nothing = largest == np.float32(NEG_INF)
    if adjusted(record):
        adjust(x, vocab, marks, record)
        largest = row_max(x, n)
    if largest == np.float32(NEG_INF):
        token = lowest_allowed(vocab, record)
    elif ld_f64(record + TEMPERATURE) == 0.0:
        argmax_range(x, 0, vocab, keys)
        token = ld_i64(keys + 8)
    else:
        token = choose(x, n, w, sums, keys, vocab, largest, record)
    if ld_i64(record + REPORT) != 0:
        report(x, n, keys, token, largest, record)
    if nothing:
        commit_nothing(vocab, record)
    else:
        commit(record, token)


def op_argmax(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """The argmax of plain greedy rows, shared by the threads; before ``op_sample``, with a barrier between."""
    logits = ld_i64(op + 8 * LOGITS)
    vocab = ld_i64(op + 8 * VOCAB)
    records = ld_i64(step + 8 * SAMPLE_RECORDS)
    share = (vocab // SAMPLE_BLOCK + n_threads) // n_threads * SAMPLE_BLOCK
    lo = min(tid * share, vocab)
    hi = min(lo + share, vocab)
    for row in range(ld_i64(step + 8 * N_SAMPLES)):
        if plain_greedy(ld_i64(records + 8 * row)):
            out = ld_i64(op + 8 * PARTIALS) + 8 * PARTIAL_WORDS * (row * n_threads + tid)
            argmax_range(logits + row * ld_i64(op + 8 * ROW_BYTES), lo, hi, out)


def op_sample(op, step, tid, n_threads):  # type: ignore[no-untyped-def]
    """Sample rows tid, tid + n_threads, ...: the token goes to the record and to the request's slot."""
    vocab = ld_i64(op + 8 * VOCAB)
    records = ld_i64(step + 8 * SAMPLE_RECORDS)
    partials = ld_i64(op + 8 * PARTIALS)
    row = tid
    while row < ld_i64(step + 8 * N_SAMPLES):
        record = ld_i64(records + 8 * row)
        if partials != 0 and plain_greedy(record):
            token = argmax_combine(partials + 8 * PARTIAL_WORDS * n_threads * row, n_threads)
            if token >= 0:
                commit(record, token)
            else:
                commit_nothing(vocab, record)
        else:
            logits = ld_i64(op + 8 * LOGITS) + row * ld_i64(op + 8 * ROW_BYTES)
            scratch = ld_i64(op + 8 * SCRATCH) + tid * ld_i64(op + 8 * SCRATCH_STRIDE)
            sample_row_kernel(logits, vocab, record, scratch)
        row += n_threads


KERNELS = {"argmax": (op_argmax, 4), "sample": (op_sample, 4)}
