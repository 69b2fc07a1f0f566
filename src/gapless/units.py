"""Numbers with units, at the edge: parsed from what users write, formatted for what they read."""

from __future__ import annotations

import re

from gapless.errors import GaplessError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TOO_MANY = 1 << 63  # bytes: no address reaches them


def parse_bytes(text: str, field: str) -> int:
    """``"2GiB"``, ``"512 MB"``, ``"1e9"`` as bytes. Raises GaplessError naming ``field``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    try:
        if match is None:
            raise ValueError
        number, prefix, binary, _ = match.groups()
        n_bytes = int(float(number) * (_BINARY if binary else _DECIMAL)[prefix])
    except (ValueError, KeyError, OverflowError):
        raise GaplessError(f"{field} = {text!r} is not a size", "write it like 512MiB or 2GB") from None
    if n_bytes >= _TOO_MANY:
        raise GaplessError(f"{field} = {text!r} is more than any memory has", "write it like 512MiB or 2GB")
    return n_bytes


def format_count(n: int, unit: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{n:,} {unit}" + ("" if n == 1 else "s")


def format_bytes(n_bytes: float) -> str:
    """``98.2 MB``: decimal prefixes, three digits."""
    return format_si(n_bytes, "B")


def format_si(value: float, unit: str) -> str:
    """Three digits and a prefix from n to T: ``25.3 GB/s``, ``4.41 ms``."""
    if value == 0:
        return f"0 {unit}"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u")):
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value / 1e-9)} n{unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
