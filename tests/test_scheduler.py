"""The scheduler against an executor that notices wrong pages: random requests, aborts, preemptions, evictions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import EOS, VOCAB, FakeExecutor, oracle
from gapless.errors import RequestError
from gapless.policy import by_name
from gapless.request import Request
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, SchedulerConfig

STOPS = frozenset((EOS,))


@dataclass
class Harness:
    """Drives a scheduler and holds every request to what it would generate alone."""

    executor: FakeExecutor
    scheduler: Scheduler
    requests: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    in_flight: int = 0
    idle_steps: int = 0

    @classmethod
    def make(cls, *, policy: str = "fcfs", prefix_cache: bool = True, **capacity: int) -> Harness:
        executor = FakeExecutor(**capacity)
        config = SchedulerConfig(prefix_cache=prefix_cache)
        return cls(executor, Scheduler(executor.capacity, by_name(policy), config))

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        priority: int = 0,
        leader: Request | None = None,
        seed: int = 5,
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0)
        request = Request(len(self.requests), prompt, sampling, seed, STOPS, priority=priority, leader=leader)
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def abort(self, request_id: int) -> None:
        if self.scheduler.abort(request_id):
            assert request_id not in self.ended
            self.ended[request_id] = "abort"
            self.aborted.add(request_id)

    def launch(self) -> bool:
        if self.in_flight == self.executor.depth:
            return False
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.executor.launch(plan)
        self.in_flight += 1
        return True

    def land(self) -> bool:
        if not self.in_flight:
            return False
        self.in_flight -= 1
        for event in self.scheduler.commit(self.executor.land()):
            request_id = event.request.request_id
            assert request_id not in self.ended, "a token after the end"
            self.outputs[request_id].append(event.token)
            if event.finish_reason is not None:
                self.ended[request_id] = event.finish_reason
        return True

    def step(self) -> None:
        while self.launch():
            pass
        if self.land():
            self.idle_steps = 0
        else:
            self.idle_steps += 1
            assert self.idle_steps < 3 or not self.scheduler.has_work, "work is left and nothing runs"
        self.scheduler.check()

    def drain(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        self.check_ends()

    def check_ends(self) -> None:
        """Every request ended once, with the tokens that it generates alone; no page and no slot is lost."""
        assert set(self.ended) == set(self.requests)
        for request_id, request in self.requests.items():
            alone = oracle(request.prompt, request.limit - len(request.prompt), request.seed, STOPS)
            output = self.outputs[request_id]
            if request_id in self.aborted:
                assert output == alone[: len(output)]
                continue
            assert output == alone, request_id
            assert self.ended[request_id] == ("stop" if alone[-1] == EOS else "length")
        capacity = self.executor.capacity
        assert self.scheduler.cache.n_available == capacity.n_pages
        assert sorted(self.scheduler._free_slots) == list(range(capacity.n_slots))
        assert not self.scheduler._requests


def prompt(rng: random.Random, longest: int) -> tuple[int, ...]:
    """Prompts that often begin alike."""
    base = random.Random(rng.randrange(3))
    shared = [base.randrange(1, VOCAB) for _ in range(longest)][: rng.randint(0, longest - 1)]
    return (*shared, *(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, max(1, longest - len(shared))))))


def random_use(seed: int, n_operations: int) -> Harness:
    """A random scheduler under random requests, aborts, launches and landings."""
    rng = random.Random(seed)
    page_tokens = rng.choice((1, 2, 4, 16))
    context = rng.choice((12, 24, 48))
    whole = -(-context // page_tokens)
    harness = Harness.make(
        policy=rng.choice(("fcfs", "priority")),
        prefix_cache=rng.random() < 0.8,
        page_tokens=page_tokens,
        context_tokens=context,
        n_pages=whole + rng.choice((0, 1, whole, 4 * whole)),
        n_slots=rng.randint(1, 6),
        max_step_tokens=rng.choice((6, 8, 16, 64)),
        depth=rng.choice((1, 1, 2, 3)),
    )
    for _ in range(n_operations):
        roll = rng.random()
        if roll < 0.12:
            leader = harness.add(
                prompt(rng, context - 2),
                rng.randint(1, 20),
                priority=rng.randrange(3),
                seed=rng.random().__hash__() % 97,
            )
            if rng.random() < 0.2:
                for index in range(rng.randint(1, 3)):
                    harness.add(leader.prompt, rng.randint(1, 9), leader=leader, priority=leader.priority, seed=index)
        elif roll < 0.16 and harness.requests:
            harness.abort(rng.randrange(len(harness.requests)))
        elif roll < 0.5:
            harness.launch()
        else:
            harness.land()
        harness.scheduler.check()
    harness.drain()
    return harness


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_random_use(seed: int) -> None:
    random_use(seed, 60)


@pytest.mark.slow
def test_a_hundred_thousand_random_operations() -> None:
    preempted = shared = 0
    for seed in range(500):
        harness = random_use(seed, 200)
        preempted += harness.scheduler.n_preemptions
        shared += sum(r.prefix_hits > 0 for r in harness.requests.values())
    assert preempted > 500
    assert shared > 500


def test_decodes_and_a_long_prompt_share_every_step() -> None:
    harness = Harness.make(n_pages=64, n_slots=4, context_tokens=128, max_step_tokens=8)
    short = [harness.add((i + 1,), 60) for i in range(3)]
    for _ in range(3):
        harness.step()
    before = [len(harness.outputs[r.request_id]) for r in short]
    long = harness.add(tuple(range(1, 60)), 4)
    for n in range(1, 9):
        harness.step()
        for r, start in zip(short, before, strict=True):
            assert len(harness.outputs[r.request_id]) >= start + n or r.finished, "a decode was held up by the prompt"
    assert long.landed > 30, "the prompt was held up by the decodes"
    harness.drain()


def test_a_prompt_advances_though_decodes_fill_the_budget() -> None:
    harness = Harness.make(n_pages=256, n_slots=16, context_tokens=64, max_step_tokens=8)
    for i in range(12):
        harness.add((i + 1, i + 2), 50)
    for _ in range(8):
        harness.step()
    late = harness.add(tuple(range(1, 20)), 4)
    for _ in range(12):
        harness.step()
    assert late.landed >= 12, "a quarter of the budget belongs to prompts"
    harness.drain()


def test_every_decode_runs_within_the_bound() -> None:
    """More decodes than the budget admits take turns."""
    harness = Harness.make(n_pages=256, n_slots=16, context_tokens=64, max_step_tokens=4)
    requests = [harness.add((i + 1,), 60) for i in range(12)]
    while harness.scheduler.n_waiting:
        harness.step()
    before = {r.request_id: len(harness.outputs[r.request_id]) for r in requests if not r.finished}
    for _ in range(12):
        harness.step()
    for request_id, count in before.items():
        if request_id not in harness.ended:
            assert len(harness.outputs[request_id]) >= count + 3
    harness.drain()


def test_a_step_is_planned_before_the_one_before_lands() -> None:
    harness = Harness.make(depth=2)
    harness.add((1, 2, 3), 6)
    assert harness.launch()
    assert harness.launch(), "the next token's step is planned though this one's is not known"
    assert not harness.launch()
    harness.drain()


def test_samples_of_one_prompt_share_its_pages() -> None:
    harness = Harness.make(n_pages=32, n_slots=4)
    leader = harness.add(tuple(range(1, 18)), 8)
    others = [harness.add(leader.prompt, 8, leader=leader, seed=i) for i in range(3)]
    harness.step()
    harness.step()
    harness.step()
    assert all(r.pages[:4] == leader.pages[:4] for r in others)
    assert all(r.prefix_hits == 16 for r in others)
    harness.drain()


def test_a_running_request_shares_what_it_has_computed() -> None:
    harness = Harness.make(n_pages=32, n_slots=4)
    first = harness.add(tuple(range(1, 14)), 20)
    harness.step()
    harness.step()
    second = harness.add((*range(1, 13), 50, 51), 4)
    harness.step()
    assert second.pages[:3] == first.pages[:3]
    harness.drain()


def test_priorities_displace() -> None:
    harness = Harness.make(policy="priority", n_slots=1)
    low = harness.add((1, 2, 3), 30)
    harness.step()
    high = harness.add((4, 5), 3, priority=1)
    harness.drain()
    assert low.preemptions == 1
    assert high.preemptions == 0
    assert next(iter(harness.ended)) == high.request_id


def test_aborting_while_a_step_is_in_flight() -> None:
    harness = Harness.make(depth=2, n_slots=1)
    first = harness.add((1, 2, 3), 30)
    harness.launch()
    harness.launch()
    harness.abort(first.request_id)
    harness.add((7, 8), 5)
    assert not harness.launch(), "the slot is still written to"
    harness.drain()


@pytest.mark.parametrize("n", [0, 64, 65])
def test_prompts_that_can_never_run_are_refused(n: int) -> None:
    harness = Harness.make(n_pages=64, context_tokens=64)
    with pytest.raises(RequestError, match=r"no tokens|64|65"):
        harness.add(tuple(range(1, n + 1)), 4)
    assert not harness.scheduler.has_work


def test_an_answer_ends_where_the_context_does() -> None:
    harness = Harness.make(n_pages=64, context_tokens=24, max_step_tokens=32)
    request = harness.add(tuple(range(1, 24)), 50)
    harness.drain()
    assert len(harness.outputs[request.request_id]) == 1
    assert harness.ended[request.request_id] in ("length", "stop")
