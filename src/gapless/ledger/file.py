"""A recorded run as one file: JSON lines, whose last one tells that nothing is missing.

The first line is an object: the format and its version, facts of the run, and the names of the columns of the rows.
Rows are lists: ``["token", ...]`` for each interval that was booked, ``["step", ...]`` for each step, ``["host", ...]``
for what the host began to do. The last line is an object again, with the number of rows and the totals. A name that
ends in .gz makes it gzip.
"""

from __future__ import annotations

import gzip
import json
import math
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from gapless.ceilings import Ceilings
from gapless.errors import LedgerFileError
from gapless.executor.timing import DeviceTimes, Source
from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.books import Intervals
from gapless.ledger.ledger import Ledger, Totals
from gapless.ledger.shares import N_SHARES, Share
from gapless.ledger.whole import writing

Ints = npt.NDArray[np.int64]

FORMAT, VERSION = "gapless-ledger", 2
TOKEN_COLUMNS = (
    "run", "request", "token", "step", "begin_ns", "end_ns", "beside_tokens", "spent_ns", "floor_ns", "share", "joules",
)  # fmt: skip
STEP_COLUMNS = ("run", "step", "begun_ns", "ended_ns", "waited_ns")
HOST_COLUMNS = ("run", "begin_ns", "account")
_COLUMNS = {"token": TOKEN_COLUMNS, "step": STEP_COLUMNS, "host": HOST_COLUMNS}
MOST = 1 << 53  # of whole numbers: what every reader of JSON has exactly
MOST_REAL = 1e18
MAX_LINE_BYTES = 1 << 20
_LABELS = {account.label: int(account) for account in Account}
_SHARES = {share.label: int(share) for share in Share}
_COUNTS = ("wall_ns", "device_ns")
_BY_ACCOUNT = ("spent_ns", "floor_ns", "hidden_ns")


@dataclass(frozen=True)
class Facts:
    """What was run, and on what.

    Attributes:
        ceilings: that the floors were taken from.
        source: of the times.
        meters: what measured joules, if anything did.
        started_unix_ns: the time at which the times in the file begin.
        settings: of the engine, by name.
    """

    model: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    runs: int
    threads: int
    isa: str | None
    ceilings: Ceilings
    gapless: str
    source: Source
    meters: tuple[str, ...] = ()
    started_unix_ns: int = 0
    settings: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedSteps:
    """When each step ran on the device, in nanoseconds, and for how long each thread waited: (steps, threads)."""

    run: Ints
    step: Ints
    begun: Ints
    ended: Ints
    waited: Ints


@dataclass(frozen=True)
class RecordedHost:
    """What the host did from when on, in nanoseconds."""

    run: Ints
    begin: Ints
    account: Ints


@dataclass(frozen=True)
class Recorded:
    """
    Attributes:
        run: of each interval, counted from 0.
        intervals, steps: in the order of booking; times begin at the first of all.
        totals: over all of them.
    """

    facts: Facts
    run: Ints
    intervals: Intervals
    steps: RecordedSteps
    host: RecordedHost
    totals: Totals


_Part = tuple[int, Ints, DeviceTimes, Ints, Intervals]


class Recorder:
    """Takes what a ledger books from now on, run by run."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._run = 0
        self._parts: list[_Part] = []
        self._unix_ns = time.time_ns() - time.perf_counter_ns()
        ledger.recorder = self._take

    def _take(self, steps: Ints, times: DeviceTimes, marks: Ints, intervals: Intervals) -> None:
        self._parts.append((self._run, steps, times, marks, intervals))

    def end_run(self) -> None:
        """All that is booked from now on is of the next run."""
        self._run += 1

    def recorded(self, facts: Facts) -> Recorded:
        """All of it; at least one step has been booked."""
        columns = {f.name: np.concatenate([getattr(p[-1], f.name) for p in self._parts]) for f in fields(Intervals)}
        runs = [np.full(len(intervals), run, np.int64) for run, *_, intervals in self._parts]
        steps = RecordedSteps(
            np.concatenate([np.full(len(steps), run, np.int64) for run, steps, *_ in self._parts]),
            np.concatenate([np.array(steps, np.int64) for _, steps, *_ in self._parts]),
            np.concatenate([times.begun for _, _, times, *_ in self._parts]),
            np.concatenate([times.ended for _, _, times, *_ in self._parts]),
            np.concatenate([times.waited for _, _, times, *_ in self._parts if len(times.begun)]),
        )
        host = RecordedHost(
            np.concatenate([np.full(len(marks), run, np.int64) for run, _, _, marks, _ in self._parts]),
            *np.concatenate([marks for _, _, _, marks, _ in self._parts]).T,
        )
        first = min((int(column.min()) for column in (columns["begin"], steps.begun) if len(column)), default=0)
        for column in (columns["begin"], columns["end"], steps.begun, steps.ended):
            column -= first
        host = RecordedHost(host.run, np.maximum(host.begin - first, 0), host.account)
        facts = replace(facts, started_unix_ns=self._unix_ns + first)
        return Recorded(facts, np.concatenate(runs), Intervals(**columns), steps, host, self.ledger.totals)


# --- writing


def write(path: Path, recorded: Recorded, field: str = "ledger-file") -> None:
    """Raises LedgerFileError naming ``field``."""
    with writing(path, field) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:  # the same bytes for the same books
                _write_lines(packed, recorded)
        else:
            _write_lines(file, recorded)


def _write_lines(file: BinaryIO | gzip.GzipFile, recorded: Recorded) -> None:
    for value in _values(recorded):
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")


def _values(recorded: Recorded) -> Iterator[Any]:
    yield {"format": FORMAT, "version": VERSION, **asdict(recorded.facts), "accounts": list(_LABELS), **_COLUMNS}
    i, s, h, t = recorded.intervals, recorded.steps, recorded.host, recorded.totals
    numbers = np.stack([recorded.run, i.request, i.token, i.step, i.begin, i.end, i.beside], axis=1)
    for row, spent, floor, share, joules in zip(numbers, i.spent, i.floor, i.share, i.joules.tolist(), strict=True):
        by_account = by_label(spent), by_label(floor)
        yield ["token", *row.tolist(), *by_account, share_by_label(share), None if math.isnan(joules) else joules]
    for row, waited in zip(np.stack([s.run, s.step, s.begun, s.ended], axis=1), s.waited, strict=True):
        yield ["step", *row.tolist(), waited.tolist()]
    for run, begin, account in zip(h.run.tolist(), h.begin.tolist(), h.account.tolist(), strict=True):
        yield ["host", run, begin, Account(account).label]
    yield {
        "tokens": t.tokens,
        "steps": t.steps,
        **{name: int(getattr(t, name)) for name in _COUNTS},
        **{name: by_label(getattr(t, name)) for name in _BY_ACCOUNT},
        "share": share_by_label(t.share),
        "undelivered": share_by_label(t.undelivered),
        "joules": None if t.joules is None else dict(zip(_LABELS, t.joules.tolist(), strict=True)),
    }


def by_label(values: npt.NDArray[Any]) -> dict[str, Any]:
    """What is not zero, by the name of its account; floors to a thousandth."""
    return {name: round(value, 3) for name, value in zip(_LABELS, values.tolist(), strict=True) if value}


def share_by_label(values: npt.NDArray[Any]) -> dict[str, int]:
    """What is not zero of a share, by the name of its column."""
    return {name: value for name, value in zip(_SHARES, values.tolist(), strict=True) if value}


# --- reading


def read(path: Path) -> Recorded:
    """Raises LedgerFileError: there is no such file, or it is not a recorded ledger, or not all of it, or damaged."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            _fail(path, "is a folder", _REMEDY)
        if not stat.S_ISREG(mode):
            _fail(path, "is no regular file", _REMEDY)
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            return _Reader(path, gzip.GzipFile(fileobj=file) if packed else file).recorded()
    except EOFError:
        _fail(path, "is truncated: its compressed data end too early", _AGAIN)
    except (gzip.BadGzipFile, zlib.error) as problem:
        _fail(path, f"is damaged: its compressed data are wrong ({problem})", _AGAIN)
    except FileNotFoundError:
        _fail(path, "does not exist", _REMEDY)
    except OSError as problem:
        _fail(path, f"cannot be read: {problem.strerror or problem}", "check the path and its rights")


_REMEDY = "give a file that 'gapless bench --ledger-file' has written"
_AGAIN = "copy or record it again"


def _fail(path: Path, problem: str, remedy: str) -> NoReturn:
    raise LedgerFileError(f"ledger {str(path)!r} {problem}", remedy)


class _Wrong(Exception):
    """What is wrong with a line."""


@dataclass
class _Rows:
    """Columns as they are read."""

    tokens: list[list[int]] = field(default_factory=list)
    spent: list[Ints] = field(default_factory=list)
    floor: list[npt.NDArray[np.float64]] = field(default_factory=list)
    share: list[Ints] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    waited: list[list[int]] = field(default_factory=list)
    host: list[list[int]] = field(default_factory=list)


class _Reader:
    """One pass over the lines of a file."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self._line = 0
        self._rows = _Rows()

    def recorded(self) -> Recorded:
        facts = self._facts()
        while True:
            value = self._next()
            try:
                if isinstance(value, dict):
                    totals = self._totals(value)
                    break
                self._row(value, facts)
            except _Wrong as problem:
                _fail(self._path, f"is damaged: line {self._line}: {problem}", _AGAIN)
        if self._file.read(1):
            _fail(self._path, f"is damaged: it goes on behind its end in line {self._line}", _AGAIN)
        rows = self._rows
        run, request, token, step, begin, end, beside = np.array(rows.tokens, np.int64).reshape(-1, 7).T
        spent, share = _table(rows.spent, N_ACCOUNTS), _table(rows.share, N_SHARES)
        floor = np.array(rows.floor, np.float64).reshape(-1, N_ACCOUNTS)
        intervals = Intervals(
            request, token, step, begin, end, spent, floor, share, beside, np.array(rows.joules, np.float64)
        )
        of_run, number, begun, ended = _table(rows.steps, 4).T
        steps = RecordedSteps(of_run, number, begun, ended, _table(rows.waited, facts.threads))
        return Recorded(facts, run, intervals, steps, RecordedHost(*_table(rows.host, 3).T), totals)

    def _facts(self) -> Facts:
        try:
            header = self._parsed(self._read_line())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise _Wrong
        except _Wrong:
            _fail(self._path, "is not a recorded ledger", _REMEDY)
        version = header.get("version")
        if type(version) is int and version > VERSION:
            _fail(self._path, f"was written by a newer gapless: its version is {version}", "update gapless to read it")
        if type(version) is int and 0 < version < VERSION:
            _fail(self._path, f"was written by an older gapless: its version is {version}", "record it again")
        try:
            if type(version) is not int or version != VERSION:
                raise _Wrong(f"version = {_shown(version)} is unknown")
            return _facts_of(header)
        except _Wrong as problem:
            _fail(self._path, f"is damaged: line 1: {problem}", _AGAIN)

    def _next(self) -> Any:
        line = self._read_line()
        if not line:
            _fail(self._path, f"is truncated: it ends behind line {self._line - 1}, without its totals", _AGAIN)
        try:
            return self._parsed(line)
        except _Wrong as problem:
            if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                _fail(self._path, f"is truncated: it ends within line {self._line}", _AGAIN)
            _fail(self._path, f"is damaged: line {self._line} {problem}", _AGAIN)

    def _read_line(self) -> bytes:
        self._line += 1
        line: bytes = self._file.readline(MAX_LINE_BYTES + 1)
        return line

    @staticmethod
    def _parsed(line: bytes) -> Any:
        if len(line) > MAX_LINE_BYTES:
            raise _Wrong("is too long")
        try:
            return json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise _Wrong("is not UTF-8 text") from None
        except (ValueError, RecursionError):  # ValueError also for numbers of thousands of digits
            raise _Wrong("is not JSON") from None

    def _row(self, row: Any, facts: Facts) -> None:
        kind = row[0] if isinstance(row, list) and row else None
        columns = _COLUMNS.get(kind if isinstance(kind, str) else "")
        if columns is None:
            raise _Wrong("a row begins with neither 'token' nor 'step' nor 'host'")
        if len(row) != len(columns) + 1:
            raise _Wrong(f"a row of a {kind} has {len(columns)} columns")
        values = dict(zip(columns, row[1:], strict=True))
        run = _whole(values["run"], "run")
        if run >= facts.runs:
            raise _Wrong(f"run = {run} is beyond the {facts.runs} runs")
        {"token": self._token, "step": self._step, "host": self._host}[str(kind)](values, facts)

    def _token(self, row: dict[str, Any], facts: Facts) -> None:
        numbers = [_whole(row[name], name) for name in TOKEN_COLUMNS[:7]]
        spent = _accounts(row["spent_ns"], "spent_ns", np.zeros(N_ACCOUNTS, np.int64))
        if sum(row["spent_ns"].values()) != numbers[5] - numbers[4]:
            raise _Wrong("the accounts do not add up to the interval")
        self._rows.tokens.append(numbers)
        self._rows.spent.append(spent)
        self._rows.floor.append(_accounts(row["floor_ns"], "floor_ns", np.zeros(N_ACCOUNTS)))
        self._rows.share.append(_accounts(row["share"], "share", np.zeros(N_SHARES, np.int64), _SHARES, 1 << 63))
        self._rows.joules.append(math.nan if row["joules"] is None else _real(row["joules"], "joules"))

    def _step(self, row: dict[str, Any], facts: Facts) -> None:
        numbers = [_whole(row[name], name) for name in STEP_COLUMNS[:4]]
        if numbers[3] < numbers[2]:
            raise _Wrong("the step ends before it begins")
        waited = row["waited_ns"]
        if not isinstance(waited, list) or len(waited) != facts.threads:
            raise _Wrong(f"waited_ns = {_shown(waited)} is no list of {facts.threads} times")
        self._rows.steps.append(numbers)
        self._rows.waited.append([_whole(each, "waited_ns") for each in waited])

    def _host(self, row: dict[str, Any], facts: Facts) -> None:
        label = row["account"]
        if not isinstance(label, str) or label not in _LABELS:
            raise _Wrong(f"there is no account {_shown(label)}")
        self._rows.host.append([row["run"], _whole(row["begin_ns"], "begin_ns"), _LABELS[label]])

    def _totals(self, value: dict[str, Any]) -> Totals:
        rows = self._rows
        tokens, steps = (_whole(value.get(name), name) for name in ("tokens", "steps"))
        if (tokens, steps) != (len(rows.tokens), len(rows.steps)):
            found = f"{len(rows.tokens)} tokens and {len(rows.steps)} steps"
            raise _Wrong(f"there are {found}, and should be {tokens} and {steps}")
        counts = {name: _whole(value.get(name), name, 1 << 63) for name in _COUNTS}
        spent, floor, hidden = (
            _accounts(value.get(name), name, np.zeros(N_ACCOUNTS, kind))
            for name, kind in zip(_BY_ACCOUNT, (np.int64, np.float64, np.int64), strict=True)
        )
        share, undelivered = (
            _accounts(value.get(name), name, np.zeros(N_SHARES, object), _SHARES, 1 << 100)
            for name in ("share", "undelivered")
        )
        booked, shared = (
            _table(rows.spent, N_ACCOUNTS).sum(axis=0),
            _table(rows.share, N_SHARES).astype(object).sum(axis=0),
        )
        if (booked != spent).any() or counts["wall_ns"] != spent.sum() or (shared + undelivered != share).any():
            raise _Wrong("the totals are not the sums of the rows")
        joules = value.get("joules")
        totals = Totals(
            tokens=tokens, steps=steps, spent_ns=spent, floor_ns=floor, hidden_ns=hidden, share=share,
            undelivered=undelivered,
            joules=None if joules is None else _accounts(joules, "joules", np.zeros(N_ACCOUNTS)),
        )  # fmt: skip
        later = np.array([numbers[TOKEN_COLUMNS.index("token")] > 0 for numbers in rows.tokens], bool)
        totals.later_tokens = int(later.sum())
        if later.any():
            totals.later_spent_ns = np.array(rows.spent)[later].sum(axis=0)
            totals.later_floor_ns = np.array(rows.floor)[later].sum(axis=0)
        for name, count in counts.items():
            setattr(totals, name, count)
        return totals


def _table(rows: list[Any], width: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)


def _facts_of(header: dict[str, Any]) -> Facts:
    words = {name: header.get(name) for name in ("model", "gapless", "isa")}
    for name, word in words.items():
        if not _is_text(word) and not (name == "isa" and word is None):
            raise _Wrong(f"{name} = {_shown(word)} is no text")
    names = ("batch", "prompt_tokens", "output_tokens", "runs", "threads")
    source, meters = header.get("source"), header.get("meters")
    if source not in list(Source):
        raise _Wrong(f"source = {_shown(source)} is none of {', '.join(Source)}")
    if not isinstance(meters, list) or not all(map(_is_text, meters)):
        raise _Wrong(f"meters = {_shown(meters)} is no list of names")
    started = _whole(header.get("started_unix_ns"), "started_unix_ns", 1 << 63)
    numbers = {name: _whole(header.get(name), name) for name in names}
    settings = header.get("settings", {})
    if not isinstance(settings, dict) or not all(type(x) is int or _is_text(x) for x in settings.values()):
        raise _Wrong(f"settings = {_shown(settings)} is no object of texts and whole numbers")
    given = header.get("ceilings")
    if not isinstance(given, dict):
        raise _Wrong(f"ceilings = {_shown(given)} is no object")
    ceilings = Ceilings(**{f.name: _real(given.get(f.name), f.name) for f in fields(Ceilings)})
    return Facts(
        **words,  # type: ignore[arg-type]
        **numbers,  # type: ignore[arg-type]
        ceilings=ceilings,
        source=Source(source),
        meters=tuple(meters),
        started_unix_ns=started,
        settings=settings,
    )


def _accounts(
    given: Any, name: str, values: npt.NDArray[Any], places: dict[str, int] = _LABELS, below: int = MOST
) -> npt.NDArray[Any]:
    """Put what is given by account into ``values``, whose type says of which kind the numbers are."""
    if not isinstance(given, dict):
        raise _Wrong(f"{name} = {_shown(given)} is no object")
    for label, value in given.items():
        if label not in places:
            raise _Wrong(f"there is no account {_shown(label)}")
        values[places[label]] = _real(value, label) if values.dtype.kind == "f" else _whole(value, label, below)
    return values


def _whole(value: Any, name: str, below: int = MOST) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise _Wrong(f"{name} = {_shown(value)} is not a whole number from 0 to {below - 1}")
    return value


def _real(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST_REAL:  # not a number compares as false
        raise _Wrong(f"{name} = {_shown(value)} is not a number from 0 to {MOST_REAL:g}")
    return float(value)


def _is_text(value: Any) -> bool:
    """JSON's escapes can spell halves of characters, which no file or terminal takes."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _shown(value: Any) -> str:
    text = "(missing)" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
