"""Calls of the library ``tokenizers``, which fails in its own ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gapless.errors import GaplessError


@contextmanager
def failures_as(error: Callable[[str], GaplessError]) -> Iterator[None]:
    """Raise what ``error`` makes of the line that says what failed; a panic of the library is no Exception."""
    try:
        yield
    except (GaplessError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:
        raise error(one_line(problem)) from None


def one_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
