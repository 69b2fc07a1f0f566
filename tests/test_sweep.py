"""Sweeps: points, slopes and what is written of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.cli import main
from gapless.ledger.accounts import Account
from gapless.sweep import slopes
from tiny_gguf import write_gguf

pytestmark = pytest.mark.xdist_group("real-model")

SIZE = ("--output-tokens", "4", "--prompt-tokens", "8", "--runs", "1", "--threads", "1", "--kv-memory", "8MB")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("sweep") / "tiny.gguf", "smollm2", "Q4_0"))


@pytest.mark.parametrize(
    ("over", "values", "xs"),
    [("context", "100,20", [20, 100]), ("batch", "1,3", [1, 3]), ("prompt", None, [64, 128]), ("context", "30", [30])],
)
def test_sweeps(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], over: str, values: str | None, xs: list[int]
) -> None:
    options = ["--sweep", over, *(["--values", values] if values else []), "--csv", str(tmp_path / "s.csv")]
    assert main(["bench", tiny, *SIZE, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["x"] for point in found["points"]] == xs
    for point in found["points"]:
        expected = {"context": ("prompt_tokens", point["x"] - 2), "batch": ("batch", point["x"]),
                    "prompt": ("prompt_tokens", point["x"])}[over]  # fmt: skip
        assert point[expected[0]] == expected[1]
    assert bool(found["slopes"]) == (len(xs) > 1)
    with (tmp_path / "s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row[over]) for row in rows] == xs
    for row in rows:
        accounts = sum(float(row[account.label]) for account in Account)
        assert accounts == pytest.approx(float(row["ttft_seconds" if over == "prompt" else "tpot_seconds"]))


def test_a_sweep_for_people(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", tiny, *SIZE, "--sweep", "context", "--values", "20,200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["context", "tokens/s", "ms"]
    assert [line.split()[0] for line in lines[1:]] == ["20", "200", "+1,000"]
    assert main(["bench", tiny, *SIZE, "--sweep", "context", "--values", "20"]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert "weights" in alone[0], "one value has accounts, and no slope"
    assert [line.split()[0] for line in alone[1:]] == ["20"]


def test_slopes_are_least_squares() -> None:
    def point(x: int) -> dict[str, Any]:
        times = {a.label: {"tpot_seconds": 0.0, "ttft_seconds": 0.0} for a in Account}
        times["kv"]["tpot_seconds"], times["weights"]["tpot_seconds"] = 1e-3 + 2e-6 * x, 3e-3
        return {"x": x, "ledger": {"accounts": times}}

    found = slopes("context", [point(x) for x in (100, 200, 400)])
    assert set(found) == {"kv", "weights"}
    assert found["kv"] == pytest.approx({"seconds_for_one_more": 2e-6, "seconds_at_none": 1e-3})
    assert found["weights"]["seconds_for_one_more"] == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--values", "1,2"), "--values is of a sweep"), (("--csv", "x"), "--csv is of a sweep"),
        (("--sweep", "batch", "--values", "1,x"), "no list like 1,2,4"),
        (("--sweep", "batch", "--values", "0"), "no list like 1,2,4"),
        (("--sweep", "batch", "--no-ledger"), "leave --no-ledger out"),
        (("--sweep", "batch", "--ledger-file", "x"), "leave --sweep out"),
        (("--sweep", "context", "--plot", "a.gif"), "svg"), (("--sweep", "size"), "size"),
        (("--sweep", "context", "--values", "9999"), "values: context = 9999"),
    ],
)  # fmt: skip
def test_sweeps_that_are_none(
    tiny: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert main(["bench", tiny, *SIZE, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--values", "1,2", "--csv", "{0}/none/x.csv"), "csv = "),
        (("--values", "1,2", "--csv", "{0}"), "csv = "),
        (("--values", "7,1000000"), "values: context = 1000000"),
    ],
)
def test_nothing_is_measured_for_a_sweep_that_cannot_end(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("gapless.sweep.benchmark", lambda *_, **__: pytest.fail("it was measured"))
    assert main(["bench", tiny, *SIZE, "--sweep", "context", *(o.format(tmp_path) for o in options)]) == 2
    assert message in capsys.readouterr().err


def test_plots(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn where matplotlib is there, else what to install is said."""
    sweep = ("--sweep", "batch", "--values", "1,2", "--plot", str(tmp_path / "plot.svg"))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert main(["bench", tiny, *SIZE, *sweep]) == 2
        assert "pip install 'gapless[plot]'" in capsys.readouterr().err
    else:
        assert main(["bench", tiny, *SIZE, *sweep]) == 0
        assert "<svg" in (tmp_path / "plot.svg").read_text()
