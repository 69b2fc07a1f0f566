"""When steps ran on the device, and what took how long in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gapless.kernels.count import OpKind

Ints = npt.NDArray[np.int64]

SAMPLE_COLUMN = len(OpKind)  # of ``DeviceTimes.by_kind``, behind those of the vocabulary's operations: choosing tokens
N_COLUMNS = SAMPLE_COLUMN + 1


@dataclass(frozen=True)
class DeviceTimes:
    """Times of steps on the device, in nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        begun, ended: (steps,).
        by_kind: (steps, N_COLUMNS), the mean over threads of the time in operations of a kind.
        sync: (steps,), the mean over threads of the time that they waited for others.
    """

    begun: Ints
    ended: Ints
    by_kind: Ints
    sync: Ints


class StepProfile(Protocol):
    """What the stamps of steps say."""

    def times(self, stamps: Any) -> DeviceTimes:
        """Of steps in the order in which they ran, their stamps stacked along the first axis."""
        ...
