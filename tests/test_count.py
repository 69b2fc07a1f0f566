"""The count interpreter, against figures worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.arch.decoder import forward
from gapless.arch.sizes import WeightInfo, planned_weights, weight_infos
from gapless.arch.spec import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    ModelSpec,
    ModelWeights,
    RopeSpec,
    map_weights,
)
from gapless.kernels.count import CountOps, OpKind, Step, StepCounter, Steps, StepWork, Work
from gapless.step import Span, StepPlan
from tiny import tiny_model

MODEL = tiny_model()
INFOS = weight_infos(MODEL.weights)
LINEAR_PARAMETERS = 2 * (64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96)


def count_step(
    spec: ModelSpec,
    weights: ModelWeights[WeightInfo],
    spans: list[tuple[int, int]],
    n_samples: int | None = None,
    **units: float,
) -> StepWork:
    return StepCounter(spec, weights, **units).count(spans, n_samples)  # type: ignore[arg-type]


def smollm2_135m() -> ModelSpec:
    attention = AttentionSpec(9, 3, 64, 0.125, RopeSpec((1.0,) * 32))
    layers = (LayerSpec(attention, 1536),) * 30
    return ModelSpec("llama", 49152, 576, layers, 1e-5, "silu", 8192, tied_embeddings=True)


def test_one_decoded_token_of_smollm2() -> None:
    """Published: 134.5 M parameters, the embedding of 28.3 M among them, tied."""
    spec = smollm2_135m()
    work = count_step(spec, planned_weights(spec, 5, embed_bits=8.5), [(511, 1)], kv_element_bytes=2)
    matrices, embedding = 106_168_320, 28_311_552
    assert work.by_kind[OpKind.LINEAR].flops == 2 * matrices
    assert work.by_kind[OpKind.LOGITS].flops == 2 * embedding
    assert work.by_kind[OpKind.LINEAR].weight_bytes == matrices * 5 // 8
    assert work.by_kind[OpKind.LOGITS].weight_bytes == embedding * 17 // 16
    assert work.by_kind[OpKind.EMBED].weight_bytes == 576 * 17 // 16
    assert work.total.kv_read_bytes == 30 * 512 * 2 * 192 * 2
    assert work.total.kv_write_bytes == 30 * 2 * 192 * 2
    assert work.total.memory_bytes == (work.total.weight_bytes + work.total.kv_read_bytes + work.total.kv_write_bytes)


def test_weights_are_read_once_and_arithmetic_grows_with_tokens() -> None:
    one = count_step(MODEL.spec, INFOS, [(0, 1)])
    many = count_step(MODEL.spec, INFOS, [(0, 1)] * 10)
    assert one.by_kind[OpKind.LINEAR].flops == 2 * LINEAR_PARAMETERS
    assert many.by_kind[OpKind.LINEAR].flops == 10 * one.by_kind[OpKind.LINEAR].flops
    assert many.by_kind[OpKind.LINEAR].weight_bytes == one.by_kind[OpKind.LINEAR].weight_bytes
    assert many.by_kind[OpKind.EMBED].weight_bytes == 10 * one.by_kind[OpKind.EMBED].weight_bytes


def test_a_pass_over_more_than_the_vocabulary_reads_the_table_once() -> None:
    work = count_step(MODEL.spec, INFOS, [(0, 300)])
    assert work.by_kind[OpKind.EMBED].weight_bytes == INFOS.embed.nbytes


def test_stored_bytes_are_all_counted() -> None:
    """A step that samples reads every byte of the model, the tied embedding as the head."""
    variant = tiny_model(bias=True, qk_norm=True, post_norms=True, experts=ExpertSpec(4, 2, 32))
    infos = weight_infos(variant.weights)
    seen: list[int] = []
    map_weights(lambda w: seen.append(w.nbytes), infos)
    work = count_step(variant.spec, infos, [(0, 64)])
    embed_rows = work.by_kind[OpKind.EMBED].weight_bytes
    assert work.total.weight_bytes - embed_rows == sum(seen)


def test_logits_only_where_sampled() -> None:
    chunk = count_step(MODEL.spec, INFOS, [(0, 16)], n_samples=0)
    assert chunk.by_kind[OpKind.LOGITS] == Work()
    last = count_step(MODEL.spec, INFOS, [(0, 16)])
    assert last.by_kind[OpKind.LOGITS].flops == 2 * 288 * 64


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("span", [(0, 1), (0, 7), (3, 1), (4, 9), (15, 2), (30, 20), (5, 11)])
def test_attention_sees_what_the_mask_says(window: int | None, span: tuple[int, int]) -> None:
    model = tiny_model(n_layers=1, windows=(window,))
    work = count_step(model.spec, weight_infos(model.weights), [span], kv_element_bytes=1)
    start, count = span
    seen = [range(0 if window is None else max(0, p + 1 - window), p + 1) for p in range(start, start + count)]
    pairs, positions = sum(map(len, seen)), len(set().union(*seen))
    assert work.by_kind[OpKind.ATTENTION].flops == pairs * 4 * (4 * 32 + 6)
    assert work.total.kv_read_bytes == positions * 2 * 64
    assert work.total.kv_write_bytes == count * 2 * 64


def test_chunks_add_up_but_for_what_is_read_again() -> None:
    whole = count_step(MODEL.spec, INFOS, [(0, 40)]).total
    parts = count_step(MODEL.spec, INFOS, [(0, 24)], n_samples=0).total
    parts += count_step(MODEL.spec, INFOS, [(24, 16)]).total
    assert parts.flops == whole.flops
    assert parts.kv_write_bytes == whole.kv_write_bytes
    assert parts.kv_read_bytes - whole.kv_read_bytes == 2 * 24 * 2 * 64 * 2
    assert parts.weight_bytes > whole.weight_bytes


def test_experts_read_are_those_that_tokens_can_touch() -> None:
    model = tiny_model(n_layers=1, experts=ExpertSpec(16, 2, 32))
    infos = weight_infos(model.weights)
    router, expert = 16 * 64 * 4, 3 * 32 * 64 * 4
    for tokens, touched in ((1, 2), (3, 6), (8, 16), (100, 16)):
        work = count_step(model.spec, infos, [(0, tokens)]).by_kind[OpKind.EXPERTS]
        assert work.weight_bytes == router + touched * expert
        per_token = 16 * (2 * 64 + 5) + 2 * (2 * 3 * 64 * 32 + 32 * 6 + 2 * 64)
        assert work.flops == tokens * per_token


def test_ranks_exchange_what_the_collectives_need() -> None:
    alone = count_step(MODEL.spec, INFOS, [(0, 4)])
    assert (alone.total.messages, alone.total.link_bytes) == (0, 0)
    shared = count_step(MODEL.spec, INFOS, [(0, 4)], tp=4, activation_element_bytes=2)
    reduce, gather = shared.by_kind[OpKind.ALL_REDUCE], shared.by_kind[OpKind.ALL_GATHER]
    assert (reduce.messages, gather.messages) == (2 * 2, 1)
    assert reduce.link_bytes == 4 * (4 * 64 * 2) * 2 * 3 // 4
    assert gather.link_bytes == 4 * 288 * 2 * 3 // 4
    assert shared.total.messages == 5


def test_a_plan_counts_as_its_spans() -> None:
    spans = (Span(1, 0, 0, 9, (0,), sample=False), Span(2, 1, 30, 1, (1, 2, 3), sample=True))
    counter = StepCounter(MODEL.spec, INFOS, kv_element_bytes=1.0625)
    by_plan = counter.count_plan(StepPlan(0, (), spans))
    by_spans = counter.count([(0, 9), (30, 1)], n_samples=1)
    assert by_plan == by_spans
    assert by_plan.total == sum(by_plan.by_kind.values(), Work())
    assert by_plan.total.kv_write_bytes == 2 * 10 * 2 * 64 * 1.0625


def test_alike_layers_count_as_each_on_its_own() -> None:
    """Counting layers by kind gives what the forward of the whole model gives."""
    model = tiny_model(n_layers=7, windows=(4, None, 4), experts=ExpertSpec(4, 2, 32))
    infos = weight_infos(model.weights)
    spans = [(0, 9), (30, 1), (2, 3)]
    ops = CountOps(Step(spans, 2), tp=2)
    forward(ops, model.spec, infos)
    counter = StepCounter(model.spec, infos, kv_element_bytes=1, activation_element_bytes=1, tp=2)
    work = counter.count(spans, 2)
    assert work.by_kind == {kind: Work(*map(round, sums)) for kind, sums in ops.tally.items()}
    assert work.by_kind[OpKind.ALL_REDUCE].messages == 14


def test_nothing_to_run_is_no_arithmetic() -> None:
    work = count_step(MODEL.spec, INFOS, [])
    assert (work.total.flops, work.total.kv_read_bytes, work.total.activation_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"bias": True, "qk_norm": True},
        {"post_norms": True, "experts": ExpertSpec(4, 2, 32)},
    ],
)
def test_a_described_model_has_the_sizes_of_the_loaded_one(features: dict[str, object]) -> None:
    model = tiny_model(**features)  # type: ignore[arg-type]
    planned = planned_weights(model.spec, 32, qkv_bias="bias" in features, qk_norm="qk_norm" in features)
    assert planned == weight_infos(model.weights)


def test_an_untied_head_is_a_weight_of_its_own() -> None:
    spec = replace(MODEL.spec, tied_embeddings=False)
    planned = planned_weights(spec, 4.5, embed_bits=16)
    assert planned.lm_head is not planned.embed
    assert planned.lm_head.nbytes == 288 * 64 * 2
    assert planned_weights(MODEL.spec, 4.5).lm_head.nbytes == 288 * 64 * 4.5 / 8


def test_a_step_is_counted_in_a_fraction_of_a_millisecond() -> None:
    """It runs at every step of a server and of a simulation. The best of many, since machines are shared."""
    spec = smollm2_135m()
    counter = StepCounter(spec, planned_weights(spec, 5))
    best_s = float("inf")
    for _ in range(50):
        start_s = time.perf_counter()
        counter.count([(100, 1)])
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s < 1e-3


VARIANTS = {
    "dense": MODEL,
    "windows": tiny_model(n_layers=3, windows=(4, None, 700), qk_norm=True, bias=True),
    "experts": tiny_model(n_layers=2, post_norms=True, experts=ExpertSpec(4, 2, 32)),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 600)), max_size=5), st.integers(0, 4)),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_many_steps_are_counted_as_each_of_them(
    variant: str, tp: int, steps: list[tuple[list[tuple[int, int]], int]]
) -> None:
    spec = VARIANTS[variant].spec
    counter = StepCounter(spec, planned_weights(spec, 5), kv_element_bytes=1.0625, tp=tp)
    spans = [(i, start, count) for i, (spans, _) in enumerate(steps) for start, count in spans]
    columns = np.array(spans, np.int64).reshape(-1, 3).T
    found = counter.count_steps(Steps(len(steps), *columns, samples=np.array([n for _, n in steps], np.int64)))
    for i, (spans_of_one, n_samples) in enumerate(steps):
        for kind, work in counter.count(spans_of_one, n_samples).by_kind.items():
            assert Work(*found[kind][:, i].tolist()) == work
