"""Steps divided over those that they computed for: nothing is lost or doubled, by the rules as they are stated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.arch.sizes import planned_weights
from gapless.ceilings import Ceilings
from gapless.executor.timing import N_COLUMNS, SAMPLE_COLUMN, DeviceTimes
from gapless.kernels.count import OpKind, StepCounter
from gapless.ledger.attribute import SpanColumns, attribute
from gapless.ledger.shares import N_TIMES, Keys, Share, divided
from tiny import tiny_model

KINDS = list(OpKind)


def keys_of(rng: np.random.Generator, n_steps: int) -> tuple[Keys, SpanColumns]:
    """Steps of one to five spans, decodes and prompts."""
    step = np.repeat(np.arange(n_steps), rng.integers(1, 6, n_steps))
    n = len(step)
    prompt = rng.random(n) < 0.4
    count, start = np.where(prompt, rng.integers(2, 90, n), 1), rng.integers(0, 100_000, n)
    sample = rng.random(n) < 0.7
    return Keys.of(step, start, count, sample), SpanColumns(step, start, count, sample, prompt)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), largest=st.sampled_from([1, 7, 1 << 20, 1 << 52, 1 << 61]))
def test_shares_add_up_to_what_is_divided(seed: int, largest: int) -> None:
    """To the last unit, for any amounts: beyond 2^53 too, where reals do not hold every whole number."""
    rng = np.random.default_rng(seed)
    keys, _ = keys_of(rng, int(rng.integers(1, 9)))
    n_steps = int(keys.step[-1]) + 1
    amounts = rng.integers(0, largest, (n_steps, 4), endpoint=True)
    for by in (keys.tokens, keys.context, keys.samples):
        found = divided(amounts, by, keys)
        assert (found >= 0).all()
        for step in range(n_steps):
            mine = keys.step == step
            assert (found[mine].sum(axis=0) == amounts[step]).all()
            weight = by[mine] if by[mine].any() else keys.tokens[mine]
            fair = amounts[step] * (weight / weight.sum())[:, None]
            assert np.allclose(found[mine], fair, rtol=1e-9, atol=1 + largest * 1e-15)


def booked(times: DeviceTimes, spans: SpanColumns) -> Any:
    spec = tiny_model().spec
    return attribute(StepCounter(spec, planned_weights(spec, 5)), Ceilings(2e10, 1e12, 2e11), times, spans)


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_a_step_are_the_step(seed: int) -> None:
    """Its time to the nanosecond, and the bytes and FLOPs that counting it gives."""
    rng = np.random.default_rng(seed)
    keys, spans = keys_of(rng, 6)
    by_kind, waited = rng.integers(0, 10_000, (6, N_COLUMNS)), rng.integers(0, 500, (6, 2))
    length = by_kind.sum(axis=1) + waited.sum(axis=1) // 2 + rng.integers(0, 99, 6)
    ended = np.cumsum(length + 10)
    share = booked(DeviceTimes(ended - length, ended, by_kind, waited), spans).share
    spec = tiny_model().spec
    counter = StepCounter(spec, planned_weights(spec, 5))
    for step in range(6):
        mine = keys.step == step
        of_step = share[mine].sum(axis=0)
        assert of_step[:N_TIMES].sum() == length[step]
        pairs = list(zip(spans.start[mine].tolist(), spans.count[mine].tolist(), strict=True))
        work = counter.count(pairs, int(spans.sample[mine].sum())).total
        assert of_step[Share.FLOPS] == work.flops
        assert of_step[Share.WEIGHT_BYTES] == work.weight_bytes
        assert of_step[Share.KV_BYTES] == work.kv_read_bytes + work.kv_write_bytes


def one_step(kind: int, starts: list[int], counts: list[int], samples: list[bool]) -> Any:
    """A step of 1000 ns, all of it in one column."""
    by_kind = np.zeros((1, N_COLUMNS), np.int64)
    by_kind[0, kind] = 1000
    start, count, sample = np.array(starts), np.array(counts), np.array(samples)
    spans = SpanColumns(np.zeros(len(start), np.int64), start, count, sample, count > 1)
    times = DeviceTimes(np.array([0]), np.array([1000]), by_kind, np.zeros((1, 1), np.int64))
    return booked(times, spans).share[:, :N_TIMES].sum(axis=1).tolist()


def test_weights_are_shared_by_tokens() -> None:
    """A prompt of three tokens has three times what a request has that decodes."""
    assert one_step(KINDS.index(OpKind.LINEAR), [50, 0, 9], [1, 3, 1], [True, True, True]) == [200, 600, 200]


def test_the_cache_is_shared_by_context() -> None:
    """Of 999 and 4,999 positions, and its own; a prompt of two tokens looks back on one and two."""
    assert one_step(KINDS.index(OpKind.ATTENTION), [998, 2997], [1, 1], [True, True]) == [249, 751]
    assert one_step(KINDS.index(OpKind.ATTENTION), [0, 6], [2, 1], [True, True]) == [300, 700]


@pytest.mark.parametrize("column", [KINDS.index(OpKind.LOGITS), SAMPLE_COLUMN])
def test_scores_and_samples_are_shared_by_who_samples(column: int) -> None:
    """A part of a prompt that gives no token has none of it."""
    assert one_step(column, [5, 0, 7], [1, 40, 1], [True, False, True]) == [500, 0, 500]


def test_what_was_counted_for_nobody_is_shared_by_all() -> None:
    assert one_step(SAMPLE_COLUMN, [0, 0], [3, 1], [False, False]) == [750, 250]
