"""How the next token is chosen, as a request asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gapless.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. The defaults follow the OpenAI API where it has the field.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or per use.
        logit_bias: token id to a number added to its logit.
        seed: same seed, same tokens; None draws one from the operating system when the request arrives.
        logprobs: how many of the most likely tokens to report at each position beside the chosen one; None for none.
        n: samples of the prompt; they share its pages.
        max_tokens: None means until the context is full.
        min_tokens: end-of-sequence, stop ids and stop strings are ignored before that many.
        stop, stop_token_ids: end the request; a stop string is left out of the text, a stop id out of nothing.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} = {value!r} is out of range", f"give a number from {low} to {high}")
        if self.top_p == 0:
            raise RequestError("top_p = 0 keeps no token", "give a number above 0, or temperature 0 for greedy")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop = {list(self.stop)!r} has an empty string", "give strings of a character or more")
        if any(not math.isfinite(b) for b in self.logit_bias.values()):
            raise RequestError("logit_bias has a value that is not finite", "give numbers from -100 to 100")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}", "lower min_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_k", 0, 1 << 30),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("logprobs", 0, 1000),
    ("n", 1, 1024),
    ("max_tokens", 1, 1 << 30),
    ("min_tokens", 0, 1 << 30),
    ("seed", -(1 << 63), (1 << 64) - 1),
)
