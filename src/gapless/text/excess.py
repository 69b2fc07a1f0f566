"""Texts that make far too many tokens, told from a part of them.

To encode a text takes many times its size in memory, so one that can never fit is better not encoded to its end. That
is sound where tokens stand for the bytes of the text: those that the beginning of a text makes stand for bytes that
the whole text needs tokens for too, and none stands for more bytes than the longest. Tokens per character would not
be sound: a vocabulary may lack characters, which make no tokens, and a token may swallow the space beside it.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import models

from gapless.errors import RequestError
from gapless.text.expansion import Step, steps_of

if TYPE_CHECKING:
    from gapless.text.tokenizer import Tokenizer

PIECE = 1 << 16  # characters; a text of one piece is encoded sooner than it is looked at here

_SPACE = re.compile(r"\s+")
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace"}


class Excess:
    """Of the texts of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def surely(self, text: str, n_tokens: int) -> bool:
        """Whether a text makes more tokens than that; False where it need not, or where only encoding it can tell."""
        if len(text) <= PIECE or not self._is_local:
            return False
        needed = self._longest * n_tokens
        if len(text) <= needed:
            return False
        for start in range(0, len(text), PIECE):
            needed -= self._bytes_within(text[start : start + PIECE])
            if needed < 0:
                return True
        return False

    def _bytes_within(self, piece: str) -> int:
        """Bytes that any encoding of a text with this piece in it has tokens for: all but those at the cuts."""
        if self._swallows:
            piece = _SPACE.sub("", piece)
        try:
            ids = self._tokenizer.encode(piece, add_special=False)
        except RequestError:  # whether the whole can be encoded is not asked here
            return 0
        return max(0, sum(len(self._tokenizer.token_bytes(i)) for i in ids) - 2 * self._longest)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max((len(self._tokenizer.token_bytes(i)) for i in self._tokenizer.hf.get_vocab().values()), default=0)

    @cached_property
    def _swallows(self) -> bool:
        """Whether tokens take white space beside them, however much there is."""
        return any(token.lstrip or token.rstrip for token in self._tokenizer.hf.get_added_tokens_decoder().values())

    @cached_property
    def _is_local(self) -> bool:
        """Whether tokens are the text's bytes, and which bytes get tokens hangs on nothing far away in the text."""
        hf = self._tokenizer.hf
        model = hf.model
        return (
            self._tokenizer.spelling is not None
            and isinstance(model, models.BPE)
            and not model.continuing_subword_prefix
            and not model.end_of_word_suffix
            and all(step["type"] in _NORMALIZERS or _replaces_a_character(step) for step in steps_of(hf.normalizer))
            and all(step["type"] in _PRE_TOKENIZERS or _keeps_all(step) for step in steps_of(hf.pre_tokenizer))
        )


def _replaces_a_character(step: Step) -> bool:
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1


def _keeps_all(step: Step) -> bool:
    return step["type"] == "Split" and bool(step["behavior"] != "Removed")
