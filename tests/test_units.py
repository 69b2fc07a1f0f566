"""Sizes as users write them, numbers as users read them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import GaplessError
from gapless.units import format_bytes, format_count, format_si, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0), ("512", 512), ("2GiB", 2 << 30), ("2 gib", 2 << 30), ("1.5MB", 1_500_000), ("3k", 3000),
        ("1e9", 10**9), ("1Ti", 1 << 40), (" 7 B ", 7),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, n_bytes: int) -> None:
    assert parse_bytes(text, "kv-memory") == n_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1.2.3", "2GB/s", "1iB", "e9", "9e999", "2 G B", "inf", "nan"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(GaplessError, match=r"kv-memory = .* is not a size"):
        parse_bytes(text, "kv-memory")


@pytest.mark.parametrize("text", ["1e30", "9e18TB", "99999999999999999999"])
def test_what_no_memory_has_is_named(text: str) -> None:
    with pytest.raises(GaplessError, match=r"kv-memory = .* is more than any memory has"):
        parse_bytes(text, "kv-memory")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    with contextlib.suppress(GaplessError):
        assert parse_bytes(text, "x") >= 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"), (0.00441, "4.41 ms"), (25.34e9, "25.3 Gs"), (999.96, "1.00 ks"), (999.4, "999 s"),
        (1e-9, "1.00 ns"),
        (2e-13, "0.00 ns"), (-0.02, "-20.0 ms"), (99.96, "100 s"), (5e15, "5000 Ts"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert format_si(value, "s") == text


def test_bytes_have_decimal_prefixes() -> None:
    assert format_bytes(98_362_432) == "98.4 MB"


def test_counts_have_a_plural() -> None:
    assert [format_count(n, "thread") for n in (0, 1, 2, 4000)] == [
        "0 threads",
        "1 thread",
        "2 threads",
        "4,000 threads",
    ]
