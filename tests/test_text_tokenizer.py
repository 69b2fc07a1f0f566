"""Tokenizers from GGUF metadata and from tokenizer.json: exact ids, exact text, clear errors."""

from __future__ import annotations

import base64
import itertools
import json
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from gapless.errors import ModelError, ModelFileError, RequestError, UnsupportedModelError
from gapless.models.gguf_file import GgufFile
from gapless.text import expansion
from gapless.text.library import failures_as
from gapless.text.pretokenizers import PRE_TOKENIZERS
from gapless.text.spelling import SPACE, byte_alphabet, byte_level
from gapless.text.stream import Detokenizer
from gapless.text.tokenizer import Tokenizer
from tokenizer_data import BYTE, CONTROL, UNUSED, byte_pair_metadata, sentence_piece_metadata

BYTES = {byte: letter for letter, byte in byte_alphabet().items()}
BYTE_PAIRS = Tokenizer.from_gguf(byte_pair_metadata(), "test")
SENTENCE_PIECE = Tokenizer.from_gguf(sentence_piece_metadata(), "test")


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token(i) for i in ids]


# --- the real model


@pytest.fixture(scope="module")
def real(real_model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(real_model), real_model.name)


# As llama.cpp gives them for the same file.
KNOWN_IDS = {
    "Hello world": [19556, 905],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "  two  spaces\n\n\tTab": [216, 827, 216, 5600, 1116, 197, 30064],
    "2024-12-31: 3.14159": [34, 32, 34, 36, 29, 33, 34, 29, 35, 33, 42, 216, 35, 30, 33, 36, 33, 37, 41],
    "½ ² ﬁ ① café": [16738, 216, 19133, 40367, 216, 173, 235, 250, 37366],
    "日本語のテキスト": [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
    "I'll don't WON'T": [57, 3060, 1326, 982, 408, 2154, 23, 68],
}


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_known_ids_of_the_real_model(real: Tokenizer, text: str) -> None:
    ids = real.encode(text)
    assert ids == KNOWN_IDS[text]
    assert real.decode(ids, skip_special=False) == text


def test_facts_of_the_real_model(real: Tokenizer) -> None:
    assert (real.vocab_size, real.bos_id) == (49152, 1)
    assert real.token(2) == "<|im_end|>"
    assert {0, 1, 2} <= real.special_ids


@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_the_real_model(real: Tokenizer, text: str) -> None:
    """But for bytes that its vocabulary lacks: of characters that nobody has assigned, and a few rare ones."""
    text = "".join(c for c in text if all(real.hf.token_to_id(BYTES[byte]) is not None for byte in c.encode()))
    ids = real.encode(text, parse_special=False)
    assert real.decode(ids) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip_special=st.booleans())
def test_the_text_of_any_ids_is_that_of_the_library(real: Tokenizer, ids: list[int], skip_special: bool) -> None:
    expected = real.hf.decode(ids, skip_special_tokens=skip_special)
    assert real.decode(ids, skip_special=skip_special) == expected


def test_the_real_tokenizer_is_built_at_once(real_model: Path) -> None:
    def seconds() -> float:
        metadata = GgufFile(real_model)
        started = time.process_time()
        Tokenizer.from_gguf(metadata, "test")
        return time.process_time() - started

    assert min(seconds() for _ in range(3)) < 0.4  # 0.12 s on a quiet machine


# --- byte pairs


def test_merges_digits_and_special_tokens() -> None:
    ids = BYTE_PAIRS.encode("hello hello 123<|end|>")
    assert spelled(BYTE_PAIRS, ids) == ["hello", "Ġhello", "Ġ", "1", "2", "3", "<|end|>"]
    assert BYTE_PAIRS.decode(ids) == "hello hello 123"
    assert BYTE_PAIRS.decode(ids, skip_special=False) == "hello hello 123<|end|>"


def test_special_tokens_in_a_text_may_be_read_as_text() -> None:
    ids = BYTE_PAIRS.encode("<|end|>", parse_special=False)
    assert 1 not in ids
    assert BYTE_PAIRS.decode(ids) == "<|end|>"
    assert BYTE_PAIRS.encode("<|end|>") == [1]


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)],
)
def test_bos_comes_where_the_file_or_its_kind_wants_it(pre: str, add_bos: bool | None, expected: bool) -> None:
    more = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer = Tokenizer.from_gguf(byte_pair_metadata(pre, **more), "test")
    assert (tokenizer.encode("hello")[0] == 0) == expected
    assert tokenizer.encode("hello", add_special=False)[0] != 0
    assert tokenizer.encode("<|begin|>hello").count(0) == 1  # a text that brings its own gets no other


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll go 1234  now\n\n", ["I", "'ll", " go", " 1234", " ", " now", "\n\n"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "WE'LL 12345, it\n\n x", ["WE", "'LL", " ", "123", "45", ",", " it", "\n\n", " x"]),
        ("qwen2", "WE'LL 123 (x)", ["WE", "'LL", " ", "1", "2", "3", " (", "x", ")"]),
        ("tekken", "camelCase it's 12/\n", ["camel", "Case", " it", "'s", " ", "1", "2", "/\n"]),
        ("gpt-4o", "camelCase it's 1234/\n", ["camel", "Case", " it's", " ", "123", "4", "/\n"]),
        ("deepseek-llm", "ab, 12\nc中文 ", ["ab", ",", " ", "1", "2", "\n", "c", "中文", " "]),
        ("deepseek-coder", "ab, 12\nc", ["ab", ",", " ", "1", "2", "\n", "c"]),
        ("deepseek-v3", "ab 1234中文かな!x", ["ab", " ", "123", "4", "中文かな", "!x"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("seed-coder", "a 12!\n", ["a", " ", "1", "2", "!", "\n"]),
    ],
)
def test_how_text_is_cut(pre: str, text: str, pieces: list[str]) -> None:
    found = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert [byte_level(piece).decode() for piece, _ in found] == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text(max_size=30))
def test_any_text_comes_back_however_it_is_cut(pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_pair_metadata(pre), "test")
    if PRE_TOKENIZERS[pre].nfc:
        text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


def test_a_whole_piece_may_go_before_its_merges() -> None:
    """Llama 3 has tokens that no merges lead to."""
    more = byte_pair_metadata()
    tokens = [*more["tokenizer.ggml.tokens"], "whole"]
    changed = {"tokens": tokens, "token_type": [*more["tokenizer.ggml.token_type"], 1]}
    whole = Tokenizer.from_gguf(byte_pair_metadata("llama-bpe", **changed), "test")
    assert spelled(whole, whole.encode("whole", add_special=False)) == ["whole"]
    merged = Tokenizer.from_gguf(byte_pair_metadata("smaug-bpe", **changed), "test")
    assert spelled(merged, merged.encode("whole", add_special=False)) == list("whole")


# --- SentencePiece


def reference_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: join the neighbours that make the piece of the best score, the leftmost of equals."""
    pieces = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joins:
            return pieces
        _, at = min(joins)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


letters = "abc"


@given(
    pieces=st.lists(st.text(letters + SPACE, min_size=2, max_size=5), max_size=25, unique=True),
    text=st.text(letters + " ", max_size=25),
)
def test_pieces_are_joined_by_score(pieces: list[str], text: str) -> None:
    scores = {piece: -float(index) for index, piece in enumerate(pieces)}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *bytes_, *letters, SPACE, *pieces]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 257 + [-1000.0] * 4 + list(scores.values()),
            "tokenizer.ggml.token_type": [2] + [BYTE] * 256 + [1] * (4 + len(pieces)),
        },
        "test",
    )
    ids = tokenizer.encode(text)
    assert spelled(tokenizer, ids) == reference_pieces(text, scores)
    assert tokenizer.decode(ids) == text


def test_runs_of_spaces_of_one_score_grow_from_the_left() -> None:
    ids = SENTENCE_PIECE.encode("       d", add_special=False)
    assert spelled(SENTENCE_PIECE, ids) == ["▁▁▁▁", "▁▁▁▁", "d"]


def test_bytes_spaces_and_tokens_of_users() -> None:
    ids = SENTENCE_PIECE.encode("hello €<user>hello</s>")
    assert spelled(SENTENCE_PIECE, ids) == [
        "<s>", "▁hello", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<user>", "▁hello", "</s>"
    ]  # fmt: skip
    assert SENTENCE_PIECE.decode(ids) == "hello €<user> hello"


def test_no_space_is_put_before_a_text_where_the_file_says_so() -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece_metadata(add_space_prefix=False, add_bos_token=False), "test")
    assert spelled(tokenizer, tokenizer.encode("hello hello")) == ["h", "el", "lo", "▁hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_control_tokens_are_not_made_of_letters() -> None:
    """With its letters in the vocabulary, ``<s>`` could be joined from pieces."""
    ids = SENTENCE_PIECE.encode("<s>", add_special=False, parse_special=False)
    assert spelled(SENTENCE_PIECE, ids) == ["▁", "<", "s", ">"]


def test_phi3_swallows_white_space_after_its_tokens() -> None:
    metadata = sentence_piece_metadata() | {"general.architecture": "phi3"}
    tokenizer = Tokenizer.from_gguf(metadata, "test")
    assert spelled(tokenizer, tokenizer.encode("<user>\n hello", add_special=False)) == ["<user>", "▁hello"]


@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_sentence_piece(text: str) -> None:
    text = text.replace(SPACE, " ")  # which SentencePiece cannot tell from a space
    ids = SENTENCE_PIECE.encode(text, add_special=False, parse_special=False)
    assert SENTENCE_PIECE.decode(ids) == text


def test_scores_may_be_an_array() -> None:
    metadata = sentence_piece_metadata()
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"], np.float32)
    assert Tokenizer.from_gguf(metadata, "test").encode("hello") == SENTENCE_PIECE.encode("hello")


# --- bytes of tokens


def test_bytes_of_tokens() -> None:
    assert BYTE_PAIRS.token_bytes(BYTE_PAIRS.encode(" hello")[0]) == b" hello"
    assert BYTE_PAIRS.token_bytes(0) == b"<|begin|>"
    assert SENTENCE_PIECE.token_bytes(SENTENCE_PIECE.encode("hello", add_special=False)[0]) == b" hello"
    assert SENTENCE_PIECE.token_bytes(4 + 0xE2) == b"\xe2"
    assert BYTE_PAIRS.token_bytes(10**6) == b""


@given(text=st.text(max_size=20))
def test_bytes_of_tokens_make_the_text(text: str) -> None:
    ids = BYTE_PAIRS.encode(text, parse_special=False)
    assert b"".join(map(BYTE_PAIRS.token_bytes, ids)) == text.encode()


def test_ids_without_a_token_make_no_text() -> None:
    for tokenizer in (BYTE_PAIRS, SENTENCE_PIECE):
        assert tokenizer.decode([10**6, -1, 1 << 40]) == ""


LONE = [chr(code) for code in (0xD800, 0xDBFF, 0xDC00, 0xDFFF)]


@pytest.mark.parametrize("tokenizer", [BYTE_PAIRS, SENTENCE_PIECE])
@given(
    before=st.text(max_size=5),
    lone=st.sampled_from(LONE),
    after=st.text(max_size=5),
    flags=st.tuples(*[st.booleans()] * 2),
)
def test_lone_surrogates_are_named_by_their_place(
    tokenizer: Tokenizer, before: str, lone: str, after: str, flags: tuple[bool, bool]
) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode(before + lone + after, add_special=flags[0], parse_special=flags[1])
    problem = f"the text has a lone surrogate at character {len(before)}, which is no valid Unicode"
    assert caught.value.problem == problem
    assert caught.value.remedy


def test_a_text_that_a_tokenizer_has_no_token_for() -> None:
    tokenizer = Tokenizer(HfTokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match=r"the model's tokenizer cannot encode the text \(WordLevel error"):
        tokenizer.encode("b")


# --- tokenizer.json


@pytest.mark.parametrize("tokenizer", [BYTE_PAIRS, SENTENCE_PIECE])
def test_a_file_is_read_as_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.hf.save(str(tmp_path / "tokenizer.json"))
    spec = SimpleNamespace(vocab_size=1000)
    loaded = SimpleNamespace(path=tmp_path, gguf=None, bos_id=0, eos_ids=(1, 2), spec=spec)
    read = Tokenizer.from_model(loaded)  # type: ignore[arg-type]
    ids = tokenizer.encode("hello, €  hello", add_special=False)
    assert read.encode("hello, €  hello") == ids
    assert read.decode(ids) == tokenizer.decode(ids)
    assert (read.eos_ids, read.bos_id) == ((1, 2), 0)
    assert read.spelling == tokenizer.spelling


def test_a_file_that_cuts_or_pads_texts_does_so_no_more(tmp_path: Path) -> None:
    hf = HfTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    hf.enable_truncation(2)
    hf.enable_padding(length=8)
    hf.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(tmp_path / "tokenizer.json").encode("a")) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="is no usable tokenizer"):
        Tokenizer.from_file(path)


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    loaded = SimpleNamespace(path=tmp_path, gguf=None, bos_id=None, eos_ids=())
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json; fetch it"):
        Tokenizer.from_model(loaded)  # type: ignore[arg-type]


# --- files that would make too much, or have the library fail


def file_with(**parts: Any) -> bytes:
    """A ``tokenizer.json`` with a few words and these parts."""
    vocab = {"[UNK]": 0, "a": 1, "é": 2, "éa": 3}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}).encode()


def read_file(content: bytes, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    return Tokenizer.from_file(path)


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(name: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def precompiled(*texts: str) -> dict[str, Any]:
    """SentencePiece's map of characters, with an empty trie."""
    data = (1024).to_bytes(4, "little") + bytes(1024) + "".join(text + "\0" for text in texts).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


TEN = "a" * 10
PREPEND = {"type": "Prepend", "prepend": SPACE}
BYTES_STEP = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
BERT = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
    "lowercase": True,
}  # fmt: skip


def template(n_texts: int, n_special: int, n_ids: int) -> dict[str, Any]:
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [text] * n_texts + [special] * n_special,
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": [1] * n_ids, "tokens": ["a"] * n_ids}},
    }


BOMBS: dict[str, dict[str, Any]] = {
    "replaced": {"normalizer": sequence("normalizers", *[replace("a", TEN)] * 12)},
    "replaced by a regular expression": {"normalizer": sequence("normalizers", *[replace(".", TEN, "Regex")] * 12)},
    "between characters": {"normalizer": sequence("normalizers", *[replace("", "a")] * 12)},
    "an expression that matches nothing": {"normalizer": sequence("normalizers", *[replace("x*", "a", "Regex")] * 12)},
    "at once": {"normalizer": replace("a", "a" * 1000)},
    "sequences within": {"normalizer": sequence("normalizers", *[sequence("normalizers", replace("a", TEN))] * 12)},
    "without types": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": TEN}] * 12}},
    "decomposed": {"normalizer": sequence("normalizers", *[replace("ل", "ﷺ"), {"type": "NFKD"}] * 12)},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "a map of characters": {"normalizer": precompiled("b", "a" * 1000)},
    "bytes as letters": {"normalizer": sequence("normalizers", *[{"type": "ByteLevel"}] * 12)},
    "ideographs": {"normalizer": sequence("normalizers", *[BERT, replace(" ", "中")] * 12)},
    "bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", *[BYTES_STEP] * 12)},
    "spaces before pieces": {"pre_tokenizer": sequence("pretokenizers", *[METASPACE] * 12)},
    "steps without number": {"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 10_000)},
    "decoded": {"decoder": sequence("decoders", *[replace(".", TEN, "Regex")] * 12)},
    "joined": {"decoder": sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 12)},
    "separated": {
        "decoder": sequence(
            "decoders", *[{"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": True}] * 12
        )
    },
    "stripped": {"decoder": {"type": "Strip", "content": "é", "start": 0, "stop": (1 << 64) - 1}},
    "special tokens": {"post_processor": template(1, 1000, 1000)},
    "a text several times": {"post_processor": sequence("processors", *[template(2, 0, 1)] * 12)},
    "a long token": {"model": {"type": "BPE", "vocab": {"a": 0, "a" * 10_000: 1}, "merges": []}},
    "a long piece": {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["a" * 10_000, -1.0]], "unk_id": 0}},
    "a long added token": {"added_tokens": [{"id": 4, "content": "b" * 10_000, "special": True}]},
    "a long token, decoded": {
        "model": {"type": "BPE", "vocab": {"a" * 1000: 0}, "merges": []},
        "decoder": replace("a", TEN),
    },
    "long words": {
        "model": {
            "type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**9,
        }
    },
    "a long prefix": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "a" * 1000}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_makes_too_much_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=r"tokenizer\.json: is no usable tokenizer: .*; use the tokenizer"
    ) as caught:
        read_file(file_with(**BOMBS[name]), tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


LLAMA_DECODER = sequence(
    "decoders", replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)  # fmt: skip
USUAL: dict[str, dict[str, Any]] = {
    "llama": {
        "normalizer": sequence("normalizers", PREPEND, replace(" ", SPACE)),
        "post_processor": template(1, 1, 1),
        "decoder": LLAMA_DECODER,
    },
    "gemma": {"normalizer": replace(" ", SPACE), "decoder": sequence("decoders", *LLAMA_DECODER["decoders"][:3])},
    "gpt2": {"pre_tokenizer": BYTES_STEP, "post_processor": BYTES_STEP, "decoder": BYTES_STEP},
    "bert": {"normalizer": BERT, "pre_tokenizer": {"type": "BertPreTokenizer"},
             "post_processor": {"type": "BertProcessing", "sep": ["a", 1], "cls": ["a", 1]},
             "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "xlnet": {
        "normalizer": sequence(
            "normalizers", replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
            {"type": "Lowercase"}, precompiled("صلى الله عليه وسلم"), replace(" {2,}", " ", "Regex"),
        ),
        "pre_tokenizer": METASPACE,
        "decoder": METASPACE,
    },
    "clip": {
        "normalizer": sequence("normalizers", {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}),
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
    },
    "letters": {"normalizer": sequence("normalizers", *[replace("[أإآا]", "ا", "Regex")] * 100)},
    "padded": {
        "padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "a"},
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_the_steps_of_usual_tokenizers_are_not_refused(name: str, tmp_path: Path) -> None:
    assert len(read_file(file_with(**USUAL[name]), tmp_path).encode("a")) <= 3


def test_a_file_of_great_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "MAX_FILE_BYTES", 1000)
    read_file(file_with().ljust(1000), tmp_path)
    with pytest.raises(ModelFileError, match="it has 1001 bytes, more than 1000"):
        read_file(file_with().ljust(1001), tmp_path)


def test_a_step_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(expansion._NORMALIZED, "NFC")
    with pytest.raises(UnsupportedModelError, match="the tokenizer's step 'NFC' is not known"):
        read_file(file_with(normalizer={"type": "NFC"}), tmp_path)


@given(
    steps=st.lists(
        st.builds(
            replace, st.text("ab*.+", max_size=3), st.text("aﷺb", max_size=4), st.sampled_from(["String", "Regex"])
        )
        | st.sampled_from([PREPEND, BERT, *({"type": kind} for kind in ("NFC", "NFKD", "Lowercase", "ByteLevel"))]),
        max_size=4,
    ),
    text=st.text("abﷺ中 İ", min_size=1, max_size=20),
)
def test_no_text_grows_beyond_its_bound(steps: list[Any], text: str) -> None:
    try:
        with failures_as(ModelFileError):  # for what is no regular expression, and where the library panics
            hf = HfTokenizer.from_str(file_with(normalizer=sequence("normalizers", *steps)).decode())
            made = len(hf.normalizer.normalize_str(text))
    except ModelFileError:
        return
    bound = expansion._grown(steps, expansion._NORMALIZED, 1, "test")
    decomposed = len(unicodedata.normalize("NFKD", text))
    assert made <= bound * decomposed


def test_a_long_token_of_a_gguf_file_is_refused() -> None:
    metadata = byte_pair_metadata()
    metadata["tokenizer.ggml.tokens"][300:] = []
    metadata["tokenizer.ggml.tokens"][5] = "a" * 10_000
    with pytest.raises(ModelFileError, match=r"m\.gguf: .*a token has 10000 characters, more than 8192"):
        Tokenizer.from_gguf(metadata, "m.gguf")


def test_pieces_that_take_too_long_to_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.text.gguf_tokenizer.MAX_CUTTING", 10)
    with pytest.raises(ModelFileError, match=r"m\.gguf: its pieces have too many characters in all"):
        Tokenizer.from_gguf(sentence_piece_metadata(), "m.gguf")


def test_a_failure_of_the_library_while_decoding_is_one_line(tmp_path: Path) -> None:
    """It panics where a token has nothing but what is taken from both its ends."""
    tokenizer = read_file(file_with(decoder={"type": "Strip", "content": "é", "start": 1, "stop": 1}), tmp_path)
    assert tokenizer.decode([1]) == "a"
    message = r"tokenizer\.json: the tokenizer cannot make text of tokens \(.*\); use the tokenizer"
    for decode in (tokenizer.decode, lambda ids: Detokenizer(tokenizer).push(ids[0])):
        with pytest.raises(ModelFileError, match=message) as caught:
            decode([2])
        assert "\n" not in str(caught.value)


# --- texts that are far too long


def n_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special=False))


SWALLOWING = Tokenizer.from_gguf(sentence_piece_metadata() | {"general.architecture": "phi3"}, "test")


@pytest.mark.parametrize("tokenizer", [BYTE_PAIRS, SENTENCE_PIECE, SWALLOWING])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["hello ", "a", " ", "\n", "€", "日", "é", "1", "<user>", "<|end|>", "x"]),
                  st.integers(1, 300)),
        min_size=1, max_size=8,
    ),
    limit=st.integers(0, 400),
)  # fmt: skip
def test_no_text_that_fits_is_refused(tokenizer: Tokenizer, parts: list[tuple[str, int]], limit: int) -> None:
    text = "".join(part * count for part, count in parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gapless.text.excess.PIECE", 64)
        if tokenizer.excess.surely(text, limit):
            assert n_tokens(tokenizer, text) > limit


@pytest.mark.parametrize("tokenizer", [BYTE_PAIRS, SENTENCE_PIECE, SWALLOWING])
@pytest.mark.parametrize("unit", ["a", "hello ", "日本", "<s>"])
def test_a_text_that_is_far_too_long_is_known_from_its_beginning(
    tokenizer: Tokenizer, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = Tokenizer.encode

    def count(self: Tokenizer, text: str, **options: bool) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", count)
    assert tokenizer.excess.surely(unit * 1_000_000, 1000)
    assert sum(encoded) < 200_000


def test_white_space_and_characters_without_tokens_may_be_as_long_as_they_like() -> None:
    text = "<user>" + " " * 1_000_000 + "hello"
    assert n_tokens(SWALLOWING, text) == 2
    assert not SWALLOWING.excess.surely(text, 10)
    metadata = byte_pair_metadata()
    metadata["tokenizer.ggml.tokens"][2 + list(byte_alphabet()).index(BYTES[ord("z")])] = "<unused>"
    lacking = Tokenizer.from_gguf(metadata, "test")
    assert n_tokens(lacking, "z" * 100_000) == 0
    assert not lacking.excess.surely("z" * 100_000, 10)


def test_texts_of_other_tokenizers_are_encoded_to_tell() -> None:
    """A word that is not known is one token, however long it is."""
    tokenizer = Tokenizer(HfTokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    assert not tokenizer.excess.surely("b" * 1_000_000, 10)


# --- metadata that is wrong


def test_unknown_kinds_are_named_with_what_is_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre = 'martian' .*llama-bpe.*smollm"):
        Tokenizer.from_gguf(byte_pair_metadata("martian"), "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model = 'rwkv' is not supported; use a model"):
        Tokenizer.from_gguf(byte_pair_metadata(model="rwkv"), "m.gguf")
    with pytest.raises(ModelFileError, match=r"m\.gguf: has no tokenizer"):
        Tokenizer.from_gguf({}, "m.gguf")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing"),
        ({"tokens": [1, 2]}, "is no list of strings"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h e", "z z"]}, r"merge 1 \('z z'\) makes no token"),
        ({"merges": ["hello"]}, "not usable"),
        ({"merges": ["q hello"]}, "makes no token"),
        ({"token_type": [1, 2]}, "token_type is no list of"),
        ({"token_type": "abc"}, "token_type is no list of"),
    ],
)
def test_byte_pairs_that_contradict_themselves(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        Tokenizer.from_gguf(byte_pair_metadata(**more), "m.gguf")


def test_a_token_may_be_there_twice_only_as_padding() -> None:
    metadata = sentence_piece_metadata()
    doubled = {
        "tokens": [*metadata["tokenizer.ggml.tokens"], "▁hello"],
        "scores": [*metadata["tokenizer.ggml.scores"], 0.0],
    }
    types = metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelFileError, match="'▁hello' is there twice"):
        Tokenizer.from_gguf(sentence_piece_metadata(**doubled, token_type=[*types, CONTROL]), "m.gguf")
    doubled["tokens"] = ["<pad>", "<pad>", *metadata["tokenizer.ggml.tokens"]]
    doubled["scores"] = [0.0, 0.0, *metadata["tokenizer.ggml.scores"]]
    padded = sentence_piece_metadata(**doubled, token_type=[UNUSED, UNUSED, *types])
    assert Tokenizer.from_gguf(padded, "m.gguf").encode("hello", add_special=False)


@pytest.mark.parametrize("bos", [-1, 10**6, "x", 1.5, [1]])
def test_a_bos_that_is_no_token(bos: Any) -> None:
    """It matters where it comes before a text."""
    for metadata in (byte_pair_metadata, sentence_piece_metadata):
        with pytest.raises(
            ModelFileError, match=r"m\.gguf: tokenizer\.ggml\.bos_token_id = .* is none of its \d+ tokens"
        ):
            Tokenizer.from_gguf(metadata(bos_token_id=bos, add_bos_token=True), "m.gguf")
        assert Tokenizer.from_gguf(metadata(bos_token_id=bos, add_bos_token=False), "m.gguf").bos_id is None


def test_a_bos_beyond_the_models_vocabulary() -> None:
    metadata = byte_pair_metadata(bos_token_id=261, add_bos_token=True)
    for size in (262, 261):
        spec = SimpleNamespace(vocab_size=size)
        loaded = SimpleNamespace(path=Path("m.gguf"), gguf=metadata, bos_id=None, eos_ids=(), spec=spec)
        if size > 261:
            Tokenizer.from_model(loaded)  # type: ignore[arg-type]
            continue
        with pytest.raises(
            ModelFileError, match=r"m\.gguf: .* adds the token 261 .* has vocab_size = 261; use the token"
        ):
            Tokenizer.from_model(loaded)  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", [[1.0], ["a"], 3])
def test_scores_that_do_not_fit(scores: Any) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores is no list of \d+ numbers"):
        Tokenizer.from_gguf(sentence_piece_metadata(scores=scores), "m.gguf")


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.integers(-3, 10), max_size=4),
    st.lists(st.floats(width=32), min_size=1, max_size=300).map(lambda values: np.array(values, np.float32)),
)
KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "add_bos_token", "add_space_prefix")


@given(kind=st.sampled_from(["gpt2", "llama"]), changes=st.dictionaries(st.sampled_from(KEYS), junk, max_size=3))
def test_any_metadata_makes_a_tokenizer_or_one_line(kind: str, changes: dict[str, Any]) -> None:
    metadata = byte_pair_metadata(**changes) if kind == "gpt2" else sentence_piece_metadata(**changes)
    try:
        line = Tokenizer.from_gguf(metadata, "m.gguf").decode([0, 1, 5])
    except ModelError as problem:
        line = str(problem)
        assert "m.gguf" in line
    assert "\n" not in line


@given(
    tokens=st.lists(st.text("ab▁", max_size=3), min_size=1, max_size=12),
    merges=st.lists(st.text("ab ", max_size=4), min_size=1, max_size=6),
    types=st.lists(st.integers(0, 7), min_size=12, max_size=12),
    text=st.text("ab ▁", max_size=10),
)
def test_any_small_vocabulary_makes_a_tokenizer_or_one_line(
    tokens: list[str], merges: list[str], types: list[int], text: str
) -> None:
    more = {"tokens": tokens, "token_type": types[: len(tokens)]}
    for metadata in (
        byte_pair_metadata(**more, merges=merges),
        sentence_piece_metadata(**more, scores=[float(-i) for i in range(len(tokens))]),
    ):
        try:
            tokenizer = Tokenizer.from_gguf(metadata, "m.gguf")
        except ModelError:
            continue
        tokenizer.decode(tokenizer.encode(text))
