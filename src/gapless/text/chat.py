"""Chat templates in a sandbox: a template comes with a model, from a stranger.

Jinja2's sandbox keeps it from Python's internals. What it does not bound is work and memory, so here every turn of a
loop and every call of a macro is counted, and whatever makes a long value is measured before it is made.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.errors import ModelError, ModelFileError, RequestError

if TYPE_CHECKING:
    from gapless.models.load import LoadedModel
    from gapless.text.tokenizer import Tokenizer

MAX_TICKS = 200_000
MAX_SECONDS = 2.0
MAX_LENGTH = 4_000_000  # characters or items of any value, and characters of the result
MAX_NUMBER = 1_000_000  # of an argument that may be a width or a count
MAX_SOURCE = 500_000

_TICK, _JOIN = "_gapless_tick", "_gapless_join"


class _TooMuch(Exception):
    """The template asks for more than it may use."""


class _Budget:
    def __init__(self) -> None:
        self.ticks = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> str:
        self.ticks += 1
        if self.ticks > MAX_TICKS or (self.ticks % 256 == 0 and time.monotonic() > self.deadline):
            raise _TooMuch("it runs for too long")
        return ""


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | bytes) else 1


def _require(length: int) -> None:
    if length > MAX_LENGTH:
        raise _TooMuch(f"it makes a value of {length} elements")


def _join(*parts: object) -> str:
    texts = [str(p) for p in parts]
    _require(sum(map(len, texts)))
    return "".join(texts)


def _check_growth(args: Sequence[object]) -> None:
    """Refuse arguments that would make a call's result long: numbers, and texts whose product is."""
    product = 1
    for arg in args:
        if isinstance(arg, int) and abs(arg) > MAX_NUMBER:
            raise _TooMuch(f"it asks for {arg}")
        product *= max(_size(arg), 1)
    if product > 64 * MAX_LENGTH:
        raise _TooMuch("it asks for a long text")


def _count(tree: nodes.Template) -> None:
    """Add a tick to every loop and macro, and measure every concatenation."""
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        node.body.insert(0, nodes.Output([_call(_TICK, [])]))
    _replace_concat(tree)


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), args, [], None, None)
    call.set_lineno(1)
    return call


def _replace_concat(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_measured(v) for v in value])
        else:
            setattr(node, field, _measured(value))
    for child in node.iter_child_nodes():
        _replace_concat(child)


def _measured(value: Any) -> Any:
    return _call(_JOIN, list(value.nodes)) if isinstance(value, nodes.Concat) else value


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _count(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _require(_size(left) + _size(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int) and not isinstance(one, int | float):
                    _require(_size(one) * max(other, 0))
            self._check_bits(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 4096:
                raise _TooMuch(f"it asks for {left} ** {right}")
        elif isinstance(left, str) and re.search(r"\d{5}|\*", left):
            raise _TooMuch("it asks for a wide format")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _check_bits(left: object, right: object) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 1 << 16:
            raise _TooMuch("it asks for a large number")

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth((owner, *args, *kwargs.values()))
            if obj.__name__ in ("format", "format_map") and re.search(r"\d{5}", owner):
                raise _TooMuch("it asks for a wide format")
        return super().call(context, obj, *args, **kwargs)


def _guarded(function: Any) -> Any:
    """A filter that refuses arguments that make long results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _check_growth([a for a in (*args, *kwargs.values()) if isinstance(a, str | int | list | tuple)])
        return function(*args, **kwargs)

    return _with_marks_of(function, call)


def _with_marks_of(function: Any, call: Any) -> Any:
    """Keep the marks by which Jinja2 passes a context, environment or evaluation context to a filter."""
    call.__dict__.update(getattr(function, "__dict__", {}))
    return call


_GROWING = ("batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "tojson", "truncate",
            "urlize", "wordwrap", "xmlattr")  # fmt: skip


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: no escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A model's template.

    Args:
        source: Jinja2.
        tokens: texts such as ``bos_token`` that the template may use.
        where: for errors.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        self._tokens = dict(tokens)
        self._where = where
        if len(source) > MAX_SOURCE:
            raise ModelFileError(f"{where}: a chat template of {len(source)} characters", "give a template of your own")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        for name in _GROWING:
            environment.filters[name] = _guarded(environment.filters[name])
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:100])
        environment.globals[_JOIN] = _join
        environment.globals.pop("lipsum", None)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError, MemoryError, _TooMuch) as problem:
            raise ModelFileError(
                f"{where}: the chat template is not usable ({_line(problem)})", "give a template of your own"
            ) from None

    @classmethod
    def from_model(cls, model: LoadedModel, tokenizer: Tokenizer) -> ChatTemplate:
        """Raises ModelError if the model has none."""
        source = _find_source(model)
        if source is None:
            raise ModelError(f"{model.path}: has no chat template", "use plain prompts, or an instruction-tuned model")
        tokens = {} if model.gguf is not None else _special_tokens(model.path)
        eos = model.eos_ids[0] if model.eos_ids else None
        found = {"bos_token": tokenizer.token(model.bos_id), "eos_token": tokenizer.token(eos)}
        return cls(source, found | tokens, str(model.path))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation. Raises RequestError where the template refuses or misbehaves."""
        budget = _Budget()
        pieces: list[str] = []
        length = 0
        try:
            context = {
                **self._tokens,
                "messages": [dict(m) for m in messages],
                "add_generation_prompt": add_generation_prompt,
                **variables,
                _TICK: budget.tick,
            }
            for piece in self._template.generate(context):
                pieces.append(piece)
                length += len(piece)
                _require(length)
                budget.tick()
        except _TooMuch as problem:
            raise RequestError(f"{self._where}: the chat template is stopped: {problem}", _OWN) from None
        except jinja2.TemplateError as problem:
            raise RequestError(
                f"{self._where}: the chat template refuses the messages: {_line(problem)}", "change the messages"
            ) from None
        except Exception as problem:  # whatever a stranger's program can raise
            raise RequestError(f"{self._where}: the chat template fails: {_line(problem)}", _OWN) from None
        return "".join(pieces)


_OWN = "use another model, or plain prompts"


def _line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]


def _find_source(model: LoadedModel) -> str | None:
    if model.gguf is not None:
        source = model.gguf.get("tokenizer.chat_template")
        return source if isinstance(source, str) else None
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        path: Path = model.path / name
        if path.exists():
            source = path.read_text("utf-8", "replace") if name.endswith("jinja") else _from_json(path)
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
    config = read_json(path) if path.exists() else {}
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
