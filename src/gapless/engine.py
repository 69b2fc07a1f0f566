"""The one loop: plan, launch, land, commit, deliver. It measures the time that it spends outside the executor."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from gapless.errors import ExecutorError, ModelError
from gapless.executor.protocol import Executor
from gapless.ledger.accounts import Account
from gapless.ledger.ledger import Ledger
from gapless.machine import start_thread
from gapless.request import FinishReason, Request
from gapless.sampling import SamplingParams
from gapless.scheduler import Scheduler
from gapless.step import StepPlan, StepResult, TokenLogprobs

T = TypeVar("T")

DAMAGED = "check the model's file against its source: weights may be damaged, or beyond what its type holds"
SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads the seeds of a prompt's samples


class Sink:
    """Receives a request's tokens, on the thread that drives the engine; subclasses make text of them."""

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a token; True to end the request here (a stop string)."""
        return False

    def on_finish(self, reason: FinishReason, error: Exception | None) -> None:
        """The request has ended; called once."""


@dataclass
class EngineStats:
    """Counters since the start.

    Attributes:
        steps: landed; scoring takes none.
        tokens: delivered.
        executor_s: spent in the executor: launching, waiting to land, scoring.
        busy_s: spent in the loop, in all; idle time between requests is not in it.
    """

    steps: int = 0
    tokens: int = 0
    executor_s: float = 0.0
    busy_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Time in the loop outside the executor: planning, taking results, making text."""
        return self.busy_s - self.executor_s

    @property
    def host_share(self) -> float:
        """``host_s`` over ``busy_s``."""
        return self.host_s / self.busy_s if self.busy_s else 0.0


class _Landed(NamedTuple):
    """A step that has landed: its result and plan, and when it was planned and landed."""

    result: StepResult
    plan: StepPlan
    planning_ns: int
    landed_ns: int


_SCHEDULE, _PREPARE = int(Account.SCHEDULE), int(Account.PREPARE)
_LAUNCH, _DETOKENIZE = int(Account.LAUNCH), int(Account.DETOKENIZE)


def _anew(kept: ExecutorError) -> ExecutorError:
    """An error of their own for whom it is raised to: one that is kept would keep the frames of all of them."""
    anew = ExecutorError(kept.problem, kept.remedy)
    anew.__cause__ = kept.__cause__
    return anew


class Engine:
    """Drives an executor with a scheduler.

    ``submit``, ``abort`` and ``call`` may be used from any thread; they take effect at the next step. ``step`` is for
    one thread at a time: hold ``driving`` around it, or leave it to an ``EngineThread``. What is accepted is answered:
    once the engine has ended, ``submit`` and ``call`` raise ExecutorError.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self._marks: list[int] = []  # what the host began to do when; the ledger's list where there is one
        self.ledger = None
        self.stats = EngineStats()
        self.driving = threading.Lock()
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._posting = threading.RLock()  # a finalizer may abort its request while this very thread submits another
        self._ended: ExecutorError | None = None
        self._in_flight: deque[tuple[StepPlan, int]] = deque()  # and when their planning began
        self._inside_ns = 0

    @property
    def ledger(self) -> Ledger | None:
        """The books, if any are kept."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        profile = self.executor.profile
        if profile is not None:
            profile.active = ledger is not None
        self._marks = [] if ledger is None else ledger.marks
        self._marks += (time.perf_counter_ns(), _SCHEDULE)

    # --- from any thread

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        sinks: Sequence[Sink],
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        read: bool = False,
    ) -> list[int]:
        """Queue a prompt, one sample for each sink; returns their request ids.

        Sample ``i`` has the seed ``seed + i * SEED_STEP`` (modulo 2^64), so the first is what ``n = 1`` gives. What is
        wrong with a request is told to its sink, by ``on_finish``.

        Args:
            read: whether a reader tells the ledger what it has taken; else what can be used counts as taken.
        """
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        tokens, leader = tuple(prompt), None
        ids: list[int] = []
        commands: list[Callable[[], None]] = []
        for index, sink in enumerate(sinks):
            own_seed = (seed + index * SEED_STEP) % (1 << 64)
            request = Request(next(self._ids), tokens, sampling, own_seed, stop_ids, priority, leader)
            leader = leader or request
            ids.append(request.request_id)
            commands.append(partial(self._add, request, sink, time.perf_counter_ns(), read))
        self._post(*commands)
        return ids

    def abort(self, request_id: int) -> None:
        """End a request. Nothing happens if it has ended."""
        with contextlib.suppress(ExecutorError):
            self._post(lambda: self._finish(request_id, "abort"))

    def call(self, use: Callable[[], T]) -> Future[T]:
        """Have the executor to oneself for a call that may use any of its pages: nothing is in flight meanwhile.

        Requests that run are computed anew afterwards; their tokens do not change.
        """
        future: Future[T] = Future()
        self._post(lambda: self._call(use, future))
        return future

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self.scheduler.has_work

    def _post(self, *commands: Callable[[], None]) -> None:
        """Have commands taken at the next step, all or none."""
        with self._posting:
            if self._ended is not None:
                raise _anew(self._ended)
            self._commands.extend(commands)

    # --- by the thread that drives

    def step(self) -> None:
        """Take commands, launch up to the executor's depth, land one step, deliver its tokens.

        An error of the executor ends the requests that ran and is told to their sinks.
        """
        started, before = time.perf_counter_ns(), self._inside_ns
        while self._commands:
            self._commands.popleft()()
        try:
            while len(self._in_flight) < self.executor.depth and self._launch():
                pass
            landed = self._land() if self._in_flight else None
        except Exception as problem:  # whatever a device may raise
            self._fail(problem)
        else:
            if landed is not None:
                self._deliver(landed)
        if self._ledger is None:
            self._marks.clear()
        elif self._ledger.due:
            self.book()
        ended = time.perf_counter_ns()
        self._marks += (ended, _SCHEDULE)  # what lies between two steps is the next one's
        self.stats.executor_s += (self._inside_ns - before) / 1e9
        self.stats.busy_s += (ended - started) / 1e9

    def end_all(self, reason: FinishReason, why: ExecutorError) -> None:
        """End the loop: every sink is told, nothing more is accepted, and nothing planned from now on."""
        with self._posting:
            self._ended = self._ended or why
        while self._commands:
            self._commands.popleft()()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            self._tell(sink, reason, _anew(why) if reason == "error" else None)

    def book(self) -> None:
        """Book what has landed: now and then by itself, and by whoever drives once there is nothing to do.

        Whatever is wrong with the books, those who wait for tokens get them: then no more are kept.
        """
        ledger = self._ledger
        if ledger is not None:
            try:
                ledger.post()
            except Exception as problem:
                ledger.problem, self.ledger = problem, None

    def _launch(self) -> bool:
        """Plan a step and launch it; False if there is none."""
        now, ledger = time.perf_counter_ns, self._ledger
        planning = now()
        if self._in_flight:
            self._marks += (planning, _SCHEDULE)
        n_preemptions = self.scheduler.n_preemptions
        plan = self.scheduler.plan()
        if ledger is not None and self.scheduler.n_preemptions != n_preemptions:
            self._note_preempted(ledger)
        if plan is None:
            return False
        launching = now()
        try:
            self.executor.launch(plan)
        finally:
            self._inside_ns += now() - launching
        self._in_flight.append((plan, planning))
        self._marks += (launching, _PREPARE)
        return True

    def _note_preempted(self, ledger: Ledger) -> None:
        for request in self.scheduler.preempted_now:
            ledger.preempted(request)

    def _land(self) -> _Landed:
        now = time.perf_counter_ns
        plan, planning = self._in_flight.popleft()
        waiting = now()
        try:
            result = self.executor.land()
        finally:
            landed = now()
            self._inside_ns += landed - waiting
        self._marks += (waiting, _LAUNCH, landed, _SCHEDULE)
        self.stats.steps += 1
        return _Landed(result, plan, planning, landed)

    def _deliver(self, landed: _Landed) -> None:
        """Commit a step's result and give its tokens to their sinks."""
        events = self.scheduler.commit(landed.result)
        now = time.perf_counter_ns
        usable: list[int] = []  # requests and times, by turns
        self._marks += (now(), _DETOKENIZE)
        for request, token, logprobs, reason in events:
            self.stats.tokens += token >= 0
            sink = self._sinks.get(request.request_id)
            if sink is None:
                continue  # a sink before it has ended them all
            if token < 0:
                problem = ModelError("no score of the next token is a finite number", DAMAGED)
                self._finish(request.request_id, "error", problem, ended=True)
                continue
            try:
                stopped = sink.on_token(token, logprobs)
            except Exception as problem:  # the sink's own: the others go on
                self._finish(request.request_id, "error", problem, ended=reason is not None)
                continue
            usable += (request.request_id, now())
            if stopped or reason is not None:
                # A stop string may complete with the very token that also ends the request.
                self._finish(request.request_id, "stop" if stopped else reason or "stop", ended=reason is not None)
        # A step that was launched before the books were opened has no stamps.
        if self._ledger is not None and landed.result.stamps is not None:
            self._ledger.landed(landed.plan, landed.planning_ns, landed.landed_ns, landed.result.stamps, usable)

    def _add(self, request: Request, sink: Sink, arrival_ns: int, read: bool) -> None:
        try:
            self.scheduler.add(request)
        except Exception as problem:
            self._tell(sink, "error", problem)
        else:
            self._sinks[request.request_id] = sink
            if self._ledger is not None:
                self._ledger.arrived(request.request_id, len(request.prompt), arrival_ns, read=read)

    def _finish(
        self, request_id: int, reason: FinishReason, error: Exception | None = None, *, ended: bool = False
    ) -> None:
        """Tell the sink of the end of a request, which the scheduler knows of already if ``ended``."""
        if ended or self.scheduler.finish(request_id, reason):
            if self._ledger is not None:
                self._ledger.ended(request_id)
            self._tell(self._sinks.pop(request_id), reason, error)

    @staticmethod
    def _tell(sink: Sink, reason: FinishReason, error: Exception | None) -> None:
        with contextlib.suppress(Exception):  # nobody is left to be told
            sink.on_finish(reason, error)

    def _call(self, use: Callable[[], T], future: Future[T]) -> None:
        if self._ended is not None:
            future.set_exception(_anew(self._ended))
            return
        try:
            while self._in_flight:
                self._deliver(self._land())
            self.scheduler.recompute()
            if self._ledger is not None:
                self._note_preempted(self._ledger)
        except Exception as problem:
            self._fail(problem)
        started = time.perf_counter_ns()
        try:
            future.set_result(use())
        except Exception as problem:
            future.set_exception(problem)
        finally:
            self._inside_ns += time.perf_counter_ns() - started

    def _fail(self, problem: Exception) -> None:
        """End what ran with the error; the loop lives on."""
        for _ in self._in_flight:
            with contextlib.suppress(Exception):
                self.executor.land()
        self._in_flight.clear()
        for request in self.scheduler.fail():
            self._finish(request.request_id, "error", problem, ended=True)


class EngineThread:
    """Drives an engine on a thread of its own, which sleeps while there is nothing to do, and closes its executor.

    So a Ctrl-C reaches whoever waits for tokens, and never a step half done. Raises ResourceError if the system
    refuses the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._work: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may put while another thread does
        self._ended: ExecutorError | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)
        start_thread(self._thread)

    @property
    def alive(self) -> bool:
        """Whether sinks may still be told something. Not so in a process forked from the one that opened the model."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Call this after ``submit``, ``abort`` or ``call``. Raises ExecutorError if the loop has ended."""
        if self._forked:
            raise ExecutorError(
                f"the model was opened by process {self._process} and its threads are not in this one, {os.getpid()}",
                "open it after the fork, or start processes by multiprocessing's spawn",
            )
        if self._ended is not None:
            raise _anew(self._ended)
        self._work.put(None)

    def end(self) -> None:
        """Have the loop end soon, and what still runs with it, as aborted. Does not wait: a finalizer may call it."""
        self._ended = self._ended or ExecutorError("the model has been closed", "open it again")
        self._work.put(None)

    def close(self) -> None:
        """``end``, and wait for it; idempotent."""
        if not self._forked:  # there, locks may be held by threads that are gone
            self.end()
            self._thread.join()

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _run(self) -> None:
        try:
            ended = self._loop()
        except Exception as problem:  # a bug: nothing that is left can be relied on
            self._ended = ExecutorError(f"the engine has failed: {problem!r}", "open the model again and report this")
            self._ended.__cause__ = problem
            self._engine.end_all("error", self._ended)
        else:
            self._engine.end_all("abort", ended)
        finally:
            self._engine.executor.close()

    def _loop(self) -> ExecutorError:
        while self._ended is None:
            self._work.get()
            while self._ended is None and self._engine.has_work:
                with self._engine.driving:
                    self._engine.step()
            with self._engine.driving:
                self._engine.book()
        return self._ended
