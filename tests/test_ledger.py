"""A ledger that a real engine keeps: what is booked adds up, and a planted cause is found."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.arch.sizes import planned_weights
from gapless.ceilings import Ceilings
from gapless.executor.profile import TapeProfile, kind_of
from gapless.executor.timing import N_COLUMNS, SAMPLE_COLUMN, DeviceTimes
from gapless.kernels.count import OpKind, StepCounter
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import address_of
from gapless.kernels.cpu.walk import tally
from gapless.ledger.accounts import Account
from gapless.ledger.attribute import SpanColumns, attribute
from gapless.ledger.ledger import Ledger
from gapless.ledger.report import lines, summary
from gapless.ledger.shares import N_SHARES, N_TIMES
from gapless.llm import LLM
from gapless.sampling import SamplingParams
from tiny import tiny_model
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

CEILINGS = Ceilings(2e10, 1e12, 2e11)
MS = 1_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("ledger") / "tiny.gguf", "smollm2", "Q4_0")


def open_with_books(path: Path, **options: Any) -> tuple[LLM, Ledger]:
    llm = LLM(path, threads=1, **options)
    assert llm.executor.profile is not None
    ledger = Ledger(llm.executor.profile, llm.executor.counter, CEILINGS)
    llm.engine.ledger = ledger
    return llm, ledger


def checked(llm: LLM, ledger: Ledger) -> dict[int, list[tuple[int, int]]]:
    """Intervals by request, after everything that must hold of any books has been looked at."""
    llm.settle()
    found: dict[int, list[tuple[int, int]]] = {}
    for part in ledger.intervals():
        assert (part.spent >= 0).all()
        assert (part.floor >= 0).all()
        assert (part.spent.sum(axis=1) == part.end - part.begin).all()
        for request, begin, end in zip(part.request.tolist(), part.begin.tolist(), part.end.tolist(), strict=True):
            rows = found.setdefault(request, [])
            assert not rows or rows[-1][1] == begin, "an interval begins where the one before it ends"
            rows.append((begin, end))
    totals = ledger.totals
    assert totals.wall_ns == totals.spent_ns.sum() == sum(end - begin for rows in found.values() for begin, end in rows)
    assert totals.tokens == sum(map(len, found.values()))
    booked = sum((part.share.sum(axis=0) for part in ledger.intervals()), np.zeros(N_SHARES, np.int64))
    assert (totals.share == booked + totals.undelivered).all(), "what steps cost is somebody's, or told to be nobody's"
    assert totals.share[:N_TIMES].sum() == totals.device_ns
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pages", [400, 10])
def test_whatever_runs_is_booked_wholly(tiny: Path, depth: int, pages: int) -> None:
    """Arrivals at any time, prompts of any length, samples that share one, a cache too small: the books balance."""
    rng = random.Random(depth)
    llm, ledger = open_with_books(
        tiny, depth=depth, max_running=6, max_step_tokens=24, kv_memory_bytes=pages * page_bytes(tiny)
    )
    expected = []
    with llm:
        for _ in range(6):
            prompts = [[rng.randrange(1, 300) for _ in range(rng.randint(1, 60))] for _ in range(rng.randint(1, 9))]
            params = SamplingParams(seed=1, n=rng.randint(1, 2), max_tokens=rng.randint(1, 60), ignore_eos=True)
            outputs = llm.generate(prompts, params)
            expected += [len(c.token_ids) for output in outputs for c in output.outputs]
        found = checked(llm, ledger)
        assert sorted(map(len, found.values())) == sorted(expected)
        assert ledger._books.n_open == 0
        if pages == 10:
            assert llm.scheduler.n_preemptions > 0
            assert ledger.totals.spent_ns[Account.PREEMPTED] > 0


def page_bytes(path: Path) -> int:
    from gapless.kernels.cpu.kv import page_bytes
    from gapless.models.load import load_model

    return page_bytes(load_model(path).spec, "f16")


def test_aborted_requests_leave_nothing_open(tiny: Path) -> None:
    llm, ledger = open_with_books(tiny, kv_memory_bytes=1 << 22)
    with llm:
        for _ in range(20):
            for _ in llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True)):
                break
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        checked(llm, ledger)
        assert ledger._books.n_open == 0
        assert not ledger._prompts


def test_books_that_fail_cost_nobody_an_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ledger = open_with_books(tiny, kv_memory_bytes=1 << 22)

    def post() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(ledger, "post", post)
    with llm:
        for _ in range(2):
            assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
            llm.settle()
    assert llm.ledger is None
    assert "a bug" in str(ledger.problem)
    with pytest.raises(AssertionError, match="a bug"):
        summary(ledger)


def slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return slow


def largest(ledger: Ledger) -> Account:
    return Account(int(np.argmax(ledger.totals.spent_ns)))


def test_a_slow_scheduler_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ledger = open_with_books(tiny, kv_memory_bytes=1 << 22)
    with llm:
        monkeypatch.setattr(llm.scheduler, "plan", slowed(llm.scheduler.plan, 0.01))
        llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=20, ignore_eos=True))
    checked(llm, ledger)
    assert largest(ledger) is Account.SCHEDULE
    assert ledger.totals.spent_ns[Account.SCHEDULE] >= 3 * 19 * 10 * MS


def test_a_reader_that_is_slow_is_found(tiny: Path) -> None:
    llm, ledger = open_with_books(tiny, kv_memory_bytes=1 << 22)
    with llm:
        for _ in llm.stream([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)):
            time.sleep(0.02)
        llm.generate([[1]], SamplingParams(max_tokens=1))
    found = checked(llm, ledger)
    assert largest(ledger) is Account.DELIVER
    assert sum(map(len, found.values())) == 21


def test_a_prompt_beside_others_is_found(real_model: Path) -> None:
    """Those who decode wait for it; what they wait is booked to it and not to arithmetic of their own."""
    llm, ledger = open_with_books(real_model, kv_memory_bytes=1 << 28, max_running=17, max_step_tokens=272)
    with llm:
        decoding = threading.Thread(
            target=llm.generate,
            args=([[i + 100, 200] for i in range(16)], SamplingParams(max_tokens=60, ignore_eos=True)),
        )
        decoding.start()
        while llm.stats.tokens < 16 * 8:
            time.sleep(0.001)
        llm.generate([list(range(300, 2348))], SamplingParams(max_tokens=1))
        decoding.join()
        checked(llm, ledger)
    n_chunks = 2048 // (272 - 16)
    slowest = ledger.worst()[:n_chunks]
    causes = [Account(int(np.argmax(token.spent))) for token in slowest]
    assert causes.count(Account.NEIGHBOURS) >= n_chunks - 2, "a machine that stalls may be slower still"
    beside = [token.beside for token, cause in zip(slowest, causes, strict=True) if cause is Account.NEIGHBOURS]
    assert set(beside) <= {256, 2048 % 256} - {0}
    assert {token.n_others for token in slowest} == {15}


class FakeMeter:
    """Uses 3 W, by the clock; fails at a reading of one's choice."""

    parts: tuple[str, ...] = ("a fake",)
    left_out: tuple[str, ...] = ()
    failed: str | None = None

    def __init__(self, fails_at: int = 1 << 60) -> None:
        self.n_read, self._fails_at = 0, fails_at
        self.last_j = 0.0

    def read_j(self) -> float | None:
        self.n_read += 1
        if self.n_read >= self._fails_at:
            return None
        self.last_j = 3.0 * time.perf_counter()
        return self.last_j

    def resume_j(self) -> float | None:
        return self.read_j()

    def close(self) -> None:
        pass


def test_joules_are_divided_by_time_on_the_device(tiny: Path) -> None:
    """What the meter says is the tokens', whole; a pause in which nothing runs is nobody's."""
    llm, ledger = open_with_books(tiny, kv_memory_bytes=1 << 22)
    ledger = llm.keep_books(CEILINGS, FakeMeter())
    with llm:
        started = time.perf_counter()
        for _ in range(2):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=20, ignore_eos=True))
            checked(llm, ledger)
            time.sleep(0.3)
        wall = time.perf_counter() - started
    books = summary(ledger)
    in_tokens = sum(float(part.joules.sum()) for part in ledger.intervals())
    assert books["joules"] == pytest.approx(in_tokens)
    assert books["joules"] == pytest.approx(sum(a["joules"] for a in books["accounts"].values()))
    assert 0 < books["joules"] < 3 * (wall - 0.6) * 1.01
    assert books["joules"] > 3 * books["device_seconds"] * 0.99
    assert books["accounts"]["queue"]["joules"] == 0
    assert "energy: " in "\n".join(lines(books))


@pytest.mark.parametrize("fails_at", [1, 3])
def test_joules_that_are_unknown_are_none(tiny: Path, fails_at: int) -> None:
    llm, _ = open_with_books(tiny, kv_memory_bytes=1 << 22)
    ledger = llm.keep_books(CEILINGS, FakeMeter(fails_at))
    with llm:
        for _ in range(3):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
            checked(llm, ledger)
    books = summary(ledger)
    assert books["joules"] is None
    assert {account["joules"] for account in books["accounts"].values()} == {None}
    assert np.isnan(ledger.intervals()[-1].joules).all()
    assert "energy" not in "\n".join(lines(books))


# --- what a step is booked to


def times_of(by_kind: list[list[int]], sync: list[int]) -> DeviceTimes:
    kinds = np.array(by_kind, np.int64)
    length = kinds.sum(axis=1) + sync + 7
    ended = np.cumsum(length + 100)
    return DeviceTimes(ended - length, ended, kinds, np.array(sync, np.int64)[:, None])


@pytest.fixture
def counter() -> StepCounter:
    spec = tiny_model().spec
    return StepCounter(spec, planned_weights(spec, 5))


def test_the_accounts_of_a_step_add_up_to_it(counter: StepCounter) -> None:
    rng = np.random.default_rng(0)
    times = times_of(rng.integers(0, 10_000, (20, N_COLUMNS)).tolist(), [50] * 20)
    step = np.sort(rng.integers(0, 20, 90))
    count = np.where(rng.random(90) < 0.4, rng.integers(2, 50, 90), 1)
    spans = SpanColumns(step, rng.integers(0, 500, 90), count, rng.random(90) < 0.8, count > 1)
    booked = attribute(counter, CEILINGS, times, spans)
    device, floor = booked.device, booked.floor
    assert (device >= 0).all()
    assert (device.sum(axis=1) == (times.ended - times.begun)[step]).all()
    assert (device[:, Account.LAUNCH] == 7).all()
    alone = np.array([~(spans.prompt & (step == s)).any() for s in step])
    assert (device[alone, Account.NEIGHBOURS] == 0).all()
    assert (device[~alone & ~spans.prompt, Account.NEIGHBOURS] > 0).all()
    assert (floor[:, Account.WEIGHTS] + floor[:, Account.COMPUTE] > 0).all()


def test_a_prompt_alone_has_no_neighbours(counter: StepCounter) -> None:
    times = times_of([[1000] * N_COLUMNS], [0])
    one = np.zeros(1, np.int64)
    spans = SpanColumns(one, one, one + 40, np.ones(1, bool), np.ones(1, bool))
    device = attribute(counter, CEILINGS, times, spans).device
    assert device[0, Account.NEIGHBOURS] == 0
    assert device[0, Account.SAMPLE] == 1000


# --- what stamps say


def tallied(stamps: Any, kinds: list[int], barriers: list[bool]) -> Any:
    """The tally of one step's stamps, (threads, operations + 1)."""
    stamps, n_ops = np.ascontiguousarray(stamps, np.int64), len(kinds)
    tape = np.zeros((n_ops, abi.OP_WORDS), np.int64)
    tape[:, abi.OP_BARRIER] = barriers
    columns, out = np.array(kinds, np.int64), np.full(abi.TALLY_THREADS + len(stamps), -1, np.int64)
    tally(address_of(tape), n_ops, address_of(stamps), address_of(columns), address_of(out), len(stamps))
    return out


def test_stamps_of_two_threads() -> None:
    """The second thread comes late, and waits for the first behind the second operation."""
    out = tallied([[2000, 2400, 3000, 3200], [2100, 2400, 2600, 3200]], [4, 4, 7], [True, True, True])
    assert out[abi.TALLY_FIRST : abi.TALLY_COLUMNS].tolist() == [2000, 3200]
    columns = out[abi.TALLY_COLUMNS :]
    assert (columns[4], columns[7]) == (400 + 600 + 300 + 200, 400)
    assert out[abi.TALLY_THREADS :].tolist() == [0, 100 + 400]
    assert columns.sum() == 2 * 1200, "all of both threads' time"


def test_threads_that_do_not_wait_go_on() -> None:
    """Without a barrier a thread's next operation begins when its own last one has ended."""
    out = tallied([[0, 100, 300], [0, 200, 300]], [0, 1], [False, True])
    assert out[abi.TALLY_COLUMNS :][:2].tolist() == [300, 300]
    assert (out[abi.TALLY_THREADS :] == 0).all()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_tally_is_of_all_the_threads_time(seed: int) -> None:
    """Whoever is late or early, waits or goes on: operations and waiting add up to the step, for every thread."""
    rng = random.Random(seed)
    n_threads, n_ops = rng.randint(1, 4), rng.randint(1, 12)
    barriers = [rng.random() < 0.6 for _ in range(n_ops - 1)] + [True]
    stamps = [[1000 + (rng.randint(0, 90) if thread else 0)] for thread in range(n_threads)]
    entered = [row[0] for row in stamps]
    for meets in barriers:
        for thread, row in enumerate(stamps):
            row.append(entered[thread] + rng.randint(0, 300))
        entered = [max(row[-1] for row in stamps)] * n_threads if meets else [row[-1] for row in stamps]
    out = tallied(stamps, [rng.randrange(N_COLUMNS) for _ in range(n_ops)], barriers)
    assert (out >= 0).all()
    assert out[abi.TALLY_LAST] == entered[0]
    assert out[abi.TALLY_COLUMNS :].sum() == n_threads * (out[abi.TALLY_LAST] - out[abi.TALLY_FIRST])


def test_ticks_become_nanoseconds() -> None:
    """Two ticks a nanosecond, between two readings of counter and clock; the mean of two threads."""
    profile = TapeProfile.__new__(TapeProfile)
    profile._n_threads = 2
    anchors = iter([(0, 1000), (20_000, 11_000)])
    profile._anchor = lambda: next(anchors)  # type: ignore[method-assign]
    profile._since = profile._anchor()
    profile._rows = tallied([[2000, 2400], [2000, 2800]], [3], [True])[None]
    times = profile.times([0])
    assert (times.begun[0], times.ended[0]) == (2000, 2400)
    assert (times.by_kind[0, 3], times.sync[0]) == (300, 100)
    assert times.waited.tolist() == [[200, 0]]


@pytest.mark.parametrize(
    ("kernel", "rows", "kind"),
    [
        ("linear_q4", abi.ROWS_TOKENS, OpKind.LINEAR), ("linear_q8", abi.ROWS_SAMPLES, OpKind.LOGITS),
        ("gated_q4m", 140_000_000, OpKind.EXPERTS), ("norm_quantise", 0, OpKind.NORM), ("add", 0, OpKind.ADD),
        ("attention_merge", 0, OpKind.ATTENTION), ("rope_cache_f16", 0, OpKind.ROPE_CACHE),
    ],
)  # fmt: skip
def test_kinds_of_kernels(kernel: str, rows: int, kind: OpKind) -> None:
    assert kind_of(kernel, rows) == list(OpKind).index(kind)
    assert kind_of("sample", 0) == kind_of("argmax", 0) == SAMPLE_COLUMN


def test_every_operation_of_every_family_has_a_kind(tmp_path: Path) -> None:
    for family in ("smollm2", "gemma3", "mixtral", "phi3"):
        with LLM(write_gguf(tmp_path / f"{family}.gguf", family, "Q4_1"), threads=1, kv_memory_bytes=1 << 22) as llm:
            assert llm.executor.profile is not None
