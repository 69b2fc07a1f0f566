"""Host work beside steps: what hides behind the device, what sticks out, and who is waited for."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_executor import FakeExecutor
from gapless.arch.sizes import planned_weights
from gapless.bench import run_once
from gapless.ceilings import Ceilings
from gapless.engine import Engine, Sink
from gapless.executor.timing import N_COLUMNS, DeviceTimes, Source
from gapless.kernels.count import OpKind, StepCounter
from gapless.ledger.accounts import Account
from gapless.ledger.ledger import BATCH_STEPS, Ledger
from gapless.llm import LLM
from gapless.machine import allowed_cores
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler
from gapless.step import StepPlan, StepResult
from tiny import tiny_model

pytestmark = pytest.mark.xdist_group("real-model")

CEILINGS = Ceilings(2e10, 1e12, 2e11)
STEP_S = 0.08
N_TOKENS = 10
LINEAR = list(OpKind).index(OpKind.LINEAR)


class SlowDevice(FakeExecutor):
    """Takes ``STEP_S`` for each step, one after the other, on a thread of its own: nothing but sleep."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, n_pages=64, context_tokens=64)
        self._todo: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    source = Source.MEASURED
    active, kept = False, BATCH_STEPS

    @property
    def profile(self) -> Any:
        return self

    @property
    def counter(self) -> StepCounter:
        spec = tiny_model().spec
        return StepCounter(spec, planned_weights(spec, 5))

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self._todo.put(None)

    def land(self) -> StepResult:
        stamps = self._done.get()
        result = super().land()
        return StepResult(result.step_id, result.tokens, stamps)

    def times(self, stamps: Any) -> DeviceTimes:
        stamps = np.stack(stamps)
        by_kind = np.zeros((len(stamps), N_COLUMNS), np.int64)
        by_kind[:, LINEAR] = stamps[:, 1] - stamps[:, 0]
        return DeviceTimes(stamps[:, 0], stamps[:, 1], by_kind, np.zeros((len(stamps), 1), np.int64))

    def _serve(self) -> None:
        while True:
            self._todo.get()
            begun = time.perf_counter_ns()
            time.sleep(STEP_S)
            self._done.put(np.array([begun, time.perf_counter_ns()]))


def run(depth: int, delay_s: float) -> Ledger:
    """One request of ``N_TOKENS`` tokens; planning each step takes ``delay_s`` longer."""
    device = SlowDevice(depth)
    engine = Engine(device, Scheduler(device.capacity))
    ledger = engine.ledger = Ledger(device, device.counter, CEILINGS)
    plan = engine.scheduler.plan

    def slow() -> StepPlan | None:
        found = plan()
        if found is not None:
            time.sleep(delay_s)
        return found

    engine.scheduler.plan = slow  # type: ignore[method-assign]
    engine.submit((1, 2), SamplingParams(max_tokens=N_TOKENS), [Sink()])
    while engine.has_work:
        engine.step()
    engine.book()
    (part,) = [p for p in ledger.intervals() if len(p)]
    assert (part.spent.sum(axis=1) == part.end - part.begin).all()
    return ledger


def seconds(ledger: Ledger, account: Account, of: str = "spent_ns") -> float:
    return float(getattr(ledger.totals, of)[account]) / 1e9


@pytest.mark.parametrize("delay_s", [0.03, 0.13], ids=["shorter than a step", "longer than a step"])
def test_planted_host_time_is_found_where_it_is(delay_s: float) -> None:
    """With one step in flight all of it sticks out; with two, what a step covers is hidden."""
    one, two = run(1, delay_s), run(2, delay_s)
    planned = N_TOKENS * delay_s
    assert seconds(one, Account.SCHEDULE) == pytest.approx(planned, rel=0.05)
    assert seconds(one, Account.SCHEDULE, "hidden_ns") == pytest.approx(0, abs=0.005)

    hidden, out = seconds(two, Account.SCHEDULE, "hidden_ns"), seconds(two, Account.SCHEDULE)
    covered = min(delay_s, STEP_S)
    steps_beside = N_TOKENS - 1
    assert hidden == pytest.approx(steps_beside * covered, rel=0.05)
    if delay_s > STEP_S:
        assert out == pytest.approx(delay_s + steps_beside * (delay_s - STEP_S), rel=0.05)
    lost = (one.totals.wall_ns - two.totals.wall_ns) / 1e9
    assert hidden == pytest.approx(lost, rel=0.05), "hidden time is what the wall has lost"


def test_books_at_rest_are_of_the_device(real_model: Path) -> None:
    """Without anything planted nearly all is on the device, whatever the depth."""
    for depth in (1, 2):
        ledger = run(depth, 0.0)
        assert ledger.totals.spent_ns[[Account.WEIGHTS, Account.COMPUTE]].sum() > 0.9 * ledger.totals.wall_ns


@pytest.fixture
def burner() -> Iterator[int]:
    """A process that wants all of the last allowed core; its number."""
    core = max(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield core
        process.kill()


@pytest.mark.skipif(allowed_cores() < 2, reason="needs a core for each of two threads")
def test_a_slow_thread_is_found(real_model: Path, burner: int) -> None:
    """A thread that shares its core with another program makes the rest wait."""
    before = {thread.native_id for thread in threading.enumerate()}
    with LLM(real_model, threads=2, kv_memory_bytes=1 << 26) as llm:
        (slow,) = [t.native_id for t in threading.enumerate() if t.name == "gapless-1" and t.native_id not in before]
        others = {core for core in os.sched_getaffinity(0) if core != burner}
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(slow, {burner})
        os.sched_setaffinity(0, others)
        try:
            assert llm.executor.profile is not None
            llm.keep_books(CEILINGS)
            assert llm.ledger is not None
            run_once(llm, [[5] * 8], 40)
        finally:
            os.sched_setaffinity(0, allowed)
        spent = llm.ledger.totals.spent_ns
        assert spent[Account.SYNC] > 0.15 * llm.ledger.totals.wall_ns
        others_than_device = [a for a in Account if a not in (Account.WEIGHTS, Account.COMPUTE, Account.KV)]
        assert max(others_than_device, key=lambda a: int(spent[a])) is Account.SYNC
