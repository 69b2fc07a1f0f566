"""Recorded ledgers for other programs: JSON lines, Chrome trace events, Parquet, metrics for Prometheus."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, BinaryIO, cast

import numpy as np

from gapless.errors import GaplessError
from gapless.ledger.accounts import Account
from gapless.ledger.file import FORMAT, Recorded, by_label, share_by_label
from gapless.ledger.prometheus import TokenSeconds, families
from gapless.ledger.shares import Share

REQUESTS, DEVICE, HOST = 1, 2, 3  # the processes of a trace
FIRST_TRACK = 10  # a viewer takes a thread with the number of its process, or 0, for its main one, and joins the two
_NUMBERS = ("run", "request", "token", "step", "begin_ns", "end_ns", "beside_tokens")
OTLP_HTTP = "otlp over HTTP"
_LIBRARIES = {
    "parquet": ("pyarrow", "pyarrow.parquet"),
    "prometheus": ("prometheus_client", "prometheus_client"),
    OTLP_HTTP: ("opentelemetry-proto", "opentelemetry.proto.collector.trace.v1.trace_service_pb2"),
}


def check(form: str) -> None:
    """Raises GaplessError where the library that writes a format is not installed."""
    library, module = _LIBRARIES.get(form, ("", "json"))
    try:
        import_module(module)
    except ImportError:
        problem = f"{form} is written by {library}, which is not there"
        raise GaplessError(problem, "pip install gapless[export]") from None


def write_jsonl(recorded: Recorded, file: BinaryIO) -> None:
    """An object on a line for each interval."""
    columns, i = _numbers(recorded), recorded.intervals
    rows = zip(*columns.values(), strict=True)
    for row, spent, floor, share, joules in zip(rows, i.spent, i.floor, i.share, i.joules.tolist(), strict=True):
        value = dict(zip(columns, row, strict=True)) | {
            "spent_ns": by_label(spent),
            "floor_ns": by_label(floor),
            "share": share_by_label(share),
            "joules": None if math.isnan(joules) else joules,
        }
        file.write(json.dumps(value).encode() + b"\n")


def write_chrome(recorded: Recorded, file: BinaryIO) -> None:
    """The object form of Chrome's trace event format, which Perfetto reads too."""
    file.write(b'{"displayTimeUnit": "ms", "otherData": ' + json.dumps(asdict(recorded.facts)).encode())
    file.write(b', "traceEvents": [')
    bits = _fraction_bits(recorded)
    for n, event in enumerate(_events(recorded)):
        if event["ph"] == "X":
            event |= _in_microseconds(event["ts"], event["dur"], bits)
        file.write((b",\n" if n else b"\n") + json.dumps(event).encode())
    file.write(b"\n]}\n")


def write_parquet(recorded: Recorded, file: BinaryIO) -> None:
    """A row for each interval; ``check`` has found pyarrow."""
    import pyarrow
    from pyarrow import parquet

    i = recorded.intervals
    columns: dict[str, Any] = {name: np.array(values, np.int64) for name, values in _numbers(recorded).items()}
    columns |= {f"{a.label}_ns": i.spent[:, a] for a in Account}
    columns |= {f"{a.label}_floor_ns": i.floor[:, a] for a in Account}
    columns |= {f"share_{s.label}": i.share[:, s] for s in Share}
    columns["joules"] = i.joules
    # By lists: then it does not matter which versions of NumPy a build of pyarrow takes arrays from.
    arrays = {
        name: pyarrow.array(column.tolist(), _arrow_type(column), from_pandas=True)  # not a number is null
        for name, column in columns.items()
    }
    table = pyarrow.table(arrays).replace_schema_metadata({FORMAT: json.dumps(asdict(recorded.facts))})
    parquet.write_table(table, file, compression="zstd")


def write_prometheus(recorded: Recorded, file: BinaryIO) -> None:
    """The text format that Prometheus scrapes; ``check`` has found its library."""
    from prometheus_client import CollectorRegistry, generate_latest

    times = TokenSeconds()
    times.add(recorded.intervals)
    registry = CollectorRegistry()
    registry.register(cast(Any, _Families(list(families(recorded.totals, times)))))
    file.write(generate_latest(registry))


@dataclass(eq=False)  # the registry wants its hash
class _Families:
    """As a collector of the library, which has a class for it that cannot be named where the library is missing."""

    found: list[Any]

    def collect(self) -> list[Any]:
        return self.found


def _arrow_type(column: Any) -> Any:
    import pyarrow

    return pyarrow.int64() if column.dtype.kind == "i" else pyarrow.float64()


def _numbers(recorded: Recorded) -> dict[str, list[int]]:
    i = recorded.intervals
    columns = (recorded.run, i.request, i.token, i.step, i.begin, i.end, i.beside)
    return {name: column.tolist() for name, column in zip(_NUMBERS, columns, strict=True)}


def _events(recorded: Recorded) -> Iterator[dict[str, Any]]:
    for process, name in ((REQUESTS, "requests"), (DEVICE, "device"), (HOST, "host")):
        yield _metadata("process_name", process, 0, {"name": name})
        yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    yield from _of_requests(recorded)
    yield from _of_device(recorded)
    yield from _of_host(recorded)


def _of_requests(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """A track for each request: its tokens, and in them their accounts, end to end in the order of booking."""
    i = recorded.intervals
    for request in np.unique(i.request).tolist():
        yield _thread(REQUESTS, FIRST_TRACK + request, f"request {request}")
    for row, spent in zip(zip(*_numbers(recorded).values(), strict=True), i.spent, strict=True):
        run, request, token, step, begin, end, beside = row
        args = {"run": run, "step": step, "beside_tokens": beside}
        yield _complete(REQUESTS, FIRST_TRACK + request, f"token {token}", "token", begin, end, args)
        for account in np.flatnonzero(spent).tolist():
            until = begin + int(spent[account])
            yield _complete(REQUESTS, FIRST_TRACK + request, Account(account).label, "account", begin, until, {})
            begin = until


def _of_device(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """A track for the steps, and one for each thread: how long it worked and how long it waited for the others."""
    s = recorded.steps
    yield _thread(DEVICE, FIRST_TRACK, "steps")
    for thread in range(s.waited.shape[1]):
        yield _thread(DEVICE, FIRST_TRACK + 1 + thread, f"thread {thread}")
    columns = (s.run.tolist(), s.step.tolist(), s.begun.tolist(), s.ended.tolist(), s.waited.tolist())
    free = 0
    for run, step, begun, ended, waited in zip(*columns, strict=True):
        begun = max(begun, free)  # from one booking to the next clocks may disagree by a little
        free = ended = max(ended, begun)
        yield _complete(DEVICE, FIRST_TRACK, f"step {step}", "step", begun, ended, {"run": run})
        for thread, waits in enumerate(waited):
            until = max(ended - waits, begun)
            yield _complete(DEVICE, FIRST_TRACK + 1 + thread, "work", "thread", begun, until, {"step": step})
            yield _complete(
                DEVICE, FIRST_TRACK + 1 + thread, Account.SYNC.label, "thread", until, ended, {"step": step}
            )


def _of_host(recorded: Recorded) -> Iterator[dict[str, Any]]:
    """What the thread that drives the engine did, each until the next; in ``launch`` it waits for the device."""
    yield _thread(HOST, FIRST_TRACK, "engine")
    h = recorded.host
    begin, account, run = h.begin.tolist(), h.account.tolist(), h.run.tolist()
    for at in range(len(begin) - 1):
        if run[at] == run[at + 1] and begin[at] < begin[at + 1]:
            yield _complete(HOST, FIRST_TRACK, Account(account[at]).label, "host", begin[at], begin[at + 1], {})


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return _metadata("thread_name", process, thread, {"name": name})


def _metadata(what: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}


def _complete(
    process: int, thread: int, name: str, category: str, begin: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    """An event with a beginning and a length, in nanoseconds yet."""
    times = {"ts": begin, "dur": end - begin}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **times, "args": args}


def _fraction_bits(recorded: Recorded) -> int:
    """How fine microseconds are told, in binary places.

    Viewers drop events that overlap, and 0.1 + 0.2 is more than 0.3. Multiples of a power of two add up exactly while
    they have 53 bits; with 12 of them behind the point they round to the same nanoseconds again.
    """
    ends = (recorded.intervals.end, recorded.steps.ended, recorded.host.begin)
    latest = max((int(column.max()) for column in ends if len(column)), default=0)
    return 12 if latest < 1 << 50 else 9


def _in_microseconds(begin: int, length: int, bits: int) -> dict[str, float]:
    begun, ended = (((time << bits) + 500) // 1000 for time in (begin, begin + length))
    return {"ts": begun / (1 << bits), "dur": (ended - begun) / (1 << bits)}
