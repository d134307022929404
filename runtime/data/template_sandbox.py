"""The sandbox of chat templates: no code of theirs runs, and what a rendering costs is counted, as nothing interrupts Python.

A pass of a loop, a call and a piece of output count as work; texts by their characters and lists by their items. What could be
large at once, such as a product or padding, is refused by the size that it would have, before it is made.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MOST_WORK = 1 << 22  # of a rendering: some seconds
_MOST_SIZE = 1 << 24  # of a value, in characters
_MOST_NUMBER = 10_000  # that a method of texts or a filter is given: a width, a count
_CHARACTERS = 1 << 7  # that are a unit of work
_ITEM = 64  # an item of a list, in characters
_LARGE = 1 << 256
_SPEND, _JOINED = "(spend)", "(joined)"  # names that no template can write
_WIDE = re.compile(r"[%:][^%{}]*(?:\d{5}|\*|\{)")  # in a format: a number too large, or one that an argument gives
_CHEAP = ("length", "count", "first", "last", "default", "d", "int", "float", "string")
_FREE_NUMBERS = ("default", "d", "int", "float", "sum", "split", "rsplit", "find", "rfind", "index", "count", "get")


class CountedSandbox(ImmutableSandboxedEnvironment):
    """Renders with bounds of work and size."""

    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=self._written, optimized=False)  # which would compute constants as it compiles
        self._left = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self.counted(name, function) for name, function in self.filters.items()}
        self.filters |= {_SPEND: self._spend, _JOINED: self._joined}

    def begin(self) -> None:
        """Count from 0 in this thread."""
        self._left.units = _MOST_WORK

    def _spend(self, units: int = 1) -> bool:
        """True. Raises TemplateError when a rendering has taken more than it may."""
        self._left.units = getattr(self._left, "units", _MOST_WORK) - units
        if self._left.units < 0:
            raise jinja2.TemplateError("takes more work than any conversation")
        return True

    def _written(self, value: Any) -> Any:
        """A value that becomes text."""
        self._allow(len(value) if type(value) is str else _size(value))
        return value

    def _joined(self, *values: Any) -> str:
        """What `~` gives."""
        texts = [str(self._written(value)) for value in values]
        self._allow(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            self._allow(len(left) + len(right))
            return left + right
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**":
            raise jinja2.TemplateError("has a power, which no conversation needs")
        if numbers:
            self._check("a calculation", None, (int(abs(left) > _LARGE) * _LARGE, int(abs(right) > _LARGE) * _LARGE))
        elif operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            self._allow(int(count) * max(_length(repeated), 1))
        elif operator == "+":
            self._allow(_length(left) + _length(right))
        else:
            self._check("format", left, (right,))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        if (found := super().wrap_str_format(value)) is not None:
            self._check("format", value.__self__, ())
        return found

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str | bytes):
            self._check(called.__name__, owner, (*args, *kwargs.values()))
        self._spend(32)
        result = super().call(context, called, *args, **kwargs)
        self._allow(_length(result))
        return result

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Counting().visit(source), *arguments, **options)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter, with bounds."""
        given = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or what is in it

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            value = args[given] if len(args) > given else None
            self._check(name, value, (*args[given + 1 :], *kwargs.values()))
            if name not in _CHEAP:
                self._allow(_length(value))
            result = function(*args, **kwargs)
            if isinstance(result, str):
                self._allow(len(result))
            return result

        return counted

    def _check(self, name: str, value: Any, given: tuple[Any, ...]) -> None:
        """Before a method of a text or a filter is called."""
        if name not in _FREE_NUMBERS and any(isinstance(each, int) and abs(each) > _MOST_NUMBER for each in given):
            raise jinja2.TemplateError(f"calls {name} with a number above {_MOST_NUMBER}")
        if name == "format" and _WIDE.search(str(value)):
            raise jinja2.TemplateError("formats with a width above 9999, or one that is an argument")
        texts = [each for each in given if isinstance(each, str | bytes)]
        if name == "replace" and isinstance(value, str | bytes) and len(texts) > 1:
            self._allow(len(value) + (value.count(texts[0]) * len(texts[1])))  # type: ignore[arg-type]
        elif name in ("indent", "wordwrap", "expandtabs") and isinstance(value, str | bytes):
            numbers = [each for each in given if isinstance(each, int)]
            self._allow(len(value) * (1 + max([*map(len, texts), *(numbers if name != "wordwrap" else []), 0])))
        elif name == "join":
            method = isinstance(value, str | bytes)  # of the separator; the filter is one of the items
            items, separator = (given[0], value) if method and given else (value, texts[0] if texts else "")
            self._allow(_size(items) + len(separator) * _length(items))
        elif name in ("tojson", "string", "pprint", "urlencode", "xmlattr", "e", "escape", "safe"):
            self._allow(_size(value) * (1 + max([each for each in given if isinstance(each, int)], default=0)))

    def _allow(self, size: int) -> None:
        """Raises TemplateError for a value that is larger than any conversation."""
        if size > _MOST_SIZE:
            raise jinja2.TemplateError(f"makes a value of more than {_MOST_SIZE} characters")
        self._spend(1 + size // _CHARACTERS)


class _Counting(NodeTransformer):
    """Puts the counting of work into a template: into loops, macros, and where texts are joined."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count(node)
        if node.test is not None:
            node.test = nodes.And(_filtered(_SPEND, [nodes.Const(1)]), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self._count(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_JOINED, node.nodes)

    def _count(self, node: Any) -> None:
        self.generic_visit(node)
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_filtered(_SPEND, [nodes.Const(1 + written // _CHARACTERS)])))


def _filtered(name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    """A filter is called as it is, in a tenth of the time of a method."""
    return nodes.Filter(arguments[0], name, arguments[1:], [], None, None)


def _length(value: Any) -> int:
    """The size of what it holds itself."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    return len(value) * (1 if isinstance(value, str | bytes) else _ITEM) if hasattr(value, "__len__") else 1


def _size(value: Any) -> int:
    """The size as text, about; of what holds one thing many times over too, up to the most that may be."""
    size, waiting = 0, [value]
    while waiting and size <= _MOST_SIZE:
        each = waiting.pop()
        if isinstance(each, str | bytes | int):
            size += _length(each)
        else:
            size += _ITEM
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
    return size
