"""The loop: what its sinks are told, whatever fails, and how little it costs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from fake_executor import EOS, FakeExecutor, oracle
from gapless.engine import SEED_STEP, Engine, EngineThread, Sink
from gapless.errors import ExecutorError, ModelError, RequestError
from gapless.executor.protocol import Capacity, Executor
from gapless.executor.reference import ReferenceExecutor
from gapless.policy import by_name
from gapless.request import FinishReason
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, SchedulerConfig
from gapless.step import SampledToken, StepPlan, StepResult, TokenLogprobs
from tiny import tiny_model

STOPS = frozenset((EOS,))
WAIT_S = 60


@dataclass
class Recorder(Sink):
    """``stop_after`` that many tokens, or ``fail_after`` them."""

    stop_after: int | None = None
    fail_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        assert not self.ends, "a token after the end"
        self.tokens.append(token)
        if len(self.tokens) == self.fail_after:
            raise ZeroDivisionError("the sink's own")
        return len(self.tokens) == self.stop_after

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        self.ends.append(reason)
        self.error = error
        self.ended.set()


def engine_of(executor: Executor, policy: str = "fcfs") -> Engine:
    return Engine(executor, Scheduler(executor.capacity, by_name(policy)))


def submit(engine: Engine, prompt: tuple[int, ...], max_tokens: int, **sink: int) -> Recorder:
    recorder = Recorder(**sink)
    engine.submit(prompt, SamplingParams(max_tokens=max_tokens, seed=1), [recorder], stop_ids=STOPS)
    return recorder


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check()


def alone(prompt: tuple[int, ...], n: int) -> list[int]:
    return oracle(prompt, n, 1, STOPS)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_arrive_and_end_once(depth: int) -> None:
    engine = engine_of(FakeExecutor(depth=depth))
    sinks = [submit(engine, (i + 1, 2, 3), 9) for i in range(6)]
    run(engine)
    for i, sink in enumerate(sinks):
        assert sink.tokens == alone((i + 1, 2, 3), 9)
        assert sink.ends in (["length"], ["stop"])
    assert engine.stats.tokens == sum(len(s.tokens) for s in sinks)
    assert 0 < engine.stats.executor_s < engine.stats.busy_s


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sink_may_end_its_request(depth: int) -> None:
    """As a stop string does: what later steps sample for it is dropped."""
    engine = engine_of(FakeExecutor(depth=depth))
    stopped, other = submit(engine, (1, 2), 20, stop_after=3), submit(engine, (5, 6), 20)
    at_the_end = submit(engine, (1, 2), 4, stop_after=4)
    run(engine)
    assert (stopped.tokens, stopped.ends) == (alone((1, 2), 3), ["stop"])
    assert other.tokens == alone((5, 6), 20)
    assert at_the_end.ends == ["stop"], "the last token completes the stop string"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sink_that_fails_ends_its_own_request(depth: int) -> None:
    engine = engine_of(FakeExecutor(depth=depth))
    failing, other = submit(engine, (1, 2), 20, fail_after=2), submit(engine, (5, 6), 20)
    run(engine)
    assert failing.ends == ["error"]
    assert isinstance(failing.error, ZeroDivisionError)
    assert other.tokens == alone((5, 6), 20)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_is_told_to_what_ran_and_the_loop_lives(depth: int) -> None:
    engine = engine_of(FakeExecutor(depth=depth, n_slots=2, fails_at=4))
    sinks = [submit(engine, (i + 1, 2), 20) for i in range(4)]
    run(engine)
    assert [s.ends for s in sinks[:2]] == [["error"], ["error"]]
    assert all(isinstance(s.error, ExecutorError) for s in sinks[:2])
    assert [s.tokens for s in sinks[2:]] == [alone((3, 2), 20), alone((4, 2), 20)]
    later = submit(engine, (9, 9), 5)
    run(engine)
    assert later.tokens == alone((9, 9), 5)


def test_an_error_at_launch_is_told() -> None:
    class NoLaunch(FakeExecutor):
        def launch(self, plan: StepPlan) -> None:
            raise ExecutorError("the device is gone", "look for it")

    engine = engine_of(NoLaunch(depth=2, n_slots=1))
    sinks = [submit(engine, (i + 1,), 5) for i in range(3)]
    run(engine)
    assert [s.ends for s in sinks] == [["error"]] * 3


def test_requests_that_cannot_run_are_told() -> None:
    engine = engine_of(FakeExecutor(context_tokens=8))
    sink, other = submit(engine, tuple(range(1, 20)), 5), submit(engine, (1, 2), 3)
    run(engine)
    assert sink.ends == ["error"]
    assert isinstance(sink.error, RequestError)
    assert other.tokens == alone((1, 2), 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_aborts_are_told_once(depth: int) -> None:
    engine = engine_of(FakeExecutor(depth=depth, n_slots=1))
    running, waiting = Recorder(), Recorder()
    ids = [
        request_id
        for sink in (running, waiting)
        for request_id in engine.submit((1, 2), SamplingParams(max_tokens=30, seed=1), [sink])
    ]
    for _ in range(3):
        engine.step()
    for request_id in (*ids, *ids, 12345):
        engine.abort(request_id)
    run(engine)
    assert running.ends == waiting.ends == ["abort"]
    assert not waiting.tokens


def test_samples_have_seeds_of_their_own() -> None:
    engine = engine_of(FakeExecutor(n_pages=64))
    sinks = [Recorder() for _ in range(3)]
    engine.submit((1, 2, 3), SamplingParams(max_tokens=6, seed=2**64 - 1, n=3), sinks)
    run(engine)
    for index, sink in enumerate(sinks):
        assert sink.tokens == oracle((1, 2, 3), 6, (2**64 - 1 + index * SEED_STEP) % 2**64, frozenset())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_call_has_the_executor_to_itself(depth: int) -> None:
    """It may overwrite any page; requests that run, and those that come, get the same tokens all the same."""
    executor = FakeExecutor(depth=depth)
    engine = engine_of(executor)
    sinks = [submit(engine, (i + 1, 2, 3, 4, 5), 20) for i in range(3)]
    for _ in range(4):
        engine.step()
    future = engine.call(lambda: executor.score([1, 2, 3]))
    failing: Future[float] = engine.call(lambda: 1 / 0)
    sinks.append(submit(engine, (1, 2, 3, 4, 5), 20))
    run(engine)
    assert future.result(0) == [-1.0, -1.0]
    assert isinstance(failing.exception(0), ZeroDivisionError)
    for i, sink in enumerate(sinks):
        assert sink.tokens == alone((i % 3 + 1, 2, 3, 4, 5), 20)


# --- on a thread of its own


def test_threads_submit_and_abort_at_once() -> None:
    engine = engine_of(FakeExecutor(depth=2, n_slots=4, n_pages=64))
    thread = EngineThread(engine)
    prompts = [(i % 7 + 1, i % 5 + 1) for i in range(60)]
    sinks = [Recorder() for _ in prompts]

    def use(first: int) -> None:
        rng = random.Random(first)
        for i in range(first, len(prompts), 3):
            ids = engine.submit(prompts[i], SamplingParams(max_tokens=20, seed=1), [sinks[i]], stop_ids=STOPS)
            if rng.random() < 0.3:
                engine.abort(ids[0])
            thread.wake()

    users = [threading.Thread(target=use, args=(i,)) for i in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.ended.wait(WAIT_S)
        expected = alone(prompt, 20)
        assert sink.tokens == (expected if sink.ends != ["abort"] else expected[: len(sink.tokens)])
    thread.close()
    assert not engine.has_work


def test_closing_ends_what_runs() -> None:
    engine = engine_of(FakeExecutor(n_pages=4096, context_tokens=16000))
    thread = EngineThread(engine)
    sink = Recorder()
    engine.submit((1, 2), SamplingParams(seed=1), [sink])
    thread.wake()
    thread.close()
    thread.close()
    assert sink.ends == ["abort"]
    with pytest.raises(ExecutorError, match="closed"):
        thread.wake()


def test_a_bug_in_the_loop_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(FakeExecutor())
    thread = EngineThread(engine)

    def commit(result: StepResult) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(engine.scheduler, "commit", commit)
    sink = submit(engine, (1, 2), 5)
    thread.wake()
    assert sink.ended.wait(WAIT_S)
    assert sink.ends == ["error"]
    with pytest.raises(ExecutorError, match="a bug"):
        thread.wake()
    thread.close()


def test_what_is_accepted_is_answered_however_it_is_closed() -> None:
    """Submitting while another thread closes: told of the end once, or refused at once."""
    for attempt in range(60):
        engine = engine_of(FakeExecutor(depth=1 + attempt % 2))
        thread = EngineThread(engine)
        accepted: list[Recorder] = []
        calls: list[Future[int]] = []

        def use(engine: Engine, thread: EngineThread, accepted: list[Recorder], calls: list[Future[int]]) -> None:
            with contextlib.suppress(ExecutorError):
                while True:
                    sinks = [Recorder(), Recorder()]
                    engine.submit((1, 2), SamplingParams(max_tokens=3, seed=1, n=2), sinks)
                    accepted += sinks
                    calls.append(engine.call(lambda: 7))
                    thread.wake()

        user = threading.Thread(target=use, args=(engine, thread, accepted, calls))
        user.start()
        time.sleep(attempt * 1e-4)
        thread.close()
        user.join(WAIT_S)
        assert not user.is_alive()
        assert all(len(sink.ends) == 1 for sink in accepted)
        assert all(call.done() for call in calls)
        engine.abort(0)
        with pytest.raises(ExecutorError, match="closed"):
            engine.submit((1, 2), SamplingParams(), [Recorder()])
        with pytest.raises(ExecutorError, match="closed"):
            engine.call(lambda: 7)


def test_an_engine_that_was_never_used_can_be_closed() -> None:
    thread = EngineThread(engine_of(FakeExecutor()))
    thread.close()
    assert not thread.alive


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_without_a_finite_score_ends_its_own_request(depth: int) -> None:
    class Damaged(FakeExecutor):
        def land(self) -> StepResult:
            result = super().land()
            tokens = [t if t.request_id != 1 or result.step_id < 3 else t._replace(token=-1) for t in result.tokens]
            return StepResult(result.step_id, tuple(tokens))

    engine = engine_of(Damaged(depth=depth))
    sinks = [submit(engine, (i + 1, 2), 20) for i in range(3)]
    run(engine)
    assert sinks[1].ends == ["error"]
    assert sinks[1].tokens == alone((2, 2), 20)[: len(sinks[1].tokens)]
    assert isinstance(sinks[1].error, ModelError)
    assert "finite" in str(sinks[1].error)
    assert (sinks[0].tokens, sinks[2].tokens) == (alone((1, 2), 20), alone((3, 2), 20))


# --- batch invariance on a real forward pass


def test_64_prompts_whatever_the_circumstances() -> None:
    """Alone, together, in tiny chunks, preempted, from a warm prefix cache, by priority: the same greedy tokens."""
    rng = random.Random(3)
    common = tuple(rng.randrange(288) for _ in range(40))
    prompts = [
        (*common[: rng.choice((0, 20, 40))], i, *(rng.randrange(288) for _ in range(rng.randint(1, 12))))
        for i in range(64)
    ]

    def generate(together: bool = True, policy: str = "fcfs", warm: bool = False, **capacity: int) -> list[list[int]]:
        model = tiny_model(n_layers=1)
        executor = ReferenceExecutor(model.spec, model.weights, **{"n_pages": 512, "n_slots": 64, **capacity})
        engine = engine_of(executor, policy)
        for _ in range(2 if warm else 1):
            sinks = []
            for i, prompt in enumerate(prompts):
                sinks.append(Recorder())
                engine.submit(prompt, SamplingParams(temperature=0, max_tokens=24), [sinks[-1]], priority=i % 3)
                if not together:
                    run(engine)
                elif policy == "priority":
                    engine.step()  # those of lower priority run when higher ones come
            run(engine)
        if capacity.get("n_pages", 512) < 64 or policy == "priority":
            assert engine.scheduler.n_preemptions > 0
        return [sink.tokens for sink in sinks]

    expected = generate(together=False)
    assert len({tuple(tokens) for tokens in expected}) > 32, "the prompts ask for different answers"
    assert generate() == expected
    assert generate(max_step_tokens=7) == expected
    assert generate(n_pages=14, n_slots=8) == expected
    assert generate(warm=True) == expected
    assert generate(policy="priority", n_slots=4) == expected


# --- the cost of a step


class NullExecutor:
    """Takes no time: what is left is the host's."""

    def __init__(self, n_slots: int, context_tokens: int) -> None:
        pages = n_slots * -(-context_tokens // 16)
        self.capacity = Capacity(pages, 16, n_slots, context_tokens, 512, n_slots)
        self.depth, self.profile = 1, None
        self._plan: StepPlan | None = None

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def land(self) -> StepResult:
        assert self._plan is not None
        tokens = tuple(SampledToken(s.request_id, 7) for s in self._plan.spans if s.sample)
        return StepResult(self._plan.step_id, tokens)

    def close(self) -> None:
        pass


def host_s(batch: int, prompt_tokens: int) -> float:
    """Processor time of a decode step, the least of several windows of 32 steps."""
    executor = NullExecutor(batch, prompt_tokens + 600)
    engine = Engine(executor, Scheduler(executor.capacity, config=SchedulerConfig()))
    for i in range(batch):
        engine.submit((i + 1, *range(prompt_tokens - 1)), SamplingParams(temperature=0), [Sink()])
    while engine.scheduler.n_waiting or engine.stats.tokens < batch:
        engine.step()
    windows = []
    for _ in range(12):
        started = time.thread_time()
        for _ in range(32):
            engine.step()
        windows.append((time.thread_time() - started) / 32)
    return min(windows)


def test_a_step_of_32_costs_the_host_little() -> None:
    """3% of a step of 20 ms are 600 us; text is made beside it."""
    assert host_s(32, 16) < 400e-6


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    short, long = (min(host_s(8, n) for _ in range(3)) for n in (16, 16_000))
    assert long < 2 * short
