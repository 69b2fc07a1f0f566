"""A request as the scheduler sees it: token ids, pages, and how far it is planned and landed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from gapless.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sample of one prompt.

    Attributes:
        prompt: token ids, at least one.
        seed: resolved; sampling at a position draws from (seed, position) alone.
        stop_ids: end the request when sampled.
        limit: total tokens (prompt and output) at which it ends.
        arrival: order of arrival, which breaks ties.
        priority: higher runs first under the priority policy.
        leader: the sample of the same prompt that computes it for all of them, or None.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    limit: int = 0
    arrival: int = 0
    priority: int = 0
    leader: Request | None = None

    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)
    slot: int = -1
    pages: tuple[int, ...] = ()
    planned: int = 0  # positions whose computation has been launched
    landed: int = 0  # positions whose computation has landed
    in_flight: int = 0  # spans launched and not landed
    sampling_in_flight: int = 0  # of them, those that bring a token
    last_step: int = -1  # the latest step that it was planned in
    cached_pages: int = 0  # leading pages that are in the prefix tree through this request
    cacheable: bool = True  # False once another request has cached the same tokens first
    prefix_hits: int = 0  # prompt tokens that were found computed when it was admitted
    preemptions: int = 0

    @property
    def n_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def n_expected(self) -> int:
        """Tokens that exist once all launched steps have landed."""
        return len(self.prompt) + len(self.output) + self.sampling_in_flight

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
