"""Chat templates: what they render, and that hostile ones end soon, in bounded memory, with one clear line."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import GaplessError, ModelError, ModelFileError, RequestError
from gapless.text.chat import MAX_SOURCE, ChatTemplate
from gapless.text.tokenizer import Tokenizer
from tokenizer_data import byte_pair_metadata

USER = {"role": "user", "content": "hi"}
TALK = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "ho"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "test")


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return template(source).render(messages or [USER], **variables)


# --- what templates may do


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_conversation() -> None:
    assert render(CHATML, TALK) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML, [USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if tools is not none %}x{% endif %}{{ tools }}", "None"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "0134"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(x, y='!') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ m('a') }}"
         "{% call m('b') %}c{% endcall %}", "a!b!c"),
        ("{{ {'b': [1, 'é<'], 'a': none} | tojson }}", '{"b": [1, "é<"], "a": null}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", "hi"),
        ("{{ messages | map(attribute='content') | map('upper') | list }}", "['BE BRIEF', 'HI', 'HO']"),
        ("{{ messages[-1:][0].content }}{{ messages[::-1] | length }}{{ messages | last | length }}", "ho32"),
        ("{% for key, value in messages[0].items() %}{{ key }}={{ value|trim }};{% endfor %}",
         "role=system;content=be brief;"),
        ("{{ 'a-b-c'.split('-', maxsplit=1)[-1].rstrip('c') ~ 1 ~ none }}", "b-1None"),
        ("{{ '%s,%03d' % ('a', 7) }}{{ '{:>4}'.format('x') }}", "a,007   x"),
        ("{{ 'x' if messages[0].role == 'system' and 'tool_calls' not in messages[0] else 'y' }}", "x"),
        ("{{ 'ab' in 'cab' }}{{ 1 in [1, 2] }}{{ 'role' in messages[0] }}{{ 3 // 2 }}{{ 7 % 4 }}", "TrueTrueTrue13"),
        ("{% filter upper %}abc{% endfilter %}{% set x %}d{% endset %}{{ x }}", "ABCd"),
        ("{% generation %}words{% endgeneration %}", "words"),
        ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{{ [3, 1, 2] | sort | join }}{{ 'a b' | replace(' ', '_') | title }}{{ '5' | int + 1 }}", "123A_b6"),
        ("{{ missing | default('d') }}{{ missing is defined }}{{ messages is iterable }}", "dFalseTrue"),
        ("{{ 'x\ny' | indent(2) }}|{{ 2.567 | round(1) }}", "x\n  y|2.6"),
        ("{% for m in messages recursive %}{{ m.content if m is mapping else m }}{{ loop.length }}{% endfor %}",
         "be brief3hi3ho3"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source, TALK) == expected


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") >= "2024"


def test_own_variables() -> None:
    assert render("{{ thinking }}{{ tools | tojson }}", thinking=True, tools=[{"a": 1}]) == 'True[{"a": 1}]'


def test_a_long_conversation_is_rendered_in_full() -> None:
    messages = [{"role": "user", "content": "word " * 200} for _ in range(2000)]
    source = (
        "{% for m in messages %}{% if m.content.strip().startswith('word') and m != messages[0] %}"
        "{{ (m.content | trim).replace('word', 'w') ~ '\n' }}{% endif %}{% endfor %}"
    )
    assert render(source, [USER, *messages]).count("\n") == 2000


def test_one_long_message_is_rendered_in_full() -> None:
    text = "0123456789" * 400_000
    assert len(render(CHATML, [{"role": "user", "content": text}])) > len(text)


# --- where they come from


def model(path: Path, gguf: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(path=path, gguf=gguf, bos_id=0, eos_ids=(1,))


TOKENIZER = Tokenizer.from_gguf(byte_pair_metadata(), "test")


def test_from_gguf_metadata() -> None:
    loaded = model(
        Path("m.gguf"), {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    )
    assert ChatTemplate.from_model(loaded, TOKENIZER).render([USER]) == "<|begin|>hi<|end|>"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "A{{ bos_token }}"},
        {"chat_template.json": json.dumps({"chat_template": "A{{ bos_token }}"})},
        {"tokenizer_config.json": json.dumps({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<B>"}})},
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "tool_use", "template": "B"},
                                                                {"name": "default", "template": "A{{ bos_token }}"}]})},
        {"chat_template.jinja": "A{{ bos_token }}", "tokenizer_config.json": json.dumps({"chat_template": "B"})},
    ],
)  # fmt: skip
def test_from_a_folder(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    expected = "A<B>" if "<B>" in str(files) else "A<|begin|>"
    assert ChatTemplate.from_model(model(tmp_path), TOKENIZER).render([USER]) == expected


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template; use plain prompts"):
        ChatTemplate.from_model(model(tmp_path), TOKENIZER)
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.from_model(model(tmp_path / "m.gguf", {}), TOKENIZER)


# --- templates that refuse or fail


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(RequestError, match="refuses the messages: roles must alternate; change the messages"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses the messages: 'dict object' has no attribute 'name'"):
        render("{{ messages[0].name.first }}")


def test_a_message_is_an_object() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\] = 'hi' is no object; give a role and a content"):
        template(CHATML).render([USER, "hi"])  # type: ignore[list-item]


def test_parts_of_a_content_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize("part", ["x", None, {"type": "image_url", "image_url": {}}, {"type": "text"}, {"text": "a"}])
def test_parts_that_are_no_text(part: object) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\] = .* is no text; give parts like"):
        render("{{ messages }}", [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ",
        "{% for %}",
        "{% if x %}",
        "{{ x | no_such_filter }}",
        "{{ x is no_such_test }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% for a in b %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{{ " + "-" * 20_000 + "1 }}",
        "{{ " + "9" * 10_000 + " }}",
        "x" * (MAX_SOURCE + 1),
        "{{ " + " ~ ".join("a" * 20_000) + " }}",
        "{{ 'a'|urlize }}",
        "\udcff{{",
    ],
)
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ModelFileError, match="test: the chat template "):
        template(source)


def grown(expression: str, start: str = "'a'", times: int = 99) -> str:
    """``n.x`` (and a twin ``n.y``), made of itself again and again."""
    twin = expression.replace("n.x", "n.y")
    return (
        f"{{% set n = namespace(x={start}, y={start}) %}}{{% for i in range({times}) %}}"
        f"{{% set n.x = {expression} %}}{{% set n.y = {twin} %}}{{% endfor %}}"
    )


LISTS = grown("[n.x, n.x]", "[1]", 60)  # 2^60 items to whoever writes or compares them
TUPLES = grown("(n.x, n.x)", "(1,)", 60)
LONG = "a" * 50_000
BLOCKS = "".join(
    f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(60)
)

# Each reaches for Python, or for more time or memory than a template may have.
HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "condition of a loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "many conditions": "{% for b in range(99999) if b is divisibleby(7) and false %}{% endfor %}" * 1000,
    "text times number": "{{ 'a' * 10 ** 9 }}",
    "number times text": "{{ 10 ** 9 * 'a' }}",
    "list times number": "{{ [0] * 10 ** 9 }}",
    "constant folded": "{{ 'a' * 1000000000 }}",
    "constant filter": "{{ 'a' | center(1000000000) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "large numbers": grown("n.x * n.x", "3"),
    "large number read": "{{ ('f' * 4000000) | int(0, 16) // 3 }}",
    "digits": "{{ 1 | round(10 ** 9, 'ceil') }}",
    "digits before the point": "{{ 5 | round(-10 ** 9) }}",
    "digits of each": "{{ [5] | map('round', -10 ** 9) | list }}",
    "doubling": grown("n.x + n.x"),
    "doubling by ~": grown("n.x ~ n.x"),
    "doubling by %": grown("'%s%s' % (n.x, n.x)"),
    "doubling by format": grown("'{0}{0}'.format(n.x)"),
    "doubling by join": grown("[n.x, n.x] | join"),
    "doubling by replace": grown("n.x.replace('a', 'aa')"),
    "doubling of lists": grown("n.x + n.x", "[1]"),
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("m(n.x)"),
    "doubling by a block": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}"
                           "{% endset %}{% set n.x = y %}{% endfor %}",
    "shared lists printed": LISTS + "{{ n.x }}",
    "shared lists as json": LISTS + "{{ n.x | tojson }}",
    "shared lists as text": LISTS + "{{ n.x | string }}",
    "shared lists joined": LISTS + "{{ '' ~ n.x }}",
    "shared lists compared": LISTS + "{{ n.x == n.y }}",
    "shared lists sought": LISTS + "{{ n.x in [n.y] }}",
    "shared lists tested": LISTS + "{{ n.x is eq(n.y) }}",
    "shared lists counted": LISTS + "{{ [n.x].count(n.y) }}",
    "shared lists changed": LISTS + "{% for i in [n.x, n.y] %}{{ loop.changed(i) }}{% endfor %}",
    "shared lists in a namespace": LISTS + "{{ n }}",
    "shared tuples hashed": TUPLES + "{{ {n.x: 1} }}",
    "shared tuples looked up": TUPLES + "{{ messages[0][n.x] }}",
    "shared tuples got": TUPLES + "{{ messages[0].get(n.x) }}",
    "shared tuples made unique": TUPLES + "{{ [n.x] | unique | list }}",
    "deep list": grown("[n.x]", "[]", 90_000) + "{{ n.x }}",
    "deep tuple": grown("(n.x,)", "()", 90_000) + "{{ {n.x: 1} }}",
    "list with itself": "{% set n = namespace(x=0) %}{% set n.x = [n] %}{{ n.x }}",
    "kept copies": "{% set t = 'a' * 4000000 %}" + grown("[n.x, t[1:]]", "[]", 90_000),
    "kept text": "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set y %}" + LONG
                 + "{% endset %}{% set n.x = [n.x, y] %}{% endfor %}",
    "written text": "{% for i in range(90000) %}" + LONG + "{% endfor %}",
    "text of a macro": "{% macro m() %}{% for i in range(90000) %}" + LONG + "{% endfor %}{% endmacro %}{{ m() }}",
    "characters as a list": "{% for i in range(999) %}{% set x = ('a' * 4000000) | list %}{% endfor %}",
    "lines": "{% for i in range(999) %}{% set x = ('\n' * 4000000).splitlines() %}{% endfor %}",
    "pieces": "{% for i in range(999) %}{% set x = ('a ' * 4000000).split() %}{% endfor %}",
    "sorting": "{% for i in range(9999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "straight sorting": "{{ range(99999) | sort | length }}" * 2500,
    "adding lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "lazy": "{{ range(99999) | map('string') | map('upper') | map('lower') | list | length }}" * 1000,
    "macro calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
                                "{{ m(60) }}",
    "block calls blocks": BLOCKS + "{% block b60 %}{% endblock %}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "widths": "{{ '%999999999d' % 1 }}",
    "width as argument": "{{ '%*d' % (999999999, 1) }}",
    "many widths": "{{ ('%9999d' * 9999) % range(9999) | list }}",
    "format width": "{{ '{:>999999999}'.format('a') }}",
    "format width as argument": "{{ '{:>{w}}'.format('a', w='999999999') }}",
    "format width in other digits": "{{ '{:>٩٩٩٩٩٩٩٩٩}'.format('a') }}",
    "format map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "indented json": "{{ ([[[1]]] * 100000) | tojson(indent=100000) }}",
    "json separators": "{{ ([1] * 100000) | tojson(separators=('a' * 100000, ':')) }}",
    "replace nothing": "{{ ('a' * 100000) | replace('', 'a' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('', 'a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join('a' * 100000) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "encode": "{{ 'a'.encode('utf-7') }}",
    "bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "keys of a text": "{{ dict.fromkeys('a' * 4000000) }}",
    "shadowed names": "{% set budget = none %}{% macro turn() %}{% endmacro %}{% set range = [0] * 99999 %}"
                      "{% for a in range %}{% for b in range %}{% endfor %}{% endfor %}",
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "internals by name": "{{ ''['__cla' ~ 'ss__'].mro() }}",
    "internals by format": "{{ '{0.__class__.__mro__}'.format('')[99999].x }}",
    "globals of a function": "{{ raise_exception.__globals__.os.system('true') }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__.x }}",
    "the environment": "{{ self._TemplateReference__context.environment.budget.spend(-(10 ** 9)) }}",
    "change the messages": "{% set _ = messages.append(1) %}",
    "change a message": "{% set _ = messages[0].update({'a': 1}) %}",
    "division by zero": "{{ 1 / 0 }}",
    "wrong type": "{{ 'a' + 1 }}",
}  # fmt: skip

MAX_GROWTH_BYTES = 400 << 20


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_templates_end_soon_with_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.text.budget.MAX_SECONDS", 0.3)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises((RequestError, ModelFileError)) as caught:
        render(HOSTILE[kind])
    assert time.process_time() - started < 3
    assert "\n" not in str(caught.value)
    assert "test: the chat template" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.remedy
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) << 10 < MAX_GROWTH_BYTES


# Wherever a template may give a number ``n``.
NUMBERS = [
    "n | round", "5 | round(n)", "5 | round(precision=n)", "5 | round(n, 'ceil')", "5.5 | round(n, 'floor')",
    "[5] | map('round', n) | list", "['a'] | map('center', n) | list", "range(n) | length", "range(0, n, n) | list",
    "range(n, 0, -1) | length", "'abc'[n]", "'abc'[n:]", "'abc'[:n]", "'abc'[::n]", "[1, 2][n]", "[1, 2][::n]",
    "messages[n]", "[1] * n", "n * 'ab'", "(1, 2) * n", "n * n", "n + n", "n - n", "-n", "n / n", "1 / n", "n // 3",
    "7 // n", "7 % n", "n % 7", "2 ** n", "n ** n", "n ** -n", "(-2) ** n", "2.5 ** n", "n ** 0.5", "'%d' % n",
    "'%c' % n", "'%s' % n", "'%x' % n", "'%f' % n", "'%.99f' % n", "('%' ~ n ~ 'd') % 1", "('%.' ~ n ~ 'f') % 1.5",
    "'%*d' % (n, 1)", "('{:>' ~ n ~ '}').format(1)", "('{:.' ~ n ~ 'f}').format(1.5)", "('{' ~ n ~ '}').format(1)",
    "'{:d}'.format(n)", "'{:c}'.format(n)", "'{:,}'.format(n)", "'{:f}'.format(n)", "'{:b}'.format(n)",
    "'a'.center(n)", "'a'.ljust(n)", "'a'.rjust(n)", "'1'.zfill(n)", "'a\tb'.expandtabs(n)", "'a b c'.split(' ', n)",
    "'a b c'.rsplit(' ', maxsplit=n)", "'a\nb'.splitlines(n)", "'aaa'.replace('a', 'b', n)", "'aaa'.count('a', n)",
    "'aaa'.find('a', 0, n)", "'aaa'.startswith('a', n)", "[1, 2].index(2, n)", "[1, 2].count(n)", "'a' | center(n)",
    "'a\nb' | indent(n)", "'a\nb' | indent(width=n)", "'aaa' | replace('a', 'b', n)", "'a b' | truncate(n)",
    "'a b' | wordwrap(n)", "[1, 2] | batch(n) | list", "[1, 2] | slice(n) | list", "'%d' | format(n)",
    "[1] | tojson(indent=n)", "n | tojson", "n | int", "'7' | int(0, n)", "'x' | int(n)", "n | float", "n | abs",
    "n | string", "n | title", "n | wordcount", "[1] | sum(start=n)", "[n, n] | sum", "[n, 1] | sort", "[n, 1] | max",
    "[n, n] | unique | list", "n | default(n)", "n | list", "n | join(n)", "n is divisibleby(n)", "n is odd",
    "n is even", "n is eq(n)", "n in [n]", "n in 'abc'", "n < n", "{n: n}", "{n: n}[n]", "{n: n}.get(n)", "n ~ n",
    "cycler(n).next()", "joiner(n)()", "dict(a=n)", "namespace(a=n)", "strftime_now('%' ~ n ~ 'Y')", "n(n)", "n.n",
]  # fmt: skip
VALUES = [0, True, -1, 9999, -9999, 10**9, -(10**9), 10**400, -(10**400), 10**5000, 1e-300, 1e308, -1e308]
VALUES += [float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("expression", NUMBERS)
def test_whatever_number_is_given_a_template_ends_soon(expression: str) -> None:
    for value in VALUES:
        started = time.process_time()
        try:
            line = "" if render(f"{{{{ {expression} }}}}", n=value) is not None else "none"
        except (RequestError, ModelFileError) as problem:
            line = str(problem)
        assert time.process_time() - started < 1.5, value
        assert "\n" not in line
        assert len(line) < 500


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages | tojson }}", "{{ x }}", "{{ '%c' % 55296 }}", "\ud800"]
)
def test_a_chat_is_valid_unicode(source: str) -> None:
    """A lone surrogate is refused wherever it comes from."""
    with pytest.raises(
        (RequestError, ModelFileError), match=r"lone surrogate at character|chat template is not usable"
    ):
        render(source, [{"role": "user", "content": "a\udfff"}], x="\ud800")


def test_a_lone_surrogate_that_is_written_as_an_escape_does_no_harm() -> None:
    assert (
        render("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"role": "", "content": "\udfff"}])
        == '"\\udfff"'
    )


def test_the_messages_are_the_callers_own() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError):
        render("{% set _ = messages[0].pop('role') %}", messages)
    assert messages == [USER]


def test_a_rendering_starts_with_a_budget_of_its_own() -> None:
    heavy = template("{% for i in range(90000) %}{% endfor %}{{ 'a' * 2000000 }}")
    for _ in range(20):
        assert len(heavy.render([USER])) == 2_000_000


WORDS = ["for", "in", "if", "endfor", "endif", "set", "macro", "endmacro", "range", "messages", "loop", "a", "b", "x",
         "99999", "0", "'s'", "*", "**", "+", "~", "|", ".", "(", ")", "[", "]", ":", ",", "==", "is", "not", "else",
         "list", "join", "tojson", "string", "replace", "format", "namespace", "{%", "%}", "{{", "}}", "-", " ", "\n",
         "recursive", "call", "endcall", "filter", "endfilter", "block", "endblock", "self", "{%-", "-%}"]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
def test_any_text_is_rendered_or_refused(source: str) -> None:
    try:
        render(source)
    except GaplessError as problem:
        line = str(problem)
    else:
        line = ""
    assert "\n" not in line
