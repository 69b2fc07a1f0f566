"""Recorded ledgers for other programs: JSON lines, Chrome trace events, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from gapless.errors import GaplessError
from gapless.ledger.accounts import Account
from gapless.ledger.file import FORMAT, Recorded, by_label

REQUESTS, DEVICE = 1, 2  # the processes of a trace
_NUMBERS = ("run", "request", "token", "step", "begin_ns", "end_ns")


def write_jsonl(recorded: Recorded, file: BinaryIO) -> None:
    """An object on a line for each interval."""
    columns, i = _numbers(recorded), recorded.intervals
    for row, spent, floor in zip(zip(*columns.values(), strict=True), i.spent, i.floor, strict=True):
        value = dict(zip(columns, row, strict=True)) | {"spent_ns": by_label(spent), "floor_ns": by_label(floor)}
        file.write(json.dumps(value).encode() + b"\n")


def write_chrome(recorded: Recorded, file: BinaryIO) -> None:
    """The object form of Chrome's trace event format, which Perfetto reads too."""
    file.write(b'{"displayTimeUnit": "ms", "otherData": ' + json.dumps(asdict(recorded.facts)).encode())
    file.write(b', "traceEvents": [')
    for n, event in enumerate(_events(recorded)):
        file.write((b",\n" if n else b"\n") + json.dumps(event).encode())
    file.write(b"\n]}\n")


def write_parquet(recorded: Recorded, file: BinaryIO) -> None:
    """A row for each interval. Raises GaplessError where pyarrow is not installed."""
    check_parquet()
    import pyarrow
    from pyarrow import parquet

    i = recorded.intervals
    columns: dict[str, Any] = {name: np.array(values, np.int64) for name, values in _numbers(recorded).items()}
    columns |= {f"{a.label}_ns": i.spent[:, a] for a in Account}
    columns |= {f"{a.label}_floor_ns": i.floor[:, a] for a in Account}
    # By lists: then it does not matter which versions of NumPy a build of pyarrow takes arrays from.
    arrays = {name: pyarrow.array(column.tolist(), _arrow_type(column)) for name, column in columns.items()}
    table = pyarrow.table(arrays).replace_schema_metadata({FORMAT: json.dumps(asdict(recorded.facts))})
    parquet.write_table(table, file, compression="zstd")


def check_parquet() -> None:
    """Raises GaplessError where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise GaplessError("parquet is written by pyarrow, which is not there", "pip install gapless[export]") from None


def _arrow_type(column: Any) -> Any:
    import pyarrow

    return pyarrow.int64() if column.dtype.kind == "i" else pyarrow.float64()


def _numbers(recorded: Recorded) -> dict[str, list[int]]:
    i = recorded.intervals
    columns = (recorded.run, i.request, i.token, i.step, i.begin, i.end)
    return {name: column.tolist() for name, column in zip(_NUMBERS, columns, strict=True)}


def _events(recorded: Recorded) -> Iterator[dict[str, Any]]:
    yield _named("process_name", REQUESTS, 0, "requests")
    yield _named("process_name", DEVICE, 0, "device")
    yield _named("thread_name", DEVICE, 0, "steps")
    i = recorded.intervals
    for request in np.unique(i.request).tolist():
        yield _named("thread_name", REQUESTS, request, f"request {request}")
    for row, spent in zip(zip(*_numbers(recorded).values(), strict=True), i.spent, strict=True):
        run, request, token, step, begin, end = row
        args = {"run": run, "step": step}
        yield _complete(REQUESTS, request, f"token {token}", "token", begin, end, args)
        for account in np.flatnonzero(spent).tolist():  # laid end to end, in the order of booking
            until = begin + int(spent[account])
            yield _complete(REQUESTS, request, Account(account).label, "account", begin, until, {})
            begin = until
    s = recorded.steps
    for run, step, begun, ended, sync in zip(
        *(column.tolist() for column in (s.run, s.step, s.begun, s.ended, s.sync)), strict=True
    ):
        yield _complete(DEVICE, 0, f"step {step}", "step", begun, ended, {"run": run, "sync_us": sync / 1e3})


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    process: int, thread: int, name: str, category: str, begin: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    """An event with a beginning and a length, in microseconds."""
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": args}
