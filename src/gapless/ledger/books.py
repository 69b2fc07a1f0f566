"""From what was recorded to what is booked: every interval between two tokens of a request, wholly.

The books follow the critical path. A token's interval begins when its reader had the token before it (or when the
request arrived) and ends when its reader has it. In it lie the steps that computed for the request, in order:

- while one of them runs on the device, the step's own accounts are booked, and to ``neighbours`` what other requests'
  prompts added to it;
- before it, while the device does not run, what the host did then; while it runs a step of others, ``neighbours``;
- behind the last one, until the token could be used, what the host did, whatever the device does by then;
- then, until the reader has taken it, ``deliver``.

What the host does while the device runs is on nobody's path. A request that has not yet been planned is in the
``queue``; one that was thrown out of the cache is ``preempted`` until it has been computed as far as it was.

All times are integers of nanoseconds, so books balance exactly: what is left of an interval is ``unaccounted``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.shares import N_SHARES
from gapless.ledger.timeline import Timeline

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Chunk:
    """What was recorded since the chunk before; columns of nanoseconds, indices and counts.

    A span may come later than its step, but those of a request come in order.

    Attributes:
        begun, ended: when each step that has landed ran on the device.
        times, accounts: of the host, as ``Timeline`` takes them.
        step, request, start, count: of each span.
        planned, span_begun, span_ended: of its step, when its planning began and when it ran on the device.
        usable: when the span's token could be used, or ``NEVER`` where it gave none that was delivered.
        taken: when its reader had it, or ``NEVER``.
        device: (spans, accounts), what the step's time on the device is booked to for this request.
        floor: (spans, accounts), the floor of that in nanoseconds.
        share: (spans, N_SHARES), what of the step is this request's when it is divided.
        beside: (spans,), prompt tokens of others in the step.
        joules: (spans,), the request's; not a number where it is unknown.
        arrivals: of requests that have come, their time.
        preemptions: of requests that were thrown out, when.
        ended_requests: of which no more is to come.
    """

    begun: Ints
    ended: Ints
    times: Ints
    accounts: Ints
    step: Ints
    request: Ints
    start: Ints
    count: Ints
    planned: Ints
    span_begun: Ints
    span_ended: Ints
    usable: Ints
    taken: Ints
    device: Ints
    floor: Floats
    share: Ints
    beside: Ints
    joules: Floats
    arrivals: dict[int, int]
    preemptions: list[tuple[int, int]]
    ended_requests: list[int]


@dataclass(frozen=True)
class Intervals:
    """Booked intervals, one for each token that was delivered."""

    request: Ints
    token: Ints  # counted in its request from 0
    step: Ints  # that gave the token
    begin: Ints
    end: Ints
    spent: Ints  # (intervals, accounts)
    floor: Floats  # (intervals, accounts)
    share: Ints  # (intervals, N_SHARES)
    beside: Ints  # prompt tokens of others in its steps
    joules: Floats  # not a number where they are unknown

    def __len__(self) -> int:
        return len(self.request)


# Columns that are summed over the spans of an interval.
_SPENT, _SHARE = slice(0, N_ACCOUNTS), slice(N_ACCOUNTS, N_ACCOUNTS + N_SHARES)
_BESIDE = N_ACCOUNTS + N_SHARES
_N_COUNTS = _BESIDE + 1
_FLOOR, _JOULES = slice(0, N_ACCOUNTS), N_ACCOUNTS
_N_REALS = _JOULES + 1


@dataclass
class _Open:
    """A request of which more may come."""

    since: int  # up to where it is booked
    begin: int  # of the interval that is open
    n_tokens: int = 0
    started: bool = False
    computed: int = 0  # positions, at most, that a step of its has ended at
    preempted: int = NEVER  # when it was thrown out, if it has not been planned since
    counts: Ints = field(default_factory=lambda: np.zeros(_N_COUNTS, np.int64))  # of the interval that is open
    reals: Floats = field(default_factory=lambda: np.zeros(_N_REALS))


class Books:
    """Takes chunks in order and gives the intervals that they complete."""

    def __init__(self) -> None:
        self.hidden = np.zeros(N_ACCOUNTS, np.int64)  # what the host did while the device ran
        self.undelivered = np.zeros(N_SHARES, np.int64)  # shares of steps behind the last token of a request
        self._seen = NEVER  # the end of the last step
        self._open: dict[int, _Open] = {}
        self._times = self._accounts = self._begun = self._ended = np.zeros(0, np.int64)

    @property
    def n_open(self) -> int:
        return len(self._open)

    def post(self, chunk: Chunk) -> Intervals:
        """Book a chunk."""
        for request, arrival in chunk.arrivals.items():
            self._open[request] = _Open(arrival, arrival)
        self._times, self._accounts = _joined(self._times, chunk.times), _joined(self._accounts, chunk.accounts)
        self._begun, self._ended = _joined(self._begun, chunk.begun), _joined(self._ended, chunk.ended)
        timeline = Timeline(self._times, self._accounts, self._begun, self._ended)
        intervals = self._intervals(chunk, timeline)
        self._add_hidden(chunk, timeline)
        for request in chunk.ended_requests:
            ended = self._open.pop(request, None)
            if ended is not None:
                self.undelivered = self.undelivered + ended.counts[_SHARE]
        self._forget()
        return intervals

    def _add_hidden(self, chunk: Chunk, timeline: Timeline) -> None:
        if len(chunk.ended):
            since, until = (np.array([t]) for t in (max(self._seen, int(chunk.begun[0])), int(chunk.ended[-1])))
            self.hidden = self.hidden + (timeline.host(since, until) - timeline.idle_host(since, until))[0]
            self.hidden[Account.LAUNCH] = 0  # then it waits for the device
            self._seen = int(chunk.ended[-1])

    def _forget(self) -> None:
        """Keep of the past what an open request still needs."""
        since = min((request.since for request in self._open.values()), default=NEVER)
        if since == NEVER:
            since = int(self._times[-1]) if len(self._times) else 0
        first = max(int(np.searchsorted(self._times, since, side="right")) - 1, 0)
        self._times, self._accounts = self._times[first:], self._accounts[first:]
        running = self._ended > since
        self._begun, self._ended = self._begun[running], self._ended[running]

    def _intervals(self, chunk: Chunk, timeline: Timeline) -> Intervals:
        order = np.lexsort((chunk.step, chunk.request))
        spans = _Spans(chunk, order, self._open)
        spans.preempted = self._preemptions(chunk, spans)
        counts = np.empty((len(order), _N_COUNTS), np.int64)
        counts[:, _SHARE], counts[:, _BESIDE] = chunk.share[order], chunk.beside[order]
        spent = counts[:, _SPENT]
        spans.put_device(spent)
        spans.add_before(spent, timeline)
        spans.add_behind(spent, timeline)
        reals = np.empty((len(order), _N_REALS))
        reals[:, _FLOOR], reals[:, _JOULES] = chunk.floor[order], chunk.joules[order]
        return self._complete(spans, counts, reals)

    def _preemptions(self, chunk: Chunk, spans: _Spans) -> Ints:
        """For each span when its request was last thrown out since the span before, or ``NEVER``."""
        found = np.full(len(spans.request), NEVER, np.int64)
        for request, first in spans.firsts():
            found[first] = self._open[request].preempted
            self._open[request].preempted = NEVER
        for request, time in chunk.preemptions:
            if request not in self._open:
                continue
            low, high = np.searchsorted(spans.request, [request, request + 1])
            at = low + int(np.searchsorted(spans.planned[low:high], time, side="right"))
            if at < high:
                found[at] = time
            else:
                self._open[request].preempted = time
        return found

    def _complete(self, spans: _Spans, counts: Ints, reals: Floats) -> Intervals:
        """Sum spans up to intervals; what is not complete is kept with its request."""
        ends = spans.taken != NEVER
        which = np.cumsum(ends) - ends  # spans of a request before its next token belong to that token's interval
        n = int(ends.sum())
        begin = np.full(n, NEVER, np.int64)
        complete = spans.completes()
        if complete.all():
            sums, real_sums = _summed(counts, which, n), _summed(reals, which, n)
        else:
            sums, real_sums = (_summed(rows[complete], which[complete], n) for rows in (counts, reals))
        request, end = spans.request[ends], spans.reached[ends]
        token = np.zeros(n, np.int64)
        # Requests one by one: of each the interval that was open, and the one that stays so.
        last_of = dict(spans.lasts())
        for request_id, first in spans.firsts():
            known, last = self._open[request_id], last_of[request_id]
            mine = slice(int(which[first]), int(which[last] + ends[last]))
            count = mine.stop - mine.start
            if count:
                sums[mine.start] += known.counts
                real_sums[mine.start] += known.reals
                begin[mine.start] = known.begin
                begin[mine.start + 1 : mine.stop] = end[mine.start : mine.stop - 1]
                token[mine] = known.n_tokens + np.arange(count)
                known.n_tokens += count
                known.begin = int(end[mine.stop - 1])
                known.counts, known.reals = np.zeros(_N_COUNTS, np.int64), np.zeros(_N_REALS)
            rest = slice(last + 1 - int((~complete[first : last + 1]).sum()), last + 1)
            if rest.start < rest.stop:
                known.counts = known.counts + counts[rest].sum(axis=0)
                known.reals = known.reals + reals[rest].sum(axis=0)
            known.since = max(int(spans.reached[last]), known.since)
            known.started = True
            known.computed = max(known.computed, int((spans.start + spans.count)[first : last + 1].max()))
        spent = sums[:, _SPENT]
        spent[:, Account.UNACCOUNTED] += end - begin - spent.sum(axis=1)
        floor, joules = real_sums[:, _FLOOR], real_sums[:, _JOULES]
        return Intervals(
            request, token, spans.step[ends], begin, end, spent, floor, sums[:, _SHARE], sums[:, _BESIDE], joules
        )


class _Spans:
    """Spans by request, then step, with the times between which each is booked."""

    def __init__(self, chunk: Chunk, order: Ints, known: dict[int, _Open]) -> None:
        self._device = chunk.device[order]
        self.step, self.request = chunk.step[order], chunk.request[order]
        self.start, self.count = chunk.start[order], chunk.count[order]
        self.planned, self.begun, self.ended = (
            column[order] for column in (chunk.planned, chunk.span_begun, chunk.span_ended)
        )
        self.usable, self.taken = chunk.usable[order], chunk.taken[order]
        self.preempted = np.full(len(order), NEVER, np.int64)
        n = len(order)
        self._first = np.ones(n, bool)
        self._first[1:] = self.request[1:] != self.request[:-1]
        rank = np.cumsum(self._first) - 1
        opened = [known[int(request)] for request in self.request[self._first]]
        self._unstarted = self._first & np.array([not o.started for o in opened], bool)[rank]
        computed = np.array([o.computed for o in opened], np.int64)[rank]
        since = np.array([o.since for o in opened], np.int64)[rank]
        own_end = np.where(self.taken != NEVER, np.maximum(self.taken, self.ended), self.ended)
        # Up to where each span is booked: never back from where the spans before it are. By request, so that none
        # reaches into the next one's: each lies above the one before by more than all times together.
        base = int(min(since.min(), self.begun.min())) if n else 0
        apart = int(max(own_end.max(), since.max()) - base + 1) if n else 1
        reached = np.maximum.accumulate(np.maximum(own_end, since) - base + rank * apart) - rank * apart + base
        self.reached: Ints = reached
        self._from: Ints = np.where(self._first, since, np.append(0, reached[:-1]))
        ends = np.where(self._first, computed, np.append(0, (self.start + self.count)[:-1]))
        high = np.maximum.accumulate(ends + rank * (1 << 40)) - rank * (1 << 40)
        self._recomputes: npt.NDArray[np.bool_] = self.start < high

    def firsts(self) -> Iterator[tuple[int, int]]:
        """Each request and its first span's index."""
        at = np.flatnonzero(self._first)
        return zip(self.request[at].tolist(), at.tolist(), strict=True)

    def lasts(self) -> Iterator[tuple[int, int]]:
        at = np.append(np.flatnonzero(self._first)[1:], len(self.request)) - 1
        return zip(self.request[at].tolist(), at.tolist(), strict=True) if len(self.request) else iter(())

    def completes(self) -> npt.NDArray[np.bool_]:
        """Whether a span belongs to an interval that ends in this chunk."""
        ends = self.taken != NEVER
        until = np.cumsum(ends)
        last = np.append(np.flatnonzero(self._first)[1:], len(ends)) - 1
        rank = np.cumsum(self._first) - 1
        complete: npt.NDArray[np.bool_] = until - ends < until[last[: rank[-1] + 1]][rank] if len(ends) else ends
        return complete

    def put_device(self, spent: Ints) -> None:
        """While the step ran: its accounts, of the part that lies behind what is booked already."""
        begin, end = np.maximum(self.begun, self._from), np.maximum(self.ended, self._from)
        whole, left = self.ended - self.begun, end - begin
        spent[:] = self._device
        cut = np.flatnonzero(left < whole)
        if len(cut):
            spent[cut] = _scaled(spent[cut], left[cut], whole[cut])
        again = np.flatnonzero(self._recomputes)
        if len(again):
            neighbours, total = spent[again, Account.NEIGHBOURS], spent[again].sum(axis=1)
            spent[again] = 0
            spent[again, Account.NEIGHBOURS], spent[again, Account.PREEMPTED] = neighbours, total - neighbours

    def add_before(self, spent: Ints, timeline: Timeline) -> None:
        """From what is booked already to the step's begin."""
        begin, end = self._from, np.maximum(self.begun, self._from)
        thrown = self.preempted != NEVER
        waits = np.flatnonzero(thrown | self._unstarted)  # to be planned
        planned = begin
        if len(waits):
            out = np.where(thrown, np.clip(self.preempted, begin, end), begin)  # from here on it waits
            planned = np.where(thrown | self._unstarted, np.clip(self.planned, out, end), out)
            account = np.where(self._unstarted, Account.QUEUE, Account.PREEMPTED)[waits]
            spent[waits, account] += (planned - out)[waits]
            self._add_idle(spent, timeline, begin, out)
        self._add_idle(spent, timeline, planned, end)

    def _add_idle(self, spent: Ints, timeline: Timeline, begin: Ints, end: Ints) -> None:
        """What the host did while the device did not run; while it did, others were served."""
        busy = end - begin - timeline.add_idle_host(spent, begin, end)
        rows = np.flatnonzero(busy)
        spent[rows, np.where(self._unstarted[rows], Account.QUEUE, Account.NEIGHBOURS)] += busy[rows]

    def add_behind(self, spent: Ints, timeline: Timeline) -> None:
        """From the step's end until the token could be used, and until it was taken; nothing for spans without."""
        begin = np.maximum(self.ended, self._from)
        usable = np.where(self.taken == NEVER, begin, np.maximum(self.usable, begin))
        taken = np.where(self.taken == NEVER, begin, np.maximum(self.taken, usable))
        timeline.add_host(spent, begin, usable)
        spent[:, Account.DELIVER] += taken - usable


def _summed(rows: Any, which: Ints, n: int) -> Any:
    """Rows added up by interval; those of one stand together, and each has one at least."""
    if not n:
        return rows[:0]
    first = np.flatnonzero(np.append(True, which[1:] != which[:-1]))
    return rows if len(first) == len(rows) else np.add.reduceat(rows, first, axis=0)


def _scaled(rows: Ints, left: Ints, whole: Ints) -> Ints:
    """``rows * left / whole``, rounded down, for steps of any length."""
    if rows.max(initial=0) < 1 << 31 and left.max() < 1 << 31:
        scaled: Ints = rows * left[:, None] // whole[:, None]
        return scaled
    exact = [[x * int(part) // int(of) for x in row] for row, part, of in zip(rows.tolist(), left, whole, strict=True)]
    return np.array(exact, np.int64)


def _joined(before: Any, after: Any) -> Any:
    return np.concatenate([before, after])
