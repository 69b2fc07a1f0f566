"""The scheduler against an executor that notices wrong pages: random requests, aborts, preemptions, evictions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import EOS, VOCAB, FakeExecutor, oracle
from gapless.errors import ExecutorError, GaplessError, RequestError
from gapless.policy import by_name
from gapless.request import FinishReason, Request, State
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, SchedulerConfig
from gapless.step import StepPlan

STOPS = frozenset((EOS,))


@dataclass
class Harness:
    """Drives a scheduler and holds every request to what it would generate alone."""

    executor: FakeExecutor
    scheduler: Scheduler
    requests: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)  # ended from outside, at any token
    missed: dict[Request, int] = field(default_factory=dict)  # steps since a decode was last in one
    in_flight: int = 0

    @classmethod
    def make(cls, *, policy: str = "fcfs", prefix_cache: bool = True, **capacity: int) -> Harness:
        executor = FakeExecutor(**capacity)
        config = SchedulerConfig(prefix_cache=prefix_cache)
        return cls(executor, Scheduler(executor.capacity, by_name(policy), config))

    @property
    def turns(self) -> int:
        """Steps within which every decode runs: ceil(decodes / places kept for them)."""
        capacity = self.executor.capacity
        budget = capacity.max_step_tokens
        places = max(1, min(budget - max(1, budget // 4), capacity.max_step_samples - 1))
        return -(-capacity.n_slots // places)

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
        request = Request(len(self.requests), prompt, sampling, seed, STOPS, priority, leader)
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request from outside, as an abort or a stop string does."""
        if self.scheduler.finish(request_id, reason):
            assert request_id not in self.ended
            self.ended[request_id] = reason
            self.cut.add(request_id)

    def launch(self) -> StepPlan | None:
        if self.in_flight == self.executor.depth:
            return None
        decodes = [r for r in self.scheduler._running if r.n_left == 1 and r.n_expected < r.limit]
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.executor.launch(plan)
        self.in_flight += 1
        self._count_missed(decodes, plan)
        return plan

    def _count_missed(self, decodes: list[Request], plan: StepPlan) -> None:
        ran = {span.request_id for span in plan.spans}
        before, self.missed = self.missed, {}
        for request in decodes:
            if request.request_id not in ran and request.state is State.RUNNING:
                self.missed[request] = before.get(request, 0) + 1
                assert self.missed[request] <= self.turns, "a decode starves"

    def land(self) -> bool:
        if not self.in_flight:
            return False
        self.in_flight -= 1
        try:
            events = self.scheduler.commit(self.executor.land())
        except ExecutorError:
            self._fail()
            return True
        for event in events:
            request_id = event.request.request_id
            assert request_id not in self.ended, "a token after the end"
            self.outputs[request_id].append(event.token)
            if event.finish_reason is not None:
                self.ended[request_id] = event.finish_reason
        return True

    def _fail(self) -> None:
        for _ in range(self.in_flight):
            with pytest.raises(ExecutorError):
                self.executor.land()
        self.in_flight = 0
        for request in self.scheduler.fail():
            assert request.request_id not in self.ended
            self.ended[request.request_id] = "error"
            self.cut.add(request.request_id)

    def use_pages_otherwise(self) -> None:
        """Let something else overwrite all pages, between two steps."""
        if self.in_flight == 0:
            self.scheduler.recompute()
            self.executor.score([1, 2])

    def step(self) -> None:
        while self.launch():
            pass
        assert self.land() or not self.scheduler.has_work, "work is left and nothing runs"
        self.scheduler.check()

    def drain(self) -> None:
        """Run to the end, which is near: the first request advances in every so many steps, then the next does."""
        bound = self.turns * sum(r.limit for r in self.requests.values() if not r.finished) + self.executor.depth
        while self.scheduler.has_work:
            self.step()
            bound -= 1
            assert bound >= 0, "it takes too many steps"
        self.check_ends()

    def check_ends(self) -> None:
        """Every request ended once, with the tokens that it generates alone; no page and no slot is lost."""
        assert set(self.ended) == set(self.requests)
        for request_id, request in self.requests.items():
            alone = oracle(request.prompt, request.limit - len(request.prompt), request.seed, STOPS)
            output = self.outputs[request_id]
            assert request.finish_reason == self.ended[request_id]
            if request_id in self.cut:
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
    """A random scheduler under random requests, ends, launches, landings and failures."""
    rng = random.Random(seed)
    page_tokens = rng.choice((1, 2, 4, 16))
    context = rng.choice((12, 24, 48))
    whole = -(-context // page_tokens)
    n_slots = rng.randint(1, 6)
    harness = Harness.make(
        policy=rng.choice(("fcfs", "priority")),
        prefix_cache=rng.random() < 0.8,
        page_tokens=page_tokens,
        context_tokens=context,
        n_pages=whole + rng.choice((0, 1, whole, 4 * whole)),
        n_slots=n_slots,
        max_step_tokens=rng.choice((2, 3, 6, 8, 16, 64)),
        max_step_samples=rng.choice((min(n_slots, 2), n_slots)),
        depth=rng.choice((1, 1, 2, 3)),
        fails_at=rng.choice((-1, -1, -1, rng.randrange(40))),
    )
    for _ in range(n_operations):
        operate(harness, rng, context)
        harness.scheduler.check()
    harness.drain()
    return harness


def operate(harness: Harness, rng: random.Random, context: int) -> None:
    roll = rng.random()
    if roll < 0.12:
        priority = rng.randrange(3)
        leader = harness.add(prompt(rng, context - 2), rng.randint(1, 20), priority=priority, seed=rng.randrange(97))
        if rng.random() < 0.2:
            for index in range(rng.randint(1, 3)):
                harness.add(leader.prompt, rng.randint(1, 9), leader=leader, priority=priority, seed=index)
    elif roll < 0.16 and harness.requests:
        harness.end(rng.randrange(len(harness.requests)), rng.choice(("abort", "stop")))
    elif roll < 0.165:
        harness.use_pages_otherwise()
    elif roll < 0.5:
        harness.launch()
    else:
        harness.land()


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_random_use(seed: int) -> None:
    random_use(seed, 60)


@pytest.mark.slow
def test_a_hundred_thousand_random_operations() -> None:
    preempted = shared = failed = 0
    for seed in range(500):
        harness = random_use(seed, 200)
        preempted += harness.scheduler.n_preemptions
        shared += sum(r.prefix_hits > 0 for r in harness.requests.values())
        failed += "error" in harness.ended.values()
    assert preempted > 500
    assert shared > 500
    assert failed > 50


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


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_in_line_advance_by_their_shares(depth: int) -> None:
    """The promise: at least K / 2^(i+1) tokens in every step for the prompt at place i."""
    harness = Harness.make(n_pages=999, n_slots=40, context_tokens=400, max_step_tokens=64, depth=depth)
    for i in range(30):  # decodes that would fill the budget
        harness.add((i + 1,), 399)
    for _ in range(10):
        harness.step()
    prompts = [harness.add(tuple(range(i + 1, i + 301)), 1) for i in range(4)]
    for _ in range(12):
        before = [r.planned for r in prompts]
        plan = harness.launch()
        harness.land()
        assert plan is not None
        for place, (request, start) in enumerate(zip(prompts, before, strict=True)):
            assert request.planned - start >= (64 // 4) >> (place + 1), place
    harness.drain()


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    harness = Harness.make(n_pages=1600, n_slots=8, context_tokens=2000, max_step_tokens=64)
    for i in range(3):
        harness.add(tuple(range(i + 1, i + 1800)), 1)
    short = harness.add((7, 8, 9), 1)
    harness.step()
    assert short.finished
    harness.drain()


def test_what_a_prompt_leaves_goes_to_the_first() -> None:
    harness = Harness.make(n_pages=99, n_slots=4, context_tokens=200, max_step_tokens=64)
    first = harness.add(tuple(range(1, 151)), 1)
    harness.add((1, 2), 1)
    plan = harness.launch()
    assert plan is not None
    assert plan.n_tokens == 64
    assert first.planned == 62
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


@pytest.mark.parametrize("samples", [2, 3])
def test_decodes_leave_a_sample_to_prompts(samples: int) -> None:
    """Where a step takes fewer samples than there are slots, the end of a prompt is not put off for ever."""
    harness = Harness.make(n_pages=256, n_slots=8, context_tokens=64, max_step_tokens=64, max_step_samples=samples)
    for i in range(7):
        harness.add((i + 1,), 50)
    for _ in range(20):
        harness.step()
    late = harness.add(tuple(range(1, 20)), 1)
    for _ in range(4 * harness.turns):
        harness.step()
    assert late.finished
    harness.drain()


def test_a_step_is_planned_before_the_one_before_lands() -> None:
    harness = Harness.make(depth=2)
    harness.add((1, 2, 3), 6)
    assert harness.launch()
    assert harness.launch(), "the next token's step is planned though this one's is not known"
    assert not harness.launch()
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_never_runs_beyond_its_length(depth: int) -> None:
    """Lengths are known beforehand, so no step is planned for a token too many."""
    harness = Harness.make(depth=depth, n_pages=64, context_tokens=24, max_step_tokens=32)
    for max_tokens in (1, 2, 5, 50):
        harness.add((3, 1, 4), max_tokens)
    harness.drain()
    for request in harness.requests.values():
        ends = [s.end for plan in harness.executor.plans for s in plan.spans if s.request_id == request.request_id]
        assert max(ends) < request.limit


def test_samples_of_one_prompt_share_its_pages() -> None:
    harness = Harness.make(n_pages=32, n_slots=4)
    leader = harness.add(tuple(range(1, 18)), 8)
    others = [harness.add(leader.prompt, 8, leader=leader, seed=i) for i in range(3)]
    for _ in range(3):
        harness.step()
    assert all(r.pages[:4] == leader.pages[:4] for r in others)
    assert all(r.prefix_hits == 16 for r in others)
    harness.drain()


@pytest.mark.parametrize("when", [0, 1, 2])
def test_samples_go_on_without_their_leader(when: int) -> None:
    harness = Harness.make(n_pages=32, n_slots=4, max_step_tokens=8)
    leader = harness.add(tuple(range(1, 18)), 8)
    other = harness.add(leader.prompt, 8, leader=leader)
    for _ in range(when):
        harness.step()
    harness.end(leader.request_id, "abort")
    harness.drain()
    assert len(harness.outputs[other.request_id]) > 0


def test_a_running_request_shares_what_it_has_computed() -> None:
    harness = Harness.make(n_pages=32, n_slots=4)
    first = harness.add(tuple(range(1, 14)), 20)
    harness.step()
    harness.step()
    second = harness.add((*range(1, 13), 50, 51), 4)
    harness.step()
    assert second.pages[:3] == first.pages[:3]
    harness.drain()


def test_answers_are_shared_too() -> None:
    """The next turn of a conversation finds the pages of the answer before it."""
    harness = Harness.make(n_pages=64, n_slots=4, context_tokens=128)
    first = harness.add((1, 2, 3), 30, seed=1)
    harness.drain()
    known = first.tokens
    assert len(known) > 12
    second = harness.add((*known, 5, 6), 4)
    harness.drain()
    assert second.prefix_hits == (len(known) - 1) // 4 * 4


def test_prompts_that_arrive_together_compute_what_they_share_about_once() -> None:
    harness = Harness.make(n_pages=999, n_slots=16, context_tokens=500, max_step_tokens=64)
    common = tuple(i % 96 + 1 for i in range(400))
    requests = [harness.add((*common, i + 1), 1) for i in range(16)]
    harness.drain()
    computed = sum(plan.n_tokens for plan in harness.executor.plans)
    assert computed < 3 * 400, "sixteen times 400 where nothing is shared"
    assert all(r.prefix_hits > 0 for r in requests[1:])


def test_admission_leaves_running_requests_room_to_grow() -> None:
    """Pages that running prompts will want are not given to others, who would be preempted at once."""
    harness = Harness.make(n_pages=20, n_slots=8, context_tokens=64, max_step_tokens=8)
    for i in range(8):
        harness.add(tuple(range(i + 1, i + 31)), 4)
    harness.drain()
    assert harness.scheduler.n_preemptions == 0


def test_the_first_to_come_is_never_preempted() -> None:
    harness = Harness.make(n_pages=18, n_slots=4, context_tokens=64)
    requests = [harness.add((i + 5, 2, 3, i + 1), 60) for i in range(4)]
    harness.drain()
    assert harness.scheduler.n_preemptions > 0
    longest = max(requests, key=lambda r: len(r.output))
    assert len(longest.output) > 16, "none has outgrown its share of the pages"
    assert requests[0].preemptions == 0


def test_priorities_displace() -> None:
    harness = Harness.make(policy="priority", n_slots=1)
    low = harness.add((1, 2, 3), 30)
    harness.step()
    high = harness.add((4, 5), 3, priority=1)
    harness.drain()
    assert low.preemptions == 1
    assert high.preemptions == 0
    assert next(iter(harness.ended)) == high.request_id


def test_equal_priorities_do_not_displace() -> None:
    harness = Harness.make(policy="priority", n_slots=1)
    first, second = (harness.add((i + 1, 2, 3), 8, priority=4) for i in range(2))
    harness.drain()
    assert first.preemptions == second.preemptions == 0


def test_aborting_while_a_step_is_in_flight() -> None:
    harness = Harness.make(depth=2, n_slots=1)
    first = harness.add((1, 2, 3), 30)
    harness.launch()
    harness.launch()
    harness.end(first.request_id, "abort")
    harness.add((7, 8), 5)
    assert not harness.launch(), "the slot is still written to"
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_ends_what_ran_and_nothing_else(depth: int) -> None:
    harness = Harness.make(depth=depth, n_slots=2, fails_at=3, n_pages=64)
    ran = [harness.add((i + 1, 2), 30) for i in range(2)]
    waited = [harness.add((i + 1, 3), 5) for i in range(2)]
    harness.drain()
    assert [r.finish_reason for r in ran] == ["error", "error"]
    assert all(r.finish_reason != "error" for r in waited)


def test_nothing_is_found_after_its_pages_were_used_otherwise() -> None:
    harness = Harness.make(n_pages=64)
    long = harness.add(tuple(range(1, 14)), 40)
    for _ in range(4):
        harness.step()
    harness.use_pages_otherwise()
    again = harness.add(tuple(range(1, 14)), 4)
    harness.drain()
    assert long.preemptions == 1
    assert again.preemptions == 0


@pytest.mark.parametrize("n", [0, 64, 65])
def test_prompts_that_can_never_run_are_refused(n: int) -> None:
    harness = Harness.make(n_pages=64, context_tokens=64)
    with pytest.raises(RequestError, match=r"no tokens|64|65"):
        harness.add(tuple(range(1, n + 1)), 4)
    assert not harness.scheduler.has_work


def test_prompts_beyond_a_lowered_context_are_refused() -> None:
    executor = FakeExecutor(n_pages=64, context_tokens=64)
    scheduler = Scheduler(executor.capacity, config=SchedulerConfig(context_tokens=20))
    assert scheduler.validate(19) == 20
    with pytest.raises(RequestError, match="20 tokens and the context holds 20"):
        scheduler.validate(20)


def test_prompts_beyond_the_pages_are_refused() -> None:
    executor = FakeExecutor(n_pages=4, page_tokens=4, context_tokens=64)
    with pytest.raises(RequestError, match="16 tokens and the context holds 16"):
        Scheduler(executor.capacity).validate(16)


def test_a_budget_of_one_token_is_refused() -> None:
    with pytest.raises(GaplessError, match="max_step_tokens = 1"):
        Scheduler(FakeExecutor().capacity, config=SchedulerConfig(max_step_tokens=1))


def test_an_answer_ends_where_the_context_does() -> None:
    harness = Harness.make(n_pages=64, context_tokens=24, max_step_tokens=32)
    request = harness.add(tuple(range(1, 24)), 50)
    harness.drain()
    assert len(harness.outputs[request.request_id]) == 1
    assert harness.ended[request.request_id] in ("length", "stop")


def test_policies_that_are_not_known() -> None:
    with pytest.raises(RequestError, match="'random'"):
        by_name("random")
