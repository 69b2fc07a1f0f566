"""What passes between scheduler and executor: the plan of a step and its result. Integers only.

The executor keeps each running request's token ids in a *slot* beside the compute. A span says which positions of
which slot a step runs; the token sampled at the end of a span is written to the slot by the executor itself, so
the next step can be planned and launched before this one has landed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gapless.sampling import SamplingParams


@dataclass(frozen=True)
class Admission:
    """Fill a slot before the step: the ids known so far (prompt, and after a preemption also the output).

    ``n_prompt`` of ``tokens`` are the prompt; ``seed`` is resolved (never None); sampling at position ``p`` draws
    from the stream (seed, p) alone, which is why a preempted request goes on with the same tokens.
    ``suppress`` are the ids that may not be sampled until ``min_tokens`` of output exist.
    """

    slot: int
    request_id: int
    tokens: tuple[int, ...]
    n_prompt: int
    sampling: SamplingParams
    seed: int
    suppress: tuple[int, ...] = ()


class Span(NamedTuple):
    """Positions ``start .. start + count`` of one request in this step.

    ``pages`` maps the request's cache pages in order and covers ``start + count`` positions. With ``sample`` the
    logits of the last position are sampled and the token becomes position ``start + count`` of the slot.
    """

    request_id: int
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks a span for
    pages: tuple[int, ...]
    sample: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class StepPlan:
    """One forward pass. Admissions take effect first. Plans run in the order in which they were launched."""

    step_id: int
    admissions: tuple[Admission, ...]
    spans: tuple[Span, ...]

    @property
    def n_tokens(self) -> int:
        return sum(span.count for span in self.spans)

    @property
    def n_samples(self) -> int:
        return sum(span.sample for span in self.spans)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely ones, best first, after penalties and bias
    but before temperature and truncation."""

    chosen: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class SampledToken(NamedTuple):
    """``token`` is -1 where no logit was finite, as with damaged weights."""

    request_id: int
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """What a landed step brought: one token for each sampling span, in the plan's order."""

    step_id: int
    tokens: tuple[SampledToken, ...]
    stamps: Any = None  # for the executor's ``profile``, valid until ``profile.kept`` more steps have been launched
