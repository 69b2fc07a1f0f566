"""The books against a clerk who goes through every nanosecond."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.ledger.accounts import ACCOUNTS, N_ACCOUNTS, Account
from gapless.ledger.books import NEVER, Books, Chunk, Intervals
from gapless.ledger.shares import N_SHARES

HOST = (Account.SCHEDULE, Account.PREPARE, Account.LAUNCH, Account.DETOKENIZE)


@dataclass
class Piece:
    """A span of a request in a step."""

    step: int
    start: int
    count: int
    usable: int = NEVER
    taken: int = NEVER
    device: list[int] = field(default_factory=list)


@dataclass
class Case:
    """What happened: times of steps and of the host, and of each request its arrival, spans and preemptions."""

    planned: list[int]
    begun: list[int]
    ended: list[int]
    marks: list[tuple[int, int]]
    arrivals: list[int]
    spans: list[list[Piece]]
    preemptions: list[tuple[int, int]]


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    n_steps = rng.randint(1, 8)
    planned, begun, ended = [], [], []
    now = rng.randint(0, 20)
    for _ in range(n_steps):
        start = now + rng.choice((0, 0, rng.randint(0, 15)))
        planned.append(max(planned[-1] if planned else 0, start - rng.randint(0, 12)))
        begun.append(start)
        now = start + rng.randint(1, 30)
        ended.append(now)
    horizon = now + 40
    marks = [(t, int(rng.choice(HOST))) for t in sorted(rng.sample(range(horizon), rng.randint(1, 25)))]
    case = Case(planned, begun, ended, marks, [], [], [])
    for request in range(rng.randint(1, 4)):
        add_request(case, request, rng)
    return case


def add_request(case: Case, request: int, rng: random.Random) -> None:
    n_steps = len(case.begun)
    steps = sorted(rng.sample(range(n_steps), rng.randint(1, n_steps)))
    arrival = rng.randint(0, case.planned[steps[0]])
    position, spans = 0, list[Piece]()
    for place, step in enumerate(steps):
        if place and rng.random() < 0.2:
            low, high = case.ended[steps[place - 1]], case.planned[step]
            if low < high:
                case.preemptions.append((request, rng.randint(low, high - 1)))
                position = 0
        piece = Piece(step, position, rng.randint(1, 5))
        position += piece.count
        duration = case.ended[step] - case.begun[step]
        cuts = sorted(rng.randint(0, duration) for _ in range(3))
        parts = np.diff([0, *cuts, duration])
        piece.device = [0] * N_ACCOUNTS
        for account, part in zip((Account.WEIGHTS, Account.NEIGHBOURS, Account.KV, Account.SYNC), parts, strict=True):
            piece.device[account] = int(part)
        if rng.random() < 0.7:
            piece.usable = case.ended[step] + rng.randint(0, 10)
            piece.taken = piece.usable + rng.choice((0, 0, rng.randint(0, 40)))
        spans.append(piece)
    case.arrivals.append(arrival)
    case.spans.append(spans)


def chunks_of(case: Case, cuts: list[int]) -> list[Chunk]:
    """The case as chunks that end behind the steps in ``cuts``."""
    bounds = [0, *cuts, len(case.begun)]
    marks, waiting = list(case.marks), dict(enumerate(case.arrivals))
    chunks = []
    for low, high in itertools.pairwise(bounds):
        last = high == len(case.begun)
        horizon = max([case.ended[high - 1], *(p.taken for r in case.spans for p in r if p.step < high)])
        taken = [m for m in marks if last or m[0] <= horizon]
        marks = marks[len(taken) :]
        rows = sorted(
            (
                p.step,
                r,
                p.start,
                p.count,
                case.planned[p.step],
                case.begun[p.step],
                case.ended[p.step],
                p.usable,
                p.taken,
                p.device,
            )
            for r, pieces in enumerate(case.spans)
            for p in pieces
            if low <= p.step < high
        )
        columns = [np.array([row[i] for row in rows], np.int64) for i in range(9)]
        device = np.array([row[9] for row in rows], np.int64).reshape(-1, N_ACCOUNTS)
        times, accounts = (np.array([m[i] for m in taken], np.int64) for i in range(2))
        steps = (np.array(c[low:high], np.int64) for c in (case.begun, case.ended))
        arrivals = {r: a for r, a in waiting.items() if a <= horizon}
        waiting = {r: a for r, a in waiting.items() if a > horizon}
        thrown = [(r, t) for r, t in case.preemptions if low <= next_step(case, r, t) < high]
        share = device.sum(axis=1, keepdims=True) * np.arange(1, N_SHARES + 1)
        ended = list(range(len(case.spans))) if last else []
        chunks.append(
            Chunk(
                *steps, times, accounts, *columns, device, device * 0.5, share, columns[2] % 7, columns[1] * 0.25,
                arrivals, thrown, ended,
            )
        )  # fmt: skip
    return chunks


def next_step(case: Case, request: int, time: int) -> int:
    return next(p.step for p in case.spans[request] if case.planned[p.step] > time)


def clerk(case: Case, request: int) -> list[tuple[int, int, list[int]]]:
    """The intervals of a request, (begin, end, accounts), by the rules as they are written, a nanosecond at a time."""
    found = []
    at = begin = case.arrivals[request]
    booked = [0] * N_ACCOUNTS
    high = 0
    for place, piece in enumerate(case.spans[request]):
        start, end = case.begun[piece.step], case.ended[piece.step]
        earlier = case.planned[case.spans[request][place - 1].step] if place else NEVER
        thrown = [t for r, t in case.preemptions if r == request and earlier <= t < case.planned[piece.step]]
        while at < start:
            if place == 0 and at < case.planned[piece.step]:
                account = Account.QUEUE
            elif thrown and thrown[-1] <= at < case.planned[piece.step]:
                account = Account.PREEMPTED
            elif device_runs(case, at):
                account = Account.QUEUE if place == 0 else Account.NEIGHBOURS
            else:
                account = host_at(case, at)
            booked[account] += 1
            at += 1
        length = max(end - at, 0)
        for account, spent in enumerate(piece.device):
            part = spent * length // (end - start)
            again = piece.start < high and account != Account.NEIGHBOURS
            booked[Account.PREEMPTED if again else account] += part
        at = max(at, end)
        if piece.taken != NEVER:
            while at < piece.taken:
                booked[host_at(case, at) if at < piece.usable else Account.DELIVER] += 1
                at += 1
            booked[Account.UNACCOUNTED] += at - begin - sum(booked)
            found.append((begin, at, booked))
            begin, booked = at, [0] * N_ACCOUNTS
        high = max(high, piece.start + piece.count)
    return found


def device_runs(case: Case, at: int) -> bool:
    return any(b <= at < e for b, e in zip(case.begun, case.ended, strict=True))


def host_at(case: Case, at: int) -> int:
    return next((a for t, a in reversed(case.marks) if t <= at), Account.UNACCOUNTED)


def by_request(parts: list[Intervals]) -> dict[int, list[tuple[int, int, list[int]]]]:
    found: dict[int, list[tuple[int, int, list[int]]]] = {}
    for part in parts:
        for i in range(len(part)):
            rows = found.setdefault(int(part.request[i]), [])
            assert part.token[i] == len(rows)
            rows.append((int(part.begin[i]), int(part.end[i]), part.spent[i].tolist()))
    return found


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 255))
def test_every_interval_is_booked_as_the_clerk_does(seed: int, cut: int) -> None:
    """Wholly, to the nanosecond, in one chunk or in several."""
    case = make_case(seed)
    cuts = [i for i in range(1, len(case.begun)) if cut >> i & 1]
    for bounds in ([], cuts):
        books = Books()
        found = by_request([books.post(chunk) for chunk in chunks_of(case, bounds)])
        for request in range(len(case.spans)):
            expected = clerk(case, request)
            assert found.get(request, []) == expected
            for begin, end, accounts in expected:
                assert sum(accounts) == end - begin
                assert min(accounts) >= 0


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 12))
def test_shares_go_to_tokens_or_are_told_to_be_nobodys(seed: int, cut: int) -> None:
    """What a request has of steps is its tokens'; what comes behind its last one is not lost."""
    case = make_case(seed)
    books, chunks = Books(), chunks_of(case, [cut] if 0 < cut < len(case.begun) else [])
    parts = [books.post(chunk) for chunk in chunks]
    given = sum((chunk.share.sum(axis=0) for chunk in chunks), np.zeros(N_SHARES, np.int64))
    booked = sum((part.share.sum(axis=0) for part in parts), np.zeros(N_SHARES, np.int64))
    assert books.n_open == 0
    assert (booked + books.undelivered == given).all()
    for request, pieces in enumerate(case.spans):
        got = [int(p.beside[i]) for p in parts for i in np.flatnonzero(p.request == request)]
        beside, expected = 0, []
        for piece in sorted(pieces, key=lambda piece: piece.step):
            beside += piece.start % 7
            if piece.taken != NEVER:
                expected.append(beside)
                beside = 0
        assert got == expected


def test_floors_are_summed_like_time() -> None:
    case = make_case(7)
    (chunk,) = chunks_of(case, [])
    intervals = Books().post(chunk)
    total = sum(chunk.floor[np.flatnonzero(chunk.request == r)].sum() for r in set(intervals.request.tolist()))
    assert 0 < intervals.floor.sum() <= total


def test_what_no_open_request_needs_is_forgotten() -> None:
    case = make_case(11)
    (chunk,) = chunks_of(case, [])
    books = Books()
    books.post(Chunk(**{**vars(chunk), "ended_requests": list(chunk.arrivals)}))
    assert books.n_open == 0
    assert len(books._times) <= 1
    assert len(books._begun) <= 1


@pytest.mark.parametrize("account", Account)
def test_every_account_is_explained(account: Account) -> None:
    assert all(ACCOUNTS[account][:3])
    assert account.label == account.name.lower()
