"""What a step's stamps say: how long each kind of operation took, and how long threads waited for the slowest."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gapless.executor.timing import N_COLUMNS, SAMPLE_COLUMN, DeviceTimes, Source
from gapless.kernels.count import OpKind
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.loader import Kernels

Ints = npt.NDArray[np.int64]

ANCHOR_READINGS = 7
KEPT_STEPS = 2047  # more than are booked at once
_KINDS = list(OpKind)
# By the beginning of a kernel's name. A gate is computed by the product before it, a residual added by the one behind.
_BY_NAME = {
    "embed": OpKind.EMBED, "norm": OpKind.NORM, "quantise": OpKind.NORM, "add": OpKind.ADD, "linear": OpKind.LINEAR,
    "gated": OpKind.LINEAR, "rope_cache": OpKind.ROPE_CACHE, "attention": OpKind.ATTENTION, "softcap": OpKind.LOGITS,
    "route": OpKind.EXPERTS, "dispatch": OpKind.EXPERTS, "gather": OpKind.EXPERTS, "combine": OpKind.EXPERTS,
}  # fmt: skip


def kind_of(kernel: str, rows: int) -> int:
    """The column of an operation.

    Args:
        kernel: its name.
        rows: its word ``OP_ROWS``, which tells products of tokens, of samples and of the rows of an expert apart.
    """
    if kernel in ("argmax", "sample"):
        return SAMPLE_COLUMN
    kind = next(kind for name, kind in _BY_NAME.items() if kernel.startswith(name))
    if kind is OpKind.LINEAR and rows == abi.ROWS_SAMPLES:
        kind = OpKind.LOGITS
    elif kind is OpKind.LINEAR and rows != abi.ROWS_TOKENS:
        kind = OpKind.EXPERTS
    return _KINDS.index(kind)


class TapeProfile:
    """Holds the tallies of steps (what their stamps add up to, ``abi.TALLY_FIRST`` and behind it) in a ring.

    What a step's result carries is the number of its row, so that keeping it costs next to nothing.
    """

    source = Source.MEASURED

    def __init__(self, kernels: Kernels, arena: Arena, n_threads: int, kept: int = KEPT_STEPS) -> None:
        self.active = False
        self.kept = kept
        width = abi.TALLY_THREADS + n_threads
        self._rows = arena.take(8 * (kept + 1) * width).view(np.int64).reshape(kept + 1, width)
        self._rows_at, self._stride = address_of(self._rows), self._rows.strides[0]
        self._n_steps = 0
        self._stamp = kernels.function("stamp", 1)
        self._word = arena.take(64).view(np.int64)
        self._n_threads = n_threads
        self._since = self._anchor()

    def _anchor(self) -> tuple[int, int]:
        """The counter and the clock at the same moment: of several readings the one that was interrupted least."""
        return min(self._reading() for _ in range(ANCHOR_READINGS))[1:]

    def _reading(self) -> tuple[int, int, int]:
        """How long it took to read both, the counter, and the clock in the middle."""
        before = time.perf_counter_ns()
        self._stamp(address_of(self._word))
        took = time.perf_counter_ns() - before
        return took, int(self._word[0]), before + took // 2

    def next_row(self) -> tuple[int | None, int]:
        """Where the next step's tally goes, if it is to be stamped: the number of its row, and the address or 0."""
        if not self.active:
            return None, 0
        row = self._n_steps % len(self._rows)
        self._n_steps += 1
        self._rows[row, abi.TALLY_LAST] = 0
        return row, self._rows_at + row * self._stride

    def times(self, stamps: Sequence[int]) -> DeviceTimes:
        """What the tallies of steps say, by their rows.

        The counter is read beside the clock at every call and taken to run evenly in between.
        """
        # The threads have gone on from the steps before. With the last one they may be at its tally yet.
        while self._rows[stamps[-1], abi.TALLY_LAST] == 0:
            time.sleep(0)
        since, now = self._since, self._anchor()
        self._since = now
        tallies = self._rows[np.array(stamps, np.intp)]
        rate = (now[1] - since[1]) / max(now[0] - since[0], 1)  # nanoseconds of a tick
        first, last = tallies[:, abi.TALLY_FIRST], tallies[:, abi.TALLY_LAST]
        begun = np.rint((first - since[0]) * rate).astype(np.int64) + since[1]
        ended = begun + np.ceil((last - first) * rate).astype(np.int64)
        each = tallies[:, abi.TALLY_COLUMNS : abi.TALLY_COLUMNS + N_COLUMNS] * (rate / self._n_threads)
        waited = tallies[:, abi.TALLY_THREADS :] * rate
        return DeviceTimes(begun, ended, each.astype(np.int64), waited.astype(np.int64))
