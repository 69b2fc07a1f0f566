"""Threads that walk a tape together.

The caller is thread 0; the others wait for the next step in compiled code, spinning for a while (a step follows a
step within microseconds) and then asleep. None of them holds the GIL while it waits or computes.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from gapless.errors import ResourceError
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.loader import Kernels
from gapless.machine import start_thread

Words = npt.NDArray[np.int64]

SPINS = 40_000  # of some tens of nanoseconds: a few milliseconds


class Crew:
    """``n_threads`` threads for tapes. ``run`` returns when the tape's last operation is done.

    Raises ResourceError if the system refuses that many.
    """

    def __init__(self, kernels: Kernels, n_threads: int) -> None:
        self.n_threads = n_threads
        self._walk = kernels.function("walk", 3)
        self._serve = kernels.function("serve", 5)
        self._publish = kernels.function("begin", 1)
        self._arena = Arena()
        self._shared = self._arena.take(abi.CREW_WORDS * 8).view(np.int64)
        self._shared_at = address_of(self._shared)
        self._closed = False
        self._asleep = 0
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run_thread, args=(tid,), name=f"gapless-{tid}", daemon=True)
            for tid in range(1, n_threads)
        ]
        try:
            for thread in self._threads:
                start_thread(thread)
        except ResourceError:
            self.close()
            raise

    def run(self, tape: int, n_ops: int, step: int, stamps: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Walk ``n_ops`` operations at address ``tape`` for the step described at ``step``.

        Args:
            stamps: what ``CREW_STAMPS`` to ``CREW_TALLY`` point to; zeros for a step that is not stamped.
        """
        assert n_ops > 0
        self._begin(tape, n_ops, step, stamps)
        self._walk(self._shared_at, 0, self.n_threads)

    def close(self) -> None:
        """End the threads; idempotent."""
        if not self._closed:
            self._closed = True
            self._begin(0, 0, 0, (0, 0, 0))
            for thread in self._threads:
                if thread.ident is not None:  # the system may have refused it
                    thread.join()

    def _begin(self, tape: int, n_ops: int, step: int, stamps: tuple[int, int, int]) -> None:
        # Whoever walked the task before has read these words: all threads met at the barrier of its last operation.
        self._shared[abi.CREW_TAPE : abi.CREW_TALLY + 1] = tape, n_ops, step, *stamps
        self._publish(self._shared_at)
        # A thread that goes to sleep says so before it looks at the word again, so one of the two sees the other.
        if self._asleep:
            with self._wake:
                self._wake.notify_all()

    def _run_thread(self, tid: int) -> None:
        seen = self._arena_word()
        while True:
            self._serve(self._shared_at, tid, self.n_threads, address_of(seen), SPINS)
            if seen[0] and self._shared[abi.CREW_OPS] == 0 and seen[0] == self._shared[abi.CREW_BEGUN]:
                return
            self._sleep(int(seen[0]))

    def _sleep(self, seen: int) -> None:
        with self._wake:
            self._asleep += 1
            while self._shared[abi.CREW_BEGUN] == seen:
                self._wake.wait()
            self._asleep -= 1

    def _arena_word(self) -> Words:
        with self._wake:
            return self._arena.take(64).view(np.int64)
