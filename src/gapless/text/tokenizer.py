"""Tokenizers: ``tokenizer.json`` as it is, or rebuilt from GGUF metadata, through Hugging Face ``tokenizers``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as HfTokenizer

from gapless.errors import ModelFileError, RequestError
from gapless.models.files import is_present, read_regular
from gapless.text.excess import Excess
from gapless.text.expansion import check_expansion
from gapless.text.gguf_tokenizer import GgufTokenizer
from gapless.text.library import failures_as
from gapless.text.spelling import Spelling, spelling_of

if TYPE_CHECKING:
    from gapless.models.load import LoadedModel

_OTHERS = "use the tokenizer that came with the model, or another copy of it"


def check_unicode(text: str, what: str = "the text") -> None:
    """Raises RequestError for a text that has no UTF-8; characters are counted from 0."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(
            f"{what} has a lone surrogate at character {problem.start}, which is no valid Unicode",
            "leave it out, or decode the text with errors='replace'",
        ) from None


def _not_encoded(line: str) -> RequestError:
    return RequestError(f"the model's tokenizer cannot encode the text ({line})", "change the text, or the model")


class Tokenizer:
    """Text to ids and back.

    Args:
        hf: does the work.
        bos_id: beginning of sequence; None if the model has none.
        eos_ids: tokens that end an answer.
        adds_bos: ``bos_id`` is put before a text, unless ``hf`` has done so.
        where: its file, for errors.

    Raises:
        ModelFileError: the library cannot say how it makes text.
    """

    def __init__(
        self,
        hf: HfTokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        adds_bos: bool = False,
        where: str = "the model",
    ) -> None:
        hf.no_truncation()
        hf.no_padding()
        self.hf = hf
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self._where = where
        self._adds_bos = adds_bos
        with failures_as(self._unusable):
            self.spelling: Spelling | None = spelling_of(hf)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_model(cls, model: LoadedModel) -> Tokenizer:
        """The model's tokenizer. Raises ModelFileError or UnsupportedModelError."""
        if model.gguf is not None:
            found, where = cls.from_gguf(model.gguf, model.path.name, model.eos_ids), model.path.name
        else:
            path = model.path / "tokenizer.json"
            if not is_present(path):
                raise ModelFileError(
                    f"{model.path}: has no tokenizer.json",
                    "fetch it from the model's page, or convert its tokenizer with transformers",
                )
            found, where = cls.from_file(path, model.bos_id, model.eos_ids), str(path)
        found._check_fits(model.spec.vocab_size, where)
        return found

    @classmethod
    def from_file(cls, path: Path, bos_id: int | None = None, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """A ``tokenizer.json``; whether BOS comes before a text is the file's own matter. Raises ModelFileError."""
        data = read_regular(path)
        with failures_as(lambda line: ModelFileError(f"{path}: is no usable tokenizer ({line})", "download it again")):
            check_expansion(data, str(path))
            hf = HfTokenizer.from_buffer(data)
        return cls(hf, bos_id=bos_id, eos_ids=eos_ids, where=str(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """A tokenizer from metadata. Raises ModelFileError or UnsupportedModelError, naming ``where``."""
        source = GgufTokenizer(metadata, where)
        return cls(source.build(), bos_id=source.bos_id, eos_ids=eos_ids, adds_bos=source.adds_bos, where=where)

    @cached_property
    def vocab_size(self) -> int:
        """Tokens that have a name; a model may have more, for padding."""
        return int(self.hf.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: to encode.
            add_special: put before it what the model wants there, which is BOS or nothing.
            parse_special: a special token written in the text becomes that token, as chat templates need it; without,
                it is text like any other, as text from strangers may be meant.

        Raises:
            RequestError: the text is no valid Unicode, or holds what the tokenizer has no token for.
        """
        check_unicode(text)
        with failures_as(_not_encoded):
            hf = self.hf if parse_special else self._blind
            ids: list[int] = hf.encode(text, add_special_tokens=add_special).ids
        if add_special and self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        With ``continues`` the ids go on from earlier text, so a space before their first word is kept.

        Raises ModelFileError if the tokenizer fails at them.
        """
        if self.spelling is None:
            with failures_as(self._unusable):
                return str(self.hf.decode(list(ids), skip_special_tokens=skip_special))
        special = self.special_ids if skip_special else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in special]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.spelling.strips_space and not continues else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; those of its name where a tokenizer spells no bytes."""
        found = self._bytes.get(token_id)
        if found is None:
            name = self.token(token_id)
            found = self.spelling.bytes_of(name) if self.spelling is not None else name.encode()
            self._bytes[token_id] = found
        return found

    def token(self, token_id: int | None) -> str:
        """The token as the vocabulary spells it; "" where there is none."""
        if token_id is None or not 0 <= token_id < 1 << 32:
            return ""
        with failures_as(self._unusable):
            return self.hf.id_to_token(token_id) or ""

    @cached_property
    def excess(self) -> Excess:
        """Tells texts that make far too many tokens."""
        return Excess(self)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: of control, not of content."""
        return frozenset(i for i, token in self.hf.get_added_tokens_decoder().items() if token.special)

    def _unusable(self, line: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: the tokenizer cannot make text of tokens ({line})", _OTHERS)

    def _check_fits(self, vocab_size: int, where: str) -> None:
        """What is put around every text must be tokens of the model. Raises ModelFileError."""
        remedy = "use the tokenizer that came with the model"
        try:
            added = max(self.encode(""), default=0)
        except RequestError as problem:
            raise ModelFileError(f"{where}: {problem.problem}", remedy) from None
        if added >= vocab_size:
            raise ModelFileError(
                f"{where}: the tokenizer adds the token {added} to every text, the model has vocab_size = {vocab_size}",
                remedy,
            )

    @cached_property
    def _blind(self) -> HfTokenizer:
        """A copy that does not see special tokens; the switch is not safe to turn while other threads encode."""
        hf = copy.deepcopy(self.hf)
        hf.encode_special_tokens = True
        return hf
