"""What recorded ledgers say: how evenly tokens came, which were waited for longest, and what two runs differ in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import Account
from gapless.ledger.file import Facts, Recorded
from gapless.ledger.ledger import N_WORST, WorstToken

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
IN_ALL = "in all"
_ANGLES = 100_001


@dataclass(frozen=True)
class TokenTimes:
    """Times between tokens of a request, its first token left out; seconds.

    Attributes:
        count: of them.
        p50_seconds, p90_seconds, p99_seconds: the least time that so many percent do not exceed.
        jitter_seconds: the mean difference, without its sign, of a time and the one before it in the same request.
    """

    count: int
    p50_seconds: float | None
    p90_seconds: float | None
    p99_seconds: float | None
    max_seconds: float | None
    jitter_seconds: float | None


def token_times(recorded: Recorded) -> TokenTimes:
    """None for what too few tokens leave open."""
    i = recorded.intervals
    order = np.lexsort((i.token, i.request, recorded.run))
    order = order[i.token[order] > 0]
    length = (i.end - i.begin)[order]
    if not len(length):
        return TokenTimes(0, None, None, None, None, None)
    same = np.ones(len(length) - 1, bool)
    for column in (recorded.run, i.request):
        same &= column[order][1:] == column[order][:-1]
    steps = np.abs(np.diff(length))[same]
    p50, p90, p99 = (float(np.percentile(length, p, method="inverted_cdf")) / 1e9 for p in (50, 90, 99))
    jitter = float(steps.mean()) / 1e9 if len(steps) else None
    return TokenTimes(len(length), p50, p90, p99, float(length.max()) / 1e9, jitter)


def worst(recorded: Recorded) -> list[tuple[int, WorstToken]]:
    """The tokens behind the first of their request that were waited for longest, each behind its run."""
    i = recorded.intervals
    length = np.where(i.token > 0, i.end - i.begin, 0)
    found = np.lexsort((i.request, i.step, -length))[:N_WORST]
    return [
        (
            int(recorded.run[at]),
            WorstToken(
                int(length[at]), int(i.request[at]), int(i.token[at]), int(i.step[at]), tuple(i.spent[at].tolist())
            ),
        )
        for at in found.tolist()
        if length[at]
    ]


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
    names = [f.name for f in fields(Facts) if f.name not in ("runs", "ceilings")]
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
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
