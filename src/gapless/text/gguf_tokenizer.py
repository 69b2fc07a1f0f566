"""A tokenizer rebuilt from the metadata of a GGUF file (the keys ``tokenizer.ggml.*`` of ggml's docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HfTokenizer

from gapless.checks import shown
from gapless.errors import ModelFileError, UnsupportedModelError
from gapless.text.expansion import check_longest
from gapless.text.library import failures_as
from gapless.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from gapless.text.spelling import SPACE

# Token types (llama.cpp's llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_PREFIX = "tokenizer.ggml."
MAX_CUTTING = 1 << 29  # characters handled to cut every piece in two wherever it can be: a second's work


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, with the type and (SentencePiece only) the score of each."""

    tokens: list[str]
    types: list[float]  # of the numbers above
    scores: list[float]
    ids: dict[str, int]


class GgufTokenizer:
    """Builds the tokenizer that a file describes: byte pairs ("gpt2") or SentencePiece ("llama").

    Args:
        metadata: of the file.
        where: the file's name, for errors.

    Raises:
        ModelFileError: there is no tokenizer, or it contradicts itself.
        UnsupportedModelError: its kind, or its way to cut text, is not known.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        self._kind = metadata.get(_PREFIX + "model")
        if self._kind is None:
            raise ModelFileError(
                f"{where}: has no tokenizer (tokenizer.ggml.model is missing)",
                "use a file that was converted with its tokenizer",
            )
        if not isinstance(self._kind, str) or self._kind not in ("gpt2", "llama"):
            raise UnsupportedModelError(
                f"{where}: tokenizer.ggml.model = {shown(self._kind)} is not supported",
                "use a model whose tokenizer is gpt2 (byte pairs) or llama (SentencePiece)",
            )
        self._pre = self._pre_tokenizer() if self._kind == "gpt2" else PreTokenizer(adds_bos=True)
        self._vocabulary = self._read_vocabulary()

    def build(self) -> HfTokenizer:
        with failures_as(lambda line: self._error(f"the tokenizer is not usable ({line})")):
            hf = self._byte_pairs() if self._kind == "gpt2" else self._sentence_piece()
            self._add_special(hf)
        return hf

    @property
    def bos_id(self) -> int | None:
        """Raises ModelFileError if it is to come before a text and is no token."""
        bos, n_tokens = self._metadata.get(_PREFIX + "bos_token_id"), len(self._vocabulary.tokens)
        if type(bos) is int and 0 <= bos < n_tokens:
            return bos
        if bos is not None and self.adds_bos:
            raise self._error(f"tokenizer.ggml.bos_token_id = {shown(bos)} is none of its {n_tokens} tokens")
        return None

    @property
    def adds_bos(self) -> bool:
        return self._metadata.get(_PREFIX + "add_bos_token", self._pre.adds_bos) is True

    @property
    def _adds_space(self) -> bool:
        return self._metadata.get(_PREFIX + "add_space_prefix", True) is True

    # --- byte pairs

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._metadata.get(_PREFIX + "pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"{self._where}: tokenizer.ggml.pre = {shown(name)} is not supported",
                f"use a model with one of {', '.join(sorted(PRE_TOKENIZERS))}",
            )
        return PRE_TOKENIZERS[name]

    def _byte_pairs(self) -> HfTokenizer:
        ids = self._vocabulary.ids
        merges = self._strings("merges")
        if not ids.keys() >= {merge.replace(" ", "", 1) for merge in merges}:
            index, merge = next((i, m) for i, m in enumerate(merges) if m.replace(" ", "", 1) not in ids)
            raise self._error(f"merge {index} ({merge!r}) makes no token of the vocabulary")
        pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
        hf = HfTokenizer(models.BPE(ids, pairs, ignore_merges=self._pre.whole_pieces))
        hf.pre_tokenizer = self._pre.build()
        if (normalizer := self._pre.normalizer()) is not None:
            hf.normalizer = normalizer
        hf.decoder = decoders.ByteLevel()
        return hf

    # --- SentencePiece

    def _sentence_piece(self) -> HfTokenizer:
        ids = self._vocabulary.ids
        unknown = next((t for t, kind in self._typed() if kind == UNKNOWN), None)
        hf = HfTokenizer(models.BPE(ids, self._merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True))
        space = normalizers.Replace(" ", SPACE)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._adds_space:
            hf.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            hf.normalizer = space
        hf.decoder = decoders.Sequence(steps)
        return hf

    def _merges(self) -> list[tuple[str, str]]:
        """Pairs in the order in which they are joined.

        SentencePiece joins, of all neighbours that make a piece, those whose piece has the best score, and of equals
        the leftmost. So every cut of a piece in two is a merge, and its rank follows from the piece's score. Where
        pieces share a score (runs of spaces do in Mistral's) the longer one goes first: the leftmost run grows to its
        full length before the next begins.
        """
        v = self._vocabulary
        ids = v.ids
        merges: list[tuple[float, int, int, int, str, str]] = []
        for token, score, kind in zip(v.tokens, v.scores, v.types, strict=True):
            if kind not in (NORMAL, USER_DEFINED):
                continue
            size = len(token)
            for cut in range(1, size):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    merges.append((-score, -size, ids[left], ids[right], left, right))
        merges.sort()
        return [merge[4:] for merge in merges]

    # --- both

    def _add_special(self, hf: HfTokenizer) -> None:
        """Tokens that are found in a text before anything else cuts it."""
        strips = self._tokens_that_strip()
        added = [
            AddedToken(token, special=kind == CONTROL, normalized=False, rstrip=token in strips)
            for token, kind in self._typed()
            if kind in (CONTROL, USER_DEFINED) and token
        ]
        hf.add_tokens(added)
        hf.add_special_tokens([token for token in added if token.special])

    def _tokens_that_strip(self) -> set[str]:
        """Tokens that swallow the white space after them. Files do not say; Phi-3's own configuration does."""
        architecture = self._metadata.get("general.architecture")
        if self._kind != "llama" or not isinstance(architecture, str) or architecture != "phi3":
            return set()
        named = {token for token, kind in self._typed() if kind in (CONTROL, USER_DEFINED)}
        return named - {"<unk>", "<s>", "<|endoftext|>"} | {"</s>"}

    def _typed(self) -> zip[tuple[str, float]]:
        return zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)

    def _read_vocabulary(self) -> Vocabulary:
        tokens = self._strings("tokens")
        check_longest(max(map(len, tokens)), self._where)
        types = self._numbers("token_type", len(tokens), NORMAL)
        scores = self._numbers("scores", len(tokens), 0.0) if self._kind == "llama" else []
        if self._kind == "llama" and sum(len(token) ** 2 for token in tokens) > MAX_CUTTING:
            raise self._error("its pieces have too many characters in all")
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            self._check_doubles(tokens, types, ids)
        return Vocabulary(tokens, types, scores, ids)

    def _check_doubles(self, tokens: list[str], types: list[float], ids: dict[str, int]) -> None:
        """Padding may share a name; a token that means something may not."""
        for index, token in enumerate(tokens):
            if ids[token] != index and types[index] != UNUSED:
                raise self._error(f"the token {token!r} is there twice, as {index} and {ids[token]}")

    def _strings(self, key: str) -> list[str]:
        values = self._metadata.get(_PREFIX + key)
        if not isinstance(values, list) or not values or set(map(type, values)) != {str}:
            raise self._error(f"{_PREFIX}{key} is missing or is no list of strings")
        return values

    def _numbers(self, key: str, count: int, default: float) -> list[float]:
        """An array as long as the vocabulary."""
        values = self._metadata.get(_PREFIX + key)
        if values is None:
            return [default] * count
        numbers = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(numbers, list) or len(numbers) != count or not set(map(type, numbers)) <= {int, float}:
            raise self._error(f"{_PREFIX}{key} is no list of {count} numbers, one for each token")
        return numbers

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: {problem}", "download the file again")
