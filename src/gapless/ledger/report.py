"""What the books say, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from gapless.executor.timing import Source
from gapless.ledger import budget as budgets
from gapless.ledger.accounts import ACCOUNTS, Account
from gapless.ledger.books import Intervals
from gapless.ledger.budget import WaitingBudget
from gapless.ledger.ledger import Ledger, Totals, WorstToken
from gapless.ledger.shares import TIMED, Share
from gapless.ledger.stability import TokenTimes, token_times
from gapless.units import format_count, format_si

Summary = dict[str, Any]
Paint = Callable[[int, str], str]  # the place of an account in the order of the report, and cells of a bar

BAR_CELLS = 60
SHADES = "█▓▒░"
REST = "·"
LEAST_SHARE = 0.0005  # below it an account has no line
N_SHOWN = 3  # accounts that a figure is explained by
MOST_OF = 0.1  # of a figure an account must hold to be named beside it


def summary(ledger: Ledger, budget: WaitingBudget | None = None) -> Summary:
    """The books as plain values: seconds are sums over tokens, bytes, FLOPs and joules those of the steps, once each.

    Raises what has kept the books from being kept: a defect; and RequestError for a budget that cannot be kept.
    """
    if ledger.problem is not None:
        raise ledger.problem
    parts = ledger.intervals()
    books = summary_of(ledger.totals, ledger.worst(), token_times(parts), ledger.source)
    return books if budget is None else with_budget(books, budget, parts)


def summary_of(t: Totals, worst: Sequence[WorstToken], times: TokenTimes, source: Source) -> Summary:
    """The same of books that are no longer kept."""
    books: Summary = {
        "tokens": t.tokens,
        "steps": t.steps,
        "wall_seconds": t.wall_ns / 1e9,
        "device_seconds": t.device_ns / 1e9,
        "accounts": {account.label: _entry(t, account, source) for account in Account},
        "hidden_seconds": {a.label: float(t.hidden_ns[a]) / 1e9 for a in Account if t.hidden_ns[a]},
        "joules": None if t.joules is None else float(t.joules.sum()),
        "undelivered": {share.label: int(t.undelivered[share]) for share in Share},
        "token_times": asdict(times),
        "worst": [_worst(token) for token in worst],
    }
    return books | {"triangle": triangle(books)}


def with_budget(books: Summary, budget: WaitingBudget, parts: Sequence[Intervals]) -> Summary:
    """With ``waiting_budget`` beside. Raises RequestError for one that cannot be kept."""
    return books | {"waiting_budget": budgets.against(budget, books, _within(parts, budget.total_s))}


def _within(parts: Sequence[Intervals], seconds: float) -> float | None:
    """Of tokens behind the first, the share that came within a time."""
    lengths = [(part.end - part.begin)[part.token > 0] for part in parts]
    n = sum(map(len, lengths))
    return sum(int((length <= 1e9 * seconds).sum()) for length in lengths) / n if n else None


_TIMES = dict(zip(TIMED, Share, strict=False))  # the columns of the accounts that steps are divided by
_BYTES = {Account.WEIGHTS: Share.WEIGHT_BYTES, Account.KV: Share.KV_BYTES}


def _entry(t: Totals, account: Account, source: Source) -> dict[str, Any]:
    later, first = max(t.later_tokens, 1), max(t.tokens - t.later_tokens, 1)
    return {
        "seconds": float(t.spent_ns[account]) / 1e9,
        "floor_seconds": float(t.floor_ns[account]) / 1e9,
        "device_seconds": float(t.share[_TIMES[account]]) / 1e9 if account in _TIMES else 0.0,
        "bytes": int(t.share[_BYTES[account]]) if account in _BYTES else 0,
        "flops": int(t.share[Share.FLOPS]) if account is Account.COMPUTE else 0,
        "ttft_seconds": float(t.spent_ns[account] - t.later_spent_ns[account]) / 1e9 / first,
        "tpot_seconds": float(t.later_spent_ns[account]) / 1e9 / later,
        "tpot_floor_seconds": float(t.later_floor_ns[account]) / 1e9 / later,
        "joules": None if t.joules is None else float(t.joules[account]),
        "source": source.value,
    }


def _worst(token: WorstToken) -> dict[str, Any]:
    cause = largest(token.spent)
    return {
        "request": token.request,
        "token": token.token,
        "seconds": token.length / 1e9,
        "cause": cause.label,
        "cause_seconds": token.spent[cause] / 1e9,
        "beside_tokens": token.beside,
        "others_of_step": token.n_others,
    }


def largest(spent: Any) -> Account:
    """The account that holds most."""
    return max(Account, key=lambda account: int(spent[account]))


# --- for people


def plain(place: int, cells: str) -> str:
    """No colours."""
    return cells


def lines(books: Summary, paint: Paint = plain, n_worst: int = 0) -> list[str]:
    """A table of where the time of a token went on average, a bar of it, how even it was, and what to do.

    Args:
        n_worst: how many of the tokens that were waited for longest are named.
    """
    if not books["wall_seconds"]:
        return ["the books are empty: no token was delivered"]
    accounts = books["accounts"]
    order = sorted(accounts, key=lambda name: -float(accounts[name]["seconds"]))
    return [
        *_table(books, order),
        _bar(books, order, paint),
        _triangle_line(books),
        *_hidden_lines(books),
        *stability_lines(books["token_times"]),
        *_worst_lines(books["worst"][:n_worst]),
        *_energy_lines(books),
        *(budgets.lines(books["waiting_budget"]) if "waiting_budget" in books else ()),
        _advice(books),
    ]


def _table(books: Summary, order: list[str]) -> list[str]:
    wall, tokens, accounts = books["wall_seconds"], books["tokens"], books["accounts"]
    of = f"mean of {format_count(tokens, 'token')}, first ones included"
    found = [f"{'account':12} {'a token':>10} {'floor':>10} {'share':>6}   {of}"]
    for name in order:
        spent, floor = accounts[name]["seconds"], accounts[name]["floor_seconds"]
        if spent >= LEAST_SHARE * wall:
            least = f"{1e3 * floor / tokens:7.3f} ms" if floor else "-"
            found.append(f"{name:12} {1e3 * spent / tokens:7.3f} ms {least:>10} {spent / wall:6.1%}")
    floor = sum(account["floor_seconds"] for account in accounts.values())
    waited = f"{max(1 - floor / wall, 0):.0%} of the time is waiting" if floor else "no floor is known"
    return [*found, f"{'in all':12} {1e3 * wall / tokens:7.3f} ms {1e3 * floor / tokens:7.3f} ms   {waited}"]


def _hidden_lines(books: Summary) -> list[str]:
    hidden = books.get("hidden_seconds")
    if not hidden:
        return []
    of = _of(hidden)
    return [f"hidden behind the device: {_time(sum(hidden.values()) / books['steps'])} of the host a step{of}"]


def _advice(books: Summary) -> str:
    """What to turn first: of a budget what is most above it, else what is most above its floor."""
    accounts = books["accounts"]
    if "waiting_budget" in books:
        rows = books["waiting_budget"]["accounts"]
        cause = max(rows, key=lambda name: float(rows[name]["over_seconds"]))
        over = rows[cause]["over_seconds"]
        if books["waiting_budget"]["over_seconds"] <= 0:
            return "on average the budget is kept"
        return f"most above its budget: {cause}, by {_time(over)}: {_knob(cause)}"
    cause = max(accounts, key=lambda name: float(accounts[name]["seconds"] - accounts[name]["floor_seconds"]))
    over = (accounts[cause]["seconds"] - accounts[cause]["floor_seconds"]) / books["wall_seconds"]
    return f"most above its floor: {cause}, by {over:.0%}: {_knob(cause)}"


def stability_lines(t: dict[str, Any]) -> list[str]:
    """How evenly tokens came, and what was in the way."""
    if t["p50_seconds"] is None:
        return ["between tokens: no request has two"]
    parts = ", ".join(f"{name} {_time(t[f'{name}_seconds'])}" for name in ("p50", "p90", "p99", "max"))
    found = [f"between tokens: {parts}; jitter {_time(t['jitter_seconds'])}{_of(t['jitter_accounts'])}"]
    if t["count"] > 1:
        slow = "token" if t["tail_count"] == 1 else f"{t['tail_count']:,} tokens"
        over = _time(t["tail_over_seconds"])
        found.append(f"the slowest {slow}: {over} above the mean{_of(t['tail_accounts'])}")
    return found


def _of(accounts: dict[str, float]) -> str:
    """What a figure is made of, the accounts that hold most of it first."""
    total = sum(accounts.values())
    parts = {name: part / total for name, part in accounts.items() if total > 0 and part >= MOST_OF * total}
    named = [f"{parts[name]:.0%} {name}" for name in sorted(parts, key=lambda name: -parts[name])[:N_SHOWN]]
    return f" ({', '.join(named)})" if named else ""


def _worst_lines(worst: Sequence[dict[str, Any]]) -> list[str]:
    return ["waited for longest:", *(f"  {sentence(entry)}" for entry in worst)] if worst else []


def sentence(entry: dict[str, Any]) -> str:
    """``request 3 token 57: 41.0 ms, 33.0 ms of it a neighbour's prefill of 512 tokens``."""
    run = f"run {entry['run']} " if "run" in entry else ""
    cause = entry["cause"]
    if cause == Account.NEIGHBOURS.label and entry["beside_tokens"]:
        cause = f"a neighbour's prefill of {format_count(entry['beside_tokens'], 'token')}"
    of = f"{_time(entry['cause_seconds'])} of it {cause}"
    others = f"; so for {entry['others_of_step']:,} more of its step" if entry["others_of_step"] else ""
    return f"{run}request {entry['request']} token {entry['token']}: {_time(entry['seconds'])}, {of}{others}"


def _energy_lines(books: Summary) -> list[str]:
    if books["joules"] is None:
        return []
    joules, accounts = books["joules"], books["accounts"]
    parts = {name: account["joules"] for name, account in accounts.items()}
    rate = joules / books["device_seconds"] if books["device_seconds"] else 0.0
    a_token = format_si(joules / books["tokens"], "J")
    return [f"energy: {a_token} a token, {format_si(rate, 'W')} while steps ran{_of(parts)}"]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_si(seconds, "s")


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


def _bar(books: Summary, order: list[str], paint: Paint) -> str:
    """The accounts side by side, each by its share, the largest first."""
    text, names, left = "", [], BAR_CELLS
    for place, (shade, name) in enumerate(zip(SHADES, order, strict=False)):
        cells = min(round(BAR_CELLS * books["accounts"][name]["seconds"] / books["wall_seconds"]), left)
        left -= cells
        text += paint(place, shade * cells)
        names += [f"{paint(place, shade)} {name}"] if cells else []
    return f"{text}{REST * left}  {'  '.join(names)}  {REST} others"
