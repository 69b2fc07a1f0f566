"""The reference sampler against its published parts, plain float64 arithmetic and the laws that it promises."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.kernels.sampling_reference import QUANTUM, exp_weights, philox4x32, sample_row, uniform
from gapless.sampling import SamplingParams
from gapless.step import TokenLogprobs

F32 = npt.NDArray[np.float32]


def sample(logits: F32, params: SamplingParams, seed: int = 0, **ids: tuple[int, ...]) -> int:
    return sample_row(logits, params, seed, 9, ids.get("prompt", ()), ids.get("output", ()), ids.get("suppress", ()))[0]


def report(logits: F32, params: SamplingParams, **ids: tuple[int, ...]) -> TokenLogprobs:
    found = sample_row(logits, params, 0, 9, ids.get("prompt", ()), ids.get("output", ()), ids.get("suppress", ()))[1]
    assert found is not None
    return found


def support(logits: F32, params: SamplingParams, draws: int = 400) -> set[int]:
    """Every token that these draws choose."""
    return {sample(logits, params, seed) for seed in range(draws)}


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((1 << 64) - 1, (1 << 128) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            0x03707344_13198A2E_85A308D3_243F6A88,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(key: int, counter: int, words: tuple[int, ...]) -> None:
    assert philox4x32(key, counter) == words


def test_uniform_numbers_are_uniform() -> None:
    by_position = np.array([uniform(5, p) for p in range(4000)])
    by_seed = np.array([uniform(s, 17) for s in range(4000)])
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0 and numbers.max() < 1  # noqa: PT018
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert np.square(counts - 200).sum() / 200 < 45  # chi square, 19 degrees of freedom, p = 0.0007
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert uniform(-1, 3) == uniform((1 << 64) - 1, 3)


def test_weights_are_near_exp_and_multiples_of_the_quantum() -> None:
    z = np.linspace(-30, 0, 100_001).astype(np.float32)
    w = exp_weights(z).astype(np.float64)
    exact = np.exp(z.astype(np.float64))
    assert np.abs(w - exact).max() < 2e-7
    assert np.all(np.abs(w - exact) <= 2e-7 * exact + QUANTUM / 2)
    assert np.all(w / QUANTUM == np.rint(w / QUANTUM))
    assert exp_weights(np.float32([0, -np.inf, np.nan])).tolist() == [1, 0, 0]


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=60), st.floats(0.3, 3.0))
def test_logprobs_are_those_of_a_softmax_before_temperature(values: list[float], temperature: float) -> None:
    logits = np.array(values, np.float32)
    exact = logits.astype(np.float64)
    exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
    params = SamplingParams(temperature=temperature, logprobs=len(values))
    token, found = sample_row(logits, params, 3, 9, (), ())
    assert found is not None
    assert found.chosen == pytest.approx(exact[token], abs=1e-5)
    assert sorted(found.top_ids) == list(range(len(values)))
    assert np.allclose(found.top, exact[list(found.top_ids)], atol=1e-5)
    assert list(found.top) == sorted(found.top, reverse=True)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
    for temperature in (1.0, 0.5, 2.0):
        wanted = np.exp(logits.astype(np.float64) / temperature)
        wanted *= 4000 / wanted.sum()
        tokens = [sample(logits, SamplingParams(temperature=temperature), seed) for seed in range(4000)]
        counts = np.bincount(tokens, minlength=5)
        assert (np.square(counts - wanted) / wanted).sum() < 20  # chi square, 4 degrees of freedom, p = 0.0005


def test_greedy_takes_the_largest_and_the_lower_id_among_equals() -> None:
    assert sample(np.float32([1, 3, 2, 3]), SamplingParams(temperature=0)) == 1


def test_cuts_keep_what_their_definitions_say() -> None:
    logits = np.log(np.float32([0.1, 0.4, 0.1, 0.3, 0.1]))
    assert support(logits, SamplingParams(top_k=2)) == {1, 3}
    assert support(logits, SamplingParams(top_k=3)) == {0, 1, 3}, "of equal logits the lowest id"
    assert support(logits, SamplingParams(top_p=0.35)) == {1}
    assert support(logits, SamplingParams(top_p=0.75)) == {0, 1, 3}
    assert support(logits, SamplingParams(min_p=0.5)) == {1, 3}
    assert support(logits, SamplingParams(min_p=0.2)) == {0, 1, 2, 3, 4}
    assert support(logits, SamplingParams(top_k=2, top_p=0.5)) == {1}, "top_p is of what top_k left"
    assert support(logits, SamplingParams(top_k=100, top_p=1.0, min_p=0.0)) == {0, 1, 2, 3, 4}


def test_temperature_comes_before_top_p() -> None:
    logits = np.log(np.float32([0.6, 0.3, 0.1]))
    assert support(logits, SamplingParams(top_p=0.65)) == {0, 1}
    assert support(logits, SamplingParams(top_p=0.65, temperature=0.5)) == {0}


def logit_of(token: int, **request: object) -> float:
    """A token's logit after changes, found from its distance to token 0, which nothing changes and whose logit is 0."""
    ids = {name: request.pop(name) for name in ("prompt", "output", "suppress") if name in request}
    logits = np.float32([0, 2, -2, 1, 0.5])
    found = report(logits, SamplingParams(logprobs=5, **request), **ids)  # type: ignore[arg-type]
    values = dict(zip(found.top_ids, found.top, strict=True))
    return round(values.get(token, -math.inf) - values[0], 6)


def test_penalties_change_logits_as_documented() -> None:
    assert logit_of(1, repetition_penalty=2.0, prompt=(1, 1)) == 1
    assert logit_of(2, repetition_penalty=2.0, output=(2,)) == -4
    assert logit_of(3, repetition_penalty=2.0, prompt=(1,)) == 1
    assert logit_of(1, presence_penalty=0.5, output=(1, 1, 1)) == 1.5
    assert logit_of(1, presence_penalty=0.5, prompt=(1,)) == 2
    assert logit_of(1, frequency_penalty=0.5, output=(1, 1, 1)) == 0.5
    assert logit_of(3, frequency_penalty=0.25, presence_penalty=1, repetition_penalty=4, output=(3, 3)) == -1.25
    assert logit_of(4, logit_bias={4: -3.0, 99: 5.0, -1: 5.0}) == -2.5
    assert logit_of(4, suppress=(4, 99, -1)) == -math.inf


def test_log_probabilities_leave_out_what_cannot_be_chosen() -> None:
    found = report(np.float32([1, -np.inf, 2, np.nan]), SamplingParams(temperature=0, logprobs=4), suppress=(2,))
    assert found.top_ids == (0,)
    assert found.chosen == 0


def test_a_row_without_a_finite_logit_gives_the_lowest_id_that_is_allowed() -> None:
    nothing = np.full(4, np.nan, np.float32)
    for params in (SamplingParams(temperature=0), SamplingParams()):
        assert sample(nothing, params) == 0
        assert sample(nothing, params, suppress=(0, 1)) == 2
        assert sample(nothing, params, suppress=(0, 1, 2, 3)) == 0
    found = report(nothing, SamplingParams(logprobs=2))
    assert found == TokenLogprobs(-math.inf, (), ())


def test_infinite_logits_win() -> None:
    logits = np.float32([5, np.inf, 7, np.inf])
    assert sample(logits, SamplingParams(temperature=0)) == 1
    assert support(logits, SamplingParams(), 60) == {1, 3}


def test_bias_beyond_float32_is_held_within_range() -> None:
    logits = np.float32([1, 2, -np.inf])
    assert sample(logits, SamplingParams(temperature=0, logit_bias={0: 1e300})) == 0
    assert sample(logits, SamplingParams(temperature=0, logit_bias={1: -1e300})) == 0
    assert sample(logits, SamplingParams(temperature=0, logit_bias={2: 1e300})) == 1
