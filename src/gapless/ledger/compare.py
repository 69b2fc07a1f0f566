"""What recorded ledgers say: which tokens were waited for longest, and what two runs differ in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import Account
from gapless.ledger.file import Facts, Recorded
from gapless.ledger.ledger import WorstToken, worst_of

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
IN_ALL = "in all"
_ANGLES = 100_001


def worst(recorded: Recorded) -> list[tuple[int, WorstToken]]:
    """The tokens behind the first of their request that were waited for longest, one of each step, behind its run."""
    return [(int(recorded.run[at]), token) for at, token in worst_of(recorded.intervals, recorded.run)]


# --- two of them


@dataclass(frozen=True)
class Change:
    """One account's time for a token in two recorded ledgers.

    Attributes:
        account: its name, or "in all".
        a_seconds, b_seconds: the mean over runs of the run's mean for a token.
        interval_seconds: Welch's interval of the change, B less A; None where there are too few runs.
        significant: whether it holds no 0.
        verdict: in words.
    """

    account: str
    a_seconds: float
    b_seconds: float
    change_seconds: float
    interval_seconds: tuple[float, float] | None
    significant: bool
    verdict: str


def changes(a: Recorded, b: Recorded) -> list[Change]:
    """Of every account, and then of all together. Raises nothing: no tokens are no runs."""
    runs_a, runs_b = _run_means(a), _run_means(b)
    few = _too_few(len(runs_a), len(runs_b))
    names = [account.label for account in Account] + [IN_ALL]
    return [_change(name, runs_a[:, at], runs_b[:, at], few) for at, name in enumerate(names)]


def time_changes(a: Recorded, b: Recorded) -> list[Change]:
    """Of the times that users feel, each of a run: an account's mean may stay while they move."""
    few = _too_few(len(np.unique(a.run)), len(np.unique(b.run)))
    found = []
    for name, figure in _TIMES.items():
        of_a, of_b = (_run_times(recorded, figure) for recorded in (a, b))
        if len(of_a) and len(of_b):
            found.append(_change(name, of_a, of_b, few or _too_few(len(of_a), len(of_b))))
    return found


# Of the tokens of a run their times, and whether each is the first of its request.
_TIMES: dict[str, Callable[[Floats, npt.NDArray[np.bool_]], Floats]] = {
    "first token": lambda times, first: times[first].mean(keepdims=True) if first.any() else times[:0],
    "later token": lambda times, first: times[~first].mean(keepdims=True) if not first.all() else times[:0],
    "p99 of later": lambda times, first: np.quantile(times[~first], [0.99]) if not first.all() else times[:0],
    "max of later": lambda times, first: times[~first].max(keepdims=True) if not first.all() else times[:0],
}


def _run_times(recorded: Recorded, figure: Callable[[Floats, npt.NDArray[np.bool_]], Floats]) -> Floats:
    """A figure of each run that has it."""
    i = recorded.intervals
    seconds, first = (i.end - i.begin) / 1e9, i.token == 0
    runs = [recorded.run == run for run in np.unique(recorded.run)]
    return np.concatenate([np.zeros(0), *(figure(seconds[run], first[run]) for run in runs)])


def _run_means(recorded: Recorded) -> Floats:
    """(runs with tokens, accounts and their sum): seconds for a token, the mean over the run's."""
    spent = recorded.intervals.spent
    means = [spent[recorded.run == run].mean(axis=0) / 1e9 for run in np.unique(recorded.run)]
    accounts = np.array(means).reshape(-1, spent.shape[1])
    return np.concatenate([accounts, accounts.sum(axis=1, keepdims=True)], axis=1)


def _too_few(n_a: int, n_b: int) -> str:
    """Which ledger has too few runs to tell a change from how runs differ anyway, in words; empty if none has."""
    few = [f"{name} has {n}" for name, n in (("A", n_a), ("B", n_b)) if n < 2]
    return f"too few runs: {' and '.join(few)}" if few else ""


def _change(name: str, a: Floats, b: Floats, few: str) -> Change:
    mean_a, mean_b = (float(x.mean()) if len(x) else 0.0 for x in (a, b))
    interval = None if few else welch(a.tolist(), b.tolist())
    significant = interval is not None and not interval[0] <= 0 <= interval[1]
    verdict = ("more" if mean_b > mean_a else "less") if significant else "no significant change"
    return Change(
        name, mean_a, mean_b, mean_b - mean_a, interval, significant, f"{verdict} ({few})" if few else verdict
    )


def differences(a: Facts, b: Facts) -> dict[str, tuple[Any, Any]]:
    """Facts in which the two differ beside how fast the machine was: what else may be why times changed."""
    names = [f.name for f in fields(Facts) if f.name not in ("runs", "ceilings", "started_unix_ns", "settings")]
    pairs: dict[str, tuple[Any, Any]] = {name: (getattr(a, name), getattr(b, name)) for name in names}
    pairs |= {name: (a.settings[name], b.settings[name]) for name in a.settings if name in b.settings}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def welch(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """An interval that holds the difference of two means, B less A, with probability ``level``.

    From at least two samples each, whose variances need not be equal (B. L. Welch, Biometrika 34, 1947).
    """
    parts = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    change, error = float(np.mean(b) - np.mean(a)), math.sqrt(sum(parts))
    if error == 0:
        return change, change
    shares = [part / sum(parts) for part in parts]
    freedom = 1 / sum(share**2 / (len(x) - 1) for share, x in zip(shares, (a, b), strict=True))
    half = t_quantile(level, freedom) * error
    return change - half, change + half


def t_quantile(level: float, freedom: float) -> float:
    """Between minus this and this lies a value of Student's t distribution with probability ``level``.

    With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1), times a constant. freedom >= 1.
    """
    angle = np.linspace(0, math.pi / 2, _ANGLES)
    density = np.cos(angle) ** (freedom - 1)
    until = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return math.sqrt(freedom) * math.tan(float(np.interp(level, until / until[-1], angle)))
