"""What commands write: one JSON value or text on standard output, notes on standard error."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TextIO

import click

from gapless.cli.streams import is_utf8
from gapless.errors import GaplessError

_INTERRUPTED = "Interrupted"


@dataclass(frozen=True)
class ErrorReport:
    """An error as users see it; also the object under ``error`` with ``--json``."""

    kind: str
    problem: str
    remedy: str
    exit_code: int

    @classmethod
    def of(cls, problem: BaseException) -> ErrorReport:
        if isinstance(problem, KeyboardInterrupt | click.Abort):
            return cls(_INTERRUPTED, "interrupted", "", 130)
        if isinstance(problem, GaplessError):
            return cls(type(problem).__name__, problem.problem, problem.remedy, problem.exit_code)
        if isinstance(problem, click.ClickException):
            context = getattr(problem, "ctx", None)
            path = context.command_path if context is not None else "gapless"
            return cls("UsageError", problem.format_message().rstrip("."), f"see '{path} --help'", 2)
        if isinstance(problem, MemoryError):
            remedy = "choose a smaller model, --context, --kv-memory, --max-running or --max-step-tokens"
            return cls("ResourceError", "out of memory", remedy, 2)
        if isinstance(problem, OSError):
            named = f"{problem.filename}: " if problem.filename else ""
            return cls("OSError", f"{named}{problem.strerror or problem}", "check the path, its rights and the disk", 2)
        what = f"defect in gapless: {type(problem).__name__}: {problem}"
        return cls("Defect", what, "set GAPLESS_TRACEBACK=1 for the traceback and report it", 1)


def report_error(report: ErrorReport, *, as_json: bool) -> int:
    """Write one line to standard error (and the object to standard output with ``as_json``); return the exit code."""
    line = f"{report.problem}; {report.remedy}" if report.remedy else report.problem
    head = "" if report.kind == _INTERRUPTED else "error: "  # who has stopped it needs no alarm
    note(f"{head}{' '.join(printable(line).split())}")
    try:
        if as_json:
            write_json({"error": report})
        sys.stdout.flush()
    except OSError:  # it may be standard output itself that failed
        drop(sys.stdout)
    return report.exit_code


def drop(stream: TextIO) -> None:
    """Let nothing more be written to a standard stream, not even by the interpreter as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_json(value: Any) -> None:
    """One JSON value on one line of standard output. Dataclasses become objects."""
    print(json.dumps(value, default=_plain, ensure_ascii=not is_utf8(sys.stdout), allow_nan=False), flush=True)


def write(text: str = "", end: str = "\n") -> None:
    """Text on standard output, at once. Not ``click.echo``, which has a mind of its own about encodings."""
    print(text, end=end, flush=True)


def cut_mark() -> str:
    """What ends a text that goes on no further because it may not."""
    return "…" if is_utf8(sys.stdout) else "..."


def note(text: str) -> None:
    """A line on standard error, if anybody reads it: what is asked for goes on without."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # its reader may have gone
        drop(sys.stderr)


def printable(text: str) -> str:
    """The text without control characters but tab and newline: a model's output must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c for c in text if c in "\t\n" or unicodedata.category(c) != "Cc")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
