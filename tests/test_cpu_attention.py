"""Rotation, cache and attention kernels of every instruction set against NumPy, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from cpu_ops import F32, ISA_NAMES, address_of
from gapless.arch.spec import AttentionSpec, ModelSpec, RopeSpec
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
    "many queries": {"heads": 8, "kv_heads": 1, "dim": 32},
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
    for threads, sizes in ((2, [1, 15, 16, 100, 1, 127, 1, 29]), (3, [129] + [1] * 4 + [157])):
        layer = Layer(kernels, a, kv_dtype, threads=threads)
        parts = [
            layer.run([whole(start + count)._replace(start=start, count=count)], rows[start : start + count])
            for start, count in chunks(n, sizes)
        ]
        assert np.array_equal(np.concatenate(parts), together)


def test_a_decode_among_others_is_as_alone(kernels: Kernels, a: AttentionSpec) -> None:
    lengths = (1, 40, 129, 260)
    texts = [text(a, n, seed=n) for n in lengths]
    layer = Layer(kernels, a, "f16", threads=2)
    for slot, (n, rows) in enumerate(zip(lengths, texts, strict=True)):
        if n > 1:
            layer.run([whole(n - 1, slot, slot * 20)], rows[:-1])
    spans = [whole(n, slot, slot * 20)._replace(start=n - 1, count=1) for slot, n in enumerate(lengths)]
    mixed = layer.run([*spans, whole(33, 5, 100)], np.concatenate([*(t[-1:] for t in texts), text(a, 33)]))
    for slot, (n, rows) in enumerate(zip(lengths, texts, strict=True)):
        alone = Layer(kernels, a, "f16").run([whole(n)], rows)
        assert np.array_equal(mixed[slot], alone[-1]), n


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
    if kernels.isa.cpu == "x86-64" and kv_dtype == "f16" and part != "queries":
        pytest.skip("halves without a conversion instruction have no NaN")
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
    if kernels.isa.cpu == "x86-64" and kv_dtype == "f16":
        pytest.skip("halves without a conversion instruction have no NaN")
    a, n, bad = attention_spec(window=40), 200, 131
    rows = text(a, n)
    clean = Layer(kernels, a, kv_dtype).run([whole(n)], rows)
    rows[bad, a.q_dim : a.q_dim + a.kv_dim] = np.nan
    spoilt = Layer(kernels, a, kv_dtype).run([whole(n)], rows)
    assert np.isnan(spoilt[bad : bad + 40]).all()
    assert np.array_equal(spoilt[:bad], clean[:bad])
    assert np.array_equal(spoilt[bad + 40 :], clean[bad + 40 :])


@dataclass
class Case:
    counts: list[int]
    starts: list[int]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_units_cover_every_query_and_split_once(threads: int) -> None:
    spec = spec_with(attention_spec(heads=6, kv_heads=2))
    limits = Limits(MAX_TOKENS, 16, threads)
    arena = Arena()
    planner = kv.UnitPlanner(spec, limits, 512, arena)
    for case in (Case([1], [0]), Case([1, 1], [300, 127]), Case([64, 1], [0, 128]), Case([1] * 40, [9] * 40)):
        spans = np.zeros((len(case.counts), abi.SPAN_WORDS), np.int64)
        spans[:, abi.SPAN_COUNT], spans[:, abi.SPAN_START] = case.counts, case.starts
        spans[:, abi.SPAN_ROW] = np.cumsum([0, *case.counts[:-1]])
        words = np.zeros(abi.STEP_WORDS, np.int64)
        planner.plan(words, spans)
        units = planner._units[: words[abi.N_UNITS]]
        seen: dict[tuple[int, int, int], set[int]] = {}
        for unit in units.tolist():
            for query in range(unit[abi.UNIT_QUERY], unit[abi.UNIT_QUERY] + unit[abi.UNIT_QUERIES]):
                splits = seen.setdefault((unit[abi.UNIT_SPAN], unit[abi.UNIT_HEAD], query), set())
                new = set(range(unit[abi.UNIT_SPLIT_LO], unit[abi.UNIT_SPLIT_HI]))
                assert not splits & new
                splits |= new
        assert len(seen) == 2 * sum(case.counts)
        for (span, _, query), splits in seen.items():
            needed = (case.starts[span] + query) // abi.SPLIT_TOKENS + 1
            assert splits >= set(range(needed))
