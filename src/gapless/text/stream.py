"""Text from tokens as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8  # a character has at most four bytes; what is longer is not going to become one


class Detokenizer:
    """Turns ids into pieces of text whose concatenation is the text of all ids.

    Only a window of ids is decoded each time: those since the last piece, after those of the piece before it (a
    tokenizer may treat the first token of a text in a way of its own).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._ids: list[int] = []  # of the last piece, then those held
        self._n_before = 0
        self._before = ""

    def push(self, token: int) -> str:
        """The text that the token completes; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids, skip_special=self._skip)
        held = len(self._ids) - self._n_before
        if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._emit(self._tokenizer.decode(self._ids, skip_special=self._skip))

    def _emit(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._ids = self._ids[self._n_before :]
        self._n_before = len(self._ids)
        self._before = self._tokenizer.decode(self._ids, skip_special=self._skip)
        return piece


class StopStrings:
    """Finds stop strings across pieces of text and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show; after ``found`` is set, the last before the stop string."""
        text = self._held + piece
        at, stop = min(((text.find(s), s) for s in self._stops if s in text), default=(-1, None))
        if stop is not None:
            self.found = stop
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        for n in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
