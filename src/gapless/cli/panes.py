"""Several answers at once on a terminal: side by side while they grow, or line by line where that cannot be."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import Protocol

from gapless.cli.output import cut_mark, printable
from gapless.outputs import StreamPiece

_REPAINT_S = 1 / 30
_MIN_COLUMN = 26


class Panes(Protocol):
    def take(self, index: int, piece: StreamPiece) -> None:
        """Add a piece of text to one answer."""
        ...

    def close(self) -> None:
        """Show what is still held back."""
        ...


def open_panes(titles: Sequence[str]) -> Panes:
    """Columns on a terminal wide enough for them, else lines."""
    size = shutil.get_terminal_size()
    width = (size.columns - 3 * (len(titles) - 1) - 1) // len(titles)
    paints = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if paints and width >= _MIN_COLUMN and size.lines >= 10:
        return Columns(titles, width, size.lines - 2)
    return Lines(titles, size.columns)


class Lines:
    """Each answer's lines as they are complete, marked with its number."""

    def __init__(self, titles: Sequence[str], width: int) -> None:
        self._width = max(20, width - 4)
        self._open = ["" for _ in titles]
        for index, title in enumerate(titles):
            print(f"{index + 1}> {title}")
        print(flush=True)

    def take(self, index: int, piece: StreamPiece) -> None:
        *done, self._open[index] = wrap(self._open[index] + _shown(piece), self._width)
        self._show(index, done)

    def close(self) -> None:
        for index, rest in enumerate(self._open):
            self._show(index, [rest] if rest else [])
        self._open = ["" for _ in self._open]

    def _show(self, index: int, lines: Sequence[str]) -> None:
        for line in lines:
            if line.strip():
                print(f"{index + 1}| {line}", flush=True)


class Columns:
    """Answers side by side, repainted in place; when they outgrow the screen their ends are shown."""

    def __init__(self, titles: Sequence[str], width: int, height: int) -> None:
        self._width, self._height = width, height
        self._heads = [wrap(title, width) for title in titles]
        self._texts = ["" for _ in titles]
        self._painted = 0
        self._due_s = 0.0

    def take(self, index: int, piece: StreamPiece) -> None:
        self._texts[index] += _shown(piece)
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._paint()
            self._due_s = now_s + _REPAINT_S

    def close(self) -> None:
        self._paint()

    def _paint(self) -> None:
        heads = _pad(self._heads)
        bodies = [wrap(text.strip(), self._width) for text in self._texts]
        room = self._height - len(heads[0]) - 1
        bodies = _pad([body[-room:] for body in bodies])
        rule = ["-" * self._width]
        columns = [head + rule + body for head, body in zip(heads, bodies, strict=True)]
        rows = [" | ".join(_fill(cell, self._width) for cell in row).rstrip() for row in zip(*columns, strict=True)]
        up = f"\x1b[{self._painted}A" if self._painted else ""
        sys.stdout.write(up + "".join(f"\r\x1b[K{row}\n" for row in rows))
        sys.stdout.flush()
        self._painted = len(rows)


def _shown(piece: StreamPiece) -> str:
    """Its text, and after the last a mark if the answer was cut."""
    return printable(piece.text) + (cut_mark() if piece.finish_reason == "length" else "")


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns; words are kept whole where they fit. The last line is the open one."""
    lines: list[str] = []
    for paragraph in text.replace("\t", "    ").split("\n"):
        line = ""
        for word in _words(paragraph):
            if line and text_width(line + word.rstrip()) > width:
                lines.append(line.rstrip())
                line, word = "", word.lstrip()
            line += word
            while text_width(line.rstrip()) > width:
                cut = _fit(line, width)
                lines.append(line[:cut])
                line = line[cut:]
        lines.append(line)
    return lines


def text_width(text: str) -> int:
    """Terminal columns of a text: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_char_width(c) for c in text)


def _char_width(c: str) -> int:
    if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def _fit(text: str, width: int) -> int:
    """How many characters fill at most ``width`` columns, one at least."""
    used = 0
    for index, c in enumerate(text):
        used += _char_width(c)
        if used > width:
            return max(1, index)
    return len(text)


def _words(paragraph: str) -> list[str]:
    """Words with the blanks that follow them."""
    words: list[str] = []
    for piece in paragraph.split(" "):
        words.append(piece + " ")
    if words:
        words[-1] = words[-1][:-1]
    return [word for word in words if word]


def _fill(text: str, width: int) -> str:
    return text + " " * (width - text_width(text))


def _pad(columns: list[list[str]]) -> list[list[str]]:
    """Columns of one height, filled up with empty lines."""
    height = max(len(column) for column in columns)
    return [column + [""] * (height - len(column)) for column in columns]
