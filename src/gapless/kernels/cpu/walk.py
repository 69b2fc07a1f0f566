"""The compiled function that is a step: it walks the tape; threads meet at a spin barrier behind each operation."""

from __future__ import annotations

from numba import njit

from gapless.kernels.cpu.abi import (
    CREW_BARRIER,
    CREW_BEGUN,
    CREW_KINDS,
    CREW_OPS,
    CREW_STAMPS,
    CREW_STEP,
    CREW_TALLY,
    CREW_TAPE,
    OP_BARRIER,
    OP_KERNEL,
    OP_WORDS,
    TALLY_COLUMNS,
    TALLY_FIRST,
    TALLY_LAST,
    TALLY_THREADS,
)
from gapless.kernels.cpu.mem import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    cycles,
    ld_i64,
    pause,
    st_i64,
    yield_core,
)

PATIENT_LOOKS = 4000  # some tens of nanoseconds each: longer than any operation is out of step by itself


@njit(inline="always")
def barrier(counter, n_threads):  # type: ignore[no-untyped-def]
    """Wait until all threads have come. ``counter`` only grows: it needs no reset between uses."""
    if n_threads > 1:
        target = (atomic_add(counter, 1) // n_threads + 1) * n_threads
        looks = 0
        while atomic_load(counter) < target:
            pause()
            looks += 1
            # Whoever is missing may be waiting for this very core.
            if looks >= PATIENT_LOOKS:
                yield_core()


@njit
def tally(tape, n_ops, stamps, kinds, out, n_threads):  # type: ignore[no-untyped-def]
    """Add up the stamps of a step by kind of operation, and for how long each thread waited for the slowest.

    All threads enter an operation when the last one is done with that before it, if they meet behind that; else each
    when it is done itself. ``TALLY_LAST`` is written last of all: until then it is 0 in a row that was cleared.
    """
    width = (n_ops + 1) * 8
    for column in range(TALLY_COLUMNS, TALLY_THREADS):
        st_i64(out + 8 * column, 0)
    first = ld_i64(stamps)
    met, all_met, latest, waited = first, False, first, out + 8 * TALLY_THREADS
    for thread in range(n_threads):
        st_i64(waited + 8 * thread, max(ld_i64(stamps + thread * width) - first, 0))  # late for the first operation
    for i in range(n_ops):
        spent, latest = 0, 0
        for thread in range(n_threads):
            at = stamps + thread * width + 8 * i
            done = ld_i64(at + 8)
            spent += done - (met if all_met else max(ld_i64(at), first))
            latest = max(latest, done)
        column = out + 8 * (TALLY_COLUMNS + ld_i64(kinds + 8 * i))
        st_i64(column, ld_i64(column) + spent)
        all_met = ld_i64(tape + 8 * (i * OP_WORDS + OP_BARRIER)) != 0
        if all_met:
            for thread in range(n_threads):
                at = waited + 8 * thread
                st_i64(at, ld_i64(at) + latest - ld_i64(stamps + thread * width + 8 * (i + 1)))
            met = latest
    st_i64(out + 8 * TALLY_FIRST, first)
    atomic_store(out + 8 * TALLY_LAST, latest)


@njit
def walk_tape(crew, tid, n_threads):  # type: ignore[no-untyped-def]
    """Each thread stamps when it is done, before it waits for the others: who was last, and how long the rest waited,
    follows from that. The last thread adds it up, while the first one, who is waited for, goes on."""
    tape, n_ops, step = ld_i64(crew + 8 * CREW_TAPE), ld_i64(crew + 8 * CREW_OPS), ld_i64(crew + 8 * CREW_STEP)
    stamps, counter = ld_i64(crew + 8 * CREW_STAMPS), crew + 8 * CREW_BARRIER
    # Behind the last barrier these words may be those of the next task.
    kinds, out = ld_i64(crew + 8 * CREW_KINDS), ld_i64(crew + 8 * CREW_TALLY)
    stamp = stamps + tid * (n_ops + 1) * 8
    if stamps != 0:
        st_i64(stamp, cycles())
    for i in range(n_ops):
        op = tape + i * OP_WORDS * 8
        call_kernel(ld_i64(op + 8 * OP_KERNEL), op, step, tid, n_threads)
        if stamps != 0:
            stamp += 8
            st_i64(stamp, cycles())
        if ld_i64(op + 8 * OP_BARRIER) != 0:
            barrier(counter, n_threads)
    if stamps != 0 and tid == n_threads - 1:
        tally(tape, n_ops, stamps, kinds, out, n_threads)


def walk(crew, tid, n_threads):  # type: ignore[no-untyped-def]
    """Run the crew's current task; the other threads ``serve``, each with its own ``tid``."""
    walk_tape(crew, tid, n_threads)


def serve(crew, tid, n_threads, seen_at, spins):  # type: ignore[no-untyped-def]
    """Walk one task after the other, as they are begun. ``seen_at`` holds how many this thread has seen.

    Returns when nothing was begun for ``spins`` looks, or when the task is empty.
    """
    seen = ld_i64(seen_at)
    while True:
        looks = 0
        while atomic_load(crew + 8 * CREW_BEGUN) == seen and looks < spins:
            pause()
            looks += 1
        if atomic_load(crew + 8 * CREW_BEGUN) == seen:
            break
        seen += 1
        st_i64(seen_at, seen)
        if ld_i64(crew + 8 * CREW_OPS) == 0:
            break
        walk_tape(crew, tid, n_threads)


def begin(crew):  # type: ignore[no-untyped-def]
    """Publish the task that the crew's words describe."""
    atomic_store(crew + 8 * CREW_BEGUN, ld_i64(crew + 8 * CREW_BEGUN) + 1)


def stamp(at):  # type: ignore[no-untyped-def]
    """Write the time-stamp counter."""
    st_i64(at, cycles())


KERNELS = {"walk": (walk, 3), "serve": (serve, 5), "begin": (begin, 1), "stamp": (stamp, 1)}
