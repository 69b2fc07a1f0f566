"""Chat templates: a conversation as the prompt text that a model was trained on.

A template comes with a model, from a stranger; it runs in the sandbox, within a budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from gapless.checks import shown
from gapless.errors import ModelError, ModelFileError, RequestError
from gapless.models.files import is_present, read_regular
from gapless.text.budget import Budget, OverBudget
from gapless.text.sandbox import Refusal, Sandbox
from gapless.text.tokenizer import Tokenizer, check_unicode

if TYPE_CHECKING:
    from gapless.models.load import LoadedModel

MAX_SOURCE = 100_000  # characters; the longest that models are known to have are a third of it
_OTHERS = "use plain prompts, or another copy of the model"


class ChatTemplate:
    """A model's template.

    Args:
        source: Jinja2, as transformers understands it.
        tokens: texts such as ``bos_token`` that the template may use.
        where: for errors.

    Raises:
        ModelFileError: the template is no template, or too long.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._where = where
        self._sandbox = Sandbox()
        if len(source) > MAX_SOURCE:
            raise ModelFileError(f"{where}: the chat template has {len(source)} characters", _OTHERS)
        try:
            self._code = self._sandbox.compile(source)
        except Exception as problem:  # a stranger's program: whatever the compilers of Jinja2 and Python raise
            raise ModelFileError(f"{where}: the chat template is not usable ({_line(problem)})", _OTHERS) from None

    @classmethod
    def from_model(cls, model: LoadedModel, tokenizer: Tokenizer) -> ChatTemplate:
        """Raises ModelError if the model has none."""
        source = _find_source(model)
        if source is None:
            raise ModelError(
                f"{model.path}: has no chat template",
                "use plain prompts (gapless generate), or an instruction-tuned model",
            )
        eos = model.eos_ids[0] if model.eos_ids else None
        tokens = {"bos_token": tokenizer.token(model.bos_id), "eos_token": tokenizer.token(eos)}
        if model.gguf is None:
            tokens |= _special_tokens(model.path)
        return cls(source, tokens, str(model.path))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: each with ``role`` and ``content`` (a text, or a list of parts ``{"type": "text", "text": ...}``,
                which are joined), and what else the template knows.
            add_generation_prompt: end with the beginning of an answer.
            variables: more for the template, such as ``tools``.

        Raises:
            RequestError: the template refuses the messages, fails, asks for too much time or memory, or makes a text
                that is no valid Unicode.
        """
        given = {
            **self._tokens,
            "tools": None,
            "documents": None,
            **variables,
            "messages": [_message(index, message) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(given)
        except OverBudget as problem:
            raise RequestError(f"{self._where}: the chat template was stopped: {problem}", _OTHERS) from None
        except (Refusal, jinja2.UndefinedError) as problem:
            raise RequestError(
                f"{self._where}: the chat template refuses the messages: {_line(problem)}", "change the messages"
            ) from None
        except Exception as problem:  # whatever a stranger's program can raise
            raise RequestError(f"{self._where}: the chat template fails: {_line(problem)}", _OTHERS) from None
        check_unicode(text, "the chat")
        return text

    def _run(self, given: dict[str, Any]) -> str:
        budget = Budget(given)
        pieces = []
        for piece in self._sandbox.rendering(self._code, budget).generate(given):
            budget.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)


def _message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] = {message!r:.80} is no object", "give a role and a content")
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages[{index}].role = {shown(role)} is no text", "give user, assistant or system")
    if isinstance(content, list | tuple):
        texts = [_part(f"messages[{index}].content[{i}]", part) for i, part in enumerate(content)]
        return {**message, "content": "".join(texts)}
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"messages[{index}].content = {shown(content)} is no text", "give a text, or text parts")
    return dict(message)


def _part(name: str, part: object) -> str:
    """The text of a part of a content, as APIs have them; most templates know texts only."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"{name} = {shown(part)} is no text", 'give parts like {"type": "text", "text": ...}')
    return text


def _line(problem: BaseException) -> str:
    text = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
    return f"{text} in line {problem.lineno}" if isinstance(problem, jinja2.TemplateSyntaxError) else text


def _find_source(model: LoadedModel) -> str | None:
    if model.gguf is not None:
        source = model.gguf.get("tokenizer.chat_template")
        return source if isinstance(source, str) else None
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        path: Path = model.path / name
        if is_present(path):
            source = read_regular(path).decode("utf-8", "replace") if name.endswith("jinja") else _from_json(path)
            if source is not None:
                return source
    return None


def _from_json(path: Path) -> str | None:
    from gapless.models.safetensors_file import read_json

    template = read_json(path).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token`` and the like of tokenizer_config.json, as texts."""
    from gapless.models.safetensors_file import read_json

    path = folder / "tokenizer_config.json"
    config = read_json(path) if is_present(path) else {}
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
