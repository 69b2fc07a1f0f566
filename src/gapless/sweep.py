"""How a model's times grow with its context, its batch or its prompts, account by account."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gapless.bench import benchmark
from gapless.ceilings import Ceilings
from gapless.errors import GaplessError
from gapless.ledger.accounts import Account
from gapless.llm import LLM

Over = Literal["context", "batch", "prompt"]
VALUES: dict[Over, tuple[int, ...]] = {
    "context": (512, 1024, 2048, 4096, 6144, 8000),
    "batch": (1, 2, 4, 8, 16, 32),
    "prompt": (64, 128, 256, 512, 1024, 2048),
}
# What is fitted: the time of first tokens against prompts, of those behind the first against the rest.
TIMES: dict[Over, str] = {"context": "tpot_seconds", "batch": "tpot_seconds", "prompt": "ttft_seconds"}


def sweep(
    llm: LLM, over: Over, values: Sequence[int], *, batch: int, prompt_tokens: int, output_tokens: int, runs: int,
    measure: Callable[[], Ceilings], progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Benchmarks at each value, and the least-squares slope of each account: seconds for one more.

    With ``context`` the middle of the answer lies at the value; with ``prompt`` one token is answered.

    Raises:
        RequestError: a value does not fit the context or the cache.
    """
    points = []
    for value in values:
        progress(f"{over} {value}")
        prompt = {"context": max(value - output_tokens // 2, 1), "batch": prompt_tokens, "prompt": value}[over]
        result = benchmark(
            llm, batch=value if over == "batch" else batch, prompt_tokens=prompt,
            output_tokens=1 if over == "prompt" else output_tokens, runs=runs, measure=measure,
        )  # fmt: skip
        points.append(result | {"x": value})
    return {"over": over, "time": TIMES[over], "points": points, "slopes": slopes(over, points)}


def slopes(over: Over, points: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each account that was booked to: seconds for one more of what is swept over, and at none of it."""
    if len(points) < 2:
        return {}
    x = np.array([point["x"] for point in points], float)
    found = {}
    for account in Account:
        y = np.array([point["ledger"]["accounts"][account.label][TIMES[over]] for point in points])
        if y.any():
            slope, at_none = np.polyfit(x, y, 1)
            found[account.label] = {"seconds_for_one_more": float(slope), "seconds_at_none": float(at_none)}
    return found


def lines(result: dict[str, Any]) -> list[str]:
    """A table: a row for each value, the accounts that ever take a hundredth of the time, and their slopes."""
    points, time = result["points"], result["time"]
    names = [account.label for account in Account]
    shown = [name for name in names if max(_share(point, name, time) for point in points) >= 0.01]
    found = [f"{result['over']:>8} {'tokens/s':>9} {'ms':>9} " + " ".join(f"{name[:10]:>10}" for name in shown)]
    for point in points:
        rate = point["prefill_tokens_per_s" if time == "ttft_seconds" else "decode_tokens_per_s"]
        parts = " ".join(f"{1e3 * _seconds(point, name, time):10.3f}" for name in shown)
        found.append(f"{point['x']:8,} {rate or 0:9,.0f} {1e3 * _total(point, time):9.3f} {parts}")
    if not result["slopes"]:
        return found
    per = 1 if result["over"] == "batch" else 1000
    rise = " ".join(f"{1e3 * per * result['slopes'][name]['seconds_for_one_more']:10.4f}" for name in shown)
    total = sum(slope["seconds_for_one_more"] for slope in result["slopes"].values())
    return [*found, f"{f'+{per:,}':>8} {'':9} {1e3 * per * total:9.4f} {rise}"]


def _seconds(point: dict[str, Any], name: str, time: str) -> float:
    return float(point["ledger"]["accounts"][name][time])


def _total(point: dict[str, Any], time: str) -> float:
    return sum(float(account[time]) for account in point["ledger"]["accounts"].values())


def _share(point: dict[str, Any], name: str, time: str) -> float:
    return _seconds(point, name, time) / (_total(point, time) or 1)


def write_csv(result: dict[str, Any], path: Path) -> None:
    """A row for each value: the rates, and each account in seconds."""
    names = [account.label for account in Account]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([result["over"], "prefill_tokens_per_s", "decode_tokens_per_s", result["time"], *names])
        for point in result["points"]:
            accounts = [_seconds(point, name, result["time"]) for name in names]
            rates = (point["prefill_tokens_per_s"], point["decode_tokens_per_s"])
            writer.writerow([point["x"], *rates, _total(point, result["time"]), *accounts])


def check_plots() -> None:
    """Raises GaplessError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise GaplessError("plots need matplotlib", "pip install 'gapless[plot]'")


def write_plot(result: dict[str, Any], path: Path) -> None:
    """The accounts stacked over what is swept; SVG or PNG by the name's end."""
    from matplotlib.figure import Figure

    x, time = [point["x"] for point in result["points"]], result["time"]
    names = [name for name in result["slopes"] if any(_share(p, name, time) >= 0.01 for p in result["points"])]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(x, [[1e3 * _seconds(p, name, time) for p in result["points"]] for name in names], labels=names)
    axes.set_xlabel(
        {"context": "tokens of context", "batch": "requests", "prompt": "tokens of the prompt"}[result["over"]]
    )
    axes.set_ylabel("ms to the first token" if time == "ttft_seconds" else "ms a token")
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path)
