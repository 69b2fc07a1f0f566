"""Every family, loaded from a Hugging Face folder, against the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from families import RECORDED, TOKEN_IDS, Array, families, golden_logits, make_hf_folder
from gapless.arch.spec import ModelSpec, RopeSpec
from gapless.executor.reference import ReferenceExecutor
from gapless.models.load import load_model
from gapless.sampling import SamplingParams
from gapless.step import Admission, Span, StepPlan

Change = Callable[[ModelSpec], ModelSpec]

TOLERANCE = 1e-4


def executor(folder: Path) -> ReferenceExecutor:
    model = load_model(folder)
    return ReferenceExecutor(model.spec, model.weights)


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder(family, tmp_path_factory.mktemp(family))


@pytest.mark.parametrize("chunk_tokens", [len(TOKEN_IDS), 9, 1])
def test_logits_in_one_chunk_in_several_and_token_by_token(family: str, folder: Path, chunk_tokens: int) -> None:
    logits = executor(folder).logits(TOKEN_IDS, chunk_tokens=chunk_tokens)
    np.testing.assert_allclose(logits[RECORDED], golden_logits(family), rtol=0, atol=TOLERANCE)


def test_configs_of_transformers_4(family: str, tmp_path: Path) -> None:
    folder = make_hf_folder(family, tmp_path, legacy=True)
    logits = executor(folder).logits(TOKEN_IDS)
    np.testing.assert_allclose(logits[RECORDED], golden_logits(family), rtol=0, atol=TOLERANCE)


def _without(**attention: object) -> Change:
    """Change every layer's attention."""

    def change(spec: ModelSpec) -> ModelSpec:
        return replace(
            spec,
            layers=tuple(replace(x, attention=replace(x.attention, **attention)) for x in spec.layers),
        )

    return change


def _plain_rope(spec: ModelSpec) -> ModelSpec:
    a = spec.layers[0].attention
    inv_freq = tuple(10000.0 ** (-2 * i / a.head_dim) for i in range(a.head_dim // 2))
    return _without(rope=RopeSpec(inv_freq))(spec)


def _spec(**fields: object) -> Change:
    return lambda spec: replace(spec, **fields)


def _experts(**fields: object) -> Change:
    def change(spec: ModelSpec) -> ModelSpec:
        layers = (replace(x, experts=x.experts and replace(x.experts, **fields)) for x in spec.layers)
        return replace(spec, layers=tuple(layers))

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama31", _plain_rope),
        ("mistral", _without(window=None)),
        ("mistral", _without(window=15)),
        ("phi3", _without(window=None)),
        ("phi3_longrope", _plain_rope),
        ("phi4_mini", _plain_rope),
        ("gemma2", _without(window=None)),
        ("gemma2", _without(window=16)),
        ("gemma2", _without(softcap=None)),
        ("gemma2", _without(scale=32**-0.5)),
        ("gemma2", _spec(final_softcap=None)),
        ("gemma2", _spec(embed_scale=1.0)),
        ("gemma2", _spec(activation="silu")),
        ("gemma3", _plain_rope),
        ("gemma3", _without(window=16)),
        ("mixtral", _experts(top_k=1)),
        ("mixtral", _experts(renormalize=False)),
        ("qwen3_moe", _experts(renormalize=True)),
    ],
)
def test_the_recorded_logits_tell_differences_of_the_families_apart(name: str, change: Change, tmp_path: Path) -> None:
    """What these texts could not show, the tests above would not have tested."""
    model = load_model(make_hf_folder(name, tmp_path))
    logits = ReferenceExecutor(change(model.spec), model.weights).logits(TOKEN_IDS)
    assert np.abs(logits[RECORDED] - golden_logits(name)).max() > 100 * TOLERANCE


def test_transformers_itself(family: str, folder: Path) -> None:
    """Logits of every position and score, and the greedy tokens that follow."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ours = executor(folder)
    with torch.no_grad():
        expected: Array = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
        greedy = model.generate(torch.tensor([TOKEN_IDS]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[
            0, len(TOKEN_IDS) :
        ]
    np.testing.assert_allclose(ours.logits(TOKEN_IDS), expected, rtol=0, atol=TOLERANCE)
    assert generate(ours, 8) == greedy.tolist()


def generate(executor: ReferenceExecutor, n: int) -> list[int]:
    pages = tuple(range(8))
    sampling = SamplingParams(temperature=0, min_tokens=n)
    admission = Admission(0, 1, TOKEN_IDS, len(TOKEN_IDS), sampling, seed=0, suppress=(257,))
    tokens: list[int] = []
    start, known = 0, len(TOKEN_IDS)
    for step in range(n):
        span = Span(1, 0, start, known - start, pages, sample=True)
        executor.launch(StepPlan(step, (admission,) if step == 0 else (), (span,)))
        tokens.append(executor.land().tokens[0].token)
        start, known = known, known + 1
    return tokens
