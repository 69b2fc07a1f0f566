"""How text is cut before byte-pair merges apply, by the name that GGUF files give it (``tokenizer.ggml.pre``).

Each entry states the cuts of the models' own tokenizer.json. A cut is a regular expression: whatever it matches
becomes a piece of its own, and so does what lies between; the next cut works within those pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

# Words end where lower case turns to upper.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_SIGNS}|{_SPACES}"

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters that have a case, without Georgian's small ones.
_DEEPSEEK_LETTERS = r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{10d0}-\x{10ff}]]+"
_DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Cuts, and what else of a byte-pair tokenizer hangs on its name.

    Attributes:
        cuts: regular expressions, applied one after another.
        words: then GPT-2's own expression cuts words.
        whole_pieces: a piece that is a token is taken whole, whatever the merges say.
        adds_bos: BOS comes before a text where the file does not say.
        nfc: the text is brought to Unicode's composed form.
    """

    cuts: tuple[str, ...] = ()
    words: bool = False
    whole_pieces: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [_cut(expression) for expression in self.cuts]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _cut(expression: str) -> pre_tokenizers.PreTokenizer:
    if expression == r"\p{N}":  # the same, several times as fast
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(expression), "isolated")


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_GROUPS: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "a.x-4.0", "mellum",
     "gigachat"): PreTokenizer(words=True),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"):
        PreTokenizer((r"\p{N}",), words=True),
    # What llama.cpp does for files that name nothing, and so what their users have seen.
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        PreTokenizer((_LLAMA3,), whole_pieces=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("tekken",): PreTokenizer((_TEKKEN,), whole_pieces=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2"): PreTokenizer((_GPT4O,)),
    ("seed-coder",): PreTokenizer((_SEED_CODER,)),
    ("deepseek-llm",): PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _CJK, r"\p{N}")),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3_WORDS)),
}  # fmt: skip

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _GROUPS.items() for name in names}
