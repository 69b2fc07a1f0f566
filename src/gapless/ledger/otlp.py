"""Recorded runs as OpenTelemetry traces: a span for each request, below one for its run.

Ids are made of what is recorded, so that an export that is repeated gives the same spans again and no others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import Account
from gapless.ledger.file import Facts, Recorded
from gapless.ledger.shares import N_TIMES, TIMED, Share

Ints = npt.NDArray[np.int64]
Values = dict[str, int | float | str]

SPANS = 200  # in a message; as JSON that stays below 1 MiB, the longest line that the collector reads
_INTERNAL = 1  # SPAN_KIND_INTERNAL: enums are numbers in OTLP's JSON
_MOST_INT = (1 << 63) - 1


def messages(recorded: Recorded, encoded: Callable[[bytes], str] = bytes.hex) -> Iterator[dict[str, Any]]:
    """Of the type ``ExportTraceServiceRequest``, in JSON.

    Args:
        encoded: ids as text: in hex, which is OTLP's own rule, or in base64, which is that of protobuf.
    """
    resource = {"attributes": _attributes(_of_resource(recorded.facts))}
    spans = _spans(recorded, encoded)
    while batch := list(islice(spans, SPANS)):
        of_scope = {"scope": {"name": "gapless.ledger"}, "spans": batch}
        yield {"resourceSpans": [{"resource": resource, "scopeSpans": [of_scope]}]}


def write_otlp(recorded: Recorded, file: BinaryIO) -> None:
    """A message on a line, as the collector's otlpjsonfile receiver reads it."""
    for message in messages(recorded):
        file.write(json.dumps(message, allow_nan=False).encode() + b"\n")


def n_spans(recorded: Recorded) -> int:
    """How many an export has."""
    requests = set(zip(recorded.run.tolist(), recorded.intervals.request.tolist(), strict=True))
    return len(requests) + len({run for run, _ in requests})


# --- spans


def _spans(recorded: Recorded, encoded: Callable[[bytes], str]) -> Iterator[dict[str, Any]]:
    i, started = recorded.intervals, recorded.facts.started_unix_ns
    order = np.lexsort((i.token, i.request, recorded.run))
    for of_run in _groups(order, recorded.run):
        run = int(recorded.run[of_run[0]])
        trace, root = encoded(_id(16, "trace", started, run)), encoded(_id(8, "run", started, run))
        load = {name: getattr(recorded.facts, name) for name in ("batch", "prompt_tokens", "output_tokens")}
        of_root: Values = {"gapless.run": run} | {f"gapless.{name}": value for name, value in load.items()}
        yield {"traceId": trace, "spanId": root, **_span(recorded, of_run, "gapless run", of_root)}
        for rows in _groups(of_run, i.request):
            request = int(i.request[rows[0]])
            yield {
                "traceId": trace,
                "spanId": encoded(_id(8, "request", started, run, request)),
                "parentSpanId": root,
                **_span(recorded, rows, "gapless request", {"gapless.run": run, "gapless.request": request}),
                **_first_token(recorded, int(rows[0])),
            }


def _groups(rows: Ints, by: Ints) -> list[Ints]:
    """Rows that are alike; they are in order."""
    return np.split(rows, np.flatnonzero(np.diff(by[rows])) + 1) if len(rows) else []


def _id(n_bytes: int, *parts: str | int) -> bytes:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:n_bytes]


def _span(recorded: Recorded, rows: Ints, name: str, values: Values) -> dict[str, Any]:
    i, started = recorded.intervals, recorded.facts.started_unix_ns
    return {
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(started + int(i.begin[rows].min())),
        "endTimeUnixNano": str(started + int(i.end[rows].max())),
        "attributes": _attributes(values | _of_tokens(recorded, rows)),
    }


def _first_token(recorded: Recorded, row: int) -> dict[str, Any]:
    i = recorded.intervals
    if i.token[row] != 0:
        return {}
    time_ns = recorded.facts.started_unix_ns + int(i.end[row])
    return {"events": [{"timeUnixNano": str(time_ns), "name": "first token"}]}


# --- attributes


def _of_resource(facts: Facts) -> Values:
    return {
        "service.name": "gapless",
        "service.version": facts.gapless,
        "gapless.model": facts.model,
        "gapless.threads": facts.threads,
        "gapless.isa": facts.isa or "reference",
        "gapless.source": facts.source.value,
    }


def _of_tokens(recorded: Recorded, rows: Ints) -> Values:
    """Of some tokens: what they waited for, what they cost. Accounts with nothing are left out."""
    i = recorded.intervals
    length, first = (i.end - i.begin)[rows], i.token[rows] == 0
    values: Values = {"gapless.tokens": len(rows)}
    if first.any():
        values["gapless.ttft.seconds"] = float(length[first].mean()) / 1e9
    if not first.all():
        values["gapless.tpot.seconds"] = float(length[~first].mean()) / 1e9
    spent, floor = i.spent[rows].sum(axis=0).tolist(), i.floor[rows].sum(axis=0).tolist()
    for account in Account:
        if spent[account]:
            values[f"gapless.account.{account.label}.seconds"] = spent[account] / 1e9
        if floor[account]:
            values[f"gapless.account.{account.label}.floor_seconds"] = floor[account] / 1e9
    return values | _share(i.share[rows].astype(object).sum(axis=0).tolist()) | _joules(i.joules[rows])


def _share(share: list[int]) -> Values:
    values: Values = {"gapless.share.device.seconds": sum(share[:N_TIMES]) / 1e9}
    for account, time_ns in zip(TIMED, share, strict=False):
        if time_ns:
            values[f"gapless.share.{account.label}.seconds"] = time_ns / 1e9
    return values | {f"gapless.share.{work.label}": share[work] for work in list(Share)[N_TIMES:]}


def _joules(joules: npt.NDArray[np.float64]) -> Values:
    total = float(joules.sum())
    return {} if math.isnan(total) else {"gapless.joules": total}


def _attributes(values: Values) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: int | float | str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int) and value <= _MOST_INT:
        return {"intValue": str(value)}  # 64 bits are text in JSON
    return {"doubleValue": float(value)}
