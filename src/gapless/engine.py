"""The one loop: plan, launch, land, commit. It measures the time that it spends outside the executor."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gapless.errors import ExecutorError
from gapless.executor.protocol import Executor
from gapless.request import FinishReason, Request
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler, TokenEvent
from gapless.step import TokenLogprobs

SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads the seeds of a prompt's samples


class Sink:
    """Receives a request's tokens; subclasses make text of them."""

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a token; True to end the request here (a stop string)."""
        return False

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        """The request has ended."""


@dataclass
class EngineStats:
    """Counters since the start. ``executor_s`` is spent in launch and land, ``busy_s`` in all of the loop."""

    steps: int = 0
    tokens: int = 0
    executor_s: float = 0.0
    busy_s: float = 0.0

    @property
    def host_share(self) -> float:
        """Time outside the executor over time in the loop."""
        return 1.0 - self.executor_s / self.busy_s if self.busy_s else 0.0


@dataclass
class _Entry:
    request: Request
    sink: Sink


class Engine:
    """Drives an executor with a scheduler. ``submit`` and ``abort`` may be called from any thread, ``step`` by one at
    a time: hold ``driving`` around it."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.driving = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._ids = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._n_launched = 0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        sinks: Sequence[Sink],
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
    ) -> list[int]:
        """Queue a prompt, one sample for each sink; returns their request ids.

        What is wrong with the request is told to the sinks, by ``on_finish``, when the loop takes it.
        """
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        tokens, leader = tuple(prompt), None
        ids: list[int] = []
        for index, sink in enumerate(sinks):
            request = Request(
                next(self._ids), tokens, sampling, (seed + index * SEED_STEP) % (1 << 64), stop_ids,
                priority=priority, leader=leader,
            )  # fmt: skip
            leader = leader or request
            ids.append(request.request_id)
            self._commands.append(lambda r=request, s=sink: self._add(r, s))  # type: ignore[misc]
        return ids

    def abort(self, request_id: int) -> None:
        """End a request; its sink learns of it when the loop takes the command. Nothing happens if it has ended."""
        self._commands.append(lambda: self._finish(request_id, "abort"))

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self.scheduler.has_work

    def step(self) -> None:
        """Take commands, launch up to the executor's depth, land one step."""
        started = time.perf_counter()
        inside = 0.0
        while self._commands:
            self._commands.popleft()()
        try:
            while self._n_launched < self.executor.depth and (plan := self.scheduler.plan()) is not None:
                launch = time.perf_counter()
                self.executor.launch(plan)
                inside += time.perf_counter() - launch
                self._n_launched += 1
            if self._n_launched:
                land = time.perf_counter()
                result = self.executor.land()
                inside += time.perf_counter() - land
                self._n_launched -= 1
                self.stats.steps += 1
                self._deliver(self.scheduler.commit(result))
        except ExecutorError as problem:
            self._fail(problem)
        self.stats.executor_s += inside
        self.stats.busy_s += time.perf_counter() - started

    def _deliver(self, events: list[TokenEvent]) -> None:
        self.stats.tokens += len(events)
        for request, token, logprobs, reason in events:
            entry = self._entries[request.request_id]
            # A stop string may complete with the very token that also ends the request.
            stopped = entry.sink.on_token(token, logprobs)
            if reason is not None:
                del self._entries[request.request_id]
                entry.sink.on_finish("stop" if stopped else reason, None)
            elif stopped:
                self._finish(request.request_id, "stop")

    def _add(self, request: Request, sink: Sink) -> None:
        try:
            self.scheduler.add(request)
        except Exception as problem:
            sink.on_finish("error", problem)
        else:
            self._entries[request.request_id] = _Entry(request, sink)

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        if self.scheduler.finish(request_id, reason):
            self._entries.pop(request_id).sink.on_finish(reason, None)

    def _fail(self, problem: ExecutorError) -> None:
        """End all requests with the error; the loop lives on."""
        self._n_launched = 0
        self.scheduler.fail_in_flight()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.sink.on_finish("error", problem)
