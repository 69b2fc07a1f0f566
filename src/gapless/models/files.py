"""Files of models, opened with care: a name may stand for a pipe, a folder, or nothing that can be read."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

from gapless.errors import ModelFileError

REMEDY = "download the file again"
MAX_TEXT_BYTES = 1 << 29  # of a file that is read into memory: the largest tokenizers are a tenth of it

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_folder(path: Path) -> bool:
    """Raises ModelFileError if the system does not let one look."""
    return _mode(path, follow=True, fmt=stat.S_IFDIR)


def is_present(path: Path) -> bool:
    """Whether there is anything by that name, a link that leads nowhere included: opening it says what is wrong.

    Raises ModelFileError if the system does not let one look.
    """
    return _mode(path, follow=False, fmt=None)


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Paths with that ending, sorted. Raises ModelFileError if the folder cannot be listed."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    except (OSError, ValueError) as problem:
        raise _unreadable(folder, problem) from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ModelFileError if it is not there, may not be read, or is no regular file."""
    try:
        _check_regular(path, os.stat(path).st_mode)
        # Should it have become a pipe meanwhile, opening it would wait for a writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem) from None
    try:
        _check_regular(path, os.fstat(file.fileno()).st_mode)
    except ModelFileError:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """The content of a file that is text, and so of a bounded size. Raises ModelFileError."""
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_TEXT_BYTES) if size <= MAX_TEXT_BYTES else None
        except OSError as problem:
            raise _unreadable(path, problem) from None
    if data is None:
        raise ModelFileError(f"{path}: has {size} bytes, more than any such file needs", REMEDY)
    return data


def map_file(path: Path) -> mmap.mmap:
    """The file in memory, read where it is looked at. Raises ModelFileError."""
    with open_regular(path) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            size = os.fstat(file.fileno()).st_size
        except ValueError:
            raise ModelFileError(f"{path.name}: the file is empty", REMEDY) from None
        except OSError as problem:
            raise _unreadable(path, problem) from None
    if size != len(data):
        raise ModelFileError(f"{path}: changes its size while it is opened", "wait until it has been written")
    return data


def _mode(path: Path, *, follow: bool, fmt: int | None) -> bool:
    """Whether the path is there, and if so of that format."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem) from None
    return fmt is None or stat.S_IFMT(mode) == fmt


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ModelFileError(f"{path}: is {kind}, where a file is needed", "put a regular file in its place")


def _unreadable(path: Path, problem: OSError | ValueError) -> ModelFileError:
    if isinstance(problem, ValueError):  # a name that no file can have
        return ModelFileError(f"{str(path)[:200]!r}: cannot be read ({problem})", "check the path")
    if problem.errno == errno.ENAMETOOLONG:
        return ModelFileError(f"{str(path)[:200]}...: is too long a name", "check the path")
    if problem.errno == errno.ENOENT and os.path.islink(path):
        return ModelFileError(f"{path}: is a link to a file that is not there", "fetch the model again")
    return ModelFileError(f"{path}: cannot be read ({problem.strerror})", "check the path and its rights")
