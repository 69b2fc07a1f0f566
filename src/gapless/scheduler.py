"""Continuous batching: which tokens of which requests the next step runs. Integers only; no clock, no I/O.

**Launch before land.** A step is planned while earlier ones are still in flight. That is sound because steps run in
order and the executor appends a sampled token to its slot itself: the next position of a request can be planned before
its token is known. If that token then ends the request, what the later step samples for it is dropped. Its pages are
given away at once, for whoever gets them writes in a later step still; its slot, which the host writes to, only after
its last step has landed. Lengths are known beforehand and are never overrun.

**Fairness.** Of a step's budget of B tokens, K (``B / arrivals_share``) are kept for prompts while any wait.

- Decodes go first, one token each. Where they do not all fit, those that have waited longest go: each of D decodes
  runs at least once in ``ceil(D / (B - K))`` steps, however long the prompts beside it are. (Samples are shared in the
  same way where a step can take fewer than there are slots: all but one for decodes.)
- A prompt takes at most half of what is left of the budget while others wait behind it; what nobody takes goes to the
  first. So the running prompt at place i (from 0) advances by at least ``K / 2^(i+1)`` tokens, rounded down, in every
  step in which it has pages: a short one behind a long one does not wait for its end.
- The policy's first request is never preempted by those behind it, so one request after the other gets to its end.
  Under FCFS everyone becomes the first; under priorities, everyone whom higher ones leave room.

**Prefixes.** Pages are found by their tokens as soon as they are full and their step has landed, also by prompts that
run already: one that others have overtaken drops its pages and goes on from theirs.

**Pages.** A request is admitted when there are pages for all that it has to compute, beside those that running
requests will want: their own prompts, and a page more for each to grow into. Answers outgrow that in the end; then the
policy's last request gives way and is computed anew later, from what the prefix tree still holds of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gapless.cache import ROOT, PageCache
from gapless.errors import GaplessError, RequestError
from gapless.executor.protocol import Capacity
from gapless.policy import Policy
from gapless.policy.fcfs import Fcfs
from gapless.request import FinishReason, Request, State
from gapless.step import Admission, Span, StepPlan, StepResult, TokenLogprobs


class TokenEvent(NamedTuple):
    """A token of a request, and its end if this was the last; a token -1, of which no logit was finite, is an error."""

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
        context_tokens: longest request, prompt and answer; the executor's if None.
        arrivals_share: one part in so many of the budget is kept for prompts.
        prefix_cache: whether computed prefixes are found again.
        model_tokens: the longest context that the model could be given, so that no error advises more than it.
    """

    max_running: int | None = None
    max_step_tokens: int | None = None
    context_tokens: int | None = None
    arrivals_share: int = 4
    prefix_cache: bool = True
    model_tokens: int | None = None


@dataclass
class _Draft:
    """A step while it is planned."""

    tokens_left: int
    samples_left: int
    spans: list[tuple[Request, Span]] = field(default_factory=list)

    def add(self, request: Request, count: int, sample: bool) -> None:
        span = Span(request.request_id, request.slot, request.planned, count, request.pages, sample)
        self.spans.append((request, span))
        self.tokens_left -= count
        self.samples_left -= sample


class _Flight(NamedTuple):
    plan: StepPlan
    requests: tuple[Request, ...]  # of the plan's spans


class Scheduler:
    """Plans steps and takes their results. ``plan`` and ``commit`` alternate as the executor's depth allows.

    Raises:
        GaplessError: the step budget is too small to be shared.
    """

    def __init__(self, capacity: Capacity, policy: Policy | None = None, config: SchedulerConfig | None = None) -> None:
        config = config or SchedulerConfig()
        self.capacity = capacity
        self.cache = PageCache(capacity.n_pages, capacity.page_tokens)
        self.n_preemptions = 0
        self._policy = policy or Fcfs()
        self._budget = min(config.max_step_tokens or capacity.max_step_tokens, capacity.max_step_tokens)
        if self._budget < 2:
            raise GaplessError(
                f"max_step_tokens = {self._budget} cannot be shared by decodes and prompts", "give at least 2"
            )
        assert capacity.max_step_samples >= min(capacity.n_slots, 2), "decodes and prompts share the samples too"
        self._kept = max(1, self._budget // config.arrivals_share)
        self._max_running = min(config.max_running or capacity.n_slots, capacity.n_slots)
        self._longest = min(
            config.context_tokens or capacity.context_tokens,
            capacity.context_tokens,
            capacity.n_pages * capacity.page_tokens,
        )
        self._model_tokens = config.model_tokens
        self._prefix_cache = config.prefix_cache
        self._requests: dict[int, Request] = {}  # not finished, or with steps in flight
        self._waiting: list[Request] = []  # by the policy's order
        self._running: list[Request] = []  # by the policy's order
        self._free_slots = list(range(capacity.n_slots - 1, -1, -1))
        self._in_flight: deque[_Flight] = deque()
        self._preempted_now: list[Request] = []  # while the present step is planned
        self._n_arrivals = 0
        self._n_steps = 0

    # --- requests

    def add(self, request: Request) -> None:
        """Queue a request; its answer ends at the context's end if ``max_tokens`` would take it further.

        Raises RequestError if the prompt leaves no room for an answer.
        """
        longest = self.validate(len(request.prompt))
        assert request.request_id not in self._requests, "request ids are used once"
        wanted = request.sampling.max_tokens
        request.limit = longest if wanted is None else min(len(request.prompt) + wanted, longest)
        request.arrival = self._n_arrivals
        self._n_arrivals += 1
        self._insert(self._waiting, request)
        self._requests[request.request_id] = request

    def validate(self, n_prompt: int) -> int:
        """The most tokens, prompt and answer, of a request. Raises RequestError if its prompt is too long."""
        if n_prompt == 0:
            raise RequestError("the prompt has no tokens", "give a prompt of at least one token")
        if n_prompt >= self._longest:
            raise RequestError(
                f"the prompt has {n_prompt} tokens and the context holds {self._longest}, the answer included",
                f"shorten the prompt{self.context_remedy}",
            )
        return self._longest

    @property
    def context_remedy(self) -> str:
        """What else helps a request that is too long, to end a sentence with; empty where nothing does."""
        held = self.capacity.n_pages * self.capacity.page_tokens
        if self._longest >= (self._model_tokens or math.inf):
            return "; the model has no longer context"
        return ", or raise kv-memory" if self._longest == held else ", or raise the context"

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and answer."""
        return self._longest

    @property
    def max_running(self) -> int:
        return self._max_running

    @property
    def max_step_tokens(self) -> int:
        return self._budget

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

    @property
    def preempted_now(self) -> list[int]:
        """Ids of the requests that the last plan, or ``recompute``, has thrown out of the cache."""
        return [request.request_id for request in self._preempted_now]

    # --- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a step lands (or at all)."""
        self._preempted_now.clear()
        while True:
            n_preempted = len(self._preempted_now)
            draft = _Draft(self._budget, self.capacity.max_step_samples)
            prompts = [r for r in self._running if r.n_left > 1]
            self._plan_decodes(draft, bool(prompts or self._waiting))
            self._plan_prompts(draft, prompts)
            # Who was preempted by a later one of the same step is in the draft still.
            spans = [(request, span) for request, span in draft.spans if request.state is State.RUNNING]
            if spans:
                return self._launch(spans)
            if len(self._preempted_now) == n_preempted:
                return None  # else those whose turn it was have made room for others

    def _plan_decodes(self, draft: _Draft, prompts_wait: bool) -> None:
        ready = [r for r in self._running if r.n_left == 1 and r.n_expected < r.limit]
        room = min(self._budget - self._kept * prompts_wait, self.capacity.max_step_samples - prompts_wait)
        room = max(room, 1)
        if len(ready) > room:
            ready.sort(key=lambda r: r.last_step)
        for request in ready[:room]:
            if request.state is State.RUNNING and self._grow(request, request.planned + 1):
                draft.add(request, 1, sample=True)

    def _plan_prompts(self, draft: _Draft, prompts: Sequence[Request]) -> None:
        """Chunks of the prompts that run, and of those that can be admitted."""
        left = draft.tokens_left
        chunks: dict[Request, int] = {}
        prompts = [r for r in prompts if r.state is State.RUNNING]
        for request in prompts:
            self._catch_up(request)
        for place, request in enumerate(prompts, start=1):
            chunks[request] = self._share(request, left, alone=place == len(prompts) and not self._waiting)
            left -= chunks[request]
        while left > 0 and (admitted := self._admit_next()) is not None:
            chunks[admitted] = self._share(admitted, left, alone=not self._waiting)
            left -= chunks[admitted]
        for request, count in chunks.items():
            more = min(request.n_left - count, left)
            left -= more
            self._plan_chunk(draft, request, count + more)

    def _share(self, request: Request, left: int, alone: bool) -> int:
        """Tokens of a prompt, given what those before it have left of the budget."""
        return min(request.n_left, left if alone else -(-left // 2))

    def _plan_chunk(self, draft: _Draft, request: Request, count: int) -> None:
        sample = count == request.n_left
        if sample and draft.samples_left == 0:
            count, sample = count - 1, False
        if count > 0 and request.state is State.RUNNING and self._grow(request, request.planned + count):
            draft.add(request, count, sample)

    def _grow(self, request: Request, n_positions: int) -> bool:
        """Pages up to a position; the policy's last, which may be the request itself, give way where there are none."""
        missing = self.cache.pages_for(n_positions) - len(request.pages)
        if missing <= 0:
            return True
        while (fresh := self.cache.allocate(missing)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += fresh
        return True

    def _launch(self, spans: Sequence[tuple[Request, Span]]) -> StepPlan:
        """Make a step of the spans and book it to their requests."""
        admissions = []
        for request, span in spans:
            if not request.slot_filled:
                admissions.append(self._admission(request))
                request.slot_filled = True
            request.planned = span.end
            request.last_step = self._n_steps
            request.in_flight += 1
            request.sampling_in_flight += span.sample
        plan = StepPlan(self._n_steps, tuple(admissions), tuple(span for _, span in spans))
        self._n_steps += 1
        self._in_flight.append(_Flight(plan, tuple(request for request, _ in spans)))
        return plan

    @staticmethod
    def _admission(request: Request) -> Admission:
        s = request.sampling
        suppress = tuple(sorted(request.ends)) if s.min_tokens > 0 else ()
        return Admission(
            request.slot, request.request_id, request.tokens, len(request.prompt), s, request.seed, suppress
        )

    # --- admission and preemption

    def _admit_next(self) -> Request | None:
        """Admit the first that waits, if there is room for it; those behind it do not pass it."""
        for request in self._waiting:
            if request.in_flight > 0 or request in self._preempted_now:
                return None
            if not self._waits_for_leader(request):
                return request if self._admit(request) else None
        return None

    @staticmethod
    def _waits_for_leader(request: Request) -> bool:
        """Whether another is about to compute the same prompt for it."""
        leader = request.leader
        return leader is not None and not leader.finished and leader.landed < len(leader.prompt)

    def _admit(self, request: Request) -> bool:
        while len(self._running) >= self._max_running:
            if not self._displace(request):
                return False
        if not self._free_slots:
            return False  # those who left have steps in flight
        hits = self._match(request)
        self.cache.hold(hits)
        while not self._fits(request, len(hits)):
            if not self._displace(request):
                self.cache.release(hits)
                return False
        self._start(request, hits)
        return True

    def _fits(self, request: Request, n_hits: int) -> bool:
        wanted = self._pages_wanted(request, n_hits)
        return wanted + sum(self._pages_wanted(r, len(r.pages)) for r in self._running) <= self.cache.n_available

    def _pages_wanted(self, request: Request, n_held: int) -> int:
        """Pages that it will ask for before long: for its known tokens, and one to grow into."""
        soon = self.cache.pages_for(request.n_expected) + 1
        return max(min(soon, self.cache.pages_for(request.limit)) - n_held, 0)

    def _displace(self, request: Request) -> bool:
        """Preempt the last running request if the policy says that this one goes before it."""
        if not self._running or not self._policy.displaces(request, self._running[-1]):
            return False
        self._preempt(self._running[-1])
        return True

    def _start(self, request: Request, hits: tuple[int, ...]) -> None:
        self._waiting.remove(request)
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        request.last_step = self._n_steps
        self._begin_after(request, hits)
        self._insert(self._running, request)

    def _match(self, request: Request) -> tuple[int, ...]:
        """Computed pages of its tokens; at least one token is left to compute, for its logits."""
        return self.cache.match(request.tokens, request.n_known - 1) if self._prefix_cache else ()

    def _begin_after(self, request: Request, hits: tuple[int, ...]) -> None:
        """Let what is computed of a request be these pages of the prefix tree, which it holds."""
        request.pages = hits
        request.planned = request.landed = len(hits) * self.cache.page_tokens
        request.cached_pages = len(hits)
        request.cacheable = self._prefix_cache
        request.slot_filled = False
        if request.preemptions == 0:
            request.prefix_hits = request.planned

    def _catch_up(self, request: Request) -> None:
        """Let a prompt go on from where others have got with the same tokens, if that is further."""
        if request.in_flight > 0:
            return
        hits = self._match(request)
        if len(hits) * self.cache.page_tokens > request.planned:
            self.cache.hold(hits)
            self.cache.release(request.pages)
            self._begin_after(request, hits)

    def _preempt(self, request: Request) -> None:
        """Back to the queue; what it computed may be found in the prefix tree again."""
        self.n_preemptions += 1
        request.preemptions += 1
        self._preempted_now.append(request)
        self._leave(request, State.WAITING)
        self._insert(self._waiting, request)

    # --- results

    def commit(self, result: StepResult) -> list[TokenEvent]:
        """Take the oldest step's result; tokens of requests that have ended meanwhile are dropped."""
        plan, requests = self._in_flight.popleft()
        assert plan.step_id == result.step_id, "results come in the order of the plans"
        tokens = iter(result.tokens)
        events: list[TokenEvent] = []
        for request, span in zip(requests, plan.spans, strict=True):
            request.in_flight -= 1
            if request.state is State.RUNNING:
                request.landed = span.end
                self._cache_pages(request)
            if span.sample:
                request.sampling_in_flight -= 1
                sampled = next(tokens)
                if not request.finished:
                    reason = self._take(request, sampled.token)
                    events.append(TokenEvent(request, sampled.token, sampled.logprobs, reason))
            self._vacate(request)
        return events

    def _take(self, request: Request, token: int) -> FinishReason | None:
        """Take a token, and end the request if it is the last."""
        if token < 0:
            self._end(request, "error")
            return "error"
        request.output.append(token)
        reason: FinishReason | None = None
        if token in request.ends and len(request.output) > request.sampling.min_tokens:
            reason = "stop"
        elif request.n_known >= request.limit:
            reason = "length"
        if reason is not None:
            self._end(request, reason)
        return reason

    def _cache_pages(self, request: Request) -> None:
        """Put pages that have become full and computed into the prefix tree."""
        size = self.cache.page_tokens
        while request.cacheable and request.landed >= (request.cached_pages + 1) * size:
            index = request.cached_pages
            parent = request.pages[index - 1] if index else ROOT
            tokens = request.tokens_between(index * size, (index + 1) * size)
            request.cacheable = self.cache.insert(parent, tokens, request.pages[index])
            request.cached_pages += request.cacheable

    def fail(self) -> list[Request]:
        """Give up the steps in flight, whose executor has failed.

        Ends the requests that run and returns them. Those that wait have lost nothing; but no page is trusted any more.
        """
        involved = [request for flight in self._in_flight for request in flight.requests]
        self._in_flight.clear()
        for request in involved:
            request.in_flight = request.sampling_in_flight = 0
        ended = list(self._running)
        for request in ended:
            self._end(request, "error")
        for request in involved:
            self._vacate(request)
        self.cache.forget()
        return ended

    def recompute(self) -> None:
        """Preempt what runs and forget all pages: the executor has used them for something else.

        No step may be in flight.
        """
        assert not self._in_flight
        self._preempted_now.clear()
        while self._running:
            self._preempt(self._running[-1])
        self.cache.forget()

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.state is State.RUNNING:
            self._leave(request, State.FINISHED)
        else:
            self._waiting.remove(request)
            request.state = State.FINISHED
            self._vacate(request)

    def _leave(self, request: Request, state: State) -> None:
        """Stop running: give back the pages and, once nothing is in flight, the slot."""
        self._running.remove(request)
        self.cache.release(request.pages)
        request.pages = ()
        request.state = state
        self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Once nothing is in flight: free the slot of a request that has stopped running, forget one that has ended."""
        if request.state is State.RUNNING or request.in_flight > 0:
            return
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1
            request.slot_filled = False
        if request.finished:
            self._requests.pop(request.request_id, None)

    # --- order

    def _insert(self, ordered: list[Request], request: Request) -> None:
        key = self._policy.key(request)
        index = len(ordered)
        while index > 0 and self._policy.key(ordered[index - 1]) > key:
            index -= 1
        ordered.insert(index, request)

    def check(self) -> None:
        """Assert that nothing is lost or doubled."""
        self.cache.check([r.pages for r in self._running])
        flying = {r for flight in self._in_flight for r in flight.requests}
        slots = [r.slot for r in {*self._running, *flying} if r.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(self.capacity.n_slots))
        for request in flying:
            assert request.in_flight == sum(f.requests.count(request) for f in self._in_flight)
        everyone = {*self._running, *self._waiting}
        assert len(everyone) == len(self._running) + len(self._waiting)
        assert all(self._requests[r.request_id] is r and not r.finished for r in everyone)
        assert set(self._requests.values()) == everyone | {r for r in flying if r.finished}
        for r in self._running:
            assert r.landed <= r.planned <= r.n_expected <= r.limit
            assert self.cache.pages_for(r.planned) <= len(r.pages) <= self.cache.pages_for(r.limit)
