"""Values that callers give, checked: each error names the field, the value and the remedy."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from gapless.errors import GaplessError, RequestError

# Of the engine's options, whichever way they are given.
RANGES: dict[str, tuple[int, int]] = {
    "threads": (1, 1024),
    "kv_memory_bytes": (1, 1 << 50),
    "context_tokens": (2, 1 << 30),
    "depth": (1, 16),
    "max_running": (1, 1 << 16),
    "max_step_tokens": (2, 1 << 20),
}
MAX_SHOWN = 80  # characters of a value in a message


def whole(name: str, value: Any, low: int, high: int, error: type[GaplessError] = RequestError) -> int:
    """``value`` as an int within ``low .. high``; NumPy's integers are whole numbers too, floats and booleans not."""
    remedy = f"give a whole number from {low} to {high}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise error(f"{name} = {shown(value)} is not a whole number", remedy)
    found = operator.index(value)
    if not low <= found <= high:
        raise error(f"{name} = {shown(value)} is too {'small' if found < low else 'large'}", remedy)
    return found


def real(name: str, value: Any, low: float, high: float, error: type[GaplessError] = RequestError) -> float:
    """``value`` as a finite float within ``low .. high``."""
    remedy = f"give a number from {low:g} to {high:g}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise error(f"{name} = {shown(value)} is not a number", remedy)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not low <= found <= high:  # nor is NaN
        raise error(f"{name} = {shown(value)} is out of range", remedy)
    return found


def flag(name: str, value: Any, error: type[GaplessError] = RequestError) -> bool:
    """``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} = {shown(value)} is neither True nor False", "give one of them")
    return value


def shown(value: Any) -> str:
    """A value in a line of error, cut where it would fill it."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits, values within values, an object of its own mind
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
