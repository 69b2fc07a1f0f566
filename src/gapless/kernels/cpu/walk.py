"""The compiled function that is a step: it walks the tape, and threads meet at a spin barrier after each operation."""

from __future__ import annotations

from numba import njit

from gapless.kernels.cpu.abi import OP_BARRIER, OP_KERNEL, OP_WORDS
from gapless.kernels.cpu.mem import atomic_add, atomic_load, call_kernel, ld_i64, pause


@njit(inline="always")
def barrier(counter, n_threads):  # type: ignore[no-untyped-def]
    """Wait until all threads have come. ``counter`` only grows: it needs no reset between uses."""
    if n_threads > 1:
        target = (atomic_add(counter, 1) // n_threads + 1) * n_threads
        while atomic_load(counter) < target:
            pause()


def walk(tape, n_ops, step, tid, n_threads, counter):  # type: ignore[no-untyped-def]
    """Run ``n_ops`` operations; every thread calls this with its own ``tid``."""
    for i in range(n_ops):
        op = tape + i * OP_WORDS * 8
        call_kernel(ld_i64(op + 8 * OP_KERNEL), op, step, tid, n_threads)
        if ld_i64(op + 8 * OP_BARRIER) != 0:
            barrier(counter, n_threads)


def wait_change(word, seen, spins):  # type: ignore[no-untyped-def]
    """Spin until the int64 at ``word`` differs from ``seen``, at most ``spins`` times."""
    for _ in range(spins):
        if atomic_load(word) != seen:
            break
        pause()


KERNELS = {"walk": (walk, 6), "wait_change": (wait_change, 3)}
