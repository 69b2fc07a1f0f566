"""A Jinja2 environment for templates from strangers.

Jinja2's own sandbox keeps a template from Python's internals. Here its work and memory are bounded too. The template
is rewritten so that every turn of a loop and every macro spends from a budget, and so that whatever is compared,
concatenated, sliced or hashed is paid for; filters, tests, operators and calls pay before they run. Filters and
methods that no chat template needs are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.text import growth
from gapless.text.budget import Budget, OverBudget, check_number

MAX_NODES = 20_000  # of a template's syntax; known models' have some thousands

# Names of the filters that the rewriting puts in: no template can spell them.
_TURN, _EACH, _READ, _WRITE, _SLICED = " turn", " each", " read", " write", " sliced"
# Filters that look at a list without looking into its items, those that compare the items, and those that make text.
_SHALLOW = ("first", "items", "last", "length", "count", "list", "map", "reject", "rejectattr", "reverse", "select",
            "selectattr")  # fmt: skip
_COMPARING = ("dictsort", "groupby", "max", "min", "sort", "sum", "unique")
_WRITING = ("abs", "capitalize", "center", "e", "escape", "float", "format", "indent", "int", "join", "lower",
            "replace", "round", "safe", "string", "title", "trim", "upper", "wordcount")  # fmt: skip
_COMPARING_TESTS = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan",
                    "<=", "le", "in", "lower", "upper")  # fmt: skip
_INTERNAL = ("_loop_vars", "_block_vars")  # which compiled templates pass along
_ATOMS = (nodes.Const, nodes.TemplateData)

_Function = Callable[..., Any]
_Functions = Mapping[str, _Function]
_Guard = Callable[..., None]


class Refusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers sets it up, but bounded: ``rendering`` gives the environment of one rendering its budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    budget: Budget

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not folded while compiling, where nothing pays
            extensions=[loopcontrols, _Generation],
            finalize=_finalize,
        )
        self.filters = _filters(cast(_Functions, self.filters))
        for name in _COMPARING_TESTS:
            self.tests[name] = _guarded(cast(_Function, self.tests[name]), _check_test)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def rendering(self, code: CodeType, budget: Budget) -> jinja2.Template:
        environment = self.overlay()
        environment.budget = budget
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if _instrument(tree) > MAX_NODES:
            raise jinja2.TemplateAssertionError("it has too many parts", 1)
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Any) -> str:
        """Jinja2 joins here what a macro or a block has written."""
        texts = list(pieces)
        self.budget.spend(len(texts) + sum(map(len, texts)))
        return "".join(texts)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            self.budget.read(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _pay_for_operator(self.budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        self.budget.made(result)
        return result

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget
        budget.spend(1 + len(args) + len(kwargs))
        if isinstance(obj, Macro | BlockReference | LoopContext):  # their bodies pay
            return super().call(context, obj, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in _INTERNAL}
        method = getattr(obj, "__wrapped__", obj)  # Jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if owner is not None and type(owner).__module__ in ("builtins", "markupsafe"):
            _pay_for_method(budget, owner, method.__name__, args, given)
        budget.read([args, given])
        result = super().call(context, obj, *args, **kwargs)
        budget.made(result)
        return result


class _Generation(Extension):
    """``{% generation %}`` marks an assistant's words for training; in a prompt they are words like others."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- the rewriting


def _instrument(node: nodes.Node) -> int:
    """Put payments into a tree; returns how many nodes it has, which is what one pass over it costs."""
    weight = 1 + sum(_instrument(child) for child in node.iter_child_nodes())
    if isinstance(node, nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends):
        raise jinja2.TemplateAssertionError("it refers to another template", node.lineno)
    if isinstance(node, nodes.For):
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _paid(node.iter, _EACH, 1 + _size(node.test))
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
        turn = nodes.ExprStmt(_paid(nodes.Const(""), _TURN, weight), lineno=node.lineno)
        node.body.insert(0, turn)
    elif isinstance(node, nodes.Compare):
        _pay_for_comparison(node)
    elif isinstance(node, nodes.Concat):
        node.nodes = [_paid(part, _WRITE) for part in node.nodes]
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node.node = _paid(node.node, _SLICED)
    elif isinstance(node, nodes.Pair):
        node.key = _paid(node.key, _READ)
    return weight


def _size(node: nodes.Node | None) -> int:
    return 0 if node is None else 1 + sum(_size(child) for child in node.iter_child_nodes())


def _paid(value: nodes.Expr, how: str, *options: int) -> nodes.Expr:
    if how in (_READ, _WRITE) and isinstance(value, _ATOMS):
        return value
    args = [nodes.Const(option) for option in options]
    return nodes.Filter(value, how, args, [], None, None, lineno=value.lineno)


def _pay_for_comparison(node: nodes.Compare) -> None:
    """Comparing with a constant takes no time; else both sides may be large."""
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    if any(isinstance(side, nodes.Const) for side in sides) and all(op.op not in ("in", "notin") for op in node.ops):
        return
    node.expr = _paid(node.expr, _READ)
    for operand in node.ops:
        if not _is_literal(operand.expr):
            operand.expr = _paid(operand.expr, _READ)


def _is_literal(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)


@jinja2.pass_environment
def _turn(environment: Sandbox, value: Any, weight: int) -> Any:
    environment.budget.spend(weight)
    return value


@jinja2.pass_environment
def _each(environment: Sandbox, value: Any, weight: int) -> Any:
    """What a loop goes over; its condition may pass over items without a turn, so they are paid for here."""
    value = _collected(environment.budget, value)
    if hasattr(value, "__len__") and not isinstance(value, Undefined):
        environment.budget.spend(len(value) * weight)
    return value


@jinja2.pass_environment
def _read(environment: Sandbox, value: Any) -> Any:
    environment.budget.read(value)
    return value


@jinja2.pass_environment
def _write(environment: Sandbox, value: Any) -> Any:
    environment.budget.write(value)
    return value


@jinja2.pass_environment
def _sliced(environment: Sandbox, value: Any) -> Any:
    environment.budget.made(value)
    return value


@jinja2.pass_context  # a context also keeps Jinja2 from finalizing constants while compiling
def _finalize(context: Context, value: Any) -> Any:
    """What ``{{ }}`` prints."""
    _budget(context).write(value)
    return value


def _budget(context: Context) -> Budget:
    environment = context.environment
    assert isinstance(environment, Sandbox)
    return environment.budget


def _collected(budget: Budget, value: Any) -> Any:
    """The items of a lazy value, so that its work is done, and paid for, here."""
    if not isinstance(value, Iterator):
        return value
    items = []
    for item in value:
        budget.made(item)
        items.append(item)
    return items


# --- operators and methods


def _pay_for_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    for value in (left, right):
        if isinstance(value, int):
            check_number(value)
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                budget.spend(len(one) * max(other, 0) * (1 if isinstance(one, str) else 2))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > growth.MAX_WIDTH:
            raise OverBudget("it makes a number of thousands of digits")
    elif operator == "%" and isinstance(left, str):
        budget.spend(growth.percent_formatted(left, budget, right))
    elif operator == "+":
        budget.made(left)
        budget.made(right)


def _pay_for_method(budget: Budget, owner: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    methods = next((methods for kind, methods in growth.METHODS if isinstance(owner, kind)), {})
    if isinstance(owner, type):  # dict.fromkeys and the like
        methods = {}
    if name not in methods:
        raise OverBudget(f"it calls the method {name!r} of a {type(owner).__name__}")
    bound = methods[name]
    if name not in ("get", "items", "keys", "values"):
        budget.read(owner)
    if name in ("format", "format_map"):
        assert isinstance(owner, str)
        budget.spend(growth.brace_formatted(owner, budget, [args, kwargs]))
    elif bound is not None:
        budget.spend(bound(owner, *args, **kwargs))


# --- filters and tests


def _filters(plain: _Functions) -> dict[str, _Function]:
    guarded: dict[str, _Function] = {
        "default": plain["default"],
        "d": plain["d"],
        "tojson": _guarded(_to_json, _check_json),
        _TURN: _turn,
        _EACH: _each,
        _READ: _read,
        _WRITE: _write,
        _SLICED: _sliced,
    }
    guarded |= {name: _guarded(plain[name], _check_shallow) for name in _SHALLOW}
    guarded |= {name: _guarded(plain[name], _check_comparing) for name in _COMPARING}
    guarded |= {name: _guarded(plain[name], _writing(name)) for name in _WRITING}
    return guarded


def _guarded(function: _Function, check: _Guard) -> _Function:
    """A filter or test that pays for its arguments by ``check``, and for its result."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def call(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        args = (_collected(budget, args[0]), *args[1:]) if args else args
        check(budget, *args, **kwargs)
        extra = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(extra[passed], *args, **kwargs) if passed is not None else function(*args, **kwargs)
        result = _collected(budget, result)
        budget.made(result)
        return result

    return call


def _check_test(budget: Budget, *args: Any) -> None:
    for arg in args:
        budget.read(arg)


def _check_shallow(budget: Budget, value: Any = None, *args: Any, **kwargs: Any) -> None:
    """Each item once, and for each the steps of the path of an attribute."""
    paths = [option for option in (*args, *kwargs.values()) if isinstance(option, str)]
    items = len(value) if isinstance(value, list | tuple | dict | str) else 1
    budget.spend(items * (1 + sum(path.count(".") for path in paths)))


def _check_comparing(budget: Budget, value: Any = None, *args: Any, **kwargs: Any) -> None:
    """Sorting looks at each item some ten times, about what writing it costs."""
    for option in (*args, *kwargs.values()):
        if not isinstance(option, str | int | float | None):
            raise OverBudget("it adds up lists")
    budget.write([value, args, kwargs])


def _writing(name: str) -> _Guard:
    bounds: dict[str, growth.Bound] = {"center": growth.padded, "indent": growth.indented, "replace": growth.replaced}
    bound = bounds.get(name)

    def check(budget: Budget, value: Any = None, *args: Any, **kwargs: Any) -> None:
        budget.write([value, args, kwargs])
        if name == "join":
            separator = kwargs.get("d", args[0] if args else "")
            budget.spend(growth.joined(str(separator), value))
        elif name == "format":
            budget.spend(growth.percent_formatted(str(value), budget, [args, kwargs]))
        elif name == "round":
            growth.columns(kwargs.get("precision", args[0] if args else 0))
        elif bound is not None:
            budget.spend(bound(str(value), *args, **kwargs))

    return check


def _check_json(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    indent = kwargs.get("indent", args[1] if len(args) > 1 else None)
    budget.write(value, growth.columns(indent))
    if any(len(str(separator)) > 8 for separator in kwargs.get("separators") or ()):
        raise OverBudget("it separates JSON by long texts")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: Jinja2's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: object) -> str:
    return datetime.now().strftime(str(form)[:100])
