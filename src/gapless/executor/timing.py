"""When steps ran on the device, and what took how long in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gapless.kernels.count import OpKind

Ints = npt.NDArray[np.int64]

SAMPLE_COLUMN = len(OpKind)  # of ``DeviceTimes.by_kind``, behind those of the vocabulary's operations: choosing tokens
N_COLUMNS = SAMPLE_COLUMN + 1


class Source(StrEnum):
    """Where the times of steps come from."""

    MEASURED = "measured"
    MODELLED = "modelled"
    REPLAYED = "replayed"


@dataclass(frozen=True)
class DeviceTimes:
    """Times of steps on the device, in nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        begun, ended: (steps,).
        by_kind: (steps, N_COLUMNS), the mean over threads of the time in operations of a kind.
        waited: (steps, threads), for how long each thread waited for others.
    """

    begun: Ints
    ended: Ints
    by_kind: Ints
    waited: Ints

    @property
    def sync(self) -> Ints:
        """(steps,), the mean over threads of the time that they waited."""
        sync: Ints = self.waited.sum(axis=1) // max(self.waited.shape[1], 1)
        return sync


class StepProfile(Protocol):
    """What the stamps of steps say.

    Attributes:
        source: of the times.
        active: whether steps are stamped: while nobody reads them they need not be.
        kept: how many steps' stamps are kept behind the one that runs.
    """

    active: bool

    @property
    def source(self) -> Source: ...

    @property
    def kept(self) -> int: ...

    def times(self, stamps: Sequence[Any]) -> DeviceTimes:
        """Of steps in the order in which they ran, from what their results carry."""
        ...
