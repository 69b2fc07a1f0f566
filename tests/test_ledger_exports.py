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
from gapless.ledger.export import write_parquet
from gapless.ledger.file import read, write
from gapless.ledger.shares import N_SHARES
from recorded_books import BATCH, RUNS, TOKENS, measure, recorded
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(write_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", "smollm2", "Q4_0"))


def test_a_trace_is_one_of_chromes(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert main(["ledger", "export", str(measured), "--format", "chrome", "--output", str(target), "--json"]) == 0
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
    assert main(["ledger", "export", str(measured), "--format", "jsonl", "--output", str(target)]) == 0
    rows, i = [json.loads(line) for line in target.read_text().splitlines()], read(measured).intervals
    assert [row["end_ns"] for row in rows] == i.end.tolist()
    for row in rows:
        assert sum(row["spent_ns"].values()) == row["end_ns"] - row["begin_ns"]
        assert set(row["floor_ns"]) <= {a.label for a in Account}


def test_a_table_of_parquet(measured: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "l.parquet"
    assert main(["ledger", "export", str(measured), "--format", "parquet", "--output", str(target)]) == 0
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


def test_parquet_needs_pyarrow(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert main(["ledger", "export", str(measured), "--format", "parquet", "--output", str(tmp_path / "l")]) == 2
    assert "pip install gapless[export]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_export_does_not_take_the_place_of_its_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "l", recorded({(0, 1): [10]}))
    (tmp_path / "link").symlink_to("l")
    for name in ("l", "link"):
        args = ("export", str(tmp_path / "l"), "--format", "jsonl", "--output", str(tmp_path / name))
        assert main(["ledger", *args]) == 2
        assert "is the ledger itself; give another path" in capsys.readouterr().err
    read(tmp_path / "l")
