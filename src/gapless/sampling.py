"""How the next token is chosen, as a request asks for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gapless.checks import flag, real, shown, whole
from gapless.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. The defaults follow the OpenAI API where it has the field.

    A single stop string need not be in a list; None is no stop, no ids, no bias.

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

    Raises:
        RequestError: a value of the wrong type or out of its range; the message names the field.
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
        for name, low, high in _NUMBERS:
            self._set(name, real(name, getattr(self, name), low, high))
        for name, least, most in _COUNTS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, whole(name, value, least, most))
        self._set("ignore_eos", flag("ignore_eos", self.ignore_eos))
        self._set("stop", _texts(self.stop))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.top_p == 0:
            raise RequestError("top_p = 0 keeps no token", "give a number above 0, or temperature 0 for greedy")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}", "lower min_tokens"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_ids(self, vocab_size: int) -> None:
        """Raises RequestError for a token id that the vocabulary does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} has the token id {token}", f"give ids from 0 to {vocab_size - 1}")
        if self.min_tokens > 0 and len(set(self.stop_token_ids)) == vocab_size:
            raise RequestError(
                f"stop_token_ids has all ids and min_tokens = {self.min_tokens} allows none of them", "lower min_tokens"
            )


_NUMBERS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)
_COUNTS: tuple[tuple[str, int, int], ...] = (
    ("top_k", 0, 1 << 30),
    ("logprobs", 0, 1000),
    ("n", 1, 1024),
    ("max_tokens", 1, 1 << 30),
    ("min_tokens", 0, 1 << 30),
    ("seed", -(1 << 63), (1 << 64) - 1),
)
_OPTIONAL = ("logprobs", "max_tokens", "seed")  # those of them that may be None
_MAX_BIAS = sys.float_info.max  # the sampler holds what comes of it within its own range


def _texts(stop: Any) -> tuple[str, ...]:
    """Stop strings: one, several or none."""
    texts = (stop,) if isinstance(stop, str) else _tuple("stop", stop, "give a string or a list of them")
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"stop has {shown(text)}, which is no string", "give a string or a list of them")
        if not text:
            raise RequestError(
                f"stop = {shown(list(texts))} has an empty string", "give strings of a character or more"
            )
    return texts


def _ids(ids: Any) -> tuple[int, ...]:
    return tuple(_id("stop_token_ids", i) for i in _tuple("stop_token_ids", ids, "give a list of token ids"))


def _biases(biases: Any) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias = {shown(biases)} is not a mapping", "give a dict of token ids and numbers")
    return {
        _id("logit_bias", token): real(f"logit_bias[{shown(token)}]", bias, -_MAX_BIAS, _MAX_BIAS)
        for token, bias in biases.items()
    }


def _id(name: str, token: Any) -> int:
    # Which ids there are is the model's to say: ``check_ids``.
    return whole(f"a token id of {name}", token, -(1 << 63), (1 << 63) - 1)


def _tuple(name: str, values: Any, remedy: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        with contextlib.suppress(TypeError):  # NumPy's arrays without a dimension say only now that they are none
            return tuple(values)
    raise RequestError(f"{name} = {shown(values)} is not a list", remedy)
