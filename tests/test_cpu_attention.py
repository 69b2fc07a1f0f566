"""Rotation, cache and attention kernels of every instruction set against NumPy, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_ops import F32, ISA_NAMES, address_of
from gapless.arch.spec import AttentionSpec, ModelSpec, RopeSpec
from gapless.errors import UnsupportedModelError
from gapless.executor.cpu_step import Slots, StepMemory
from gapless.kernels.cpu import abi, kv
from gapless.kernels.cpu.arena import Arena
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Kernels, load_kernels
from gapless.kernels.cpu.tape import Limits, Rows, Tape
from gapless.kernels.reference import PagedKV, rms_norm, rotate
from gapless.sampling import SamplingParams
from gapless.step import Admission, Span, StepPlan
from tiny import tiny_model

MAX_TOKENS = 400


@pytest.fixture(scope="module", params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(select(request.param), None, ("walk", "attention"))


def spec_with(attention: AttentionSpec) -> ModelSpec:
    spec = tiny_model(n_layers=1, context_tokens=512).spec
    return replace(spec, layers=(replace(spec.layers[0], attention=attention),))


def attention_spec(
    *, heads: int = 6, kv_heads: int = 2, dim: int = 64, window: int | None = None, softcap: float | None = None,
    rotary: int | None = None,
) -> AttentionSpec:  # fmt: skip
    rotary = rotary or dim
    rope = RopeSpec(tuple(10000.0 ** (-2 * i / rotary) for i in range(rotary // 2)))
    return AttentionSpec(heads, kv_heads, dim, dim**-0.5, rope, window, softcap)


class Layer:
    """One attention layer with its cache; runs chunks of one text or several."""

    def __init__(
        self, kernels: Kernels, a: AttentionSpec, kv_dtype: kv.KvDtype = "f32", *, threads: int = 1, norms: bool = False
    ) -> None:
        self.a, self.threads = a, threads
        self.arena, spec = Arena(), spec_with(a)
        limits = Limits(MAX_TOKENS, 16, threads)
        self.tape = Tape(kernels, self.arena, limits)
        pool = kv.KvPool(spec, kv_dtype, 128, 512, self.arena, self.tape)
        self.width = a.q_dim + 2 * a.kv_dim
        self.qkv = self.tape.rows("qkv", self.width)
        self.norms = [np.linspace(0.5, 1.5, a.head_dim, dtype=np.float32) for _ in range(2)] if norms else [None, None]
        addresses = [None if n is None else self.tape.vector(n) for n in self.norms]
        q = pool.rope_cache(self.qkv, 0, a, addresses[0], addresses[1], 1e-6)
        self.out = pool.attention(q, 0, a)
        self.ops = self.tape.finish()
        self.step = StepMemory(self.arena, limits, kv.UnitPlanner(spec, limits, 512, self.arena))
        self.slots = Slots(self.arena, 8, 512)
        self.kernels = kernels

    def run(self, spans: list[Span], rows: F32, *, admit: bool = True) -> F32:
        n = sum(s.count for s in spans)
        sampling = SamplingParams(temperature=0)
        admissions = tuple(Admission(s.slot, s.slot, (0,) * s.end, s.end, sampling, 0) for s in spans if admit)
        for admission in admissions:
            self.slots.admit(admission)
        for span in spans:
            self.slots.map_pages(span)
        self.step.fill(StepPlan(0, admissions, tuple(spans)), self.slots)
        view(self.qkv)[:n, : self.width] = rows
        for op in self.ops:
            name = next(k for k, v in self.kernels._addresses.items() if v == op[abi.OP_KERNEL])
            for tid in range(self.threads):
                self.kernels.call(name, address_of(op), self.step.address, tid, self.threads)
        return view(self.out)[:n, : self.a.q_dim].copy()


def view(rows: Rows) -> F32:
    import ctypes

    raw = (ctypes.c_uint8 * (MAX_TOKENS * rows.stride)).from_address(rows.address)
    return np.frombuffer(raw, np.float32).reshape(MAX_TOKENS, -1)


def text(a: AttentionSpec, n: int, seed: int = 0) -> F32:
    rows = np.random.default_rng(seed).standard_normal((n, a.q_dim + 2 * a.kv_dim)).astype(np.float32)
    return rows * np.float32(1.5)


def expected(layer: Layer, rows: F32, kv_dtype: str = "f32") -> F32:
    """The same in NumPy, in float64 where it matters."""
    a, n = layer.a, len(rows)
    q, k, v = np.split(rows, [a.q_dim, a.q_dim + a.kv_dim], axis=1)
    q, k, v = (part.reshape(n, -1, a.head_dim) for part in (q, k, v))
    q_norm, k_norm = layer.norms
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, 1e-6), rms_norm(k, k_norm, 1e-6)
    positions = np.arange(n)
    q, k = rotate(q, positions, a.rope), rotate(k, positions, a.rope)
    cache = PagedKV(spec_with(a), -(-n // 16), 16, kv_dtype)  # type: ignore[arg-type]
    span = Span(0, 0, 0, n, tuple(range(-(-n // 16))), False)
    cache.write(0, span, k, v)
    keys, values = (x.astype(np.float64) for x in cache.read(0, span.pages, 0, n))
    out = np.empty((n, a.n_heads, a.head_dim))
    group = a.n_heads // a.n_kv_heads
    for head in range(a.n_heads):
        scores = q[:, head].astype(np.float64) @ keys[head // group].T * a.scale
        if a.softcap is not None:
            scores = a.softcap * np.tanh(scores / a.softcap)
        seen = positions[None] <= positions[:, None]
        if a.window is not None:
            seen &= positions[None] > positions[:, None] - a.window
        weights = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(axis=1, keepdims=True)), 0)
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[head // group]
    return out.reshape(n, -1).astype(np.float32)


def whole(n: int, slot: int = 0, first_page: int = 0) -> Span:
    return Span(slot, slot, 0, n, tuple(range(first_page, first_page + -(-n // 16))), False)


def chunks(n: int, sizes: list[int]) -> list[tuple[int, int]]:
    found, start = [], 0
    for size in sizes:
        found.append((start, size))
        start += size
    assert start == n
    return found


VARIANTS = {
    "plain": {},
    "one head": {"heads": 1, "kv_heads": 1},
    "group of 3": {"heads": 9, "kv_heads": 3},
    "group of 4": {"heads": 4, "kv_heads": 1, "dim": 96},
    "group of 7": {"heads": 14, "kv_heads": 2, "dim": 32},
    "group of 64": {"heads": 64, "kv_heads": 1, "dim": 16},
    "odd dim": {"heads": 4, "kv_heads": 2, "dim": 80},
    "tiny dim": {"heads": 4, "kv_heads": 4, "dim": 8},
    "large dim": {"heads": 2, "kv_heads": 1, "dim": 256},
    "window": {"window": 37},
    "wide window": {"window": 200},
    "softcap": {"softcap": 5.0},
    "window and softcap": {"window": 150, "softcap": 3.0, "dim": 128},
    "partial rotation": {"rotary": 48},
}


@pytest.fixture(params=list(VARIANTS))
def a(request: pytest.FixtureRequest) -> AttentionSpec:
    return attention_spec(**VARIANTS[request.param])


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_agrees_with_numpy(kernels: Kernels, a: AttentionSpec, kv_dtype: kv.KvDtype) -> None:
    layer, rows = Layer(kernels, a, kv_dtype), text(a, 150)
    kind = {"f32": "f32", "f16": "f16", "q8": "int8"}[kv_dtype]
    out, wanted = layer.run([whole(150)], rows), expected(layer, rows, kind)
    # An int8 cache rounds at ties of a scale that differs in its last bit.
    assert np.abs(out - wanted).max() < (2e-2 if kv_dtype == "q8" else 2e-3 if kv_dtype == "f16" else 3e-5)
    assert np.abs(out - wanted).mean() < (1e-3 if kv_dtype == "q8" else 1e-5)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_a_row_does_not_depend_on_chunks_threads_or_company(
    kernels: Kernels, a: AttentionSpec, kv_dtype: kv.KvDtype
) -> None:
    n = 290
    rows = text(a, n)
    together = Layer(kernels, a, kv_dtype).run([whole(n)], rows)
    for threads, sizes in ((2, [1, 15, 16, 100, 1, 127, 1, 29]), (3, [129] + [1] * 4 + [157]), (4, [200, 3, 2, 85])):
        layer = Layer(kernels, a, kv_dtype, threads=threads)
        parts = [
            layer.run([whole(start + count)._replace(start=start, count=count)], rows[start : start + count])
            for start, count in chunks(n, sizes)
        ]
        assert np.array_equal(np.concatenate(parts), together)


@pytest.mark.parametrize("prompt", [0, 2, 33])
def test_a_decode_among_others_is_as_alone(kernels: Kernels, a: AttentionSpec, prompt: int) -> None:
    """Whether a long history is shared out depends on the company; the result does not."""
    lengths = (1, 40, 129, 260, 500)
    texts = [text(a, n, seed=n) for n in lengths]
    layer = Layer(kernels, a, "f16", threads=2)
    pages = (0, 1, 4, 13, 30)
    for slot, (n, rows) in enumerate(zip(lengths, texts, strict=True)):
        for start in range(0, n - 1, MAX_TOKENS):
            part = rows[start : min(start + MAX_TOKENS, n - 1)]
            layer.run([whole(n - 1, slot, pages[slot])._replace(start=start, count=len(part))], part)
    spans = [whole(n, slot, pages[slot])._replace(start=n - 1, count=1) for slot, n in enumerate(lengths)]
    others = [whole(prompt, 5, 100)] if prompt else []
    mixed = layer.run([*spans, *others], np.concatenate([*(t[-1:] for t in texts), text(a, prompt)]))
    for slot, (n, rows) in enumerate(zip(lengths, texts, strict=True)):
        alone = Layer(kernels, a, "f16")
        for start in range(0, n, MAX_TOKENS):
            part = rows[start : start + MAX_TOKENS]
            last = alone.run([whole(n)._replace(start=start, count=len(part))], part)[-1]
        assert np.array_equal(mixed[slot], last), n


def test_norms_of_queries_and_keys(kernels: Kernels) -> None:
    a = attention_spec(dim=64)
    layer, rows = Layer(kernels, a, norms=True), text(a, 40)
    assert np.abs(layer.run([whole(40)], rows) - expected(layer, rows)).max() < 3e-5


def test_pages_may_lie_anywhere_and_hold_rubbish(kernels: Kernels) -> None:
    a = attention_spec()
    rows = text(a, 50)
    layer = Layer(kernels, a, "f16")
    layer.run([whole(200)], text(a, 200, seed=9) * 100)
    scattered = Span(1, 1, 0, 50, (7, 2, 9, 0), False)
    clean = Layer(kernels, a, "f16").run([whole(50)], rows)
    assert np.array_equal(layer.run([scattered], rows), clean)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_what_is_not_a_number_stays_so(kernels: Kernels, kv_dtype: kv.KvDtype, part: str, n: int, threads: int) -> None:
    """A request that overflowed must show it, and must not be handed what another one left in the scratch."""
    a = attention_spec()
    layer, rows = Layer(kernels, a, kv_dtype, threads=threads), text(a, n, seed=5)
    layer.run([whole(n, 0, 0)], text(a, n))
    columns = {"queries": (0, a.q_dim), "keys": (a.q_dim, a.q_dim + a.kv_dim), "values": (a.q_dim + a.kv_dim, None)}
    rows[:, slice(*columns[part])] = np.nan
    assert np.isnan(layer.run([whole(n, 1, 40)], rows)).all()
    alone = Span(1, 1, n, 1, tuple(range(40, 40 + n // 16 + 1)), False)
    assert np.isnan(layer.run([alone], np.full((1, layer.width), np.nan, np.float32), admit=False)).all()


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_one_bad_key_spoils_only_those_who_see_it(kernels: Kernels, kv_dtype: kv.KvDtype) -> None:
    a, n, bad = attention_spec(window=40), 200, 131
    rows = text(a, n)
    clean = Layer(kernels, a, kv_dtype).run([whole(n)], rows)
    rows[bad, a.q_dim : a.q_dim + a.kv_dim] = np.nan
    spoilt = Layer(kernels, a, kv_dtype).run([whole(n)], rows)
    assert np.isnan(spoilt[bad : bad + 40]).all()
    assert np.array_equal(spoilt[:bad], clean[:bad])
    assert np.array_equal(spoilt[bad + 40 :], clean[bad + 40 :])


CONTEXT = 4096
STEP_TOKENS = 128


def plan_units(
    spans: list[tuple[int, int]], threads: int, heads: int = 9, kv_heads: int = 3
) -> tuple[list[list[int]], list[list[int]]]:
    """Units and merges of spans (start, count)."""
    spec = spec_with(attention_spec(heads=heads, kv_heads=kv_heads))
    planner = kv.UnitPlanner(spec, Limits(STEP_TOKENS, 16, threads), CONTEXT, Arena())
    table = np.zeros((len(spans), abi.SPAN_WORDS), np.int64)
    table[:, abi.SPAN_START], table[:, abi.SPAN_COUNT] = np.array(spans).T
    table[:, abi.SPAN_ROW] = np.cumsum(table[:, abi.SPAN_COUNT]) - table[:, abi.SPAN_COUNT]
    words = np.zeros(abi.STEP_WORDS, np.int64)
    planner.plan(words, table)
    units, merges = planner._units[: words[abi.N_UNITS]], planner._merges[: words[abi.N_MERGES]]
    assert (len(units), len(merges)) == (words[abi.N_UNITS], words[abi.N_MERGES]), "no room"
    return units.tolist(), merges.tolist()


def unit_work(unit: list[int]) -> int:
    return unit[abi.UNIT_QUERIES] * (unit[abi.UNIT_SPLIT_HI] - unit[abi.UNIT_SPLIT_LO])


some_spans = st.lists(
    st.tuples(st.integers(0, CONTEXT - 40), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=12
).filter(lambda spans: sum(count for _, count in spans) <= STEP_TOKENS)


@given(some_spans, st.integers(1, 6), st.sampled_from([(9, 3), (1, 1), (64, 1), (8, 8), (14, 2)]))
def test_units_take_every_split_of_every_query_once(
    spans: list[tuple[int, int]], threads: int, heads: tuple[int, int]
) -> None:
    units, merges = plan_units(spans, threads, *heads)
    group = heads[0] // heads[1]
    seen: dict[tuple[int, int, int], list[int]] = {}
    partials: dict[tuple[int, int, int], list[int]] = {}
    for unit in units:
        assert unit[abi.UNIT_QUERIES] == 1 or unit[abi.UNIT_QUERIES] * group <= abi.QUERY_ROWS
        for query in range(unit[abi.UNIT_QUERY], unit[abi.UNIT_QUERY] + unit[abi.UNIT_QUERIES]):
            key = (unit[abi.UNIT_SPAN], unit[abi.UNIT_HEAD], query)
            seen.setdefault(key, []).extend(range(unit[abi.UNIT_SPLIT_LO], unit[abi.UNIT_SPLIT_HI]))
            if unit[abi.UNIT_PARTIAL] >= 0:
                assert unit[abi.UNIT_SPLIT_HI] - unit[abi.UNIT_SPLIT_LO] == 1
                partials.setdefault(key, []).append(unit[abi.UNIT_PARTIAL])
    assert len(seen) == heads[1] * sum(count for _, count in spans)
    for (span, _, query), splits in seen.items():
        # A tile of queries may reach one split further than its first query sees.
        needed = (spans[span][0] + query) // abi.SPLIT_TOKENS + 1
        assert splits == list(range(len(splits)))
        assert needed <= len(splits) <= needed + 1
    first_rows = np.cumsum([0, *(count for _, count in spans)])
    expected_merges = [
        [first_rows[span] + query, head, places[0], len(places)] for (span, head, query), places in partials.items()
    ]
    assert sorted(merges) == sorted(expected_merges)
    used = sorted(place for places in partials.values() for place in places)
    assert used == [i * group for i in range(len(used))]
    for places in partials.values():
        assert places == [places[0] + i * group for i in range(len(places))]


@given(some_spans, st.integers(2, 6), st.sampled_from([(9, 3), (1, 1), (64, 1), (8, 8)]))
def test_partials_have_room(spans: list[tuple[int, int]], threads: int, heads: tuple[int, int]) -> None:
    units, _ = plan_units(spans, threads, *heads)
    a = attention_spec(heads=heads[0], kv_heads=heads[1])
    room = kv._partials(Arena(), spec_with(a), CONTEXT, Limits(STEP_TOKENS, 16, threads)).nbytes
    n_partials = sum(unit[abi.UNIT_PARTIAL] >= 0 for unit in units) * heads[0] // heads[1]
    assert n_partials * (abi.PARTIAL_HEAD_BYTES + 4 * 64) <= room


BALANCED = {
    "one request": [(1023, 1)],
    "one long request": [(4000, 1)],
    "a long one among short ones": [(4000, 1)] + [(50, 1)] * 8,
    "a batch of many lengths": [(100 * i, 1) for i in range(32)],
    "a prompt": [(0, 128)],
    "the end of a long prompt": [(4000, 3)],
    "a prompt and decodes": [(900, 1)] * 9 + [(3000, 50)],
}


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("case", list(BALANCED))
def test_threads_get_about_the_same(case: str, threads: int) -> None:
    units, _ = plan_units(BALANCED[case], threads)
    loads = [sum(unit_work(unit) for unit in units[tid::threads]) for tid in range(threads)]
    assert max(loads) <= 1.25 * sum(loads) / threads


def test_layers_of_different_heads_are_refused() -> None:
    spec = spec_with(attention_spec())
    other = replace(spec.layers[0], attention=attention_spec(heads=4))
    with pytest.raises(UnsupportedModelError, match="differ in their heads"):
        kv.UnitPlanner(replace(spec, layers=(*spec.layers, other)), Limits(8, 1, 1), 64, Arena())
