"""The time per token that is promised, shared over the accounts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import RequestError
from gapless.ledger.accounts import ABOVE_FLOORS, ACCOUNTS, Account
from gapless.ledger.budget import WaitingBudget, against, lines


def test_allowances_are_of_a_whole() -> None:
    given = [info.allowance for info in ACCOUNTS.values() if info.allowance is not None]
    assert sum(given) + ABOVE_FLOORS == 100


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_shares_add_up_and_leave_nobody_below_its_floor(seed: int) -> None:
    rng = random.Random(seed)
    floored = rng.sample([Account.WEIGHTS, Account.KV, Account.COMPUTE, Account.LINK], rng.randint(0, 4))
    floors = {account: rng.uniform(0, 5e-3) for account in floored}
    fixed = {a: floors.get(a, 0) + rng.uniform(0, 1e-3) for a in rng.sample(list(Account), rng.randint(0, 5))}
    total = sum(({**floors, **fixed}).values()) + rng.uniform(1e-9, 0.02)
    shared = WaitingBudget(total, fixed).shared(floors)
    assert sum(shared.values()) == pytest.approx(total)
    assert all(shared[account] >= floors.get(account, 0) for account in Account)
    assert all(shared[account] == seconds for account, seconds in fixed.items())
    rest = total - sum(({**floors, **fixed}).values())
    free = [a for a in (Account.NEIGHBOURS, Account.SYNC) if a not in fixed]
    if len(free) == 2:
        assert shared[Account.NEIGHBOURS] == pytest.approx(3 * shared[Account.SYNC]), "as their allowances"
    assert all(shared[a] <= floors.get(a, 0) + rest + 1e-12 for a in free)


def test_those_with_floors_share_by_them() -> None:
    floors = {Account.WEIGHTS: 6e-3, Account.KV: 2e-3}
    shared = WaitingBudget(18e-3).shared(floors)
    assert shared[Account.WEIGHTS] == pytest.approx(6e-3 + 10e-3 * 0.35 * 0.75)
    assert shared[Account.KV] == pytest.approx(2e-3 + 10e-3 * 0.35 * 0.25)
    assert shared[Account.NEIGHBOURS] == pytest.approx(3e-3)
    assert shared[Account.QUEUE] == shared[Account.LINK] == 0


@pytest.mark.parametrize(
    ("text", "total", "fixed"),
    [
        ("20ms", 0.02, {}),
        (" 1.5 s ", 1.5, {}),
        ("800us", 0.0008, {}),
        ("20ms,neighbours=5ms, deliver=0ms", 0.02, {Account.NEIGHBOURS: 0.005, Account.DELIVER: 0.0}),
    ],
)
def test_budgets_are_read(text: str, total: float, fixed: dict[Account, float]) -> None:
    found = WaitingBudget.parse(text)
    assert found.total_s == pytest.approx(total)
    assert found.fixed_s == pytest.approx(fixed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20", "waiting-budget = '20' is no time"),
        ("", "waiting-budget = '' is no time"),
        ("-5ms", "waiting-budget = '-5ms' is no time"),
        ("0ms", "waiting-budget = '0ms' leaves no time for a token"),
        ("nan s", "is no time"),
        ("1e999s", "is no time"),
        ("9" * 400 + "s", "is no time of at most an hour"),
        ("2h", "is no time"),
        ("20ms,rent=1ms", "'rent=1ms' names no account"),
        ("20ms,sync", "'sync' names no account"),
        ("20ms,", "'' names no account"),
        ("20ms,sync=1ms,sync=2ms", "sets sync twice"),
        ("20ms,sync=-1ms", "waiting-budget: sync = '-1ms' is no time"),
    ],
)
def test_what_is_no_budget_is_told(text: str, message: str) -> None:
    with pytest.raises(RequestError) as problem:
        WaitingBudget.parse(text)
    assert message in str(problem.value)


def test_what_no_tuning_reaches_is_told() -> None:
    floors = {Account.WEIGHTS: 3e-3, Account.KV: 1e-3}
    with pytest.raises(RequestError, match=r"waiting-budget = 3.00 ms is less than the floors of a token, 4.00 ms"):
        WaitingBudget(3e-3).shared(floors)
    with pytest.raises(RequestError, match=r"kv = 500 us is less than its floor of 1.00 ms"):
        WaitingBudget(9e-3, {Account.KV: 5e-4}).shared(floors)
    with pytest.raises(RequestError, match=r"less than what is set and the floors of the rest, 10.0 ms"):
        WaitingBudget(9e-3, {Account.KV: 7e-3}).shared(floors)
    assert sum(WaitingBudget(4e-3).shared(floors).values()) == pytest.approx(4e-3)


def test_what_was_spent_stands_beside() -> None:
    accounts = {a.label: {"tpot_seconds": 0.0, "tpot_floor_seconds": 0.0} for a in Account}
    accounts["weights"] = {"tpot_seconds": 9e-3, "tpot_floor_seconds": 5e-3}
    accounts["neighbours"] = {"tpot_seconds": 1e-3, "tpot_floor_seconds": 0.0}
    found = against(WaitingBudget(15e-3), {"accounts": accounts}, 0.9)
    assert found["accounts"]["weights"]["over_seconds"] == pytest.approx(9e-3 - 8.5e-3)
    assert found["accounts"]["neighbours"]["over_seconds"] == pytest.approx(1e-3 - 3e-3)
    assert found["over_seconds"] == pytest.approx(-5e-3)
    text = lines(found)
    assert text[1].split()[0] == "weights"
    assert text[1].endswith("over by 500 us")
    assert text[-1].endswith("under by 5.00 ms; 90.0% of tokens came within it")
