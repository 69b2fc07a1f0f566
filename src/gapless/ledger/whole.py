"""Files that are written whole or not at all: beside their place first, then renamed into it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gapless.errors import LedgerFileError


def check_writable(path: Path, field: str) -> None:
    """Raises LedgerFileError naming ``field`` if no file can be put at ``path``. Leaves nothing behind."""
    with _told(path, field):
        part = _part_of(_target(path))
        try:
            part.open("xb").close()
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, field: str) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends, unless it ends by an exception.

    Raises LedgerFileError naming ``field``.
    """
    with _told(path, field), replacing(path) as file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """``writing``, for files that no user has named: raises OSError."""
    target = _target(path)
    part = _part_of(target)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # so that the rename cannot outlive the content in a crash
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Where the file will lie: a link stays and what it names is written."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OSError(errno.EISDIR, "it is a folder")
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")  # a rename would take the place of a device
    return target


def _part_of(target: Path) -> Path:
    return target.with_name(f".gapless-{secrets.token_hex(8)}.part")


@contextmanager
def _told(path: Path, field: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = problem.strerror or problem
        raise LedgerFileError(
            f"{field} = {str(path)!r} cannot be written: {why}",
            "give the path of a file in a folder that you may write to",
        ) from None
