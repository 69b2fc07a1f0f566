"""Small vocabularies as GGUF metadata, one of each kind."""

from __future__ import annotations

from typing import Any

from gapless.text.spelling import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_pair_metadata(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """All bytes, a few words, and two tokens of control."""
    tokens = ["<|begin|>", "<|end|>", *byte_alphabet()]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ċ Ċ"]
    tokens += [merge.replace(" ", "") for merge in merges]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def sentence_piece_metadata(**more: Any) -> dict[str, Any]:
    """All bytes, pieces with scores, two tokens of control, one that users defined."""
    pieces = {"▁": -1, "▁h": -2, "el": -3, "lo": -4, "▁hel": -5, "▁hello": -6, "▁▁": -1e9, "▁▁▁▁": -1e9, "▁▁▁": -1e9}
    letters = {letter: -100.0 - index for index, letter in enumerate("helo wrdan.,é\n<>/s")}
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<user>": USER_DEFINED}
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(special) + 256) + [float(s) for s in (pieces | letters).values()],
        "tokenizer.ggml.token_type": [*special.values(), *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
