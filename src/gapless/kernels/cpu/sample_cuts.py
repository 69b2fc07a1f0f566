"""Where top_k, top_p and the reported top tokens end, without sorting the vocabulary.

A cut is a pair (bound, last_tie): it keeps x > bound, and x == bound with id <= last_tie. It is found by
bisection, a vectorised count or sum each time, until the band in doubt holds at most ``BAND`` tokens; only those are
sorted. Sums of weights are exact, so the cut is the one that a full sort gives. Logits of a model are told apart in a
dozen passes; equal or nearly equal ones, as of a constant row, in at most ``VALUE_STEPS`` + 32.
"""

from __future__ import annotations

import numpy as np

from gapless.kernels.cpu.mem import bits_f32, ld_f32, ld_i64
from gapless.kernels.cpu.sample_passes import (
    LARGEST,
    collect,
    count_above,
    jit,
    mass_above,
    nth_equal,
    rank_of,
    sort_keys,
)
from gapless.kernels.cpu.sample_record import BAND
from gapless.kernels.sampling_reference import LOWEST_Z

VALUE_STEPS = 16


@jit
def middle_of(low, high, step):  # type: ignore[no-untyped-def]
    """A float between two: halfway by value at first, then halfway in the order of all floats, which comes to an end.

    It is one of the two if none lies between.
    """
    if step < VALUE_STEPS:
        return np.float32((np.float64(low) + np.float64(high)) * 0.5)
    rank = (rank_of(low) + rank_of(high)) >> 1
    return bits_f32(rank if rank >= 0 else 0x7FFFFFFF - rank)


@jit
def floor_bound(largest, inverse):  # type: ignore[no-untyped-def]
    """A bound below ``largest`` so that all values up to it have weight 0."""
    reach = -LOWEST_Z / np.float64(inverse)
    bound = largest
    while (bound - largest) * inverse > np.float32(LOWEST_Z):
        bound = np.float32(np.float64(largest) - reach)
        reach *= 2.0
    return bound


@jit
def narrow_count(x, n, want, low, n_low, high):  # type: ignore[no-untyped-def]
    """Narrow (low, high], where count(x > low) = n_low >= want > count(x > high) = 0, to a band in doubt.

    Returns low, high and both counts. The band holds at most BAND tokens, or only tokens equal to ``high``.
    """
    n_high = 0
    step = 0
    while n_low - n_high > BAND:
        middle = middle_of(low, high, step)
        step += 1
        if middle <= low or middle >= high:
            break
        count = count_above(x, n, middle)
        if count >= want:
            low = middle
            n_low = count
        else:
            high = middle
            n_high = count
    return low, n_low, high, n_high


@jit
def cut_count(x, n, w, keys, want, low, n_low, high, with_mass):  # type: ignore[no-untyped-def]
    """The cut that keeps the first ``want`` in order: bound, last_tie and (on demand) the weight kept."""
    low, n_low, high, n_high = narrow_count(x, n, want, low, n_low, high)
    mass = 0.0
    if with_mass:
        _, mass = mass_above(x, w, n, high)
    rank = want - n_high
    if n_low - n_high > BAND:
        last = nth_equal(x, n, high, rank, 0)
        return high, last, mass + rank * np.float64(ld_f32(w + 4 * last))
    sort_keys(keys, collect(x, n, low, high, keys))
    last = 0
    for i in range(rank):
        last = ld_i64(keys + 8 * i) & 0xFFFFFFFF
        mass += ld_f32(w + 4 * last)
    return ld_f32(x + 4 * last), last, mass


@jit
def cut_mass(x, n, w, keys, target, low, n_low, high):  # type: ignore[no-untyped-def]
    """The cut that keeps the shortest prefix in order whose weight reaches ``target`` <= weight(x > low)."""
    n_high = 0
    mass = 0.0
    step = 0
    while n_low - n_high > BAND:
        middle = middle_of(low, high, step)
        step += 1
        if middle <= low or middle >= high:
            break
        count, above = mass_above(x, w, n, middle)
        if above >= target:
            low = middle
            n_low = count
        else:
            high = middle
            n_high = count
            mass = above
    if n_low - n_high > BAND:
        each = np.float64(ld_f32(w + 4 * nth_equal(x, n, high, 1, 0)))
        rank = np.int64((target - mass) / each)
        while rank > 1 and mass + (rank - 1) * each >= target:
            rank -= 1
        while mass + rank * each < target:
            rank += 1
        return high, nth_equal(x, n, high, rank, 0)
    count = collect(x, n, low, high, keys)
    sort_keys(keys, count)
    last = 0
    for i in range(count):
        last = ld_i64(keys + 8 * i) & 0xFFFFFFFF
        mass += ld_f32(w + 4 * last)
        if mass >= target:
            break
    return ld_f32(x + 4 * last), last


@jit
def top_keys(x, n, keys, want, largest):  # type: ignore[no-untyped-def]
    """Order keys of the first ``want`` tokens with a finite logit, sorted; returns how many there are."""
    reach = -LOWEST_Z
    low = largest
    count = 0
    while count < want and low >= np.float32(-LARGEST):
        low = np.float32(largest - min(reach, 3.0 * LARGEST))
        count = count_above(x, n, low)
        reach *= 4.0
    want = min(want, count)
    low, n_low, high, n_high = narrow_count(x, n, want, low, count, largest)
    if n_low - n_high > BAND:
        count = collect(x, n, high, np.float32(LARGEST), keys)
        nth_equal(x, n, high, want - count, keys + 8 * count)
        count = want
    else:
        count = collect(x, n, low, np.float32(LARGEST), keys)
    sort_keys(keys, count)
    return want
