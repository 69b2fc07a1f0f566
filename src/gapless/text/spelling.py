"""How the tokens of a vocabulary spell bytes.

Text of tokens is the concatenation of their bytes, read as UTF-8: so it can be made one token at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer as HfTokenizer

SPACE = "▁"  # stands for a space in SentencePiece vocabularies


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one printable character, those that print as themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = byte_alphabet()


def byte_level(token: str) -> bytes:
    """Bytes of a token written in GPT-2's alphabet; any other token stands for its own characters."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback(token: str) -> bytes:
    """Bytes of a SentencePiece token: ``<0x0A>`` is a byte, anything else is text."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


@dataclass(frozen=True)
class Spelling:
    """``bytes_of`` a token; with ``strips_space`` a space at the start of a text is the tokenizer's own."""

    bytes_of: Callable[[str], bytes]
    strips_space: bool = False


def spelling_of(hf: HfTokenizer) -> Spelling | None:
    """The spelling that a tokenizer's decoder amounts to; None if text depends on more than each token's bytes."""
    if hf.decoder is None:
        return None
    decoder = json.loads(hf.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or not _is_space_replaced(steps[0]):
        return None
    if kinds[3:] == []:
        return Spelling(byte_fallback)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return Spelling(byte_fallback, strips_space=True) if steps[3:] == [strip] else None


def _is_space_replaced(step: dict[str, object]) -> bool:
    return step.get("pattern") == {"String": SPACE} and step.get("content") == " "
