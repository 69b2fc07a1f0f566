"""Tokenizers: ``tokenizer.json`` as it is, or rebuilt from GGUF metadata, through Hugging Face ``tokenizers``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from gapless.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from gapless.models.load import LoadedModel

# Token types of GGUF (llama.cpp's llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(suffix: str) -> str:
    """Words cut where lower case turns to upper."""
    return f"{_HEAD}{_UPPER}*{_LOWER}+{suffix}|{_HEAD}{_UPPER}+{_LOWER}*{suffix}|"


# How a text is cut before merges apply, by tokenizer.ggml.pre: the expressions of the models' own tokenizer.json.
_SPLITS = {
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "tekken": _cased("") + r"\p{N}" + _CASED_REST,
    "gpt-4o": _cased(_SUFFIX) + r"\p{N}{1,3}" + _CASED_REST,
}
_SAME = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "dbrx": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2", "megrez": "qwen2", "llama4": "gpt-4o",
}  # fmt: skip
_BYTE_LEVEL = ("gpt-2", "gpt2", "smollm", "default")
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")


class Tokenizer:
    """Text to ids and back.

    Args:
        hf: does the work.
        bos_id: is put before a text if ``add_bos`` and the tokenizer does not do so itself.
    """

    def __init__(
        self, hf: HfTokenizer, *, bos_id: int | None = None, eos_ids: Sequence[int] = (), add_bos: bool = False
    ) -> None:
        self.hf = hf
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self._add_bos = add_bos and bos_id is not None

    @classmethod
    def from_model(cls, model: LoadedModel) -> Tokenizer:
        """The model's tokenizer. Raises ModelFileError or UnsupportedModelError."""
        if model.gguf is not None:
            return cls.from_gguf(model.gguf, model.path.name, model.eos_ids)
        path = model.path / "tokenizer.json"
        if not path.exists():
            raise ModelFileError(
                f"{model.path}: has no tokenizer.json",
                "fetch it from the model's page, or convert its tokenizer with transformers",
            )
        return cls.from_file(path, model.bos_id, model.eos_ids)

    @classmethod
    def from_file(cls, path: Path, bos_id: int | None = None, eos_ids: Sequence[int] = ()) -> Tokenizer:
        try:
            hf = HfTokenizer.from_file(str(path))
        except Exception as problem:  # the library raises no narrower type
            raise ModelFileError(f"{path}: is no usable tokenizer ({problem})", "download it again") from None
        return cls(hf, bos_id=bos_id, eos_ids=eos_ids)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """A tokenizer from metadata, of byte-pair ("gpt2") or SentencePiece ("llama") kind."""
        return _GgufBuilder(metadata, where).build(eos_ids)

    @cached_property
    def vocab_size(self) -> int:
        return int(self.hf.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in it are recognised; with ``add_special`` BOS is put before it."""
        ids: list[int] = self.hf.encode(text, add_special_tokens=add_special).ids
        if add_special and self._add_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, token_id: int | None) -> str:
        """The token as the vocabulary spells it; "" where there is none."""
        return "" if token_id is None else self.hf.id_to_token(token_id) or ""


class _GgufBuilder:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        kind = metadata.get("tokenizer.ggml.model")
        if kind is None:
            raise ModelFileError(f"{where}: has no tokenizer", "use a GGUF file with tokenizer.ggml metadata")
        if kind not in ("gpt2", "llama"):
            raise UnsupportedModelError(
                f"{where}: tokenizer.ggml.model = {kind!r} is not supported", "use a model with gpt2 or llama"
            )
        self.kind = kind
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._numbers("token_type", 1)
        self.pre = metadata.get("tokenizer.ggml.pre", "default")

    def build(self, eos_ids: Sequence[int]) -> Tokenizer:
        hf = self._byte_pair() if self.kind == "gpt2" else self._sentence_piece()
        self._add_special(hf)
        bos = self._metadata.get("tokenizer.ggml.bos_token_id")
        bos_id = bos if type(bos) is int and 0 <= bos < len(self.tokens) else None
        default = self.kind == "llama" or self.pre in _BOS_BY_DEFAULT
        add_bos = self._metadata.get("tokenizer.ggml.add_bos_token", default)
        return Tokenizer(hf, bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos is True)

    def _byte_pair(self) -> HfTokenizer:
        vocab = self._vocab()
        merges: list[tuple[str, str]] = []
        for index, merge in enumerate(self._list("merges", str)):
            left, _, right = merge.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise self._error(f"merge {index} ({merge!r}) is not of tokens in the vocabulary")
            merges.append((left, right))
        split = _SPLITS.get(_SAME.get(self.pre, self.pre))
        try:
            hf = HfTokenizer(models.BPE(vocab, merges, ignore_merges=split is not None))
        except Exception as problem:  # the library raises no narrower type
            raise self._error(f"the vocabulary is not usable ({problem})") from None
        hf.pre_tokenizer = self._pre_tokenizer(split)
        hf.decoder = decoders.ByteLevel()
        return hf

    def _pre_tokenizer(self, split: str | None) -> pre_tokenizers.PreTokenizer:
        if split is not None:
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(split), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        if self.pre not in _BYTE_LEVEL:
            known = ", ".join(sorted({*_BYTE_LEVEL, *_SPLITS, *_SAME}))
            raise UnsupportedModelError(
                f"{self._where}: tokenizer.ggml.pre = {self.pre!r} is not supported", f"use a model with one of {known}"
            )
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.pre != "smollm":
            return words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])

    def _sentence_piece(self) -> HfTokenizer:
        """Merges follow from the scores: of all adjacent pairs, the one that makes the best piece is joined first."""
        vocab, scores = self._vocab(), self._numbers("scores", 0.0)
        merges: list[tuple[float, int, int, str, str]] = []
        for piece, score in zip(self.tokens, scores, strict=True):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    merges.append((-score, vocab[left], vocab[right], left, right))
        merges.sort()
        unknown = next((t for t, kind in zip(self.tokens, self.types, strict=True) if kind == _UNKNOWN), None)
        hf = HfTokenizer(
            models.BPE(vocab, [m[3:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefix = self._metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        space = normalizers.Replace(" ", "▁")
        hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        hf.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return hf

    def _add_special(self, hf: HfTokenizer) -> None:
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
        hf.add_tokens(added)
        hf.add_special_tokens([token for token in added if token.special])

    def _vocab(self) -> dict[str, int]:
        vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(vocab) != len(self.tokens):
            seen: set[str] = set()
            double = next(t for t in self.tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
            if self.types[vocab[double]] != _UNUSED:
                raise self._error(f"the token {double!r} is there twice")
        return vocab

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not values or not all(isinstance(v, kind) for v in values):
            raise self._error(f"tokenizer.ggml.{key} is missing or malformed")
        return values

    def _numbers(self, key: str, default: float) -> list[Any]:
        """An array as long as the vocabulary."""
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return [default] * len(self.tokens)
        if not hasattr(values, "tolist") or len(values) != len(self.tokens):
            raise self._error(f"tokenizer.ggml.{key} does not fit a vocabulary of {len(self.tokens)} tokens")
        return list(values.tolist())

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: {problem}", "download the file again")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and others of a folder's tokenizer_config.json, as texts."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        raise ModelFileError(f"{path}: not valid JSON", "download the file again") from None
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name) if isinstance(config, dict) else None
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
