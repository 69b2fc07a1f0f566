"""Recorded while steps run, booked in batches behind them; what is old is kept as exact sums.

While steps run, only numbers are appended to lists. Some hundreds of steps are booked at once, in vectorised code, so
that what a step costs is measured in microseconds.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.ceilings import Ceilings
from gapless.energy import EnergyMeter
from gapless.executor.timing import DeviceTimes, StepProfile
from gapless.kernels.count import StepCounter
from gapless.ledger.accounts import N_ACCOUNTS
from gapless.ledger.attribute import SpanColumns, attribute
from gapless.ledger.books import NEVER, Books, Chunk, Intervals
from gapless.ledger.shares import N_SHARES, N_TIMES, TIMED
from gapless.step import Span, StepPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Exact = npt.NDArray[np.object_]  # of whole numbers without a limit: FLOPs leave 64 bits within hours

BATCH_STEPS = 1024  # booked at once, at most, or when they have so many spans:
BATCH_SPANS = 4096
KEPT_TOKENS = 1 << 16  # whose intervals are kept one by one
N_WORST = 10
_FIELDS = Span._fields
HELD_SPANS = 4096  # of a request whose reader does not read: beyond them its tokens count as taken


@dataclass(frozen=True)
class WorstToken:
    """A token that its reader waited long for: of those that a step gave, the one that waited longest."""

    length: int
    request: int
    token: int
    step: int
    spent: tuple[int, ...]
    beside: int  # prompt tokens of others in its steps
    n_others: int  # that the step gave too


@dataclass
class Totals:
    """Sums over all tokens since the start.

    Attributes:
        tokens: booked.
        wall_ns: of their intervals.
        spent_ns, floor_ns: by account; ``spent_ns`` adds up to ``wall_ns``.
        later_tokens: those behind the first of their request; ``later_spent_ns`` and ``later_floor_ns`` are theirs.
        hidden_ns: by account, what the host did while the device ran.
        steps: that have landed, and ``device_ns`` for which they ran.
        share: of all steps, once each: what is divided over tokens, and that of ``undelivered``: steps that gave no
            token any more.
        joules: of all steps by account; None without a meter, or once a reading has failed.
    """

    tokens: int = 0
    wall_ns: int = 0
    spent_ns: Ints = field(default_factory=lambda: np.zeros(N_ACCOUNTS, np.int64))
    floor_ns: Floats = field(default_factory=lambda: np.zeros(N_ACCOUNTS))
    later_tokens: int = 0
    later_spent_ns: Ints = field(default_factory=lambda: np.zeros(N_ACCOUNTS, np.int64))
    later_floor_ns: Floats = field(default_factory=lambda: np.zeros(N_ACCOUNTS))
    hidden_ns: Ints = field(default_factory=lambda: np.zeros(N_ACCOUNTS, np.int64))
    steps: int = 0
    device_ns: int = 0
    share: Exact = field(default_factory=lambda: np.zeros(N_SHARES, object))
    undelivered: Exact = field(default_factory=lambda: np.zeros(N_SHARES, object))
    joules: Floats | None = None


class Ledger:
    """The books of one engine.

    ``taken`` and ``left`` may be called by any thread, the rest by the one that drives the engine.

    Attributes:
        marks: times and accounts, by turns, in ascending order: what the host did from when on. Whoever drives the
            engine appends to it.
        due: whether so much has gathered that it should be booked.

    Args:
        profile: reads the stamps of steps.
        counter: counts their work, with weights and cache as they are held.
        ceilings: of the device.
        meter: of the energy that the device takes, if there is one.
    """

    def __init__(
        self, profile: StepProfile, counter: StepCounter, ceilings: Ceilings, meter: EnergyMeter | None = None
    ) -> None:
        self.totals = Totals(joules=None if meter is None else np.zeros(N_ACCOUNTS))
        self.source = profile.source
        self.ceilings = ceilings
        self.meter = meter
        self.problem: Exception | None = None  # why no more is booked
        # Is given whatever is booked: ids of steps that have landed, their times, what the host did from when on (times
        # and accounts), and the intervals that are complete.
        self.recorder: Callable[[Ints, DeviceTimes, Ints, Intervals], None] | None = None
        self._profile, self._counter = profile, counter
        self._books = Books()
        self._kept: deque[Intervals] = deque()
        self._n_kept = 0
        self._worst: list[tuple[int, int, int, WorstToken]] = []  # a heap
        self.marks: list[int] = []
        self.due = False
        assert profile.kept >= BATCH_STEPS, "stamps must last until they are booked"
        self._landed: list[tuple[int, tuple[Span, ...], int, int, Any, list[int]]] = []  # what ``landed`` is told
        self._n_spans = 0
        self._arrivals: dict[int, int] = {}
        self._preemptions: list[tuple[int, int]] = []
        self._ended: list[int] = []
        self._prompts: dict[int, int] = {}  # of open requests their tokens
        self._readers: dict[int, deque[int]] = {}  # of requests that are read as they go, when tokens were taken
        self._unread: set[int] = set()  # of them those that nobody reads any more
        self._held: _Rows | None = None
        self._read_j = None if meter is None else meter.read_j()  # when the steps began that are not booked yet

    # --- while steps run

    def arrived(self, request: int, n_prompt: int, arrival_ns: int, *, read: bool) -> None:
        """A request has come.

        Args:
            arrival_ns: when it was submitted.
            read: whether a reader tells what it has taken.
        """
        if not self._prompts and self.meter is not None:
            self._read_j = self.meter.resume_j()  # what was used while there was nothing to do is nobody's
        self._arrivals[request] = arrival_ns
        self._prompts[request] = n_prompt
        if read:
            self._readers[request] = deque()

    def landed(self, plan: StepPlan, planning_ns: int, landed_ns: int, stamps: Any, usable: list[int]) -> None:
        """A step has landed, and its tokens can be used.

        Args:
            planning_ns, landed_ns: when its planning began, and when it landed.
            stamps: that its result carries.
            usable: requests, and when their token could be used, by turns.
        """
        self._landed.append((plan.step_id, plan.spans, planning_ns, landed_ns, stamps, usable))
        self._n_spans += len(plan.spans)
        self.due = self._n_spans >= BATCH_SPANS or len(self._landed) >= BATCH_STEPS

    def preempted(self, request: int) -> None:
        self._preemptions.append((request, time.perf_counter_ns()))

    def ended(self, request: int) -> None:
        """No token of it comes any more."""
        self._ended.append(request)

    # --- by readers

    def taken(self, request: int, n_tokens: int) -> None:
        """A reader has so many more tokens."""
        reader = self._readers.get(request)
        if reader is not None:
            reader.extend([time.perf_counter_ns()] * n_tokens)

    def left(self, request: int) -> None:
        """Nobody reads it any more: what has not been taken counts as taken when it could be."""
        if request in self._readers:
            self._unread.add(request)

    # --- behind them

    def post(self) -> None:
        """Book what has landed."""
        if not self._landed and not self._ended:
            return
        steps, times, rows = self._rows()
        ready, self._held = self._ready(rows)
        marks = np.array(self.marks, np.int64).reshape(-1, 2)
        self.marks.clear()
        self.due = False
        held = set() if self._held is None else set(self._held.request.tolist())
        over, self._ended = [r for r in self._ended if r not in held], [r for r in self._ended if r in held]
        chunk = Chunk(
            begun=times.begun, ended=times.ended, times=marks[:, 0], accounts=marks[:, 1], step=ready.step,
            request=ready.request, start=ready.start, count=ready.count, planned=ready.planned,
            span_begun=ready.begun, span_ended=ready.ended, usable=ready.usable, taken=ready.taken,
            device=ready.device, floor=ready.floor, share=ready.share, beside=ready.beside, joules=ready.joules,
            arrivals=self._arrivals, preemptions=self._preemptions, ended_requests=over,
        )  # fmt: skip
        self._arrivals, self._preemptions = {}, []
        for request in over:
            self._prompts.pop(request, None)
            self._readers.pop(request, None)
            self._unread.discard(request)
        intervals = self._books.post(chunk)
        self._add(times, intervals)
        if self.recorder is not None:
            self.recorder(steps, times, marks, intervals)

    def intervals(self) -> list[Intervals]:
        """Those that are kept, in the order of booking."""
        return list(self._kept)

    def worst(self) -> list[WorstToken]:
        """The tokens behind the first of their request that were waited for longest, the worst first."""
        return [entry[-1] for entry in sorted(self._worst, reverse=True)]

    def _rows(self) -> tuple[Ints, DeviceTimes, _Rows]:
        """Ids of the steps that have landed, their times, and their spans with those that were held back."""
        landed, self._landed, self._n_spans = self._landed, [], 0
        empty = np.zeros(0, np.int64)
        if not landed:
            times = DeviceTimes(empty, empty, empty.reshape(0, 0), empty.reshape(0, 0))
            return empty, times, self._held or _Rows.empty()
        step_ids, spans_of, planning, landing, stamps, usable = zip(*landed, strict=True)
        steps, planned = np.array(step_ids, np.int64), np.array(planning, np.int64)
        times = _clipped(self._profile.times(stamps), planned, np.array(landing, np.int64))
        spans = list(chain.from_iterable(spans_of))
        index = np.repeat(np.arange(len(steps)), np.fromiter(map(len, spans_of), np.int64, len(steps)))
        step = steps[index]
        fields = list(zip(*spans, strict=True))
        request, start, count, sample = (
            np.fromiter(fields[_FIELDS.index(name)], kind, len(spans))
            for name, kind in (("request_id", np.int64), ("start", np.int64), ("count", np.int64), ("sample", bool))
        )
        n_prompt = np.fromiter(map(self._prompts.get, fields[0], repeat(-1)), np.int64, len(spans))
        columns = SpanColumns(index, start, count, sample, (start < n_prompt) | (count > 1))
        booked = attribute(self._counter, self.ceilings, times, columns)
        self.totals.share += booked.share.sum(axis=0).astype(object)
        open_yet = n_prompt >= 0  # a request may have ended with steps in flight
        self.totals.undelivered += booked.share[~open_yet].sum(axis=0).astype(object)
        rows = _Rows(
            step,
            request,
            start,
            count,
            planned[index],
            times.begun[index],
            times.ended[index],
            _usable_of(steps, usable, step, request),
            booked.device,
            booked.floor,
            booked.share,
            booked.beside,
            self._joules(times, booked.share),
        ).part(open_yet)
        return steps, times, rows if self._held is None else self._held.joined(rows)

    def _joules(self, times: DeviceTimes, share: Ints) -> Floats:
        """Of each span: what was used since the steps before, by time on the device. Not a number where unknown."""
        now = None if self.meter is None else self.meter.read_j()
        before, self._read_j = self._read_j, now
        device_ns = int((times.ended - times.begun).sum())
        if now is None or before is None or not device_ns:
            self.totals.joules = None
            return np.full(len(share), np.nan)
        of_spans: Floats = share[:, :N_TIMES] * ((now - before) / device_ns)
        if self.totals.joules is not None:
            self.totals.joules[list(TIMED)] += of_spans.sum(axis=0)
        joules: Floats = of_spans.sum(axis=1)
        return joules

    def _ready(self, rows: _Rows) -> tuple[_Rows, _Rows | None]:
        """Rows that can be booked, when their tokens were taken set; and those whose readers are behind."""
        rows.taken = rows.usable.copy()
        ready = np.ones(len(rows.request), bool)
        for request, reader in list(self._readers.items()):
            mine = np.flatnonzero(rows.request == request)
            if len(mine) > HELD_SPANS:
                continue
            for place, row in enumerate(mine.tolist()):
                if rows.usable[row] == NEVER:
                    continue
                if reader:
                    rows.taken[row] = max(reader.popleft(), int(rows.usable[row]))
                elif request not in self._unread:
                    ready[mine[place:]] = False
                    break
        return (rows, None) if ready.all() else (rows.part(ready), rows.part(~ready))

    def _add(self, times: DeviceTimes, intervals: Intervals) -> None:
        t = self.totals
        t.steps += len(times.begun)
        t.device_ns += int((times.ended - times.begun).sum())
        t.tokens += len(intervals)
        t.wall_ns += int((intervals.end - intervals.begin).sum())
        spent, floor, first = intervals.spent.sum(axis=0), intervals.floor.sum(axis=0), intervals.token == 0
        t.spent_ns += spent
        t.floor_ns += floor
        t.later_tokens += len(first) - int(first.sum())
        t.later_spent_ns += spent - intervals.spent[first].sum(axis=0)
        t.later_floor_ns += floor - intervals.floor[first].sum(axis=0)
        t.hidden_ns = self._books.hidden
        t.undelivered += self._books.undelivered.astype(object)
        self._books.undelivered = np.zeros(N_SHARES, np.int64)
        self._kept.append(intervals)
        self._n_kept += len(intervals)
        while self._n_kept > KEPT_TOKENS and len(self._kept) > 1:
            self._n_kept -= len(self._kept.popleft())
        self._note_worst(intervals)

    def _note_worst(self, intervals: Intervals) -> None:
        least = self._worst[0][0] if len(self._worst) == N_WORST else 0
        for _, token in worst_of(intervals, longer_than=least):
            entry = (token.length, -token.step, -token.request, token)
            if len(self._worst) < N_WORST:
                heapq.heappush(self._worst, entry)
            elif entry > self._worst[0]:
                heapq.heapreplace(self._worst, entry)


def worst_of(intervals: Intervals, run: Ints | None = None, longer_than: int = 0) -> list[tuple[int, WorstToken]]:
    """The tokens behind the first of their request that were waited for longest, one of each step, with their places.

    Args:
        run: of each interval, where steps of several runs are counted from the start in each.
        longer_than: nanoseconds.
    """
    i = intervals
    length = np.where(i.token > 0, i.end - i.begin, 0)
    later = np.flatnonzero(length > longer_than)
    order = later[np.lexsort((i.request[later], i.step[later], -length[later]))]
    step = i.step if run is None else i.step + (run << 40)
    found: list[tuple[int, WorstToken]] = []
    seen: set[int] = set()
    for at in order.tolist():
        if len(found) == N_WORST:
            break
        if int(step[at]) in seen:
            continue
        seen.add(int(step[at]))
        alike = int(((step == step[at]) & (length > 0)).sum()) - 1
        token = WorstToken(
            int(length[at]), int(i.request[at]), int(i.token[at]), int(i.step[at]), tuple(i.spent[at].tolist()),
            int(i.beside[at]), alike,
        )  # fmt: skip
        found.append((at, token))
    return found


@dataclass
class _Rows:
    """Spans with all that is booked of them; columns as in ``Chunk``."""

    step: Ints
    request: Ints
    start: Ints
    count: Ints
    planned: Ints
    begun: Ints
    ended: Ints
    usable: Ints
    device: Ints
    floor: Floats
    share: Ints
    beside: Ints
    joules: Floats
    taken: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def empty(cls) -> _Rows:
        none, wide, reals = np.zeros(0, np.int64), np.zeros((0, N_ACCOUNTS), np.int64), np.zeros((0, N_ACCOUNTS))
        share = np.zeros((0, N_SHARES), np.int64)
        return cls(none, none, none, none, none, none, none, none, wide, reals, share, none, reals[:, 0])

    def part(self, which: npt.NDArray[np.bool_]) -> _Rows:
        if which.all():
            return self
        return _Rows(**{name: column[which] if len(column) else column for name, column in vars(self).items()})

    def joined(self, other: _Rows) -> _Rows:
        mine, more = vars(self), vars(other)
        return _Rows(**{name: np.concatenate([mine[name], more[name]]) for name in mine if name != "taken"})


def _usable_of(steps: Ints, usable: Sequence[list[int]], step: Ints, request: Ints) -> Ints:
    """When each span's token could be used, or ``NEVER``."""
    lengths = np.fromiter(map(len, usable), np.int64, len(usable))
    flat = np.fromiter(chain.from_iterable(usable), np.int64, int(lengths.sum()))
    requests, times = flat[::2], flat[1::2]
    steps = np.repeat(steps, lengths // 2)
    keys, wanted = (steps << 32) + requests, (step << 32) + request
    if np.array_equal(keys, wanted):
        return times
    found = np.full(len(step), NEVER, np.int64)
    if len(keys):
        order = np.argsort(keys, kind="stable")
        at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        there = keys[order][at] == wanted
        found[there] = times[order][at][there]
    return found


def _clipped(times: DeviceTimes, earliest: Ints, latest: Ints) -> DeviceTimes:
    """The times within what the host knows: no step runs before it is planned, behind its landing, or beside another.

    Two clocks agree to a microsecond or so, and less well where a reading was interrupted.
    """
    ended = np.maximum.accumulate(np.minimum(times.ended, latest))
    begun = np.minimum(np.maximum(times.begun, earliest), ended)
    begun[1:] = np.maximum(begun[1:], ended[:-1])
    inside = times.by_kind.sum(axis=1) + times.sync
    part = np.minimum(1.0, (ended - begun) / np.maximum(inside, 1))
    by_kind, waited = ((each * part[:, None]).astype(np.int64) for each in (times.by_kind, times.waited))
    return DeviceTimes(begun, ended, by_kind, waited)
