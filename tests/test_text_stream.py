"""Streamed text is the text of all tokens, however it is cut; stop strings are found wherever they fall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from gapless.errors import RequestError
from gapless.text.stream import REPLACEMENT, Detokenizer, StopStrings
from gapless.text.tokenizer import Tokenizer
from tokenizer_data import byte_pair_metadata, sentence_piece_metadata

BYTE_PAIRS = Tokenizer.from_gguf(byte_pair_metadata(), "test")
SENTENCE_PIECE = Tokenizer.from_gguf(sentence_piece_metadata(), "test")
WORD_PIECE = HfTokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "##c": 3, "##d": 4, ".": 5}, unk_token="[UNK]"))
WORD_PIECE.decoder = decoders.WordPiece(cleanup=False)
METASPACE = HfTokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4, "é": 5}, unk_token="<unk>"))
METASPACE.decoder = decoders.Metaspace()
ALL = {
    "byte pairs": BYTE_PAIRS,
    "sentence piece": SENTENCE_PIECE,
    "word piece": Tokenizer(WORD_PIECE),
    "metaspace": Tokenizer(METASPACE),
}


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
def test_pieces_make_the_text_of_all_tokens(kind: str, skip_special: bool, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    ids = data.draw(ids_of(tokenizer))
    text = "".join(pieces_of(tokenizer, ids, skip_special=skip_special))
    assert text == tokenizer.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize("kind", ["byte pairs", "sentence piece"])
@given(data=st.data())
def test_no_piece_changes_what_was_shown(kind: str, data: st.DataObject) -> None:
    """After each token, the pieces so far and what is left are the text of the tokens so far."""
    tokenizer = ALL[kind]
    ids = data.draw(ids_of(tokenizer))
    shown = ""
    detokenizer = Detokenizer(tokenizer)
    for n, token in enumerate(ids, start=1):
        shown += detokenizer.push(token)
        assert tokenizer.decode(ids[:n]).startswith(shown)
        assert tokenizer.decode(ids).startswith(shown)


@given(text=st.text(max_size=20))
@pytest.mark.parametrize("kind", ["byte pairs", "sentence piece"])
def test_a_character_comes_whole(kind: str, text: str) -> None:
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text, add_special=False)
    for piece in pieces_of(tokenizer, ids):
        assert REPLACEMENT not in piece or REPLACEMENT in text


def test_an_incomplete_character_waits_and_is_replaced_at_the_end() -> None:
    ids = BYTE_PAIRS.encode("€", add_special=False)
    assert len(ids) == 3
    assert pieces_of(BYTE_PAIRS, ids) == ["", "", "€", ""]
    assert pieces_of(BYTE_PAIRS, ids[:2]) == ["", "", REPLACEMENT]


def test_the_space_before_a_first_word_belongs_to_the_tokenizer_unless_text_goes_on() -> None:
    ids = SENTENCE_PIECE.encode("hello hello", add_special=False)
    assert "".join(pieces_of(SENTENCE_PIECE, ids)) == "hello hello"
    assert "".join(pieces_of(SENTENCE_PIECE, ids, continues=True)) == " hello hello"
    assert SENTENCE_PIECE.decode(ids, continues=True) == " hello hello"


def test_tokens_of_control_show_nothing_unless_asked_for() -> None:
    ids = [SENTENCE_PIECE.bos_id or 1, *SENTENCE_PIECE.encode("hello", add_special=False)]
    assert "".join(pieces_of(SENTENCE_PIECE, ids)) == "hello"
    assert "".join(pieces_of(SENTENCE_PIECE, ids, skip_special=False)).startswith("<s>")


# --- stop strings


def expected_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the first end of any stop string, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


letters = st.text("ab", max_size=30)


@given(
    text=letters,
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
@example(text="xabcd", stops=["abcd", "bc"], sizes=[])
@example(text="aaab", stops=["aab"], sizes=[1, 1, 1, 1])
def test_what_is_found_does_not_depend_on_the_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    finder = StopStrings(stops)
    shown = "".join(finder.push(piece) for piece in cut(text, sizes)) + finder.flush()
    assert (shown, finder.found) == expected_stop(text, stops)


@given(text=letters, stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += finder.push(character)
        if finder.found is not None:
            return
        held = text[len(shown) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_before_stop_strings_count_is_forgotten() -> None:
    finder = StopStrings(["abc"])
    assert finder.push("xab") == "x"
    assert finder.flush() == "ab"
    assert finder.push("c") == "c"
    assert finder.found is None


def test_nothing_follows_a_stop() -> None:
    finder = StopStrings(["."])
    assert finder.push("one. two") == "one"
    assert (finder.push("three"), finder.flush(), finder.found) == ("", "", ".")


def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    finder = StopStrings(["a" * 10_000 + "b"])
    shown = sum(len(finder.push("a")) for _ in range(50_000))
    assert shown == 40_000


@pytest.mark.parametrize("stop", ["\ud800", "a\udfffb"])
def test_a_stop_string_that_no_text_can_hold_is_refused(stop: str) -> None:
    with pytest.raises(RequestError, match=r"the stop string '.*' has a lone surrogate at character \d"):
        StopStrings(["a", stop])
