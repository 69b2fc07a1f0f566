"""What a template may spend: characters made, values read, turns of loops, and time.

The unit is about one character made, or one small step taken. Whoever is about to make or walk something spends
for it first, so neither memory nor time can pass what the budget allows by more than one operation.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Set, ValuesView

from jinja2.utils import Namespace

UNITS = 16_000_000
UNITS_PER_INPUT = 40  # more for each unit of the messages: what comes in may be handled some tens of times
MAX_SECONDS = 1.0  # of processor time, so that a busy machine fails nothing
MAX_DEPTH = 100  # of values within values; deeper ones would exhaust the stack of C code that walks them
MAX_BITS = 4096  # of a whole number

_CHECK_EVERY, _CALL = 4096, 64  # units between looks at the clock; what a payment counts for besides its units
_NODE = 8  # writing a value: quotes, commas and the like
_STEP = 3  # reading a value within another
_REFERENCE = 2  # a place in a list
ELEMENT = 16  # a new small value in a list

_SIZED = (list, tuple, range, Set, KeysView, ValuesView, ItemsView)


class OverBudget(Exception):
    """A template asks for more than it may have."""


class Budget:
    """Of one rendering; ``inputs`` are what the template is given."""

    def __init__(self, inputs: object) -> None:
        self.left = 1 << 62
        self._deadline = time.thread_time() + MAX_SECONDS
        self._unchecked = 0
        self.write(inputs)
        self.left = UNITS + UNITS_PER_INPUT * ((1 << 62) - self.left)

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise OverBudget("it makes or reads too much")
        self._unchecked += units + _CALL
        if self._unchecked > _CHECK_EVERY:
            self._unchecked = 0
            if time.thread_time() > self._deadline:
                raise OverBudget(f"it runs for more than {MAX_SECONDS:g} s")

    def read(self, value: object) -> None:
        """Spend for comparing, hashing or sorting a value, with all that is in it."""
        if isinstance(value, str):
            self.spend(1 + (len(value) >> 4))
        elif value is None or isinstance(value, bool | float):
            self.spend(1)
        else:
            self._walk(value, per_node=_STEP, shift=4)

    def write(self, value: object, indent: int = 0) -> None:
        """Spend for a value as text, with all that is in it; ``indent`` columns for each level."""
        if isinstance(value, str):
            self.spend(1 + len(value))
        else:
            self._walk(value, per_node=_NODE, shift=0, indent=indent)

    def made(self, value: object) -> None:
        """Spend for a result: the characters of a string, the places of a list."""
        if isinstance(value, str):
            self.spend(1 + len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(1 + _REFERENCE * len(value))
        else:
            self.spend(1)
            if isinstance(value, int):
                check_number(value)

    def _walk(self, value: object, per_node: int, shift: int, indent: int = 0) -> None:
        """Breadth first: a value that holds another twice is walked twice, as whoever writes or compares it will."""
        level: list[object] = [value]
        for depth in range(MAX_DEPTH):
            self.spend(len(level) * (per_node + indent * depth))
            below: list[object] = []
            for item in level:
                if isinstance(item, str):
                    self.spend(len(item) >> shift)
                elif isinstance(item, int):
                    check_number(item)
                else:
                    below.extend(self._children(item))
            if not below:
                return
            level = below
        raise OverBudget(f"it nests values more than {MAX_DEPTH} deep")

    def _children(self, value: object) -> Iterable[object]:
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")
        if isinstance(value, Mapping):
            self.spend(2 * len(value))
            return [*value.keys(), *value.values()]
        if isinstance(value, _SIZED):
            self.spend(len(value))
            return value
        return ()


def check_number(value: int) -> None:
    if value.bit_length() > MAX_BITS:
        raise OverBudget("it makes a number of thousands of digits")
