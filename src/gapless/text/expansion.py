"""How much a ``tokenizer.json`` lets a text grow, told before the library is given it.

The file comes from a stranger. A dozen of its steps, each of which makes ten letters of one, make terabytes of a page;
and the library runs out of memory by ending the process. So each step is bounded, and so is what they do together.

Lengths are those of Unicode's fully decomposed form (NFKD): no Unicode normalization makes that longer, whichever
comes in between, so the steps that do no more than normalize count for nothing.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unicodedata import normalize

from tokenizers import Tokenizer as HfTokenizer

from gapless.errors import ModelFileError, UnsupportedModelError

MAX_FILE_BYTES = 1 << 27  # four times the largest known
MAX_GROWTH = 64  # of one character, or one token; T5 has 36: one may become 18, and a space goes before each piece
MAX_TOKEN_CHARACTERS = 8192  # of a token, and of the text that becomes of it; known ones have some hundreds
MAX_STEPS = 256
MAX_AFFIX = 64  # characters that mark how a piece stands in its word, such as "##" and "</w>"
MAX_WORD = 1000  # characters of a word that WordPiece cuts, in a time of their square; usual are 100
MAX_STRIPPED = 64  # characters that a decoder takes from a token's end; the library fails where a token has fewer

_REMEDY = "use the tokenizer that came with the model, or another copy of it"
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")

Step = Mapping[str, Any]
Rule = Callable[[Step, float], float]  # the most that a step makes of so many characters, or tokens


def check_expansion(data: bytes, where: str) -> None:
    """Refuse a ``tokenizer.json`` that makes too much of a text, or of a token.

    Raises:
        ModelFileError: it does so, or is none.
        UnsupportedModelError: it has a step whose growth is not known.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _error(where, f"it has {len(data)} bytes, more than {MAX_FILE_BYTES}")
    try:
        file = json.loads(data)
    except (ValueError, RecursionError):
        raise _error(where, "it is no valid JSON") from None
    if not isinstance(file, dict):
        raise _error(where, "it is no JSON object")
    model = file.get("model")
    if isinstance(model, dict):
        _check_model(model, where)
    parts = _without_vocabulary(file)
    steps = {part: _steps(getattr(parts, part), where) for part in _PARTS}
    _check_stripped(steps["decoder"], where)
    text = _grown(steps["normalizer"], _NORMALIZED, 1, where)
    text = _grown(steps["pre_tokenizer"], _PRE_TOKENIZED, text, where)
    tokens = _grown(steps["post_processor"], _PROCESSED, 1, where)
    decoded = _grown(steps["decoder"], _DECODED, 1, where)
    for growth, what in ((text, "of a character"), (tokens, "of a token"), (decoded, "of a token's character")):
        if growth > MAX_GROWTH:
            raise _error(where, f"its steps may make {growth:.3g} {what}, more than {MAX_GROWTH}")
    check_longest(_grown(steps["decoder"], _DECODED, _longest_token(file), where), where)


def check_longest(characters: float, where: str) -> None:
    """Raises ModelFileError if a token stands for so many that answers of ordinary length would fill the memory."""
    if characters > MAX_TOKEN_CHARACTERS:
        raise _error(where, f"a token has {characters:.6g} characters, more than {MAX_TOKEN_CHARACTERS}")


def steps_of(part: Any) -> Iterator[Step]:
    """The steps of a normalizer or the like, as the library has understood it; one after the other."""
    return _flat(json.loads(part.__getstate__())) if part is not None else iter(())


def _flat(step: Step) -> Iterator[Step]:
    if step["type"] != "Sequence":
        yield step
        return
    for child in next(step[key] for key in _CHILDREN if key in step):
        yield from _flat(child)


def _steps(part: Any, where: str) -> list[Step]:
    steps = list(steps_of(part))
    if len(steps) > MAX_STEPS:
        raise _error(where, f"it has {len(steps)} steps, more than {MAX_STEPS}")
    return steps


def _without_vocabulary(file: Mapping[str, Any]) -> HfTokenizer:
    """The file's steps in the library's own form, of the several that it reads. Nothing has gone through them yet."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    return HfTokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, **{part: file.get(part) for part in _PARTS}})
    )


def _grown(steps: list[Step], rules: Mapping[str, Rule], size: float, where: str) -> float:
    for step in steps:
        rule = rules.get(step["type"])
        if rule is None:
            raise UnsupportedModelError(f"{where}: the tokenizer's step {step['type']!r:.80} is not known", _REMEDY)
        size = rule(step, size)
    return size


def _check_model(model: Mapping[str, Any], where: str) -> None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name)
        if isinstance(affix, str) and len(affix) > MAX_AFFIX:
            raise _error(where, f"{name} has {len(affix)} characters, more than {MAX_AFFIX}")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > MAX_WORD:
        raise _error(where, f"max_input_chars_per_word = {word} is more than {MAX_WORD}")


def _check_stripped(decoder: list[Step], where: str) -> None:
    for step in decoder:
        for end in ("start", "stop"):
            if step["type"] == "Strip" and step[end] > MAX_STRIPPED:
                raise _error(where, f"the decoder Strip has {end} = {step[end]}, more than {MAX_STRIPPED}")


def _longest_token(file: Mapping[str, Any]) -> int:
    """Characters of the longest name. What is no vocabulary is left to the library to refuse."""
    model = file.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    names = [entry[0] if isinstance(entry, list) and entry else entry for entry in _listed(vocab)]
    names += [token.get("content") for token in _listed(file.get("added_tokens")) if isinstance(token, dict)]
    return max((len(name) for name in names if isinstance(name, str)), default=0)


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | dict) else []


def _error(where: str, problem: str) -> ModelFileError:
    return ModelFileError(f"{where}: is no usable tokenizer: {problem}", _REMEDY)


# --- what each step may make of n characters; with n = 1, of each character of a text that is not empty

# Regular expressions each of whose matches takes a character: literals, sets and classes, all of them required.
_TAKES = re.compile(r"(?:[^\\*?|(^${]|\\[sSdDwWnrt.]|\\[pP]\{\w+\}|\{[1-9]\d*,?\d*\})+")


def _replaced(pattern: Mapping[str, str], content: str, n: float) -> float:
    made = len(normalize("NFKD", content))
    if text := pattern.get("String"):
        return n * max(1.0, made / len(text))
    if _TAKES.fullmatch(pattern.get("Regex", "")):
        return n * max(1, made)
    return n + (n + 1) * made  # it may match between characters


def _replace(step: Step, n: float) -> float:
    return _replaced(step["pattern"], step["content"], n)


def _precompiled(step: Step, n: float) -> float:
    """A trie of what is replaced, behind its size, and then what takes its place, each text with a zero at its end."""
    data = base64.b64decode(step["precompiled_charsmap"])
    texts = data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace")
    return n * max(1, *(len(normalize("NFKD", text)) for text in texts.split("\0")))


def _byte_level(step: Step, n: float) -> float:
    return 4 * n * (2 if step.get("add_prefix_space") else 1)  # a character has up to four bytes


def _metaspace(step: Step, n: float) -> float:
    return n if step.get("prepend_scheme") == "never" else 2 * n  # before each piece, which may be one character


def _ctc(step: Step, n: float) -> float:
    return _replaced({"String": step["word_delimiter_token"]}, " ", n)


def _template(step: Step, n: float) -> float:
    made = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
    pieces = step["single"]
    special = sum(made.get(piece["SpecialToken"]["id"], 1) for piece in pieces if "SpecialToken" in piece)
    return n * sum("Sequence" in piece for piece in pieces) + special


def _same(step: Step, n: float) -> float:
    return n


_UNICODE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Strip", "StripAccents")
_CUTS = ("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts",
         "Whitespace", "WhitespaceSplit")  # fmt: skip
_JOINS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip")

_NORMALIZED: dict[str, Rule] = {
    **dict.fromkeys(_UNICODE, _same),
    "BertNormalizer": lambda _, n: 3 * n,  # spaces around ideographs
    "ByteLevel": lambda _, n: 11 * n,  # in decomposed form: its letters for bytes include "¾"
    "Precompiled": _precompiled,
    "Prepend": lambda step, n: n + len(normalize("NFKD", step["prepend"])),
    "Replace": _replace,
}
_PRE_TOKENIZED: dict[str, Rule] = {
    **dict.fromkeys(_CUTS, _same),
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
}
_PROCESSED: dict[str, Rule] = {
    "BertProcessing": lambda _, n: n + 2,
    "ByteLevel": _same,
    "RobertaProcessing": lambda _, n: n + 2,
    "TemplateProcessing": _template,
}
_DECODED: dict[str, Rule] = {
    **dict.fromkeys(_JOINS, _same),
    "BPEDecoder": lambda step, n: _replaced({"String": step["suffix"]}, " ", n),
    "CTC": _ctc,
    "Replace": _replace,
    "WordPiece": lambda _, n: n + 1,
}
