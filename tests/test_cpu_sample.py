"""The compiled sampler of every instruction set against the reference sampler, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_ops import F32, ISA_NAMES, address_of, aligned, run, step_of
from gapless.kernels.cpu import abi, sample_record
from gapless.kernels.cpu.arena import Arena
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Kernels, load_kernels
from gapless.kernels.cpu.sample_record import MAX_TOP, SAMPLE_BLOCK, SAMPLE_PARAMS, fill_record
from gapless.kernels.cpu.tape import Limits, Tape
from gapless.kernels.sampling_reference import LARGEST, clean, sample_row
from gapless.sampling import SamplingParams
from gapless.step import Admission, TokenLogprobs

MODULES = ("walk", "sample")
PATTERN = -1.5  # what results hold before they are written

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module", params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(select(request.param), None, MODULES)


@dataclass
class Row:
    """One row of logits and the request that samples it."""

    logits: F32
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()
    suppress: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def expected(self) -> tuple[int, TokenLogprobs | None]:
        suppress = self.suppress if len(self.output) < self.params.min_tokens else ()
        ids = self.prompt, self.output
        return sample_row(self.logits, self.params, self.seed, self.position, *ids, suppress)


class Batch:
    """Rows in memory as a step has them."""

    def __init__(self, kernels: Kernels, rows: list[Row], threads: int, padding: int = 0) -> None:
        self.kernels, self.rows, self.threads = kernels, rows, threads
        n, vocab = len(rows), rows[0].logits.size
        self.logits = aligned((n, vocab + padding))
        self.logits[:] = 7e8  # behind the vocabulary: must not be looked at
        self.records = np.zeros(n, SAMPLE_PARAMS)
        self.top_ids, self.top = np.zeros((n, MAX_TOP), np.int32), np.full((n, MAX_TOP), PATTERN)
        self.slots = [np.full(row.position + 2, -9, np.int32) for row in rows]
        self.keep = [self._fill(i, row, vocab) for i, row in enumerate(rows)]
        self.addresses = address_of(self.records) + np.arange(n, dtype=np.int64) * SAMPLE_PARAMS.itemsize
        self.step = step_of(0, n)
        self.step[abi.SAMPLE_RECORDS] = address_of(self.addresses)
        self.arena = Arena()
        tape = Tape(kernels, self.arena, Limits(n, n, threads))
        self.op = np.zeros(abi.OP_WORDS, np.int64)
        for word, value in sample_record.sample_words(
            address_of(self.logits), self.logits.strides[0], vocab, tape
        ).items():
            self.op[word] = value

    def _fill(self, i: int, row: Row, vocab: int) -> object:
        self.logits[i, :vocab] = row.logits
        tokens = row.prompt + row.output
        self.slots[i][: len(tokens)] = tokens
        admission = Admission(i, i, tokens, len(row.prompt), row.params, row.seed, row.suppress)
        record = self.records[i : i + 1]
        keep = fill_record(record, admission, address_of(self.slots[i]))
        record["position"] = row.position
        record["top_ids"], record["top"] = address_of(self.top_ids[i]), address_of(self.top[i])
        return keep

    def run(self, *, with_argmax: bool = True) -> list[tuple[int, TokenLogprobs | None]]:
        if with_argmax:
            run(self.kernels, "argmax", self.op, self.step, self.threads)
        else:
            self.op[sample_record.PARTIALS] = 0
        run(self.kernels, "sample", self.op, self.step, self.threads)
        return [self._result(i) for i in range(len(self.rows))]

    def _result(self, i: int) -> tuple[int, TokenLogprobs | None]:
        record, row = self.records[i], self.rows[i]
        token = int(self.slots[i][row.position])
        nothing = bool(np.isneginf(clean(row.logits)).all())
        assert record["token"] == (-1 if nothing else token)
        assert self.slots[i][row.position + 1] == -9
        assert tuple(self.slots[i][: row.position]) == row.prompt + row.output
        if row.params.logprobs is None:
            return token, None
        n = int(record["n_reported"])
        assert np.all(self.top[i, n:] == PATTERN), "wrote more than it reports"
        chosen = float(record["chosen"])
        return token, TokenLogprobs(chosen, tuple(self.top_ids[i, :n].tolist()), tuple(self.top[i, :n].tolist()))


def check(kernels: Kernels, rows: list[Row], threads: int = 1, padding: int = 0) -> None:
    batch = Batch(kernels, rows, threads, padding)
    for row, (token, logprobs) in zip(rows, batch.run(), strict=True):
        wanted, wanted_logprobs = row.expected()
        assert token == wanted, row
        assert (logprobs is None) == (wanted_logprobs is None)
        if logprobs is not None and wanted_logprobs is not None:
            assert logprobs.top_ids == wanted_logprobs.top_ids, row
            assert logprobs.chosen == pytest.approx(wanted_logprobs.chosen, rel=1e-12, abs=1e-12)
            assert logprobs.top == pytest.approx(wanted_logprobs.top, rel=1e-12, abs=1e-12)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaussian(vocab: int, spread: float = 3.0, seed: int = 0) -> F32:
    return (rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def shapes(vocab: int) -> Iterator[tuple[str, F32]]:
    """Rows of every character: spread, flat, peaked, with many equal values, and with values that are not numbers."""
    values = gaussian(vocab)
    yield "spread", values
    yield "flat", gaussian(vocab, 1e-3)
    yield "wide", gaussian(vocab, 400.0)
    peaked = values.copy()
    peaked[vocab // 2] = 60.0
    yield "peaked", peaked
    yield "few levels", np.round(values)
    yield "constant", np.full(vocab, 3.25, np.float32)
    yield "zeros of both signs", np.where(values > 0, np.float32(0.0), np.float32(-0.0))
    yield "two levels", np.where(values > 0, np.float32(1.0), np.float32(1.0 + 2.0**-23))
    yield "huge", np.where(values > 0, np.float32(3e38), np.float32(-3e38))
    rubbish = values.copy()
    rubbish[::7], rubbish[1::11], rubbish[2::13] = NAN, -INF, INF
    yield "not numbers", rubbish
    masked = np.full(vocab, -INF, np.float32)
    masked[vocab // 3] = -2.0
    masked[-1] = -2.0
    yield "masked", masked
    yield "nothing finite", np.full(vocab, NAN, np.float32)


USED = tuple(rng(1).integers(0, 700, 60).tolist())

REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "greedy with logprobs": SamplingParams(temperature=0, logprobs=5),
    "greedy with bias": SamplingParams(temperature=0, logit_bias={3: 50.0, 4: 50.0, 10**6: 9.0, -1: 99.0}),
    "greedy and suppressed": SamplingParams(temperature=0, min_tokens=1000, logprobs=3),
    "temperature": SamplingParams(),
    "cold": SamplingParams(temperature=1e-3),
    "freezing": SamplingParams(temperature=1e-300),
    "hot": SamplingParams(temperature=100.0),
    "top_k": SamplingParams(top_k=40),
    "top_k of one": SamplingParams(top_k=1),
    "top_k of most": SamplingParams(top_k=500, temperature=5.0),
    "top_p": SamplingParams(top_p=0.9),
    "top_p of little": SamplingParams(top_p=1e-6, temperature=2.0),
    "top_p of nearly all": SamplingParams(top_p=0.999999, temperature=10.0),
    "min_p": SamplingParams(min_p=0.05),
    "min_p of all": SamplingParams(min_p=1.0),
    "every cut": SamplingParams(temperature=0.8, top_k=300, top_p=0.7, min_p=0.01, logprobs=0),
    "repetition": SamplingParams(repetition_penalty=1.3, logprobs=4),
    "repetition wanted": SamplingParams(repetition_penalty=0.7),
    "frequency and presence": SamplingParams(frequency_penalty=0.6, presence_penalty=-0.4),
    "every change": SamplingParams(
        temperature=1.7, top_k=600, top_p=0.95, min_p=1e-4, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={0: 2.5, 5: -100.0, 699: 1e300, 698: -1e300}, logprobs=20, min_tokens=1000,
    ),
    "all logprobs": SamplingParams(logprobs=1000),
}  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 5, SAMPLE_BLOCK, 700, 1537, 6000])
def test_chooses_what_the_reference_chooses(kernels: Kernels, vocab: int) -> None:
    suppress = (0, 2, vocab - 1, 10**7, 2**40, -3)
    rows = [
        Row(logits, params, seed, USED[:25], USED[25:], suppress)
        for _, logits in shapes(vocab)
        for seed, params in enumerate(REQUESTS.values(), 100)
    ]
    check(kernels, rows)


def test_a_large_vocabulary(kernels: Kernels) -> None:
    for logits in (gaussian(49152), gaussian(151936, 2.0), np.round(gaussian(128256))):
        check(kernels, [Row(logits, p, 7, USED, USED[::2]) for p in REQUESTS.values()], threads=2)


def numbers() -> st.SearchStrategy[float]:
    special = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, LARGEST, -LARGEST, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38]
    return st.sampled_from(special) | st.floats(width=32) | st.integers(-3, 3).map(float)


@st.composite
def requests(draw: st.DrawFn) -> SamplingParams:
    some = lambda plain, others: st.just(plain) | others  # noqa: E731
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0, 0.3, 25.0, 1e-30])),
        top_k=draw(some(0, st.integers(1, 40))),
        top_p=draw(some(1.0, st.floats(1e-9, 1.0))),
        min_p=draw(some(0.0, st.floats(0.0, 1.0))),
        repetition_penalty=draw(some(1.0, st.floats(0.01, 100.0))),
        presence_penalty=draw(some(0.0, st.floats(-100.0, 100.0))),
        frequency_penalty=draw(some(0.0, st.floats(-100.0, 100.0))),
        logit_bias=draw(st.dictionaries(st.integers(-2, 50), st.floats(-1e40, 1e40), max_size=3)),
        logprobs=draw(some(None, st.integers(0, 50))),
        min_tokens=draw(st.integers(0, 5)),
    )


@st.composite
def rows(draw: st.DrawFn) -> Row:
    logits = np.array(draw(st.lists(numbers(), min_size=1, max_size=40)), np.float32)
    ids = st.lists(st.integers(0, 45), max_size=8).map(tuple)
    seed = draw(st.integers(-(2**63), 2**64 - 1))
    return Row(logits, draw(requests()), seed, (1, *draw(ids)), draw(ids), draw(ids))


@pytest.mark.parametrize("isa", ISA_NAMES)
@given(row=rows())
def test_any_small_row(isa: str, row: Row) -> None:
    check(load_kernels(select(isa), None, MODULES), [row], padding=3)


@pytest.mark.parametrize("isa", ISA_NAMES)
@given(st.integers(0, 2**32), st.sampled_from([1, 31, 32, 511, 513, 3000]), requests(), st.sampled_from([1e-4, 1, 30]))
def test_any_long_row(isa: str, seed: int, vocab: int, params: SamplingParams, spread: float) -> None:
    logits = gaussian(vocab, spread, seed)
    if seed % 3 == 0:
        logits = np.round(logits * 2)
    ids = rng(seed).integers(0, vocab, (3, 50))
    prompt, output, suppress = (tuple(row[: seed % 51].tolist()) for row in ids)
    check(load_kernels(select(isa), None, MODULES), [Row(logits, params, seed, (0, *prompt), output, suppress)])


def mixed_rows(vocab: int) -> list[Row]:
    """As many as there are requests, plain greedy ones between others."""
    return [
        Row(gaussian(vocab, seed=i), params, i, USED[: 3 + i], USED[i : 2 * i], (5, 6))
        for i, params in enumerate(REQUESTS.values())
    ]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_token_does_not_depend_on_threads_or_company(kernels: Kernels, threads: int) -> None:
    rows = mixed_rows(2100)
    together = Batch(kernels, rows, threads, padding=12).run()
    assert together == [Batch(kernels, [row], 1).run(with_argmax=False)[0] for row in rows]
    assert together[::-1] == Batch(kernels, rows[::-1], threads).run()


def test_scratch_is_left_clean(kernels: Kernels) -> None:
    """A second run on the same scratch gives the same, though penalties left marks there in between."""
    batch = Batch(kernels, mixed_rows(900), 2)
    assert batch.run() == batch.run()


def test_equal_logits_at_the_edge_of_a_cut_go_by_id(kernels: Kernels) -> None:
    vocab = 3000
    logits = np.zeros(vocab, np.float32)
    logits[[17, 2900]] = 1.0
    for params, allowed in (
        (SamplingParams(top_k=3, temperature=100.0), {0, 17, 2900}),
        (SamplingParams(top_k=1002, temperature=100.0), {17, 2900, *range(1001)}),
        (SamplingParams(top_k=3, top_p=0.5, temperature=100.0), {17, 2900}),
    ):
        rows = [Row(logits, params, seed) for seed in range(200)]
        found = {token for token, _ in Batch(kernels, rows, 2).run()}
        assert found <= allowed
        assert len(found) > min(len(allowed), 100) - 1
        check(kernels, rows[:20])


def test_suppressed_ids_may_be_chosen_once_min_tokens_are_out(kernels: Kernels) -> None:
    logits = np.zeros(600, np.float32)
    logits[42] = 9.0
    params = SamplingParams(temperature=0, min_tokens=2)
    batch = [Row(logits, params, 0, (1,), (3,) * n, (42,)) for n in range(4)]
    assert [token for token, _ in Batch(kernels, batch, 1).run()] == [0, 0, 42, 42]


def test_as_many_logprobs_as_may_be_asked_for(kernels: Kernels) -> None:
    """Values that are equal where the report ends, and finite ones at both ends of the range."""
    few_levels = np.round(gaussian(5000, 1.0))
    extremes = np.full(700, -LARGEST, np.float32)
    extremes[600] = INF
    for logits in (few_levels, extremes, gaussian(1300), np.full(40, 2.0, np.float32)):
        check(kernels, [Row(logits, SamplingParams(logprobs=n, temperature=0)) for n in (0, 1, 257, 999, 1000)])
