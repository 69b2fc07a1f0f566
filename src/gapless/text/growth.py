"""How long a text can get: an upper bound before it is made, for each operation whose result outgrows its arguments."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sized
from typing import Any

from gapless.text.budget import ELEMENT, Budget, OverBudget

MAX_WIDTH = 10_000  # of a column, a precision, an indentation


def columns(value: object) -> int:
    """A number that asks for so many characters; a negative one, for as many digits before the point."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, int):
        return 0
    if abs(value) > MAX_WIDTH:
        raise OverBudget(f"it asks for a width of more than {MAX_WIDTH}")
    return max(value, 0)


def replaced(text: str, old: object, new: object, count: object = -1) -> int:
    old, new = str(old), str(new)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def padded(text: str, width: object = 80, fillchar: object = " ") -> int:
    return len(text) + columns(width)


def indented(text: str, width: object = 4, first: object = False, blank: object = False) -> int:
    return len(text) + len(text.splitlines()) * columns(width)


def joined(separator: str, parts: object) -> int:
    """The parts themselves are spent for as arguments."""
    return len(separator) * len(parts) if isinstance(parts, Sized) else 0


def split(text: str, sep: object = None, maxsplit: object = -1) -> int:
    parts = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    return len(text) + ELEMENT * (parts + 1)


def split_lines(text: str, keepends: object = False) -> int:
    return len(text) + ELEMENT * (len(text) + 1)


def percent_formatted(text: str, budget: Budget, values: object) -> int:
    """``text % values``: each place may take a whole value, padded to its width."""
    if re.search(r"%[^a-zA-Z%]*\*", text):
        raise OverBudget("it takes a width from an argument")
    return len(text) + _digits(text) + text.count("%") * _written(budget, values)


def brace_formatted(text: str, budget: Budget, values: object) -> int:
    """``text.format(values)``."""
    places, widths = 0, 0
    for _, field, spec, _ in string.Formatter().parse(text):
        if spec and "{" in spec:
            raise OverBudget("it takes a width from an argument")
        places += field is not None
        widths += _digits(spec or "")
    return len(text) + widths + places * _written(budget, values)


def _digits(text: str) -> int:
    """Columns of all numbers; Python takes digits of any script for a width."""
    return sum(columns(int(number)) for number in re.findall(r"\d{1,9}", text))


def _written(budget: Budget, values: object) -> int:
    """Units that the values cost as text."""
    before = budget.left
    budget.write(values)
    return before - budget.left


# Methods that templates may call, by the type that has them. None: the result is no longer than text and arguments.
Bound = Callable[..., int]
_TEXT: dict[str, Bound | None] = dict.fromkeys(
    ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
     "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
     "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith",
     "strip", "swapcase", "title", "upper")
)  # fmt: skip
_TEXT |= {"center": padded, "join": joined, "ljust": padded, "replace": replaced, "rjust": padded, "rsplit": split,
          "split": split, "splitlines": split_lines, "zfill": padded, "format": None, "format_map": None}  # fmt: skip
_MAPPING: dict[str, Bound | None] = dict.fromkeys(("copy", "get", "items", "keys", "values"))
_SEQUENCE: dict[str, Bound | None] = dict.fromkeys(("copy", "count", "index"))
METHODS: tuple[tuple[Any, dict[str, Bound | None]], ...] = (
    (str, _TEXT),
    (Mapping, _MAPPING),
    ((list, tuple), _SEQUENCE),
)
