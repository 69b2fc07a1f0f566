"""The waiting budget: the time per token that a service promises, shared over the accounts, beside what was spent.

Every account gets its floor first. What the promise leaves above all floors may be waited, and is shared by the
allowances of the table of accounts, or as the user says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gapless.errors import RequestError
from gapless.ledger.accounts import ABOVE_FLOORS, ACCOUNTS, Account
from gapless.units import format_si

FIELD = "waiting-budget"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_S = 3600.0
_ROUNDING_S = 1e-12
_FORM = "write it like 20ms, or like 20ms,neighbours=5ms to set what an account may take"


@dataclass(frozen=True)
class WaitingBudget:
    """
    Attributes:
        total_s: time per token behind the first (TPOT).
        fixed_s: of accounts that are not to be shared out to.
    """

    total_s: float
    fixed_s: Mapping[Account, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> WaitingBudget:
        """``20ms``, or ``20ms,neighbours=5ms,deliver=0ms``. Raises RequestError."""
        first, *others = text.split(",")
        total_s, fixed = _seconds(first, FIELD), {}
        if total_s == 0:
            raise RequestError(f"{FIELD} = {text!r} leaves no time for a token", _FORM)
        for other in others:
            name, equals, value = other.strip().partition("=")
            account = _BY_NAME.get(name)
            if not equals or account is None:
                raise RequestError(f"{FIELD}: {other.strip()!r} names no account", f"{_FORM}; see docs/ledger.md")
            if account in fixed:
                raise RequestError(f"{FIELD} sets {name} twice", "give it once")
            fixed[account] = _seconds(value, f"{FIELD}: {name}")
        return cls(total_s, fixed)

    def shared(self, floors_s: Mapping[Account, float]) -> dict[Account, float]:
        """What each account may take of the time per token; they add up to the total.

        Args:
            floors_s: of accounts that have one, for a token.

        Raises:
            RequestError: the floors alone are more, or what is set for an account is less than its floor.
        """
        floors = {account: floors_s.get(account, 0.0) for account in Account}
        for account, seconds in self.fixed_s.items():
            if seconds < floors[account]:
                raise RequestError(
                    f"{FIELD}: {account.label} = {_time(seconds)} is less than its floor of {_time(floors[account])}",
                    "give it that at least",
                )
        shared: dict[Account, float] = {**floors, **self.fixed_s}
        left_s = self.total_s - sum(shared.values())
        if left_s < -_ROUNDING_S:
            what = "what is set and the floors of the rest" if self.fixed_s else "the floors of a token"
            raise RequestError(
                f"{FIELD} = {_time(self.total_s)} is less than {what}, {_time(sum(shared.values()))}",
                "no tuning reaches it: give more time, or have fewer bits a weight, shorter contexts, a faster machine",
            )
        allowances = _allowances({a: floor for a, floor in floors.items() if a not in self.fixed_s})
        whole = sum(allowances.values())
        for account, allowance in allowances.items():
            shared[account] += left_s * allowance / whole if whole else 0.0
        return shared


def _allowances(floors: Mapping[Account, float]) -> dict[Account, float]:
    """In what proportion these accounts share what may be waited."""
    by_floor = sum(floor for account, floor in floors.items() if ACCOUNTS[account].allowance is None)
    found = {}
    for account, floor in floors.items():
        allowance = ACCOUNTS[account].allowance
        of_floors = ABOVE_FLOORS * floor / by_floor if by_floor else 0.0
        found[account] = of_floors if allowance is None else float(allowance)
    return found


_BY_NAME = {account.label: account for account in Account}


def _seconds(text: str, name: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s)\s*", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= _LONGEST_S:
        raise RequestError(f"{name} = {text.strip()!r} is no time of at most an hour", _FORM)
    return seconds


def _time(seconds: float) -> str:
    return format_si(seconds, "s")


def against(budget: WaitingBudget, books: Mapping[str, Any], within: float | None) -> dict[str, Any]:
    """The budget beside what tokens behind the first took. Raises RequestError for one that cannot be kept.

    Args:
        books: a summary of them.
        within: the share of tokens that came within the whole of it.
    """
    accounts = books["accounts"]
    shared = budget.shared({account: accounts[account.label]["tpot_floor_seconds"] for account in Account})
    rows = {}
    for account in Account:
        spent = accounts[account.label]["tpot_seconds"]
        rows[account.label] = {
            "budget_seconds": shared[account],
            "spent_seconds": spent,
            "over_seconds": spent - shared[account],
        }
    spent = sum(row["spent_seconds"] for row in rows.values())
    return {
        "budget_seconds": budget.total_s,
        "spent_seconds": spent,
        "over_seconds": spent - budget.total_s,
        "tokens_within": within,
        "accounts": rows,
    }


def lines(kept: Mapping[str, Any]) -> list[str]:
    """A table of what ``against`` has found, the most overspent account first."""
    rows = kept["accounts"]
    order = sorted(rows, key=lambda name: -float(rows[name]["over_seconds"]))
    found = [f"{'budget':12} {'a token':>10} {'spent':>10}"]
    for name in order:
        budget, spent, over = (rows[name][f"{what}_seconds"] for what in ("budget", "spent", "over"))
        if max(budget, spent) > 0.0005 * kept["budget_seconds"]:
            found.append(f"{name:12} {1e3 * budget:7.3f} ms {1e3 * spent:7.3f} ms  {_verdict(over)}")
    total = f"{'in all':12} {1e3 * kept['budget_seconds']:7.3f} ms {1e3 * kept['spent_seconds']:7.3f} ms"
    within = "" if kept["tokens_within"] is None else f"; {kept['tokens_within']:.1%} of tokens came within it"
    return [*found, f"{total}  {_verdict(kept['over_seconds'])}{within}"]


def _verdict(over_s: float) -> str:
    return f"over by {_time(over_s)}" if over_s > 0 else f"under by {_time(-over_s)}"
