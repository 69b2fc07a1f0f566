"""What the books say, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gapless.ledger.accounts import ACCOUNTS, Account
from gapless.ledger.ledger import Ledger, Totals, WorstToken

Summary = dict[str, Any]

BAR_CELLS = 60
SHADES = "█▓▒░"
REST = "·"
LEAST_SHARE = 0.0005  # below it an account has no line


def summary(ledger: Ledger) -> Summary:
    """The books as plain values: seconds are sums over tokens, bytes and FLOPs those of the steps, once each.

    Raises what has kept the books from being kept: a defect.
    """
    if ledger.problem is not None:
        raise ledger.problem
    return summary_of(ledger.totals, ledger.worst())


def summary_of(t: Totals, worst: Iterable[WorstToken]) -> Summary:
    """The same of books that are no longer kept."""
    books: Summary = {
        "tokens": t.tokens,
        "steps": t.steps,
        "wall_seconds": t.wall_ns / 1e9,
        "device_seconds": t.device_ns / 1e9,
        "accounts": {account.label: _entry(t, account) for account in Account},
        "hidden_seconds": {a.label: float(t.hidden_ns[a]) / 1e9 for a in Account if t.hidden_ns[a]},
        "worst": [_worst(token) for token in worst],
    }
    return books | {"triangle": triangle(books)}


def _entry(t: Totals, account: Account) -> dict[str, Any]:
    later, first = max(t.later_tokens, 1), max(t.tokens - t.later_tokens, 1)
    return {
        "seconds": float(t.spent_ns[account]) / 1e9,
        "floor_seconds": float(t.floor_ns[account]) / 1e9,
        "bytes": {Account.WEIGHTS: t.weight_bytes, Account.KV: t.kv_bytes}.get(account, 0),
        "flops": t.flops if account is Account.COMPUTE else 0,
        "ttft_seconds": float(t.spent_ns[account] - t.later_spent_ns[account]) / 1e9 / first,
        "tpot_seconds": float(t.later_spent_ns[account]) / 1e9 / later,
        "tpot_floor_seconds": float(t.later_floor_ns[account]) / 1e9 / later,
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


def lines(books: Summary) -> list[str]:
    """A table of where the time of a token went on average, a bar of it, and what to do about the longest wait."""
    if not books["wall_seconds"]:
        return ["the books are empty: no token was delivered"]
    wall, tokens, accounts = books["wall_seconds"], books["tokens"], books["accounts"]
    order = sorted(accounts, key=lambda name: -float(accounts[name]["seconds"]))
    found = [f"{'account':12} {'a token':>10} {'floor':>10} {'share':>6}   mean of {tokens:,} tokens"]
    for name in order:
        spent, floor = accounts[name]["seconds"], accounts[name]["floor_seconds"]
        if spent >= LEAST_SHARE * wall:
            least = f"{1e3 * floor / tokens:7.3f} ms" if floor else "-"
            found.append(f"{name:12} {1e3 * spent / tokens:7.3f} ms {least:>10} {spent / wall:6.1%}")
    floor = sum(account["floor_seconds"] for account in accounts.values())
    found.append(f"{'in all':12} {1e3 * wall / tokens:7.3f} ms {1e3 * floor / tokens:7.3f} ms")
    cause = max(accounts, key=lambda name: float(accounts[name]["seconds"] - accounts[name]["floor_seconds"]))
    over = (accounts[cause]["seconds"] - accounts[cause]["floor_seconds"]) / wall
    return [
        *found,
        _bar(books, order),
        _triangle_line(books),
        f"most above its floor: {cause}, by {over:.0%}: {_knob(cause)}",
    ]


CORNERS: dict[str, tuple[Account, ...]] = {
    "compute": (Account.COMPUTE,),
    "interconnect": (Account.WEIGHTS, Account.KV, Account.LINK, Account.NETWORK),
    "physical": (Account.THROTTLE,),
}
MOVES = {
    "compute": "more or faster arithmetic, fewer FLOPs a token",
    "interconnect": "more memory bandwidth, fewer bytes a token, larger batches",
    "physical": "more power or better cooling",
}


def triangle(books: Summary) -> dict[str, Any]:
    """Of each corner its share of the floor and of what is spent above it; the one that binds has most of the floor.

    What lies in no corner (waiting for others, for the host, for readers) is the share of ``others``.
    """
    accounts = books["accounts"]
    floors = {corner: sum(accounts[a.label]["floor_seconds"] for a in own) for corner, own in CORNERS.items()}
    spent = {corner: sum(accounts[a.label]["seconds"] for a in own) for corner, own in CORNERS.items()}
    floor = sum(floors.values())
    waits = {corner: max(spent[corner] - floors[corner], 0.0) for corner in CORNERS}
    waits["others"] = books["wall_seconds"] - sum(spent.values())
    wait = sum(waits.values())
    return {
        "floor_shares": {corner: seconds / floor if floor else None for corner, seconds in floors.items()},
        "wait_shares": {corner: seconds / wait if wait > 0 else None for corner, seconds in waits.items()},
        "binds": max(floors, key=lambda corner: floors[corner]) if floor else None,
    }


def _triangle_line(books: Summary) -> str:
    found = triangle(books)
    if found["binds"] is None:
        return "triangle: no floor is known"
    floor, wait = (
        ", ".join(f"{name} {share or 0:.0%}" for name, share in found[key].items())
        for key in ("floor_shares", "wait_shares")
    )
    return f"triangle: {found['binds']} binds (of the floor: {floor}; of the wait: {wait}): {MOVES[found['binds']]}"


def _knob(name: str) -> str:
    return ACCOUNTS[Account[name.upper()]].knob


def _bar(books: Summary, order: list[str]) -> str:
    """The accounts side by side, each by its share, the largest first."""
    text, names = "", []
    for shade, name in zip(SHADES, order, strict=False):
        cells = round(BAR_CELLS * books["accounts"][name]["seconds"] / books["wall_seconds"])
        text += shade * cells
        names += [f"{shade} {name}"] if cells else []
    return f"{text:{REST}<{BAR_CELLS}}  {'  '.join(names)}  {REST} others"
