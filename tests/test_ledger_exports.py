"""Recorded ledgers for other programs: what is written is what the books say, as those programs read it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.cli import main
from gapless.ledger.accounts import N_ACCOUNTS, Account
from gapless.ledger.export import write_parquet, write_prometheus
from gapless.ledger.file import read, write
from gapless.ledger.prometheus import TokenSeconds, families
from gapless.ledger.shares import N_SHARES, Share
from recorded_books import BATCH, RUNS, TOKENS, measure, recorded
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(write_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", "smollm2", "Q4_0"))


def exported(ledger: Path, form: str, target: Path | str, *options: str) -> int:
    return main(["ledger", "export", str(ledger), "--format", form, "--output", str(target), *options])


def test_a_trace_is_one_of_chromes(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert exported(measured, "chrome", target, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["tokens"], told["bytes"]) == (
        str(target), RUNS * BATCH * TOKENS, target.stat().st_size,
    )  # fmt: skip
    trace, books = json.loads(target.read_text()), read(measured)
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid", "args"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(tracks) == RUNS * BATCH + 1 + 1 + 1, "requests, steps, a thread, the host"
    of = {kind: [e for e in events if e.get("cat") == kind] for kind in ("token", "account", "step")}
    assert (len(of["token"]), len(of["step"])) == (len(books.intervals), len(books.steps.step))
    parts = iter(of["account"])
    for token, spent in zip(of["token"], books.intervals.spent, strict=True):
        until = token["ts"]
        for account in np.flatnonzero(spent).tolist():
            part = next(parts)
            assert (part["name"], part["tid"]) == (Account(account).label, token["tid"])
            assert part["ts"] == pytest.approx(until, abs=1e-3)
            until = part["ts"] + part["dur"]
        assert until == pytest.approx(token["ts"] + token["dur"], abs=1e-3), "the accounts fill the token"


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


@pytest.mark.parametrize(
    ("form", "library", "modules"),
    [
        ("parquet", "pyarrow", ("pyarrow", "pyarrow.parquet")),
        ("prometheus", "prometheus_client", ("prometheus_client",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_library_is_named(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    form: str, library: str, modules: tuple[str, ...],
) -> None:  # fmt: skip
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert exported(measured, form, tmp_path / "l") == 2
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
