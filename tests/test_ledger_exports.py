"""Recorded ledgers for other programs: what is written is what the books say, as those programs read it."""

from __future__ import annotations

import base64
import contextlib
import http.server
import importlib
import io
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_servers import serving
from gapless.cli import main
from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.books import Intervals
from gapless.ledger.export import write_chrome, write_parquet, write_prometheus
from gapless.ledger.file import Recorded, read, write
from gapless.ledger.otlp import SPANS, messages, n_spans, write_otlp
from gapless.ledger.prometheus import TokenSeconds, families
from gapless.ledger.shares import N_SHARES, N_TIMES, Share
from gapless.models.fetch import MAX_ANSWER_BYTES, Unreachable, post
from recorded_books import BATCH, RUNS, TOKENS, measure, recorded
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(write_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", "smollm2", "Q4_0"))


def exported(ledger: Path, form: str, target: Path | str, *options: str) -> int:
    return main(["ledger", "export", str(ledger), "--format", form, "--output", str(target), *options])


# --- Chrome trace events


def trace_of(books: Recorded) -> dict[str, Any]:
    file = io.BytesIO()
    write_chrome(books, file)
    trace: dict[str, Any] = json.loads(file.getvalue())
    return trace


def microseconds(event: dict[str, Any]) -> tuple[float, float]:
    """Begin and end as a viewer has them that reckons in the numbers of the file."""
    return event["ts"], event["ts"] + event["dur"]


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """As Perfetto has them: it rounds both numbers to nanoseconds first. What then overlaps it leaves out."""
    begin, length = (math.floor(1000.0 * event[name] + 0.5) for name in ("ts", "dur"))
    return begin, begin + length


def check_nesting(events: list[Any], times: Callable[[Any], tuple[float, float]]) -> None:
    """Of two events on a track one holds the other, or they do not overlap."""
    tracks: dict[tuple[int, int], list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for of_track in tracks.values():
        open_until: list[float] = []
        for event in sorted(of_track, key=lambda e: times(e)[0]):
            begin, end = times(event)
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def check_trace(books: Recorded) -> dict[str, Any]:
    trace = trace_of(books)
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"]["model"] == books.facts.model
    events, named, order = trace["traceEvents"], set(), {}
    for event in events:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid", "args"} <= set(event)
        if event["ph"] == "X":
            assert all(isinstance(event[name], float) and event[name] >= 0 for name in ("ts", "dur"))
        elif event["name"] == "process_sort_index":
            order[event["pid"]] = event["args"]["sort_index"]
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert (event["name"], event["pid"], event["tid"]) not in named, "a track has one name"
            named.add((event["name"], event["pid"], event["tid"]))
            assert isinstance(event["args"]["name"], str)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[process] for process in sorted(order, key=lambda p: order[p])] == ["requests", "device", "host"]
    assert len(set(order.values())) == len(order) == len(names)
    for process, thread in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        assert ("thread_name", process, thread) in named
        assert process in names
    check_nesting(events, microseconds)
    check_nesting(events, nanoseconds)
    return trace


def test_a_trace_is_one_of_chromes(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert exported(measured, "chrome", target, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["tokens"], told["bytes"]) == (
        str(target), RUNS * BATCH * TOKENS, target.stat().st_size,
    )  # fmt: skip
    books = read(measured)
    trace = check_trace(books)
    assert trace == json.loads(target.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert all(thread not in (0, process) for process, thread in tracks), "a viewer joins these with its main thread"
    assert len(tracks) == RUNS * BATCH + 1 + 1 + 1, "requests, steps, a thread, the host"
    of = {kind: [e for e in events if e.get("cat") == kind] for kind in ("token", "account", "step", "host")}
    i = books.intervals
    assert [nanoseconds(e) for e in of["token"]] == list(zip(i.begin.tolist(), i.end.tolist(), strict=True))
    steps = list(zip(books.steps.begun.tolist(), books.steps.ended.tolist(), strict=True))
    assert [nanoseconds(e) for e in of["step"]] == steps
    assert of["host"]
    parts = iter(of["account"])
    for token, spent in zip(of["token"], i.spent, strict=True):
        until = token["ts"]
        for account in np.flatnonzero(spent).tolist():
            part = next(parts)
            assert (part["name"], part["tid"]) == (Account(account).label, token["tid"])
            assert part["ts"] == until
            assert nanoseconds(part)[1] - nanoseconds(part)[0] == spent[account]
            until = microseconds(part)[1]
        assert until == microseconds(token)[1], "the accounts fill the token"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 30, 49, 50, 52]))
def test_events_nest_as_viewers_read_them(seed: int, bits: int) -> None:
    """However long the recording: the first token takes up to 2^bits nanoseconds."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(1 << bits)), *rng.integers(0, 2000, 30).tolist()]
    books = recorded({(0, 1): lengths, (0, 2): [0, 1, 0, *lengths[1:]]})
    for spent, length in zip(books.intervals.spent, books.intervals.end - books.intervals.begin, strict=True):
        ends = np.sort(rng.integers(0, length + 1, N_ACCOUNTS - 1))
        spent[:] = np.diff([0, *ends, length])
    books.steps.waited[:] = rng.integers(0, 2000, books.steps.waited.shape)
    if bits < 50:
        check_trace(books)
    else:  # beyond 13 days its rounding to nanoseconds is not exact any more
        check_nesting(trace_of(books)["traceEvents"], microseconds)


def test_steps_of_clocks_that_disagree_do_not_overlap() -> None:
    books = recorded({(0, 1): [1000, 1000, 1000]})
    books.steps.ended[:] = (1020, 1010, 2900)
    trace = check_trace(books)
    found = [nanoseconds(e) for e in trace["traceEvents"] if e.get("cat") == "step"]
    assert found == [(0, 1020), (1020, 1020), (2000, 2900)]


def test_a_trace_of_no_tokens() -> None:
    trace = check_trace(recorded({}))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}


# --- JSON lines and Parquet


def test_lines_of_json(measured: Path, tmp_path: Path) -> None:
    target = tmp_path / "l.jsonl"
    assert exported(measured, "jsonl", target) == 0
    rows, i = [json.loads(line) for line in target.read_text().splitlines()], read(measured).intervals
    assert [row["end_ns"] for row in rows] == i.end.tolist()
    for row in rows:
        assert sum(row["spent_ns"].values()) == row["end_ns"] - row["begin_ns"]
        assert set(row["floor_ns"]) <= {a.label for a in Account}


def test_a_table_of_parquet(measured: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "l.parquet"
    assert exported(measured, "parquet", target) == 0
    table, books = parquet.read_table(target), read(measured)
    assert table.num_columns == 8 + 2 * N_ACCOUNTS + N_SHARES
    columns = table.to_pydict()
    assert columns["end_ns"] == books.intervals.end.tolist()
    assert columns["compute_ns"] == books.intervals.spent[:, Account.COMPUTE].tolist()
    assert columns["compute_floor_ns"] == books.intervals.floor[:, Account.COMPUTE].tolist()
    assert {str(table.schema.field(name).type) for name in ("run", "kv_ns")} == {"int64"}
    assert json.loads(table.schema.metadata[b"gapless-ledger"])["runs"] == RUNS
    with (tmp_path / "empty").open("wb") as file:
        write_parquet(recorded({}), file)
    assert parquet.read_table(tmp_path / "empty").num_rows == 0


WHOLE = [
    *("run", "request", "token", "step", "begin_ns", "end_ns", "beside_tokens"),
    *(f"{a.label}_ns" for a in Account),
    *(f"share_{s.label}" for s in Share),
]
REAL = [*(f"{a.label}_floor_ns" for a in Account), "joules"]


@pytest.fixture(scope="module")
def parquet(measured: Path) -> Path:
    """Of books in which the joules of every other token are known."""
    pytest.importorskip("pyarrow.parquet")
    books = read(measured)
    books.intervals.joules[::2] = 0.5
    path = measured.with_name("before.parquet")
    with path.open("wb") as file:
        write_parquet(books, file)
    return path


def test_pandas_reads_parquet(measured: Path, parquet: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame, i = pandas.read_parquet(parquet), read(measured).intervals
    types = {name: str(kind) for name, kind in frame.dtypes.items()}
    assert types == dict.fromkeys(WHOLE, "int64") | dict.fromkeys(REAL, "float64")
    length = frame["end_ns"] - frame["begin_ns"]
    assert (frame[[f"{a.label}_ns" for a in Account]].sum(axis=1) == length).all()
    assert length.tolist() == (i.end - i.begin).tolist()
    assert frame["joules"].notna().tolist() == [True, False] * (len(i) // 2)


def test_duckdb_queries_parquet(parquet: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(f"SELECT column_name, column_type FROM (DESCRIBE FROM '{parquet}')").fetchall()
    assert dict(found) == dict.fromkeys(WHOLE, "BIGINT") | dict.fromkeys(REAL, "DOUBLE")
    spent = " + ".join(f"{a.label}_ns" for a in Account)
    query = f"SELECT count(*), count(*) FILTER ({spent} = end_ns - begin_ns), count(joules) FROM '{parquet}'"
    n = RUNS * BATCH * TOKENS
    assert duckdb.sql(query).fetchall() == [(n, n, n // 2)]


def test_the_query_of_the_documentation(measured: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    page = (Path(__file__).parents[1] / "docs" / "ledger.md").read_text()
    (query,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(parquet.parent)
    rows, books = duckdb.sql(query).fetchall(), read(measured)
    i = books.intervals
    assert len(rows) == RUNS * BATCH
    assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
    for run, request, ttft_ms, p99_ms, for_others, weight_bytes in rows:
        mine = (books.run == run) & (i.request == request)
        length, first = (i.end - i.begin)[mine], i.token[mine] == 0
        others = i.spent[mine][:, [Account.QUEUE, Account.PREEMPTED, Account.NEIGHBOURS]]
        assert ttft_ms == pytest.approx(length[first].sum() / 1e6)
        assert p99_ms == pytest.approx(length[~first].max() / 1e6)
        assert for_others == pytest.approx(others.sum() / length.sum())
        assert weight_bytes == pytest.approx(i.share[mine, Share.WEIGHT_BYTES].mean())


@pytest.mark.parametrize(
    ("form", "library", "modules"),
    [
        ("parquet", "pyarrow", ("pyarrow", "pyarrow.parquet")),
        ("prometheus", "prometheus_client", ("prometheus_client",)),
        ("otlp over HTTP", "opentelemetry-proto", ("opentelemetry.proto.collector.trace.v1.trace_service_pb2",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_library_is_named(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    form: str, library: str, modules: tuple[str, ...],
) -> None:  # fmt: skip
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    target = "http://127.0.0.1:1" if "HTTP" in form else tmp_path / "l"
    assert exported(measured, form.split()[0], target) == 2
    expected = f"error: {form} is written by {library}, which is not there; pip install gapless[export]\n"
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


def test_an_export_does_not_take_the_place_of_its_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "l", recorded({(0, 1): [10]}))
    (tmp_path / "link").symlink_to("l")
    for name in ("l", "link"):
        assert exported(tmp_path / "l", "jsonl", tmp_path / name) == 2
        assert "is the ledger itself; give another path" in capsys.readouterr().err
    read(tmp_path / "l")


# --- Prometheus


def metrics(path: Path) -> dict[tuple[str, ...], float]:
    """Samples by name and values of labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(path.read_text()))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name.removeprefix("gapless_ledger_"), *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_metrics_are_the_totals(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    assert exported(measured, "prometheus", tmp_path / "l.prom") == 0
    found, t = metrics(tmp_path / "l.prom"), read(measured).totals
    assert (found["tokens_total",], found["steps_total",]) == (t.tokens, t.steps)
    assert found["flops_total",] == t.share[Share.FLOPS]
    assert found["bytes_total", "weights"] == t.share[Share.WEIGHT_BYTES]
    assert found["bytes_total", "kv"] == t.share[Share.KV_BYTES]
    for account in Account:
        assert found["seconds_total", account.label] == t.spent_ns[account] / 1e9
        assert found["floor_seconds_total", account.label] == t.floor_ns[account] / 1e9
        assert found["hidden_seconds_total", account.label] == t.hidden_ns[account] / 1e9
    assert sum(found["seconds_total", a.label] for a in Account) == pytest.approx(t.wall_ns / 1e9)
    assert sum(found["device_seconds_total", a.label] for a in Account) == pytest.approx(t.device_ns / 1e9)
    assert found["device_seconds_total", "compute"] == t.share[Share.COMPUTE_NS] / 1e9


def test_metrics_have_joules_where_they_are_known(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    books = recorded({(0, 1): [10, 20]})
    for joules in (None, np.arange(N_ACCOUNTS) * 0.5):
        books.totals.joules = joules
        with (tmp_path / "l.prom").open("wb") as file:
            write_prometheus(books, file)
        found = {label[0]: value for (name, *label), value in metrics(tmp_path / "l.prom").items() if "joules" in name}
        assert found == ({} if joules is None else {a.label: 0.5 * a for a in Account})


def test_metrics_of_no_tokens(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with (tmp_path / "l.prom").open("wb") as file:
        write_prometheus(recorded({}), file)
    found = metrics(tmp_path / "l.prom")
    assert (found["tokens_total",], found["token_seconds_count",], found["token_seconds_sum",]) == (0, 0, 0)


def test_a_time_at_the_end_of_a_bucket_is_in_it() -> None:
    times = TokenSeconds()
    for of_tokens in ([7, 0, 100_000, 100_001], [1, 10**10], [2, 10**10 + 1]):
        times.add(recorded({(0, 1): of_tokens}).intervals)
    found = dict(times.buckets())
    assert (found["0.0001"], found["0.0002"], found["5.0"], found["10.0"], found["+Inf"]) == (2, 3, 3, 4, 5)
    assert times.total_ns == 200_001 + 2 * 10**10 + 1
    assert [float(end) for end in found] == sorted(float(end) for end in found)


def test_metrics_of_a_ledger_never_fall() -> None:
    """What a ledger has forgotten stays counted: the same families, from books that are being kept."""
    pytest.importorskip("prometheus_client")
    times, before = TokenSeconds(), dict[str, float]()
    for n in (1, 2, 3):
        books = recorded({(0, request): [10, 20] for request in range(n)})
        times.add(books.intervals)
        now = {f"{s.name}{s.labels}": s.value for family in families(books.totals, times) for s in family.samples}
        assert all(now[name] >= value for name, value in before.items())
        assert now["gapless_ledger_token_seconds_count{}"] == n * (n + 1) / 2
        before = now


# --- OpenTelemetry


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spans_of(messages: list[Any]) -> list[Any]:
    return [
        span
        for message in messages
        for of_resource in message["resourceSpans"]
        for of_scope in of_resource["scopeSpans"]
        for span in of_scope["spans"]
    ]


def plain(attributes: list[Any]) -> dict[str, Any]:
    """As a reader of OTLP's JSON has them."""
    kinds = {"stringValue": str, "intValue": int, "doubleValue": float}
    found = {}
    for attribute in attributes:
        ((kind, value),) = attribute["value"].items()
        assert isinstance(value, float if kind == "doubleValue" else str), "64 bits are text"
        found[attribute["key"]] = kinds[kind](value)
    assert len(found) == len(attributes)
    return found


def test_a_span_for_each_request_below_one_for_its_run(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "spans.jsonl"
    assert exported(measured, "otlp", target, "--json") == 0
    told, books = json.loads(capsys.readouterr().out), read(measured)
    assert (told["path"], told["spans"], told["bytes"]) == (str(target), RUNS * (BATCH + 1), target.stat().st_size)
    messages = lines_of(target)
    assert plain(messages[0]["resourceSpans"][0]["resource"]["attributes"]) == {
        "service.name": "gapless", "service.version": books.facts.gapless, "gapless.model": books.facts.model,
        "gapless.threads": 1, "gapless.isa": books.facts.isa, "gapless.source": "measured",
    }  # fmt: skip
    spans = spans_of(messages)
    roots = {span["traceId"]: span for span in spans if "parentSpanId" not in span}
    assert len(roots) == RUNS
    assert len({span["spanId"] for span in spans}) == len(spans) == RUNS * (BATCH + 1)
    i = books.intervals
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
        assert span["kind"] == 1
        values = plain(span["attributes"])
        mine = books.run == values["gapless.run"]
        if "parentSpanId" in span:
            assert span["parentSpanId"] == roots[span["traceId"]]["spanId"]
            mine &= i.request == values["gapless.request"]
        times = [int(span[name]) - books.facts.started_unix_ns for name in ("startTimeUnixNano", "endTimeUnixNano")]
        assert times == [i.begin[mine].min(), i.end[mine].max()]
        assert isinstance(span["startTimeUnixNano"], str)
        assert values["gapless.tokens"] == mine.sum()
        for account in Account:
            spent, floor = i.spent[mine, account].sum(), i.floor[mine, account].sum()
            assert values.get(f"gapless.account.{account.label}.seconds", 0) == spent / 1e9
            assert values.get(f"gapless.account.{account.label}.floor_seconds", 0) == pytest.approx(floor / 1e9)
        length, first = (i.end - i.begin)[mine], i.token[mine] == 0
        assert values["gapless.ttft.seconds"] == length[first].mean() / 1e9
        assert values["gapless.tpot.seconds"] == length[~first].mean() / 1e9
        share = i.share[mine].sum(axis=0)
        assert values["gapless.share.device.seconds"] == share[:N_TIMES].sum() / 1e9
        assert values["gapless.share.compute.seconds"] == share[Share.COMPUTE_NS] / 1e9
        assert [values[f"gapless.share.{s.label}"] for s in list(Share)[N_TIMES:]] == share[N_TIMES:].tolist()
        assert "gapless.joules" not in values
        if "parentSpanId" in span:
            (event,) = span["events"]
            assert event["name"] == "first token"
            end = int(i.end[mine][first][0]) + books.facts.started_unix_ns
            assert event["timeUnixNano"] == str(end)


def test_spans_that_are_exported_again_are_the_same(measured: Path, tmp_path: Path) -> None:
    for name in "ab":
        assert exported(measured, "otlp", tmp_path / name) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    books = read(measured)
    later = replace(books, facts=replace(books.facts, started_unix_ns=books.facts.started_unix_ns + 1))
    ids = [{span["spanId"] for span in spans_of(list(messages(each)))} for each in (books, later)]
    assert not ids[0] & ids[1], "another recording has other spans"


def test_spans_of_odd_books() -> None:
    assert list(messages(recorded({}))) == []
    alone = recorded({(0, 1): [10]})
    _, request = spans_of(list(messages(alone)))
    assert "gapless.tpot.seconds" not in plain(request["attributes"])
    books = recorded({(0, 1): [10, 20, 30]})
    whole = plain(spans_of(list(messages(books)))[1]["attributes"])
    assert whole["gapless.share.flops"] == 3.0 * 2**62, "beyond 64 bits it is a real number"
    assert "gapless.joules" not in whole, "of the first token they are not known"
    books.intervals.joules[0] = 0.5
    assert plain(spans_of(list(messages(books)))[1]["attributes"])["gapless.joules"] == 1.0
    late = replace(books, run=books.run[1:], intervals=Intervals(*(c[1:] for c in vars(books.intervals).values())))
    _, request = spans_of(list(messages(late)))
    assert "events" not in request, "the first token was not recorded"
    assert "gapless.ttft.seconds" not in plain(request["attributes"])


def test_no_line_is_longer_than_the_collector_reads(tmp_path: Path) -> None:
    n = 2 * SPANS
    books = recorded({(0, request): [10, 20] for request in range(n)})
    books.intervals.spent[:], books.intervals.floor[:] = 10**15 - 7, 1e18 / 7
    books.intervals.share[:], books.intervals.joules[:] = 10**15 - 7, 1 / 7
    with (tmp_path / "l").open("wb") as file:
        write_otlp(books, file)
    lines = (tmp_path / "l").read_bytes().splitlines()
    assert [len(spans_of([json.loads(line)])) for line in lines] == [SPANS, SPANS, 1]
    assert max(map(len, lines)) < 1 << 20
    assert n_spans(books) == n + 1


# --- a collector


@dataclass
class Collector:
    """What it was asked, and how it answers: with a status, or the next ones, and a body.

    Attributes:
        silent: whether it gives no answer at all.
        raw: what is sent instead of an answer, a byte at a time.
    """

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    silent: bool = False
    raw: bytes = b""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def service() -> Any:
    return pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found, over = Collector(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.asked.append((self.path, dict(self.headers), body))
            for byte in found.raw:
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(bytes([byte]))
                over.wait(0.05)
            if found.silent or found.raw:
                over.wait()
                return
            self.send_response(found.statuses.pop(0) if found.statuses else 200)
            for name, value in {**found.headers, "Content-Length": str(len(found.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.body)

        def do_GET(self) -> None:
            pytest.fail("nothing is asked for")

    with serving(Handler) as url:
        found.url = url
        yield found
        over.set()


def test_a_post_has_its_content_and_the_password(collector: Collector) -> None:
    collector.body = b"x" * (MAX_ANSWER_BYTES + 1)
    answer = post(collector.url.replace("://", "://me:s3cr%40et@") + "/a", b"content", "text/x", 5.0)
    assert answer == b"x" * MAX_ANSWER_BYTES
    ((path, headers, body),) = collector.asked
    assert (path, headers["Content-Type"], body) == ("/a", "text/x", b"content")
    assert headers["Authorization"] == "Basic " + base64.b64encode(b"me:s3cr@et").decode()


@pytest.mark.parametrize(
    ("how", "message", "status"),
    [
        ({"statuses": [307], "headers": {"Location": "/b"}}, "307 Temporary Redirect", 307),
        ({"statuses": [500]}, "500 Internal Server Error", 500),
        ({"silent": True}, r"it does not answer within 0\.3 s", None),
        ({"raw": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000}, r"it does not answer within 0\.3 s", None),
        ({"raw": b"\r\n\r\n"}, r"it gives no proper HTTP \(BadStatusLine\)", None),
    ],
    ids=["redirection", "error", "silent", "drips", "no HTTP"],
)
def test_a_post_that_fails_says_why(
    collector: Collector, how: dict[str, Any], message: str, status: int | None
) -> None:
    vars(collector).update(how)
    with pytest.raises(Unreachable, match=message) as caught:
        post(collector.url, b"content", "text/x", 0.3)
    assert caught.value.status == status
    assert len(collector.asked) == 1


def test_a_collector_gets_what_the_file_has(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any
) -> None:
    json_format = importlib.import_module("google.protobuf.json_format")
    assert exported(measured, "otlp", collector.url + "/", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    ((path, headers, body),) = collector.asked
    assert told == {
        "url": f"{collector.url}/v1/traces", "format": "otlp", "spans": RUNS * (BATCH + 1), "bytes": len(body),
        "tokens": RUNS * BATCH * TOKENS, "steps": read(measured).totals.steps,
    }  # fmt: skip
    assert (path, headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
    got = json_format.MessageToDict(service.ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True)
    for span in spans_of([got]):
        for name in {"traceId", "spanId", "parentSpanId"} & set(span):
            span[name] = base64.b64decode(span[name]).hex()
    assert exported(measured, "otlp", tmp_path / "l") == 0
    assert [got] == lines_of(tmp_path / "l")


def test_many_spans_go_in_several_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any
) -> None:
    write(tmp_path / "l", recorded({(0, request): [10] for request in range(SPANS)}))
    assert exported(tmp_path / "l", "otlp", collector.url) == 0
    assert f"{collector.url}/v1/traces: {SPANS} tokens, {SPANS + 1} spans, " in capsys.readouterr().out
    assert len(collector.asked) == 2
    collector.statuses = [200, 503]
    assert exported(tmp_path / "l", "otlp", collector.url) == 2
    assert f"503 Service Unavailable; {SPANS} spans before were taken; see what" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "asked", "told"),
    [
        ("", "/v1/traces", "/v1/traces"),
        ("/v1/traces", "/v1/traces", "/v1/traces"),
        ("/v1/traces/#x", "/v1/traces", "/v1/traces"),
        ("/of/team?key=s3cret", "/of/team/v1/traces?key=s3cret", "/of/team/v1/traces"),
    ],
)
def test_the_place_of_traces_is_added_to_an_address(
    measured: Path,
    capsys: pytest.CaptureFixture[str],
    collector: Collector,
    service: Any,
    given: str,
    asked: str,
    told: str,
) -> None:
    assert exported(measured, "otlp", collector.url.replace("http", "HTTP") + given) == 0
    assert capsys.readouterr().out.startswith(f"{collector.url}{told}: ")
    assert collector.asked[0][0] == asked


@pytest.mark.parametrize("as_json", [False, True])
def test_a_password_goes_to_the_collector_and_nowhere_else(
    measured: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any, as_json: bool
) -> None:
    address, options = collector.url.replace("://", "://me:s3cr%40et@"), ("--json",) if as_json else ()
    collector.statuses = [200, 401, 500]
    codes = [exported(measured, "otlp", address, *options) for _ in range(3)]
    collector.body, collector.headers = b"", {"Location": address}
    collector.statuses = [302]
    codes.append(exported(measured, "otlp", address, *options))
    assert codes == [0, 2, 2, 2]
    expected = "Basic " + base64.b64encode(b"me:s3cr@et").decode()
    assert {headers["Authorization"] for _, headers, _ in collector.asked} == {expected}
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not {part for part in ("s3cr", "me:", expected[6:]) if part in text}
    assert "401 Unauthorized; give user and password in the address" in err


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (302, {"Location": "/elsewhere"}, "302 Found; give the address of an OTLP receiver"),
        (307, {"Location": "http://127.0.0.1:1/"}, "307 Temporary Redirect; give the address"),
        (
            400,
            {},
            "400 Bad Request; give the address of an OTLP receiver for HTTP, such as http://localhost:4318, or a",
        ),
        (403, {}, "403 Forbidden; give user and password in the address, as https://USER:PASSWORD@HOST"),
        (404, {}, "404 Not Found; give the address of an OTLP receiver"),
        (429, {}, "429 Too Many Requests; see what the receiver logs, and run it again: spans keep their ids"),
        (500, {}, "500 Internal Server Error; see what the receiver logs, and run it again"),
    ],
)
def test_what_a_collector_refuses(
    measured: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any,
    status: int, headers: dict[str, str], message: str,
) -> None:  # fmt: skip
    collector.statuses, collector.headers, collector.body = [status], headers, b"\x1b[31mwords"
    assert exported(measured, "otlp", collector.url) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: output = '{collector.url}/v1/traces': {message}")
    assert err.count("\n") == 1
    assert len(collector.asked) == 1


def test_spans_that_are_not_kept_are_told(
    measured: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any
) -> None:
    answer = service.ExportTraceServiceResponse()
    collector.body = answer.SerializeToString()
    assert exported(measured, "otlp", collector.url) == 0
    answer.partial_success.rejected_spans, answer.partial_success.error_message = 2, "too old\x1b"
    collector.body = answer.SerializeToString()
    capsys.readouterr()
    assert exported(measured, "otlp", collector.url) == 2
    assert "/v1/traces': 2 spans were rejected ('too old\\x1b'); see what" in capsys.readouterr().err
    for body in (b"ok", b"{}", b"<html>"):
        collector.body = body
        assert exported(measured, "otlp", collector.url) == 0


@pytest.mark.parametrize(
    ("silent", "raw"), [(True, b""), (False, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000)], ids=["silent", "drips"]
)
def test_a_collector_that_does_not_answer_is_not_waited_for(
    measured: Path, capsys: pytest.CaptureFixture[str], collector: Collector, service: Any,
    monkeypatch: pytest.MonkeyPatch, silent: bool, raw: bytes,
) -> None:  # fmt: skip
    monkeypatch.setattr("gapless.ledger.collector.LIMIT_S", 0.5)
    collector.silent, collector.raw = silent, raw
    begun_s = time.monotonic()
    assert exported(measured, "otlp", collector.url) == 2
    assert time.monotonic() - begun_s < 5
    err = capsys.readouterr().err
    assert "/v1/traces': it does not answer within 0.5 s; give the address" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://me:s3cret@127.0.0.1:1/et", "output = 'http://127.0.0.1:1/et/v1/traces': Connection refused; give the"),
        ("http://[", "output = 'http://[' is no proper address of http or https; give the address of an OTLP"),
        ("http://", "output = 'http://' is no proper address"),
        ("http://me:s3cr[et@host", "output = 'host' is no proper address"),
        ("http://me:1/s3cret@host", "output = 'host' is no proper address"),
        ("http://me:1?s3cret@host", "output = 'host' is no proper address"),
        ("http://host:port/?key=s3cret", "output = 'http://host:port/' is no proper address"),
        ("grpc://host:4317", "output = 'grpc://host:4317' is no proper address of http or https"),
        ("http://" + "x" * 70, "x/v1/traces': it is no proper address"),
        ("http://127.0.0.1:1/a b", "it is no proper address"),
    ],
)
def test_addresses_that_lead_nowhere(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    service: Any, address: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.chdir(tmp_path)
    assert exported(measured, "otlp", address, "--json") == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert "s3cr" not in out + err
    assert json.loads(out)["error"]["kind"] == "GaplessError"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["jsonl", "chrome", "parquet", "prometheus"])
def test_only_spans_go_to_an_address(measured: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert exported(measured, form, "http://me:s3cret@127.0.0.1:1") == 2
    expected = f"error: format = {form!r} goes to no address; give a path, or --format otlp\n"
    assert capsys.readouterr().err == expected
