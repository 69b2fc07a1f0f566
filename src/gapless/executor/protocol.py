"""The executor's contract: submit plans, collect results, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gapless.step import StepPlan, StepResult

if TYPE_CHECKING:  # planning needs no arrays
    from gapless.executor.timing import StepProfile
    from gapless.kernels.count import StepCounter


@dataclass(frozen=True)
class Capacity:
    """What an executor can hold. The scheduler is configured from it."""

    n_pages: int
    page_tokens: int
    n_slots: int
    context_tokens: int
    max_step_tokens: int
    max_step_samples: int


class Executor(Protocol):
    """Runs steps. ``launch`` returns at once where the device allows; ``land`` blocks for the oldest launched step.

    Steps run in launch order and a later step sees the cache and the slots as the earlier ones left them.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def depth(self) -> int:
        """How many steps may be in flight, at least 1."""
        ...

    @property
    def profile(self) -> StepProfile | None:
        """Reads the stamps of results; None if steps are not stamped."""
        ...

    @property
    def counter(self) -> StepCounter:
        """Counts the work of its steps, with weights and cache as it holds them."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises ExecutorError if the device has failed."""
        ...

    def land(self) -> StepResult:
        """Wait for the oldest launched step."""
        ...

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        ...
