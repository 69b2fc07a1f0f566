"""Text from tokens as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gapless.text.tokenizer import Tokenizer, check_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_TOKENS = 8  # a character has at most four bytes; what is longer is not going to become one


class Detokenizer:
    """Turns ids into pieces of text whose concatenation is ``tokenizer.decode`` of all of them.

    Args:
        tokenizer: whose ids they are.
        skip_special: leave out tokens of control.
        continues: the ids go on from earlier text, so a space before their first word is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        spelling = tokenizer.spelling
        self._text: _Bytes | _Window
        if spelling is None:
            self._text = _Window(tokenizer)
        else:
            self._text = _Bytes(tokenizer, strips_space=spelling.strips_space and not continues)

    def push(self, token: int) -> str:
        """The text that the token completes; "" while a character is incomplete."""
        return "" if token in self._skipped else self._text.push(token)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        return self._text.flush()


class _Bytes:
    """For tokens that spell bytes: an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, strips_space: bool) -> None:
        self._tokenizer = tokenizer
        self._strips_space = strips_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._stripped(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


class _Window:
    """For other tokenizers: decodes the ids since the last piece after those of that piece, and takes what is new.

    What a token means may hang on the one before it, but hardly on those further back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of the last piece, then those held
        self._n_before = 0
        self._before = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode()
        held = len(self._ids) - self._n_before
        return "" if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS else self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode())

    def _emit(self, text: str) -> str:
        piece = text[len(self._before) :]
        self._ids = self._ids[self._n_before :]
        self._n_before = len(self._ids)
        self._before = self._decode()
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=False)


class StopStrings:
    """Finds stop strings across pieces of text and holds back what may become one.

    What it finds does not depend on how the text is cut: it is the stop string that is complete first, and of those
    that end together the longest. Each string is sought by a Knuth-Morris-Pratt automaton, whose state is how much
    of it the text ends with.

    Raises RequestError for a stop string that no text can hold.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            check_unicode(stop, f"the stop string {stop!r:.80}")
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show; once ``found`` is set, the last before the stop string, and then none."""
        if self.found is not None:
            return ""
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            for automaton in self._automata:
                automaton.step(character)
            complete = next((a for a in self._automata if a.complete), None)
            if complete is not None:
                self.found, self._held = complete.stop, ""
                return text[: end - len(complete.stop)]
        keep = max((a.matched for a in self._automata), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes or stop strings do not count yet."""
        for automaton in self._automata:
            automaton.matched = 0
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0] * len(stop)  # of stop[: i + 1]: the longest proper beginning that is also its end
        for i in range(1, len(stop)):
            self._borders[i] = self._after(self._borders[i - 1], stop[i])

    @property
    def complete(self) -> bool:
        return self.matched == len(self.stop)

    def step(self, character: str) -> None:
        self.matched = self._after(self.matched, character)

    def _after(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0
