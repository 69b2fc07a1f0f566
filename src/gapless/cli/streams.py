"""The standard streams, made fit for use whatever the program was started with."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TextIO

from gapless.errors import RequestError


def prepare_streams() -> None:
    """Open closed streams on nothing, and let no character that an encoding lacks end the program."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere(descriptor))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        # An ASCII stream is one whose locale is not set: what comes is UTF-8 then. Bytes that are not text are kept,
        # so that whoever reads a line can say which one it was.
        encoding = "utf-8" if _codec(sys.stdin) == "ascii" else sys.stdin.encoding
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")


def is_utf8(stream: TextIO) -> bool:
    """Whether the stream takes every character."""
    return _codec(stream) == "utf-8"


def valid_text(text: str, what: str) -> str:
    """The text, its undecoded bytes read as UTF-8. Raises RequestError, naming ``what``, if they are not."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise RequestError(f"{what} is not valid UTF-8", "convert it to UTF-8 first") from None


def _nowhere(descriptor: int) -> TextIO:
    """A stream on /dev/null with the closed one's number, lest a file that is opened later gets it."""
    opened = os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
    if opened != descriptor and not _is_open(descriptor):
        os.dup2(opened, descriptor)
        os.close(opened)
        opened = descriptor
    os.set_inheritable(opened, True)  # the compilers that are started have standard streams too
    return open(opened, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


def _codec(stream: TextIO) -> str:
    try:
        return codecs.lookup(stream.encoding or "utf-8").name
    except LookupError:
        return ""
