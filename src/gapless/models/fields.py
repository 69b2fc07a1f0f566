"""Fields of a model's description, read with the suspicion that a file deserves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.checks import shown
from gapless.errors import ModelFileError

MAX_SIZE = 1 << 24
LEAST, MOST = 1e-20, 1e12  # of a number that single precision computes with

_MISSING = object()


class Fields:
    """Typed, bounded access to a mapping; errors name the file, the field and the value."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self.where = where
        self._prefix = prefix

    def error(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(
            f"{self.where}: {self._prefix}{key} = {shown(value)} is not {wanted}", "use an unmodified copy of the model"
        )

    def has(self, key: str) -> bool:
        return self._values.get(self._prefix + key) is not None

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            if default is _MISSING:
                raise ModelFileError(
                    f"{self.where}: the field {self._prefix}{key} is missing", "use an unmodified copy of the model"
                )
            return default
        return value

    def size(self, key: str, default: Any = _MISSING, *, most: int = MAX_SIZE) -> int:
        """A positive integer."""
        value = self.raw(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(key, value, f"a whole number from 1 to {most}")
        return value

    def optional_size(self, key: str) -> int | None:
        """A positive integer; None where the field is absent, null or 0."""
        return self.size(key, most=1 << 31) if self._says(key) else None

    def number(self, key: str, default: Any = _MISSING, *, low: float = LEAST, high: float = MOST) -> float:
        """A number above ``low`` and up to ``high``."""
        value = self.raw(key, default)
        if not _within(value, low, high):
            raise self.error(key, value, f"a number above {low:g} and up to {high:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self._says(key) else None

    def _says(self, key: str) -> bool:
        """Whether the field is there and not 0, which stands for nothing."""
        value = self.raw(key, None)
        return value is not None and not (isinstance(value, int | float) and value == 0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a text")
        return value

    def numbers(self, key: str, n: int, *, low: float = LEAST, high: float = MOST) -> tuple[float, ...]:
        """``n`` numbers above ``low`` and up to ``high``."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != n:
            raise self.error(key, value if not isinstance(value, list) else f"{len(value)} values", f"{n} numbers")
        for v in value:
            if not _within(v, low, high):
                raise self.error(key, v, f"all numbers above {low:g} and up to {high:g}")
        return tuple(float(v) for v in value)

    def sub(self, key: str) -> Fields:
        """A nested table, empty where it is absent."""
        value = self.raw(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, value, "a table")
        return Fields(value, f"{self.where}: {key}")


def _within(value: object, low: float, high: float) -> bool:
    """Whether it is a number, and one in that range; no comparison holds for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value <= high
