"""Ceilings that are measured once and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless import measured
from gapless.cli import main
from gapless.doctor import known_ceilings
from gapless.measured import Measured, path_of, store, stored
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

FOUND = Measured("A Processor", "avx2", 2, ((1 << 20, 100.0), (1 << 22, 60.0)), 5e11, 1e11)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_found_again() -> None:
    assert stored("A Processor", 2, "avx2") is None
    assert store(FOUND) == path_of("avx2", 2)
    assert stored("A Processor", 2, "avx2") == FOUND
    assert (
        stored("Another", 2, "avx2") is stored("A Processor", 1, "avx2") is stored("A Processor", 2, "portable") is None
    )


def test_a_busy_machine_lowers_nothing() -> None:
    store(FOUND)
    store(Measured("A Processor", "avx2", 2, ((1 << 20, 50.0), (1 << 22, 70.0)), 6e11, 1e10))
    assert stored("A Processor", 2, "avx2") == Measured(
        "A Processor", "avx2", 2, ((1 << 20, 100.0), (1 << 22, 70.0)), 6e11, 1e11
    )


@pytest.mark.parametrize(
    ("size", "rate"), [(1, 100.0), (1 << 20, 100.0), (1 << 21, 80.0), (1 << 22, 60.0), (1 << 40, 60.0), (0, 100.0)]
)
def test_bandwidth_between_two_sizes(size: int, rate: float) -> None:
    ceilings = FOUND.ceilings(size)
    assert ceilings.bandwidth_bytes_per_s == pytest.approx(rate)
    assert (ceilings.int8_ops_per_s, ceilings.float_ops_per_s) == (5e11, 1e11)


def test_files_that_are_none_are_measured_anew() -> None:
    path = store(FOUND)
    whole = path.read_text()
    values = json.loads(whole)
    broken = [whole[:n] for n in range(0, len(whole) - 1, 7)]
    broken += [json.dumps(values | change) for change in (
        {"version": 1}, {"version": 3}, {"bandwidth": []}, {"bandwidth": [[1, 0]]}, {"bandwidth": [[4, 1], [2, 1]]},
        {"bandwidth": 3},
        {"int8_ops_per_s": "fast"}, {"float_ops_per_s": -1}, {"int8_ops_per_s": float("nan")}, {"processor": None},
        {"bandwidth": [[0, 1]]},
    )]  # fmt: skip
    for text in [*broken, "[]", "null", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")]:
        path.write_text(text)
        assert stored("A Processor", 2, "avx2") is None, text[:60]


def test_what_was_kept_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.doctor.processor_name", lambda: "A Processor")
    store(FOUND)
    assert known_ceilings(2, 1 << 21, "avx2") == FOUND.ceilings(1 << 21)


def test_measuring_and_using(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = str(write_gguf(tmp_path / "tiny.gguf", "smollm2", "Q4_0"))
    monkeypatch.setattr(measured, "WORKING_SETS", (1 << 20, 1 << 22))
    assert main(["doctor", tiny, "--threads", "1", "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert [size for size, _ in found["bandwidth"]] == [1 << 20, 1 << 22]
    assert found["int8_ops_per_s"] > found["float_ops_per_s"] > 1e8
    monkeypatch.setattr("gapless.doctor.measure_ceilings", lambda *_: pytest.fail("they are known"))
    assert main(["generate", tiny, "--prompt", "a", "--max-tokens", "5", "--threads", "1", "--ledger", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completion_tokens"] == 5
    assert "mean of 5 tokens" in captured.err
    assert "most above its floor" in captured.err
    impossible = ("--waiting-budget", "0.0001us", "--threads", "1", "--max-tokens", "5")
    assert main(["generate", tiny, "--prompt", "a", *impossible, "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completion_tokens"] == 5, "the answer stands"
    assert "is less than the floors of a token" in captured.err


def test_the_reference_keeps_no_books(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(write_gguf(tmp_path / "tiny.gguf", "smollm2", "Q4_0"))
    assert main(["generate", tiny, "--prompt", "a", "--executor", "reference", "--ledger"]) == 2
    assert "the reference executor keeps no time of its steps" in capsys.readouterr().err
