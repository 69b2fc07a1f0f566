"""Recorded ledgers: written by a benchmark, read back, shown and compared; damaged ones are told."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.cli import main
from gapless.errors import LedgerFileError
from gapless.ledger.accounts import Account
from gapless.ledger.compare import changes, t_quantile, welch, worst
from gapless.ledger.export import write_chrome, write_jsonl
from gapless.ledger.file import MAX_LINE_BYTES, Recorded, RecordedSteps, read, write
from gapless.ledger.otlp import write_otlp
from gapless.ledger.report import lines, summary_of
from gapless.ledger.stability import TokenTimes, token_times
from recorded_books import BATCH, BENCH, MS, RUNS, TOKENS, measure, recorded
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", "smollm2", "Q4_0"))


@pytest.fixture(scope="module")
def measured(tiny: str) -> Path:
    return measure(Path(tiny))


def same(a: Recorded, b: Recorded) -> bool:
    pairs = [(vars(getattr(x, part)) for x in (a, b)) for part in ("intervals", "steps", "host", "totals")]
    return (
        a.facts == b.facts
        and np.array_equal(a.run, b.run)
        and all(alike(x[name], y[name]) for x, y in pairs for name in x)
    )


def alike(a: Any, b: Any) -> bool:
    return np.array_equal(a, b, equal_nan=getattr(a, "dtype", np.dtype(int)).kind == "f")


# --- the file


def test_a_benchmark_is_recorded_wholly(measured: Path) -> None:
    found = read(measured)
    assert (found.facts.runs, found.facts.batch, found.facts.output_tokens) == (RUNS, BATCH, TOKENS)
    i, s = found.intervals, found.steps
    assert len(i) == found.totals.tokens == RUNS * BATCH * TOKENS
    for run in range(RUNS):
        assert sorted(i.token[found.run == run].tolist()) == sorted([*range(TOKENS)] * BATCH)
    requests = [set(i.request[found.run == run].tolist()) for run in range(RUNS)]
    assert [len(r) for r in requests] == [BATCH] * RUNS
    assert not requests[0] & requests[1]
    assert min(i.begin.min(), s.begun.min()) == 0
    assert (i.spent.sum(axis=1) == i.end - i.begin).all()
    at = {
        step: (run, ended) for run, step, ended in zip(s.run.tolist(), s.step.tolist(), s.ended.tolist(), strict=True)
    }
    for run, step, end in zip(found.run.tolist(), i.step.tolist(), i.end.tolist(), strict=True):
        assert at[step][0] == run, "the step is of the same run"
        assert at[step][1] <= end, "and gave its token before it could be used"


def test_what_a_ledger_no_longer_keeps_is_recorded(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.ledger.ledger.KEPT_TOKENS", 4)
    monkeypatch.setattr("gapless.ledger.ledger.BATCH_STEPS", 2)
    assert main(["bench", tiny, *BENCH, "--ledger-file", str(tmp_path / "l")]) == 0
    found = read(tmp_path / "l")
    assert (found.totals.tokens, found.totals.steps) == (RUNS * BATCH * TOKENS, len(set(found.steps.step.tolist())))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 5)), st.lists(st.integers(0, 10**9), max_size=5), max_size=6
    ),
    st.sampled_from(["l.jsonl", "l.gz"]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: dict[tuple[int, int], list[int]], name: str
) -> None:
    path, books = tmp_path_factory.mktemp("round") / name, recorded(lengths)
    write(path, books)
    assert same(read(path), books)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (name == "l.gz")
    assert [p.name for p in path.parent.iterdir()] == [name], "nothing is left beside it"
    use(read(path))


def use(books: Recorded) -> None:
    """All that is done with books works, whatever a file says."""
    entries = [token for _, token in worst(books)]
    assert lines(summary_of(books.totals, entries, times_of(books), books.facts.source), n_worst=10)
    json.dumps(summary_of(books.totals, entries, times_of(books), books.facts.source), allow_nan=False)
    changes(books, books)
    with open(os.devnull, "wb") as sink:
        write_jsonl(books, sink)
        write_chrome(books, sink)
        write_otlp(books, sink)


@pytest.mark.parametrize("name", ["l.jsonl", "l.gz"])
def test_every_prefix_is_told_to_be_one(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, recorded({(0, 1): [1000, 20, 30], (1, 2): [40]}))
    data, cut = (tmp_path / name).read_bytes(), tmp_path / "cut"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        if name == "l.jsonl" and size == len(data) - 1:
            read(cut)  # but for its last newline
            continue
        with pytest.raises(LedgerFileError, match=r"is truncated|is not a recorded ledger"):
            read(cut)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["l.jsonl", "l.gz"]), st.integers(0, 1 << 30), st.integers(1, 4))
def test_damage_is_told_or_read(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, flips: int) -> None:
    path, rng = tmp_path_factory.getbasetemp() / f"damaged-{name}", random.Random(seed)
    write(path, recorded({(0, 1): [1000, 20, 30], (1, 2): [40, 50]}))
    data = bytearray(path.read_bytes())
    for _ in range(flips):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), ord(rng.choice('0123456789-.e"[]{},:'))])
    path.write_bytes(data)
    try:
        use(read(path))
    except LedgerFileError as problem:
        told = problem
    else:
        return
    assert str(path) in told.problem
    assert told.remedy
    assert "\n" not in str(told)


def edited(path: Path, line: int, change: Callable[[Any], Any]) -> Path:
    values = [json.loads(text) for text in path.read_text().splitlines()]
    values[line] = change(values[line])
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def at(place: Any, value: Any) -> Callable[[Any], Any]:
    def change(row: Any) -> Any:
        row[place] = value
        return row

    return change


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (0, at("version", 3), "was written by a newer gapless: its version is 3; update gapless to read it"),
        (0, at("version", 1), "was written by an older gapless: its version is 1; record it again"),
        (0, at("version", True), "is damaged: line 1: version = True is unknown"),
        (0, at("version", 0), "is damaged: line 1: version = 0 is unknown"),
        (
            0,
            at("format", "other"),
            "is not a recorded ledger; give a file that 'gapless bench --ledger-file' has written",
        ),
        (0, lambda _: [1], "is not a recorded ledger"),
        (0, at("model", 3), "line 1: model = 3 is no text"),
        (0, at("model", "\ud800"), r"line 1: model = '\\ud800' is no text"),
        (0, at("batch", "2"), "line 1: batch = '2' is not a whole number"),
        (0, at("ceilings", None), r"line 1: ceilings = \(missing\) is no object"),
        (0, at("ceilings", {}), r"line 1: bandwidth_bytes_per_s = \(missing\) is not a number"),
        (0, at("runs", 1), "line 4: run = 1 is beyond the 1 runs"),
        (1, lambda _: 7, "line 2: a row begins with neither 'token' nor 'step'"),
        (1, at(0, "tokens"), "line 2: a row begins with neither"),
        (1, lambda row: row[:-1], "line 2: a row of a token has 11 columns"),
        (1, at(2, 1.5), "line 2: request = 1.5 is not a whole number"),
        (1, at(2, True), "line 2: request = True is not a whole number"),
        (1, at(2, -1), "line 2: request = -1 is not a whole number"),
        (1, at(2, 1 << 60), "line 2: request = 1152921504606846976 is not a whole number"),
        (1, at(6, 1001), "line 2: the accounts do not add up to the interval"),
        (1, at(8, {"rent": 1}), "line 2: there is no account 'rent'"),
        (1, at(8, [1]), r"line 2: spent_ns = \[1\] is no object"),
        (1, at(9, {"weights": math.nan}), "line 2: weights = nan is not a number"),
        (1, at(9, {"weights": 10**400}), r"line 2: weights = 10{39}\.\.\. is not a number"),
        (1, at(10, {"weights": 1}), "line 2: there is no account 'weights'"),
        (1, at(11, "much"), "line 2: joules = 'much' is not a number"),
        (4, at(4, 0), "line 5: the step ends before it begins"),
        (4, at(5, 0), "line 5: waited_ns = 0 is no list of 1 times"),
        (4, at(5, [1, 2]), r"line 5: waited_ns = \[1, 2\] is no list of 1 times"),
        (6, at(3, "rent"), "line 7: there is no account 'rent'"),
        (6, at(3, 7), "line 7: there is no account 7"),
        (0, at("source", "guessed"), "line 1: source = 'guessed' is none of measured, modelled, replayed"),
        (0, at("meters", "gpu"), "line 1: meters = 'gpu' is no list of names"),
        (0, at("started_unix_ns", None), r"line 1: started_unix_ns = \(missing\) is not a whole number"),
        (-1, at("tokens", 4), "line 10: there are 3 tokens and 2 steps, and should be 4 and 2"),
        (-1, at("spent_ns", {}), "line 10: the totals are not the sums of the rows"),
        (-1, at("wall_ns", 1), "line 10: the totals are not the sums of the rows"),
        (-1, at("share", {}), "line 10: the totals are not the sums of the rows"),
        (-1, at("undelivered", {"flops": 1}), "line 10: the totals are not the sums of the rows"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, line: int, change: Callable[[Any], Any], message: str) -> None:
    books = recorded({(0, 1): [1000, 20], (1, 2): [40]})
    books = replace(books, steps=RecordedSteps(*(column[1:] for column in vars(books.steps).values())))
    books.totals.steps = 2
    write(tmp_path / "l", books)
    with pytest.raises(LedgerFileError, match=message):
        read(edited(tmp_path / "l", line, change))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a recorded ledger"),
        (b"\xff\xfe\n", "is not a recorded ledger"),
        (b"GGUF" + bytes(100), "is not a recorded ledger"),
        (b"[" * 100_000 + b"\n", "is not a recorded ledger"),
        (b"1" * (MAX_LINE_BYTES + 9), "is not a recorded ledger"),
        (b'{"error": 1}\n', "is not a recorded ledger"),
        (gzip.compress(b"{}\n", mtime=0), "is not a recorded ledger"),
        (b"\x1f\x8b", "is truncated: its compressed data end too early"),
        (b"\x1f\x8b" + bytes(50), "is damaged: its compressed data are wrong"),
        (b"HEAD" + b'["token", "\xff"]\n', "is damaged: line 2 is not UTF-8 text"),
        (b"HEAD" + b"[1,\n[2]\n", "is damaged: line 2 is not JSON"),
        (b"HEAD" + b"1" * 5000 + b"\n", "is damaged: line 2 is not JSON"),
        (b"HEAD" + b"[" * 100_000 + b"\n", "is damaged: line 2 is not JSON"),
        (b"HEAD" + b" " * (MAX_LINE_BYTES + 1), "is damaged: line 2 is too long"),
        (b"HEAD", "is truncated: it ends behind line 1, without its totals"),
        (b"HEAD" + b"[1, ", "is truncated: it ends within line 2"),
        (b"ALL" + b"\n", "is damaged: it goes on behind its end in line 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",
)
def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, message: str) -> None:
    write(tmp_path / "l", recorded({(0, 1): [1000]}))
    whole = (tmp_path / "l").read_bytes()
    data = data.replace(b"ALL", whole).replace(b"HEAD", whole[: whole.index(b"\n") + 1])
    (tmp_path / "l").write_bytes(data)
    assert main(["ledger", "show", str(tmp_path / "l")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: ledger '{tmp_path}/l' {message}")
    assert err.count("\n") == 1


def test_paths_that_name_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    cases = {"none": "does not exist", "": "is a folder", "pipe": "is no regular file", "loop": "cannot be read"}
    for name, message in {**cases, "x" * 300: "cannot be read"}.items():
        for args in (("show",), ("diff", str(tmp_path / name)), ("export", "--format", "jsonl", "--output", "x")):
            assert main(["ledger", *args, str(tmp_path / name), "--json"]) == 2
            out, err = capsys.readouterr()
            assert message in json.loads(out)["error"]["problem"]
            assert err.count("\n") == 1


# --- what writes it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ledger-file", "DIR/l", "--no-ledger"), "--ledger-file needs the books that --no-ledger leaves out"),
        (("--ledger-file", "DIR/l", "--executor", "reference"), "the reference executor keeps no time of its steps"),
        (("--ledger-file", "DIR"), "cannot be written: it is a folder"),
        (("--ledger-file", "DIR/none/l"), "cannot be written: No such file or directory"),
        (("--ledger-file", "DIR/file/l"), "cannot be written: Not a directory"),
        (("--ledger-file", "/dev/null"), "cannot be written: it is no regular file"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_is_measured(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("gapless.cli.options.EngineOptions.open", lambda *_: pytest.fail("a model was opened"))
    (tmp_path / "file").touch()
    assert main(["bench", tiny, *BENCH, *(o.replace("DIR", str(tmp_path)) for o in options)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l"
    (tmp_path / "link").symlink_to("l")
    write(tmp_path / "link", recorded({(0, 1): [10]}))
    assert (tmp_path / "link").is_symlink()
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LedgerFileError, match=r"ledger-file = '.*' cannot be written: No space left on device; give"):
        write(path, recorded({(0, 1): [10, 20]}))
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l", "link"]


# --- show


def test_show(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", str(measured), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["ledger"]["tokens"]) == (RUNS, RUNS * BATCH * TOKENS)
    times = found["ledger"]["token_times"]
    assert times["count"] == RUNS * BATCH * (TOKENS - 1)
    assert times["p50_seconds"] <= times["p90_seconds"] <= times["p99_seconds"] <= times["max_seconds"]
    slowest = found["ledger"]["worst"]
    assert len(slowest) == 10
    assert slowest[0]["seconds"] == times["max_seconds"]
    assert main(["ledger", "show", str(measured)]) == 0
    text = capsys.readouterr().out
    assert f"mean of {RUNS * BATCH * TOKENS} tokens" in text
    assert f"run {slowest[0]['run']} request {slowest[0]['request']} token {slowest[0]['token']}: " in text


def test_the_books_of_a_file_are_those_of_the_benchmark(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", tiny, *BENCH, "--ledger-file", str(tmp_path / "l"), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["ledger"]
    assert main(["ledger", "show", str(tmp_path / "l"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ledger"]
    for entry in shown["worst"]:
        entry.pop("run")
    assert shown["worst"] == measured["worst"]
    for books in (measured, shown):
        for account in books["accounts"].values():
            for name in ("floor_seconds", "tpot_floor_seconds"):
                account[name] = pytest.approx(account[name], rel=1e-3, abs=1e-12)
    for name in ("floor_shares", "wait_shares"):
        shown["triangle"][name] = pytest.approx(shown["triangle"][name], rel=1e-3, abs=1e-3)
    assert shown == measured


def times_of(books: Recorded) -> TokenTimes:
    return token_times([books.intervals], [books.run])


def test_times_between_tokens() -> None:
    """The first token of a request has none before it; a request's pace is not compared with another's."""
    found = times_of(recorded({(0, 1): [900 * MS, 10 * MS, 30 * MS, 20 * MS], (1, 1): [5, 40 * MS], (1, 2): [7]}))
    assert found.count == 4
    assert (found.p50_seconds, found.p90_seconds, found.max_seconds) == (0.02, 0.04, 0.04)
    assert found.jitter_seconds == pytest.approx((0.02 + 0.01) / 2)
    assert times_of(recorded({(0, 1): [5]})).p50_seconds is None
    assert times_of(recorded({(0, 1): [5, 6]})).jitter_seconds is None


def test_the_cause_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = recorded({(0, 3): [99 * MS, 1 * MS, 41 * MS]})
    books.intervals.spent[2] = 0
    books.intervals.spent[2, [Account.NEIGHBOURS, Account.KV]] = (33_100_000, 7_900_000)
    books.totals.spent_ns[:] = books.intervals.spent.sum(axis=0)
    for beside, cause in ((0, "neighbours"), (512, "a neighbour's prefill of 512 tokens")):
        books.intervals.beside[2] = beside
        write(tmp_path / "l", books)
        assert main(["ledger", "show", str(tmp_path / "l")]) == 0
        text = capsys.readouterr().out
        assert f"waited for longest:\n  request 3 token 2: 41.0 ms, 33.1 ms of it {cause}\n" in text
        assert "max 41.0 ms; jitter 40.0 ms (83% neighbours, 20% kv)" in text
        assert "the slowest token: 20.0 ms above the mean (83% neighbours, 20% kv)" in text


def test_books_without_tokens_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "l", recorded({}))
    for command in (("show",), ("diff", str(tmp_path / "l"))):
        for option in ((), ("--json",)):
            assert main(["ledger", *command, str(tmp_path / "l"), *option]) == 0, capsys.readouterr().err
    assert "too few runs: A has 0 and B has 0" in capsys.readouterr().out


# --- diff


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 10, 2.22814), (0.99, 4, 4.60409), (0.95, 1e6, 1.95997)],
)
def test_quantiles_are_those_of_the_tables(level: float, freedom: float, expected: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(expected, rel=1e-4)


def test_the_interval_is_welchs() -> None:
    """With variances 2 and 8 of three samples each: error sqrt(10 / 3), freedom (10/3)^2 / ((2/3)^2/2 + (8/3)^2/2)."""
    a, b = [10 - math.sqrt(2), 10, 10 + math.sqrt(2)], [20 - math.sqrt(8), 20, 20 + math.sqrt(8)]
    half = t_quantile(0.95, (10 / 3) ** 2 / ((2 / 3) ** 2 / 2 + (8 / 3) ** 2 / 2)) * math.sqrt(10 / 3)
    assert welch(a, b) == pytest.approx((10 - half, 10 + half))


def test_an_interval_holds_the_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        low, high = welch(rng.normal(0, 1, 4).tolist(), rng.normal(1, 3, 6).tolist())
        held += low <= 1 <= high
    assert 930 <= held <= 970


def with_lengths(*runs: list[int]) -> Recorded:
    return recorded({(run, run): of_tokens for run, of_tokens in enumerate(runs)})


def test_changes_are_told_from_how_runs_differ() -> None:
    a = with_lengths([100, 100], [102, 102], [98, 98])
    verdicts = {c.account: c.verdict for c in changes(a, with_lengths([200, 200], [202, 202], [198, 198]))}
    assert (verdicts["weights"], verdicts["in all"], verdicts["queue"]) == ("more", "more", "no significant change")
    slight = {c.account: c for c in changes(a, with_lengths([101, 101], [103, 103], [100, 98]))}
    assert slight["in all"].verdict == "no significant change"
    assert slight["in all"].change_seconds > 0
    one = {c.account: c for c in changes(a, with_lengths([500, 500]))}["in all"]
    assert one.verdict == "no significant change (too few runs: B has 1)"
    assert (one.significant, one.interval_seconds) == (False, None)


def test_a_file_is_no_different_from_itself(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "diff", str(measured), str(measured), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {}
    assert [c["account"] for c in found["accounts"]] == [*(a.label for a in Account), "in all"]
    assert {c["verdict"] for c in found["accounts"]} == {"no significant change"}
    assert main(["ledger", "diff", str(measured), str(measured)]) == 0
    out, err = capsys.readouterr()
    rows = out.splitlines()[1:]
    assert all(row.endswith("no significant change") for row in rows if row)
    in_all = next(place for place, row in enumerate(rows) if row.startswith("in all"))
    assert rows[in_all + 1] == ""
    assert [row[:12] for row in rows[in_all + 2 :]] == ["first token ", "later token ", "p99 of later", "max of later"]
    assert err == ""


def test_times_that_users_feel_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of all tokens is the same: one token waits and others are faster."""
    even = with_lengths([100, 102, 98, 100], [100, 102, 98, 100], [100, 101, 99, 100])
    uneven = with_lengths([100, 41, 41, 218], [100, 40, 40, 220], [100, 41, 40, 219])
    write(tmp_path / "a", even)
    write(tmp_path / "b", uneven)
    assert main(["ledger", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    verdicts = {change["account"]: change["verdict"] for change in found["times"]}
    assert verdicts["max of later"] == verdicts["p99 of later"] == "more"
    assert verdicts["first token"] == verdicts["later token"] == "no significant change"


def test_settings_that_differ_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = with_lengths([100, 90], [100, 91])
    for name, chosen in (("a", {"depth": 1, "kv_dtype": "f16"}), ("b", {"depth": 2, "kv_dtype": "f16", "new": 1})):
        write(tmp_path / name, replace(books, facts=replace(books.facts, settings=chosen)))
    assert main(["ledger", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == "A and B differ in depth: 1 and 2\n"


def test_what_else_differs_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = with_lengths([100, 90], [100, 91])
    write(tmp_path / "a", books)
    write(tmp_path / "b", replace(books, facts=replace(books.facts, model="other\x1b", prompt_tokens=9)))
    assert main(["ledger", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    err = capsys.readouterr().err
    assert err == "A and B differ in model: m and other\nA and B differ in prompt tokens: 4 and 9\n"


# --- the group


def test_the_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger"]) == 0
    assert "export" in capsys.readouterr().out
    assert main(["ledger", "burn"]) == 2
    assert "see 'gapless ledger --help'" in capsys.readouterr().err


# --- what bits a weight change


def requantised(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """The model with all its matrices in another format."""
    reader = GGUFReader(source)
    writer = GGUFWriter(str(target), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            part = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], part)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
            writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
def test_twice_the_bits_of_weights_are_booked_to_weights(
    real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else differs between the two models: what a token waits longer is the weights'.

    Others may hold the machine for a while, and then nothing is significant: it is measured again.
    """
    load = ("--threads", "1", "--runs", "6", "--prompt-tokens", "4", "--output-tokens", "32", "--kv-memory", "64MB")
    kinds = {"four": GGMLQuantizationType.Q4_0, "eight": GGMLQuantizationType.Q8_0}
    models = {name: requantised(real_model, tmp_path / f"{name}.gguf", kind) for name, kind in kinds.items()}
    for _ in range(5):
        for name, model in models.items():
            assert main(["bench", str(model), *load, "--ledger-file", str(tmp_path / name)]) == 0
        capsys.readouterr()
        assert main(["ledger", "diff", str(tmp_path / "four"), str(tmp_path / "eight"), "--json"]) == 0
        found = {change["account"]: change for change in json.loads(capsys.readouterr().out)["accounts"]}
        weights, in_all = found.pop("weights"), found.pop("in all")
        most_of_others = max(abs(change["change_seconds"]) for change in found.values())
        if weights["significant"] and in_all["significant"] and weights["change_seconds"] > 2 * most_of_others:
            break
    assert weights["verdict"] == in_all["verdict"] == "more"
    assert weights["change_seconds"] > 2 * most_of_others
