"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.request import FinishReason
from gapless.step import TokenLogprobs


@dataclass
class Completion:
    """One sample of a prompt. ``logprobs`` has an entry for each token where they were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    first_token_s: float | None = None  # after submission
    last_token_s: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its samples; the shortcuts speak of the first."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submission to the first token."""
        return self.outputs[0].first_token_s


@dataclass(frozen=True)
class StreamPiece:
    """A piece of text as it comes, with the tokens behind it; the last one says why the stream ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
