"""Continuous batching: which tokens of which requests the next step runs. Integers only; no clock, no I/O.

A step is planned while earlier ones are still in flight. That is sound because steps run in order and the executor
appends a sampled token to its slot itself: the next position of a request can be planned before its token is known.
Pages of a finished request are given away at once for the same reason; its slot, which the host writes to, only after
its last step has landed.

Fairness: decodes go first and take one token each; ``arrivals_share`` of the budget is kept for prompts while any
wait; where decodes do not fit, those that have waited longest go. So a decode waits at most
ceil(decodes / (budget - share)) steps, and the oldest prompt gets at least ``arrivals_share`` tokens in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gapless.cache import ROOT, PageCache
from gapless.errors import RequestError
from gapless.executor.protocol import Capacity
from gapless.policy import Policy
from gapless.policy.fcfs import Fcfs
from gapless.request import FinishReason, Request, State
from gapless.step import Admission, Span, StepPlan, StepResult, TokenLogprobs


class TokenEvent(NamedTuple):
    """A token of a request, and its end if this was the last."""

    request: Request
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class SchedulerConfig:
    """
    Attributes:
        max_running: requests that run at once; the executor's slots if None.
        max_step_tokens: token budget of a step; the executor's if None.
        arrivals_share: one part in so many of the budget is kept for prompts.
        prefix_cache: whether computed prefixes are found again.
    """

    max_running: int | None = None
    max_step_tokens: int | None = None
    arrivals_share: int = 4
    prefix_cache: bool = True


class Scheduler:
    """Plans steps and takes their results. ``plan`` and ``commit`` alternate as the executor's depth allows."""

    def __init__(self, capacity: Capacity, policy: Policy | None = None, config: SchedulerConfig | None = None) -> None:
        config = config or SchedulerConfig()
        self.capacity = capacity
        self.cache = PageCache(capacity.n_pages, capacity.page_tokens)
        self._policy = policy or Fcfs()
        self._budget = min(config.max_step_tokens or capacity.max_step_tokens, capacity.max_step_tokens)
        self._max_running = min(config.max_running or capacity.n_slots, capacity.n_slots)
        self._kept = max(1, self._budget // config.arrivals_share)
        self._prefix_cache = config.prefix_cache
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []  # by the policy's order
        self._free_slots = list(range(capacity.n_slots - 1, -1, -1))
        self._in_flight: deque[StepPlan] = deque()
        self._left_now: list[Request] = []  # preempted while the present step is planned
        self._n_arrivals = 0
        self._n_steps = 0
        self.n_preemptions = 0

    # --- requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run."""
        most = self.validate(len(request.prompt))
        assert request.request_id not in self._requests, "request ids are used once"
        wanted = request.sampling.max_tokens
        request.limit = most if wanted is None else min(len(request.prompt) + wanted, most)
        request.arrival = self._n_arrivals
        self._n_arrivals += 1
        self._requests[request.request_id] = request
        self._enqueue(request)

    def validate(self, n_prompt: int) -> int:
        """The most tokens, prompt and answer, of a request. Raises RequestError if its prompt is too long."""
        capacity = self.capacity
        most = min(capacity.context_tokens, capacity.n_pages * capacity.page_tokens)
        if n_prompt == 0:
            raise RequestError("the prompt has no tokens", "give a prompt of at least one token")
        if n_prompt >= most:
            raise RequestError(
                f"the prompt has {n_prompt} tokens and the context holds {most}, the answer included",
                "shorten the prompt or raise the context",
            )
        return most

    def abort(self, request_id: int) -> bool:
        """End a request at once; False if it is not there (any more)."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """End a request for a reason found outside, such as a stop string."""
        request = self._requests.get(request_id)
        if request is None or request.finished:
            return False
        self._end(request, reason)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return bool(self._waiting or self._running or self._in_flight)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    # --- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a step lands (or at all)."""
        plan = self._plan()
        # A request that had to preempt itself can be admitted afresh.
        return self._plan() if plan is None and self._left_now else plan

    def _plan(self) -> StepPlan | None:
        self._left_now.clear()
        spans: list[Span] = []
        admissions: list[Admission] = []
        left = self._budget
        samples = self.capacity.max_step_samples
        prefills = [r for r in self._running if r.n_expected - r.planned > 1]
        reserved = self._kept if prefills or self._waiting else 0
        left, samples = self._plan_decodes(spans, left, min(left - reserved, left), samples)
        for request in prefills:
            if left > 0 and request.state is State.RUNNING:
                used = self._plan_prefill(request, spans, left, samples)
                left -= used
                samples -= used > 0 and spans[-1].sample
        self._admit(spans, admissions, left, samples)
        standing = tuple(s for s in spans if self._stands(s))
        if not standing:
            return None
        plan = StepPlan(self._n_steps, tuple(admissions), standing)
        self._n_steps += 1
        self._in_flight.append(plan)
        for span in plan.spans:
            request = self._requests[span.request_id]
            request.planned = span.end
            request.last_step = plan.step_id
            request.in_flight += 1
            request.sampling_in_flight += span.sample
        return plan

    def _stands(self, span: Span) -> bool:
        """Whether the span's request still runs: it may have been preempted by a later one of the same step."""
        return self._requests[span.request_id].slot == span.slot

    def _plan_decodes(self, spans: list[Span], left: int, allowed: int, samples: int) -> tuple[int, int]:
        ready = [r for r in self._running if r.n_expected - r.planned == 1 and r.n_expected < r.limit]
        room = min(max(allowed, 1), samples)
        if len(ready) > room:
            ready.sort(key=lambda r: r.last_step)
        for request in ready[:room]:
            if request.state is not State.RUNNING or not self._grow(request, request.planned + 1):
                continue
            spans.append(Span(request.request_id, request.slot, request.planned, 1, request.pages, True))
            left -= 1
            samples -= 1
        return left, samples

    def _plan_prefill(self, request: Request, spans: list[Span], left: int, samples: int) -> int:
        """A chunk of a prompt (or of what a preempted request has to recompute); returns its tokens."""
        count = min(request.n_expected - request.planned, left)
        sample = request.planned + count == request.n_expected and request.n_expected < request.limit
        if sample and samples <= 0:
            count, sample = count - 1, False
        if count <= 0 or not self._grow(request, request.planned + count):
            return 0
        spans.append(Span(request.request_id, request.slot, request.planned, count, request.pages, sample))
        return count

    def _admit(self, spans: list[Span], admissions: list[Admission], left: int, samples: int) -> None:
        index = 0
        while left > 0 and index < len(self._waiting):
            request = self._waiting[index]
            if self._must_wait(request):
                index += 1
                continue
            if not self._make_room(request):
                return
            hits = self._match(request)
            count = min(request.n_known - len(hits) * self.cache.page_tokens, left)
            self.cache.hold(hits)
            fresh = self.cache.allocate(self._pages_for(len(hits) * self.cache.page_tokens + count) - len(hits))
            if fresh is None:
                self.cache.release(hits)
                if not self._displace(request):
                    return
                continue
            del self._waiting[index]
            self._start(request, hits, fresh)
            admissions.append(self._admission(request))
            used = self._plan_prefill(request, spans, left, samples)
            left -= used
            samples -= used > 0 and spans[-1].sample

    def _must_wait(self, request: Request) -> bool:
        """For an earlier step of its own to land, or for its leader to compute the prompt."""
        leader = request.leader
        leads = leader is not None and leader.state is State.RUNNING and leader.landed < len(leader.prompt)
        waits = leader is not None and leader.state is State.WAITING and leader.preemptions == 0
        return request.in_flight > 0 or leads or waits or request in self._left_now

    def _make_room(self, request: Request) -> bool:
        """A slot for a waiting request."""
        while len(self._running) >= self._max_running or not self._free_slots:
            if len(self._running) < self._max_running or not self._displace(request):
                return False
        return True

    def _displace(self, request: Request) -> bool:
        """Preempt the last running request if the policy says that this one goes before it."""
        if not self._running or not self._policy.displaces(request, self._running[-1]):
            return False
        self._preempt(self._running[-1])
        return True

    def _match(self, request: Request) -> tuple[int, ...]:
        """Computed pages of its tokens; at least one token is left to compute, for there is a token to sample."""
        return self.cache.match(request.tokens, request.n_known - 1) if self._prefix_cache else ()

    def _start(self, request: Request, hits: tuple[int, ...], fresh: tuple[int, ...]) -> None:
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        request.pages = hits + fresh
        request.planned = request.landed = len(hits) * self.cache.page_tokens
        request.cached_pages = len(hits)
        request.cacheable = self._prefix_cache
        if request.preemptions == 0:
            request.prefix_hits = request.planned
        self._insert_by_policy(self._running, request)

    def _admission(self, request: Request) -> Admission:
        s = request.sampling
        suppress = tuple(sorted(self._stops(request))) if s.min_tokens > 0 else ()
        return Admission(
            request.slot, request.request_id, request.tokens, len(request.prompt), s, request.seed, suppress
        )

    def _grow(self, request: Request, n_positions: int) -> bool:
        """Pages up to a position; others, or the request itself, are preempted where there are none."""
        missing = self._pages_for(n_positions) - len(request.pages)
        if missing <= 0:
            return True
        while (fresh := self.cache.allocate(missing)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += fresh
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue; what it computed may be found in the prefix tree again."""
        self.n_preemptions += 1
        request.preemptions += 1
        self._left_now.append(request)
        self._leave(request)
        request.state = State.WAITING
        self._enqueue(request)

    # --- results

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Take the oldest step's result; tokens of requests that have ended meanwhile are dropped."""
        plan = self._in_flight.popleft()
        assert plan.step_id == result.step_id, "results come in the order of the plans"
        tokens = iter(result.tokens)
        events: list[TokenEvent] = []
        for span in plan.spans:
            request = self._requests[span.request_id]
            sampled = next(tokens) if span.sample else None
            request.in_flight -= 1
            request.sampling_in_flight -= span.sample
            if request.slot == span.slot and request.state is State.RUNNING:
                request.landed = span.end
            if sampled is not None and not request.finished:
                events.append(self._take(request, sampled.token, sampled.logprobs))
            elif request.state is State.RUNNING:
                self._cache_pages(request)
            self._tidy(request, span.slot)
        return events

    def fail_in_flight(self) -> list[Request]:
        """Drop all steps and end all requests after the executor has failed; returns those that had not ended."""
        self._in_flight.clear()
        ended = [r for r in self._requests.values() if not r.finished]
        for request in ended:
            self._end(request, "error")
        for request in list(self._requests.values()):
            request.in_flight = request.sampling_in_flight = 0
            self._tidy(request, request.slot)
        self._free_slots = list(range(self.capacity.n_slots - 1, -1, -1))
        self._requests.clear()
        return ended

    def _take(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        request.output.append(token)
        reason: FinishReason | None = None
        if token in self._stops(request) and len(request.output) > request.sampling.min_tokens:
            reason = "stop"
        if reason is None and request.n_known >= request.limit:
            reason = "length"
        if request.state is State.RUNNING:
            self._cache_pages(request)
        if reason is not None:
            self._end(request, reason)
        return TokenEvent(request, token, logprobs, reason)

    @staticmethod
    def _stops(request: Request) -> frozenset[int]:
        """Ids that end a request."""
        own = request.sampling.stop_token_ids
        stops = frozenset() if request.sampling.ignore_eos else request.stop_ids
        return stops.union(own) if own else stops

    def _cache_pages(self, request: Request) -> None:
        """Put pages that are full, computed and of known tokens into the prefix tree."""
        size = self.cache.page_tokens
        full = min(request.landed, request.n_known) // size
        if full <= request.cached_pages or not request.cacheable:
            return
        tokens = request.tokens
        for index in range(request.cached_pages, full):
            parent = request.pages[index - 1] if index else ROOT
            if not self.cache.insert(parent, tokens[index * size : (index + 1) * size], request.pages[index]):
                request.cacheable = False
                return
            request.cached_pages += 1

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        if request.in_flight == 0:
            self._requests.pop(request.request_id, None)

    def _leave(self, request: Request) -> None:
        """Give back the pages and, once nothing is in flight, the slot."""
        self._running.remove(request)
        self.cache.release(request.pages)
        request.pages = ()
        if request.in_flight == 0:
            self._free_slots.append(request.slot)
        request.slot = -1

    def _tidy(self, request: Request, slot: int) -> None:
        """Free the slot of a request that left while steps were in flight, and forget one that has ended."""
        if request.in_flight == 0:
            if request.slot != slot and slot not in self._free_slots:
                self._free_slots.append(slot)
            if request.finished:
                self._requests.pop(request.request_id, None)

    # --- order

    def _enqueue(self, request: Request) -> None:
        self._insert_by_policy(self._waiting, request)

    def _insert_by_policy(self, ordered: list[Request], request: Request) -> None:
        key = self._policy.key(request)
        index = len(ordered)
        while index > 0 and self._policy.key(ordered[index - 1]) > key:
            index -= 1
        ordered.insert(index, request)

    def _pages_for(self, n_positions: int) -> int:
        return -(-n_positions // self.cache.page_tokens)

    def check(self) -> None:
        """Assert that nothing is lost or doubled."""
        self.cache.check([r.pages for r in self._running])
        slots = [r.slot for r in self._running]
        assert len(set(slots)) == len(slots)
        assert not set(slots) & set(self._free_slots)
        assert len(set(self._free_slots)) == len(self._free_slots)
        leaving = {s.slot for plan in self._in_flight for s in plan.spans if not self._stands(s)}
        assert set(slots) | set(self._free_slots) | leaving == set(range(self.capacity.n_slots))
        everyone: Iterable[Request] = (*self._running, *self._waiting)
        assert all(self._requests[r.request_id] is r and not r.finished for r in everyone)
