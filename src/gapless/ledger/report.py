"""What the books say, for people and for programs."""

from __future__ import annotations

from typing import Any

from gapless.ledger.accounts import ACCOUNTS, N_ACCOUNTS, Account
from gapless.ledger.ledger import Ledger, Totals, WorstToken

BAR_CELLS = 60
SHADES = "█▓▒░"
LEAST_SHARE = 0.0005  # below it an account has no line


def summary(ledger: Ledger) -> dict[str, Any]:
    """The books as plain values: seconds are sums over tokens, bytes and FLOPs those of the steps, once each."""
    t = ledger.totals
    return {
        "tokens": t.tokens,
        "steps": t.steps,
        "wall_seconds": t.wall_ns / 1e9,
        "device_seconds": t.device_ns / 1e9,
        "accounts": {account.label: _entry(t, account) for account in Account},
        "hidden_seconds": {a.label: float(t.hidden_ns[a]) / 1e9 for a in Account if t.hidden_ns[a]},
        "worst": [_worst(token) for token in ledger.worst()],
    }


def _entry(t: Totals, account: Account) -> dict[str, Any]:
    return {
        "seconds": float(t.spent_ns[account]) / 1e9,
        "floor_seconds": float(t.floor_ns[account]) / 1e9,
        "bytes": {Account.WEIGHTS: t.weight_bytes, Account.KV: t.kv_bytes}.get(account, 0),
        "flops": t.flops if account is Account.COMPUTE else 0,
        "joules": None,
        "source": "measured",
    }


def _worst(token: WorstToken) -> dict[str, Any]:
    cause = largest(token.spent)
    return {
        "request": token.request,
        "token": token.token,
        "seconds": token.length / 1e9,
        "cause": cause.label,
        "cause_seconds": token.spent[cause] / 1e9,
    }


def largest(spent: Any) -> Account:
    """The account that holds most."""
    return max(Account, key=lambda account: int(spent[account]))


def main_wait(t: Totals) -> Account:
    """The account that lies furthest above its floor."""
    return max(Account, key=lambda account: float(t.spent_ns[account] - t.floor_ns[account]))


def lines(ledger: Ledger) -> list[str]:
    """A table of where the time of a token went on average, a bar of it, and what to do about the longest wait."""
    t = ledger.totals
    if not t.tokens:
        return ["the books are empty: no token was delivered"]
    shown = [a for a in Account if t.spent_ns[a] >= LEAST_SHARE * t.wall_ns]
    found = [f"{'account':12} {'a token':>10} {'floor':>10} {'share':>6}   (mean of {t.tokens:,} tokens)"]
    for account in sorted(shown, key=lambda a: -int(t.spent_ns[a])):
        spent, floor = t.spent_ns[account] / t.tokens / 1e6, t.floor_ns[account] / t.tokens / 1e6
        least = f"{floor:7.3f} ms" if floor else "-"
        share = t.spent_ns[account] / t.wall_ns
        found.append(f"{account.label:12} {spent:7.3f} ms {least:>10} {share:6.1%}")
    wall, floor = t.wall_ns / t.tokens / 1e6, t.floor_ns.sum() / t.tokens / 1e6
    found.append(f"{'in all':12} {wall:7.3f} ms {floor:7.3f} ms {1 - floor / wall:6.1%} of it waiting")
    found.append(bar(t))
    cause = main_wait(t)
    over = (t.spent_ns[cause] - t.floor_ns[cause]) / t.wall_ns
    found.append(f"most waiting: {cause.label} ({over:.0%}): {ACCOUNTS[cause].knob}")
    return found


def bar(t: Totals) -> str:
    """The accounts side by side, each by its share, the largest first."""
    order = sorted(range(N_ACCOUNTS), key=lambda a: -int(t.spent_ns[a]))
    cells, text, names = 0, "", []
    for place, account in enumerate(order[: len(SHADES)]):
        n = round(BAR_CELLS * t.spent_ns[account] / t.wall_ns)
        cells += n
        text += SHADES[place] * n
        if n:
            names.append(f"{SHADES[place]} {Account(account).label}")
    return f"{text}{'·' * max(BAR_CELLS - cells, 0)}  {' '.join(names)} · others"
