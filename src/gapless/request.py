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

    The fields above the line are given; the scheduler alone writes those below it.

    Attributes:
        prompt: token ids, at least one.
        seed: resolved; sampling at a position draws from (seed, position) alone.
        stop_ids: the model's own ends of sequence.
        priority: higher runs first under the priority policy.
        leader: the sample of the same prompt that computes it for all of them, or None.
        ends: ids that end the request when they are sampled.
        limit: total tokens (prompt and output) at which it ends.
        arrival: order of arrival, which breaks ties.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    leader: Request | None = None
    # ---
    ends: frozenset[int] = field(init=False)
    limit: int = field(default=0, init=False)
    arrival: int = field(default=0, init=False)
    state: State = field(default=State.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    output: list[int] = field(default_factory=list, init=False)
    slot: int = field(default=-1, init=False)  # kept until the last step in flight has landed
    slot_filled: bool = field(default=False, init=False)  # whether the executor knows the tokens
    pages: tuple[int, ...] = field(default=(), init=False)
    planned: int = field(default=0, init=False)  # positions whose computation has been launched
    landed: int = field(default=0, init=False)  # positions whose computation has landed
    in_flight: int = field(default=0, init=False)  # spans launched and not landed
    sampling_in_flight: int = field(default=0, init=False)  # of them, those that bring a token
    last_step: int = field(
        default=-1, init=False
    )  # the latest step that it was planned in, or the one it was admitted in
    cached_pages: int = field(default=0, init=False)  # leading pages that are in the prefix tree
    cacheable: bool = field(default=True, init=False)  # False once others have cached the same tokens first
    prefix_hits: int = field(default=0, init=False)  # prompt tokens that others had computed for it
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        own = frozenset(self.sampling.stop_token_ids)
        self.ends = own if self.sampling.ignore_eos else own | self.stop_ids

    @property
    def n_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def n_expected(self) -> int:
        """Tokens that exist once all launched steps have landed."""
        return len(self.prompt) + len(self.output) + self.sampling_in_flight

    @property
    def n_left(self) -> int:
        """Positions that are still to be launched, of the tokens expected."""
        return len(self.prompt) + len(self.output) + self.sampling_in_flight - self.planned

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    def tokens_between(self, start: int, end: int) -> tuple[int, ...]:
        """The known tokens at positions ``start .. end``, without a copy of the others."""
        n = len(self.prompt)
        if end <= n:
            return self.prompt[start:end]
        return (*self.prompt[start:n], *self.output[max(start - n, 0) : end - n])

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
