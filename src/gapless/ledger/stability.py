"""How evenly tokens came, and what the unevenness was booked to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gapless.ledger.accounts import Account
from gapless.ledger.books import Intervals

Ints = npt.NDArray[np.int64]

TAIL = 100  # one of so many tokens, the slowest, are the tail


@dataclass(frozen=True)
class TokenTimes:
    """Times between tokens of a request, its first token left out; seconds. None for what too few tokens leave open.

    Attributes:
        count: of them.
        p50_seconds, p90_seconds, p99_seconds: the least time that so many percent do not exceed.
        jitter_seconds: the mean difference, without its sign, of a time and the one before it in the same request.
        jitter_accounts: the same by account: by how much it moved in the direction in which the time did. They add up.
        tail_count: the slowest hundredth of them, one at least.
        tail_over_seconds: by how much these are longer than the mean of all.
        tail_accounts: the same by account. They add up.
    """

    count: int
    p50_seconds: float | None = None
    p90_seconds: float | None = None
    p99_seconds: float | None = None
    max_seconds: float | None = None
    jitter_seconds: float | None = None
    jitter_accounts: dict[str, float] = field(default_factory=dict)
    tail_count: int = 0
    tail_over_seconds: float | None = None
    tail_accounts: dict[str, float] = field(default_factory=dict)


def token_times(parts: Sequence[Intervals], runs: Sequence[Ints] | None = None) -> TokenTimes:
    """Of intervals of one run, or of several where ``runs`` tells to which each belongs."""
    request, token, begin, end = (
        np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])
        for name in ("request", "token", "begin", "end")
    )
    run = np.zeros_like(request) if runs is None else np.concatenate(runs)
    order = np.lexsort((token, request, run))
    order = order[token[order] > 0]
    length = (end - begin)[order]
    if not len(length):
        return TokenTimes(0)
    spent = np.concatenate([part.spent for part in parts])[order]
    same = (run[order][1:] == run[order][:-1]) & (request[order][1:] == request[order][:-1])
    p50, p90, p99 = (float(np.percentile(length, p, method="inverted_cdf")) / 1e9 for p in (50, 90, 99))
    tail = np.argsort(length, kind="stable")[-max(len(length) // TAIL, 1) :]
    over = spent[tail].mean(axis=0) - spent.mean(axis=0)
    jitter = _jitter(length, spent, same)
    return TokenTimes(
        count=len(length),
        p50_seconds=p50,
        p90_seconds=p90,
        p99_seconds=p99,
        max_seconds=float(length.max()) / 1e9,
        jitter_seconds=None if jitter is None else float(jitter.sum()) / 1e9,
        jitter_accounts={} if jitter is None else _seconds(jitter),
        tail_count=len(tail),
        tail_over_seconds=float(over.sum()) / 1e9,
        tail_accounts=_seconds(over),
    )


def _jitter(length: Ints, spent: Ints, same: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64] | None:
    """The mean step from one time to the next by account, counted in the direction of the whole step."""
    if not same.any():
        return None
    direction = np.sign(np.diff(length))[same]
    steps: npt.NDArray[np.float64] = (np.diff(spent, axis=0)[same] * direction[:, None]).mean(axis=0)
    return steps


def _seconds(by_account: npt.NDArray[np.float64]) -> dict[str, float]:
    return {account.label: float(by_account[account]) / 1e9 for account in Account if by_account[account]}
