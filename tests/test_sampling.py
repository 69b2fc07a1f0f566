"""Sampling parameters as callers give them: what is taken, and what is refused in which words."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import RequestError
from gapless.sampling import SamplingParams

NAMES = [field.name for field in fields(SamplingParams)]
HUGE = 10**400


def refused(**given: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    return str(caught.value)


@pytest.mark.parametrize("value", [0, 1, True, np.int64(1), np.float32(0.5)])
def test_numbers_of_every_kind_become_plain_ones(value: Any) -> None:
    if isinstance(value, bool):
        assert "min_p = True is not a number" in refused(min_p=value)
        return
    params = SamplingParams(temperature=value, min_p=value)
    assert type(params.temperature) is float
    assert params.min_p == pytest.approx(float(value))


def test_whole_numbers_are_whole() -> None:
    params = SamplingParams(max_tokens=np.int32(7), seed=np.uint64(2**64 - 1), top_k=np.int8(3))
    assert (params.max_tokens, params.seed, params.top_k) == (7, 2**64 - 1, 3)
    assert {type(params.max_tokens), type(params.seed), type(params.top_k)} == {int}
    for name in ("max_tokens", "seed", "top_k", "n", "min_tokens", "logprobs"):
        for value in (3.0, "3", True, [3], HUGE, -HUGE, math.nan):
            assert f"{name} = " in refused(**{name: value})


def test_one_stop_string_is_one() -> None:
    """Not as many as it has letters."""
    assert SamplingParams(stop="land").stop == ("land",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[np.int64(3)]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_arrays_without_a_dimension_are_no_lists() -> None:
    assert "stop_token_ids = array(5) is not a list" in refused(stop_token_ids=np.array(5))
    assert "stop = array('a'" in refused(stop=np.array("a"))


def test_none_is_none_where_there_may_be_none() -> None:
    params = SamplingParams(
        stop=None, stop_token_ids=None, logit_bias=None, seed=None, logprobs=None, max_tokens=None  # type: ignore[arg-type]
    )  # fmt: skip
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    for name in ("temperature", "top_p", "top_k", "n", "min_tokens", "ignore_eos"):
        assert f"{name} = None is n" in refused(**{name: None})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stop": [""]}, "empty string"), ({"stop": ["a", 3]}, "stop has 3"), ({"stop": 3}, "stop = 3 is not a list"),
        ({"stop": b"x"}, "stop = b'x'"), ({"stop_token_ids": 3}, "stop_token_ids = 3 is not a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids = '12'"), ({"stop_token_ids": [1.5]}, "stop_token_ids = 1.5"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids = 1000"), ({"logit_bias": [1]}, "logit_bias = [1]"),
        ({"logit_bias": {"a": 1}}, "logit_bias = 'a'"), ({"logit_bias": {3: "x"}}, "logit_bias[3] = 'x'"),
        ({"logit_bias": {3: math.inf}}, "logit_bias[3] = inf"), ({"logit_bias": {-HUGE: 1.0}}, "logit_bias = -1000"),
        ({"logit_bias": {3: HUGE}}, "logit_bias[3]"), ({"temperature": HUGE}, "temperature = 1000"),
        ({"temperature": math.nan}, "temperature = nan"), ({"top_p": 0}, "top_p = 0"), ({"n": 0}, "n = 0 is too small"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5 exceeds"), ({"ignore_eos": 1}, "ignore_eos = 1"),
    ],
)  # fmt: skip
def test_the_message_names_the_field_and_the_value(given: dict[str, Any], words: str) -> None:
    message = refused(**given)
    assert words in message
    assert "; " in message, "and the remedy"
    assert len(message) < 250


LEAVES = (
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(HUGE),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
KEYS = st.integers(-2, 9) | st.text(max_size=2)
ANYTHING = st.recursive(
    st.one_of(*LEAVES, st.complex_numbers()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)


@given(st.sampled_from(NAMES), ANYTHING)
def test_whatever_is_given_is_taken_or_refused(name: str, value: Any) -> None:
    message = ""
    try:
        params = SamplingParams(**{name: value})
    except RequestError as problem:
        message = str(problem)
    if message:
        assert name in message
        return
    again = SamplingParams(**{field: getattr(params, field) for field in NAMES})
    assert again == params


def test_ids_beyond_the_vocabulary() -> None:
    for params in (SamplingParams(stop_token_ids=(1, 99)), SamplingParams(logit_bias={99: 1.0})):
        params.check_ids(100)
        with pytest.raises(RequestError, match="token id 99; give ids from 0 to 98"):
            params.check_ids(99)
