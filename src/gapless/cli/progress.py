"""How far a download is: a bar on a terminal, two lines elsewhere; both on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gapless.cli.output import note
from gapless.units import format_bytes

if TYPE_CHECKING:
    from gapless.models.store import Progress


@contextlib.contextmanager
def downloading(name: str) -> Iterator[Progress]:
    """Yields a callback of (bytes done, bytes in all), a ``WaitingProgress``; nothing is shown before it is told."""
    shown = _Bar(name) if sys.stderr.isatty() else _Lines(name)
    try:
        yield shown
    finally:
        shown.close()


def _note_waiting(name: str) -> None:
    note(f"waiting for another process that is fetching {name}")


class _Lines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = self._whole = False

    def __call__(self, done: int, total: int) -> None:
        if not self._begun:
            self._begun = True
            note(f"fetching {self._name}: {format_bytes(total)}")
        if done >= total and not self._whole:
            self._whole = True
            note(f"fetched {self._name}")

    def waiting(self) -> None:
        _note_waiting(self._name)

    def close(self) -> None:
        """Nothing is held back."""


class _Bar:
    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(desc=f"fetching {self._name}", total=total, initial=done, unit="B", unit_scale=True)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()  # its time is that of the download, whatever follows

    def waiting(self) -> None:
        _note_waiting(self._name)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
