"""The CPU executor against the reference and recorded logits; a request's tokens whatever runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_ops import ISA_NAMES, quantised
from families import RECORDED, TOKEN_IDS, families, golden_logits, make_hf_folder
from gapless.arch.spec import ExpertSpec, map_weights
from gapless.executor.cpu import CpuExecutor
from gapless.executor.reference import ReferenceExecutor
from gapless.models.load import load_model
from gapless.models.tensor import WeightTensor
from gapless.sampling import SamplingParams
from gapless.step import Admission, Span, StepPlan
from tiny import TinyModel, tiny_model

TOLERANCE = 1e-3  # of logits, as the project promises; most are within a hundredth of it


@pytest.fixture(scope="module", params=families())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_hf_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_logits_of_every_family_agree_with_transformers(folder: tuple[str, Path], isa: str) -> None:
    name, path = folder
    model = load_model(path)
    executor = CpuExecutor(
        model.spec, model.weights, n_pages=32, n_slots=4, max_step_tokens=64, isa=isa, kv_dtype="f32", threads=2
    )
    try:
        logits = executor.logits(TOKEN_IDS)
    finally:
        executor.close()
    np.testing.assert_allclose(logits[RECORDED], golden_logits(name), rtol=0, atol=TOLERANCE)


FEATURES = {
    "plain": tiny_model(d_model=64, d_ff=96),
    "bias, norms of heads and after blocks": tiny_model(bias=True, qk_norm=True, post_norms=True),
    "window and caps": tiny_model(windows=(20, None), softcap=8.0),
    "experts": tiny_model(experts=ExpertSpec(5, 2, 64), d_ff=64),
}


def quantise(model: TinyModel, quant: str) -> TinyModel:
    """The model with its matrices rounded to a GGML type."""

    def convert(w: WeightTensor) -> WeightTensor:
        router = len(w.shape) == 2 and w.shape[0] < 8  # files keep it in float32
        if len(w.shape) == 1 or router or w.shape[-1] % 32:
            return w
        q = quantised(w.float32().reshape(-1, w.shape[-1]), quant)
        return WeightTensor(w.name, quant, w.shape, q.data.reshape(*w.shape[:-1], -1))

    return TinyModel(model.spec, map_weights(convert, model.weights))


@pytest.fixture(scope="module", params=["Q4_0", "Q5_1", "Q8_0", "F32"])
def quant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(FEATURES))
def model(request: pytest.FixtureRequest, quant: str) -> TinyModel:
    found = FEATURES[request.param]
    return found if quant == "F32" else quantise(found, quant)


IDS = tuple(np.random.default_rng(3).integers(0, 288, 150).tolist())


def test_int8_activations_stay_near_the_reference(model: TinyModel, quant: str) -> None:
    executor = CpuExecutor(
        model.spec, model.weights, n_pages=32, n_slots=4, max_step_tokens=64, threads=2, kv_dtype="f32"
    )
    wanted = ReferenceExecutor(model.spec, model.weights).logits(IDS)
    got = executor.logits(IDS)
    executor.close()
    error = np.sqrt(np.mean(np.square(got - wanted))) / np.sqrt(np.mean(np.square(wanted)))
    # Rounding may choose another expert, which makes another value altogether.
    routed = model.spec.layers[0].experts is not None
    assert error < (1e-4 if quant == "F32" else 0.2 if routed else 0.06)


@pytest.fixture
def executors(model: TinyModel) -> Iterator[list[CpuExecutor]]:
    """The same model under different threads, depths and instruction sets of one dot product."""
    made = [
        CpuExecutor(model.spec, model.weights, n_pages=64, n_slots=6, max_step_tokens=96, threads=threads, depth=depth)
        for threads, depth in ((1, 1), (3, 1), (2, 2))
    ]
    yield made
    for executor in made:
        executor.close()


def alone(executor: CpuExecutor, prompt: tuple[int, ...], n: int, chunk: int = 96, first_page: int = 0) -> list[int]:
    """Greedy tokens of one request in chunks of its prompt."""
    pages = tuple(range(first_page, first_page + 8))
    admission = Admission(0, 1, prompt, len(prompt), SamplingParams(temperature=0), 0)
    tokens: list[int] = []
    start, known = 0, len(prompt)
    while len(tokens) < n:
        count = min(chunk, known - start)
        span = Span(1, 0, start, count, pages, start + count == known)
        executor.launch(StepPlan(0, (admission,) if start == 0 else (), (span,)))
        landed = executor.land().tokens
        start += count
        if landed:
            tokens.append(landed[0].token)
            known += 1
    return tokens


def test_tokens_do_not_depend_on_threads_depth_or_chunks(executors: list[CpuExecutor]) -> None:
    wanted = alone(executors[0], IDS[:75], 12)
    for executor in executors:
        for chunk in (96, 16, 7, 1):
            assert alone(executor, IDS[:75], 12, chunk, first_page=chunk % 50) == wanted


def test_tokens_do_not_depend_on_company(executors: list[CpuExecutor]) -> None:
    prompts = [IDS[i * 9 : i * 9 + 5 + 3 * i] for i in range(5)]
    wanted = [alone(executors[0], p, 8) for p in prompts]
    for executor in executors[1:]:
        assert together(executor, prompts, 8) == wanted


def together(executor: CpuExecutor, prompts: list[tuple[int, ...]], n: int) -> list[list[int]]:
    """All in one batch, each joining a step after the one before."""
    pages = [tuple(range(10 * i, 10 * i + 10)) for i in range(len(prompts))]
    done = [0] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    step = 0
    while any(len(t) < n for t in tokens):
        spans, admissions = [], []
        for i, prompt in enumerate(prompts):
            if i > step or len(tokens[i]) == n:
                continue
            if done[i] == 0:
                admissions.append(Admission(i, i, prompt, len(prompt), SamplingParams(temperature=0), 0))
            known = len(prompt) + len(tokens[i])
            spans.append(Span(i, i, done[i], known - done[i], pages[i], True))
            done[i] = known
        executor.launch(StepPlan(step, tuple(admissions), tuple(spans)))
        for sampled in executor.land().tokens:
            tokens[sampled.request_id].append(sampled.token)
        step += 1
    return tokens


def test_a_step_can_be_launched_before_the_one_before_lands() -> None:
    model = FEATURES["plain"]
    executor = CpuExecutor(model.spec, model.weights, n_pages=16, n_slots=2, max_step_tokens=64, threads=1, depth=2)
    pages, prompt = tuple(range(8)), IDS[:20]
    wanted = alone(executor, prompt, 6)
    admission = Admission(1, 1, prompt, 20, SamplingParams(temperature=0), 0)
    executor.launch(StepPlan(0, (admission,), (Span(1, 1, 0, 20, pages, True),)))
    tokens = []
    for step in range(1, 6):
        executor.launch(StepPlan(step, (), (Span(1, 1, 19 + step, 1, pages, True),)))
        tokens.append(executor.land().tokens[0].token)
    tokens.append(executor.land().tokens[0].token)
    executor.close()
    assert tokens == wanted


def test_instruction_sets_agree_but_for_rounding() -> None:
    model = quantise(FEATURES["plain"], "Q4_1")
    found = []
    for isa in ISA_NAMES:
        executor = CpuExecutor(model.spec, model.weights, n_pages=32, n_slots=4, max_step_tokens=64, isa=isa)
        found.append(executor.logits(IDS))
        executor.close()
    for logits in found[1:]:
        assert np.abs(logits - found[0]).max() < 0.05


def test_scores_are_log_probabilities() -> None:
    model = FEATURES["plain"]
    executor = CpuExecutor(model.spec, model.weights, n_pages=32, n_slots=4, max_step_tokens=64, kv_dtype="f32")
    wanted = ReferenceExecutor(model.spec, model.weights).score(IDS)
    assert np.allclose(executor.score(IDS), wanted, atol=1e-3)
    executor.close()
