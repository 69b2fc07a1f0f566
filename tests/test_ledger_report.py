"""What is made of the books for people and programs."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from gapless.ledger.accounts import Account
from gapless.ledger.report import CORNERS, Summary, lines, triangle
from gapless.ledger.stability import TokenTimes


def books(spent: dict[Account, float], floor: dict[Account, float]) -> Summary:
    accounts = {a.label: {"seconds": spent.get(a, 0.0), "floor_seconds": floor.get(a, 0.0)} for a in Account}
    times = asdict(TokenTimes(0))
    wall = sum(spent.values())
    return {
        "tokens": 10, "wall_seconds": wall, "device_seconds": wall, "accounts": accounts, "joules": None,
        "token_times": times, "worst": [],
    }  # fmt: skip


def test_the_triangle() -> None:
    found = triangle(
        books(
            {Account.WEIGHTS: 4.0, Account.KV: 1.0, Account.COMPUTE: 3.0, Account.SYNC: 1.0, Account.QUEUE: 1.0},
            {Account.WEIGHTS: 3.0, Account.KV: 1.0, Account.COMPUTE: 1.0},
        )
    )
    assert found["binds"] == "interconnect"
    assert found["floor_shares"] == {"compute": 0.2, "interconnect": 0.8, "physical": 0.0}
    assert found["wait_shares"] == pytest.approx({"compute": 0.4, "interconnect": 0.2, "physical": 0.0, "others": 0.4})


def test_without_a_floor_nothing_binds() -> None:
    found = triangle(books({Account.SCHEDULE: 1.0}, {}))
    assert found["binds"] is None
    assert set(found["floor_shares"].values()) == {None}
    assert found["wait_shares"]["others"] == 1.0


def test_no_account_lies_in_two_corners() -> None:
    own = [account for accounts in CORNERS.values() for account in accounts]
    assert len(own) == len(set(own))


def test_a_table_of_the_largest_first() -> None:
    found = lines(books({Account.COMPUTE: 1.0, Account.QUEUE: 3.0, Account.SAMPLE: 1e-6}, {Account.COMPUTE: 0.9}))
    assert [line.split()[0] for line in found[1:4]] == ["queue", "compute", "in"]
    assert "300.000 ms" in found[1]
    assert "75.0%" in found[1]
    assert found[-1].startswith("most above its floor: queue, by 75%: raise --max-running")
    assert "triangle: compute binds" in "\n".join(found)


def test_with_a_budget_the_advice_is_of_what_is_over_it() -> None:
    """The largest account may lie within its budget, and the report must not send anybody after it."""
    kept = books({Account.QUEUE: 3.0, Account.DELIVER: 1.0}, {})
    rows = {"queue": {"over_seconds": -0.1}, "deliver": {"over_seconds": 0.2}}
    rows = {name: {"budget_seconds": 1.0, "spent_seconds": 1.0, **row} for name, row in rows.items()}
    whole = {"budget_seconds": 1.0, "spent_seconds": 1.1, "tokens_within": 0.5, "accounts": rows}
    assert lines(kept | {"waiting_budget": whole | {"over_seconds": 0.1}})[-1].startswith(
        "most above its budget: deliver, by 200 ms: read faster"
    )
    assert lines(kept | {"waiting_budget": whole | {"over_seconds": -0.1}})[-1] == "on average the budget is kept"


def test_what_was_hidden_is_shown_apart() -> None:
    kept = books({Account.QUEUE: 3.0}, {}) | {"hidden_seconds": {"schedule": 0.3, "prepare": 0.1}, "steps": 100}
    assert "hidden behind the device: 4.00 ms of the host a step (75% schedule, 25% prepare)" in lines(kept)


def test_empty_books_say_so() -> None:
    assert lines({"tokens": 0, "wall_seconds": 0.0, "accounts": {}}) == ["the books are empty: no token was delivered"]
