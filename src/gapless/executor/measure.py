"""The ceilings of this machine, measured with the threads and instructions that the kernels use."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gapless.executor.crew import Crew
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Kernels, Progress, load_kernels
from gapless.kernels.cpu.tape import Limits, Tape
from gapless.machine import allowed_cores

RUNS = 7
LEAST_S = 0.005  # of a run that is long enough to be measured
RUN_BYTES = 1 << 30  # read in each run
DOT_SUMS = 12  # of ``probe.multiply_all``
BEYOND_CACHES_BYTES = 2 << 30


def memory_bandwidth(
    threads: int | None = None,
    isa: str | None = None,
    *,
    n_bytes: int = BEYOND_CACHES_BYTES,
    progress: Progress | None = None,
) -> float:
    """Bytes per second at which all threads together read a buffer of ``n_bytes`` again and again; the best run.

    A buffer that fits a cache shows the cache's rate: give the bytes that a step reads for the floor of that step.
    """
    kernels, n_threads = _kernels(isa, progress), threads or allowed_cores()
    data = Arena().take(n_bytes)  # on huge pages, as the weights are
    data[:] = 1
    rounds = max(1, RUN_BYTES // n_bytes)
    seconds = _time(kernels, "probe_read", n_threads, {abi.PROBE_BYTES: n_bytes, abi.PROBE_ROUNDS: rounds}, data)
    return n_bytes * rounds / seconds


def int8_rate(threads: int | None = None, isa: str | None = None, *, progress: Progress | None = None) -> float:
    """Int8 operations per second (a multiplication and an addition are two) of all threads; the best run."""
    kernels, n_threads = _kernels(isa, progress), threads or allowed_cores()
    data = _ones(np.uint8)
    return 2.0 * 4 * kernels.isa.lanes * _sums_per_second(kernels, "probe_multiply", n_threads, data)


def float_rate(threads: int | None = None, isa: str | None = None, *, progress: Progress | None = None) -> float:
    """Float32 operations per second (a multiplication and an addition are two) of all threads; the best run."""
    kernels, n_threads = _kernels(isa, progress), threads or allowed_cores()
    data = _ones(np.float32).view(np.uint8)
    return 2.0 * kernels.isa.lanes * _sums_per_second(kernels, "probe_multiply_floats", n_threads, data)


def _sums_per_second(kernels: Kernels, name: str, n_threads: int, data: np.ndarray) -> float:  # type: ignore[type-arg]
    """Vectors of products that all threads add up in a second. It begins small: instructions for it may be lacking."""
    rounds = 20_000
    while (seconds := _time(kernels, name, n_threads, {abi.PROBE_ROUNDS: rounds}, data)) < LEAST_S:
        rounds *= 4
    return DOT_SUMS * rounds * n_threads / seconds


def _ones(kind: type[np.generic]) -> np.ndarray:  # type: ignore[type-arg]
    """4 KiB of them, aligned as what the kernels read: a vector that crosses a cache line is read twice."""
    data = Arena().take(4096).view(kind)
    data[:] = 1
    return data


def _kernels(isa: str | None, progress: Progress | None) -> Kernels:
    return load_kernels(select(isa), progress, ("walk", "probe"))


def _time(kernels: Kernels, name: str, n_threads: int, words: dict[int, int], data: np.ndarray) -> float:  # type: ignore[type-arg]
    """Least seconds of one operation on all threads: others on the machine can only make it longer."""
    arena = Arena()
    tape = Tape(kernels, arena, Limits(1, 1, n_threads))
    tape.emit(name, words | {abi.PROBE_DATA: address_of(data), abi.PROBE_OUT: tape.scratch("out", 1024)})
    ops = tape.finish()
    crew = Crew(kernels, n_threads)
    try:
        return min(_seconds(lambda: crew.run(address_of(ops), 1, 0)) for _ in range(RUNS))
    finally:
        crew.close()


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
