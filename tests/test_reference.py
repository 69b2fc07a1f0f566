"""The NumPy executor: steps, slots and pages, and results that do not depend on what else runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gapless.arch.spec import ExpertSpec, RopeSpec
from gapless.errors import ModelError
from gapless.executor.reference import ReferenceExecutor
from gapless.kernels.reference import DenseWeights, PagedKV, activate, matmul, rotate
from gapless.sampling import SamplingParams
from gapless.step import Admission, SampledToken, Span, StepPlan
from tiny import TinyModel, tiny_model

GREEDY = SamplingParams(temperature=0, logprobs=3)
VARIANTS = {
    "plain": {},
    "window": {"windows": (8, None), "softcap": 4.0, "post_norms": True},
    "experts": {"experts": ExpertSpec(6, 2, 64)},
    "bias_and_norms": {"bias": True, "qk_norm": True, "n_kv_heads": 1},
}


@pytest.fixture(params=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(**VARIANTS[request.param])


def text(n: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 288, n).tolist())


def admit(slot: int, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, n_prompt: int = 0) -> Admission:
    return Admission(slot, 100 + slot, tokens, n_prompt or len(tokens), sampling, seed=slot)


def run(executor: ReferenceExecutor, *spans: Span, admissions: tuple[Admission, ...] = ()) -> list[SampledToken]:
    executor.launch(StepPlan(0, admissions, spans))
    return list(executor.land().tokens)


def generate(
    model: TinyModel,
    prompt: tuple[int, ...],
    n: int,
    *,
    chunk: int,
    pages: tuple[int, ...] = tuple(range(16)),
) -> list[SampledToken]:
    """``n`` tokens of a prompt alone, prefilled ``chunk`` tokens a step."""
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    admissions: tuple[Admission, ...] = (admit(0, prompt),)
    out: list[SampledToken] = []
    start, known = 0, len(prompt)
    while len(out) < n:
        count = min(chunk, known - start)
        sample = start + count == known
        out += run(executor, Span(100, 0, start, count, pages, sample), admissions=admissions)
        start, known, admissions = start + count, known + sample, ()
    return out


def test_chunks_and_places_of_pages_change_nothing(model: TinyModel) -> None:
    prompt = text(21)
    whole = generate(model, prompt, 8, chunk=64)
    assert whole == generate(model, prompt, 8, chunk=1)
    assert whole == generate(model, prompt, 8, chunk=5, pages=tuple(reversed(range(16))))
    assert len({t.token for t in whole}) > 1


def test_company_changes_nothing(model: TinyModel) -> None:
    """Four requests of unequal length, together, prefill beside decode; each as if alone, to the last bit."""
    prompts = [text(n, seed=n) for n in (3, 9, 17, 30)]
    alone = [generate(model, prompt, 5, chunk=64) for prompt in prompts]
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    pages = [tuple(range(16 * i, 16 * i + 16)) for i in range(4)]
    together: list[list[SampledToken]] = [[] for _ in prompts]
    for step in range(9):  # request i arrives with step i
        live = [i for i in range(min(step + 1, 4)) if len(together[i]) < 5]
        spans, arrivals = [], []
        for i in live:
            known = len(prompts[i]) + len(together[i])
            start = known - 1 if together[i] else 0
            spans.append(Span(100 + i, i, start, known - start, pages[i], sample=True))
            if not together[i]:
                arrivals.append(admit(i, prompts[i]))
        for i, token in zip(live, run(executor, *spans, admissions=tuple(arrivals)), strict=True):
            together[i].append(token)
    for i, tokens in enumerate(together):
        assert tokens == [t._replace(request_id=100 + i) for t in alone[i]]


def test_recompute_after_preemption_goes_on_with_the_same_tokens(model: TinyModel) -> None:
    prompt = text(11)
    whole = generate(model, prompt, 8, chunk=64)
    known = (*prompt, *(t.token for t in whole[:4]))
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    pages = tuple(range(16))
    again = run(
        executor,
        Span(103, 3, 0, len(known), pages, sample=True),
        admissions=(admit(3, known, n_prompt=len(prompt)),),
    )
    assert again[0].token == whole[4].token
    assert again[0].logprobs == whole[4].logprobs


def test_shared_prefix_pages_give_the_same_tokens(model: TinyModel) -> None:
    prefix, tail = text(8), text(5, seed=2)
    alone = generate(model, (*prefix, *tail), 1, chunk=64)
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    run(executor, Span(100, 0, 0, 8, (7, 3), sample=False), admissions=(admit(0, prefix),))
    second = admit(1, (*prefix, *tail))
    shared = run(executor, Span(101, 1, 8, 5, (7, 3, 0, 1), sample=True), admissions=(second,))
    assert shared[0].token == alone[0].token
    assert shared[0].logprobs == alone[0].logprobs


def test_logits_agree_with_steps_and_do_not_disturb_them() -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    prompt = text(10)
    logits = executor.logits(prompt)
    np.testing.assert_array_equal(logits, executor.logits(prompt, chunk_tokens=3))
    tokens = run(executor, Span(100, 0, 0, 10, (0, 1, 2), sample=True), admissions=(admit(0, prompt),))
    assert tokens[0].token == int(logits[-1].argmax())
    executor.logits(text(30))
    after = run(executor, Span(100, 0, 10, 1, (0, 1, 2), sample=True))
    assert after[0].token == int(executor.logits((*prompt, tokens[0].token))[-1].argmax())


def test_scores_are_log_probabilities() -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.spec, model.weights)
    prompt = text(12)
    scores = executor.score(prompt)
    logits = executor.logits(prompt).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = [np.log(p[i, prompt[i + 1]]) for i in range(11)]
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_suppressed_ids_are_free_once_min_tokens_exist() -> None:
    model = tiny_model()
    prompt = text(10)
    favourite = generate(model, prompt, 1, chunk=64)[0].token
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    sampling = SamplingParams(temperature=0, min_tokens=1)
    held = replace(admit(0, prompt, sampling), suppress=(favourite,))
    span = Span(100, 0, 0, 10, (0, 1, 2, 3), sample=True)
    assert run(executor, span, admissions=(held,))[0].token != favourite
    free = replace(held, sampling=replace(sampling, min_tokens=0))
    assert run(executor, span, admissions=(free,))[0].token == favourite


def test_reading_an_unwritten_page_is_an_error() -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    with pytest.raises(ModelError, match="not finite"):
        run(executor, Span(100, 0, 4, 2, (0, 1), sample=True), admissions=(admit(0, text(6)),))


@pytest.mark.parametrize(
    "span",
    [
        Span(999, 0, 0, 4, (0,), sample=True),  # another request's slot
        Span(100, 0, 0, 6, (0, 1), sample=True),  # more than the slot knows
        Span(100, 0, 0, 3, (0,), sample=True),  # sampling in the middle of the prompt
        Span(100, 0, 0, 4, (), sample=True),  # no page for the tokens
        Span(100, 0, 0, 4, (1 << 20,), sample=True),  # no such page
        Span(100, 0, 4, 0, (0,), sample=False),  # nothing to run
    ],
)
def test_plans_that_break_the_contract_fail(span: Span) -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.spec, model.weights, page_tokens=4)
    with pytest.raises(AssertionError):
        run(executor, span, admissions=(admit(0, text(4)),))


def test_one_step_is_in_flight_at_most() -> None:
    model = tiny_model()
    executor = ReferenceExecutor(model.spec, model.weights)
    assert executor.depth == 1
    with pytest.raises(AssertionError):
        executor.land()
    executor.launch(StepPlan(1, (), ()))
    with pytest.raises(AssertionError):
        executor.launch(StepPlan(2, (), ()))
    assert executor.land().step_id == 1


@pytest.mark.parametrize(("dtype", "bound"), [("f16", 2**-11), ("int8", 1 / 254)])
def test_cache_types_round_as_their_width_says(dtype: str, bound: float) -> None:
    spec = tiny_model(n_layers=1).spec
    cache = PagedKV(spec, 4, 4, dtype)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((6, 2, 32), np.float32) for _ in range(2))
    keys[0, 0] = 0
    cache.write(0, Span(0, 0, 3, 6, (2, 0, 1), sample=False), keys, values)
    read_keys, read_values = cache.read(0, (2, 0, 1), 3, 9)
    for written, read in ((keys, read_keys), (values, read_values)):
        error = np.abs(read - written.transpose(1, 0, 2))
        assert 0 < error.max() <= bound * np.abs(written).max() * 1.001
    np.testing.assert_array_equal(read_keys[0, 0], 0)
    assert np.isnan(cache.read(0, (2, 0, 1), 2, 3)[0]).all()


def test_dense_weights_keep_to_their_budget() -> None:
    model = tiny_model()
    layer = model.weights.layers[0]
    dense = DenseWeights(budget_bytes=layer.q.nbytes)
    assert dense(layer.q) is dense(layer.q)
    np.testing.assert_array_equal(dense(layer.k), layer.k.float32())
    assert dense(layer.q) is dense(layer.q)
    again = DenseWeights(budget_bytes=0)
    full = ReferenceExecutor(model.spec, model.weights).logits(text(5))
    frugal = ReferenceExecutor(model.spec, model.weights, dense_budget_bytes=0).logits(text(5))
    np.testing.assert_array_equal(full, frugal)
    np.testing.assert_array_equal(again(layer.q), layer.q.float32())


def test_matmul_rows_do_not_see_each_other() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((37, 96), np.float32), rng.standard_normal((50, 96), np.float32)
    whole = matmul(x, w)
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-4, atol=1e-4)
    for i in range(37):
        np.testing.assert_array_equal(matmul(x[i : i + 1], w)[0], whole[i])


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    x = np.random.default_rng(4).standard_normal((3, 2, 10), np.float32)
    rope = RopeSpec((1.0, 0.5), scale=2.0)
    turned = rotate(x, np.array([0, 5, 1 << 20]), rope)
    for t, position in enumerate((0, 5, 1 << 20)):
        for i, frequency in enumerate(rope.inv_freq):
            before = complex(x[t, 1, i], x[t, 1, i + 2])
            after = complex(turned[t, 1, i], turned[t, 1, i + 2])
            assert after == pytest.approx(2 * before * np.exp(1j * position * frequency), rel=1e-5, abs=1e-5)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])


def test_activations() -> None:
    x = np.array([-200, -3, -1, 0, 1, 3, 200], np.float32)
    np.testing.assert_allclose(activate(x, "silu"), [0, -0.142278, -0.268941, 0, 0.731059, 2.857722, 200], atol=1e-6)
    gelu = [0, -0.003637, -0.158808, 0, 0.841192, 2.996363, 200]
    np.testing.assert_allclose(activate(x, "gelu_tanh"), gelu, atol=1e-5)
