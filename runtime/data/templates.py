"""Chat templates: jinja2 in a sandbox, with the settings, filters and globals that Hugging Face templates expect.

The environment is the one documented for `apply_chat_template`: blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, and the `generation` tag, which has no effect on the text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from importlib.metadata import version
from time import strftime
from types import FunctionType
from typing import Any, NoReturn

import jinja2
import xxhash
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from runtime.errors import UserError

# ---- Template sandbox
# The sandbox of chat templates. No code of a template runs, and the work of a rendering is counted, because nothing
# interrupts Python.
#
# A pass of a loop, a call and a piece of output count as work; texts count by characters, lists by items. A value that could
# be large at once, such as a product or padding, is refused by its size before it is made.

_MOST_WORK = 1 << 22  # of a rendering: some seconds
_MOST_SIZE = 1 << 24  # of a value, in characters
_MOST_NUMBER = 10_000  # an argument of a text's method or a filter: a width, a count
_CHARACTERS = 1 << 7  # a unit of work
_ITEM = 64  # size of a list's item, in characters
_LARGE = 1 << 256
_SPEND, _JOINED = "(spend)", "(joined)"  # names that a template cannot write
_WIDE = re.compile(r"[%:][^%{}]*(?:\d{5}|\*|\{)")  # in a format: a number too large, or taken from an argument
_CHEAP = ("length", "count", "first", "last", "default", "d", "int", "float", "string")
_FREE_NUMBERS = ("default", "d", "int", "float", "sum", "split", "rsplit", "find", "rfind", "index", "count", "get")


class CountedSandbox(ImmutableSandboxedEnvironment):
    """Renders with bounds on work and size."""

    intercepted_binops = frozenset({"**", "*", "+", "%"})

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=self._written, optimized=False)  # an optimizer computes constants at compile time
        self._left = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self.counted(name, function) for name, function in self.filters.items()}
        self.filters |= {_SPEND: self._spend, _JOINED: self._joined}

    def begin(self) -> None:
        """Count from 0 in this thread."""
        self._left.units = _MOST_WORK

    def _spend(self, units: int = 1) -> bool:
        """Count work and return True. Raises TemplateError if a rendering exceeds its bound."""
        self._left.units = getattr(self._left, "units", _MOST_WORK) - units
        if self._left.units < 0:
            raise jinja2.TemplateError("takes more work than any conversation")
        return True

    def _written(self, value: Any) -> Any:
        """Check the size of a value that becomes text, and return the value."""
        self._allow(len(value) if type(value) is str else _size(value))
        return value

    def _joined(self, *values: Any) -> str:
        """Return the result of `~`."""
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
        """Return a filter with bounds."""
        given = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or a part of it

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
        """Check the arguments of a text's method or a filter, before the call."""
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
        """Count a value of `size` as work. Raises TemplateError for a value larger than any conversation."""
        if size > _MOST_SIZE:
            raise jinja2.TemplateError(f"makes a value of more than {_MOST_SIZE} characters")
        self._spend(1 + size // _CHARACTERS)


class _Counting(NodeTransformer):
    """Inserts the counting of work into a template: into loops, macros, and joined texts."""

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
    """Return a call of a filter, which takes a tenth of the time of a method call."""
    return nodes.Filter(arguments[0], name, arguments[1:], [], None, None)


def _length(value: Any) -> int:
    """Return the size of a value without the contents of its items."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    return len(value) * (1 if isinstance(value, str | bytes) else _ITEM) if hasattr(value, "__len__") else 1


def _size(value: Any) -> int:
    """Return the approximate size as text, at most about `_MOST_SIZE`; a value that is held many times counts each time."""
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


Message = Mapping[str, Any]


_MOST_CHARACTERS = 1 << 22  # of a conversation
_LEAST_JINJA = (3, 1, 6)  # no escape from the sandbox is known
_BARE: dict[str, Any] = {"__builtins__": {}}  # the globals of functions that templates see hold no more than needed


class ChatTemplate:
    """A compiled template with the model's special tokens (`bos_token`, `eos_token` ...) as its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str, with_tools: str = ""):
        """Compile `source`, and `with_tools`, a separate template for conversations with tools. `origin` names the template in
        errors. Raises UserError if either is not a template."""
        self.origin = origin
        self.stop_words: tuple[str, ...] = ()
        self.source = source
        self._variables = dict(special_tokens)
        self._with_tools = ChatTemplate(with_tools, special_tokens, origin) if with_tools else None
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{origin}: not a chat template: line {error.lineno}: {error.message}") from error
        except Exception as error:  # from Python's compiler, for jinja2's code
            raise UserError(f"{origin}: not a chat template: {_line(error)}") from error

    @property
    def identity(self) -> str:
        """A hash, equal for templates that render every conversation alike."""
        more = [self._with_tools.source] if self._with_tools else []
        return xxhash.xxh3_64_hexdigest(json.dumps([self.source, self._variables, *more], sort_keys=True).encode())

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return the conversation as text, special tokens included, up to where the reply begins (`add_generation_prompt`).

        `tools`: functions in OpenAI's format, which some templates list. Raises UserError if the template refuses them."""
        if tools is not None and self._with_tools:
            return self._with_tools.render(messages, add_generation_prompt, tools)
        self._environment.begin()
        try:
            text = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except Exception as error:  # a template may divide by zero, or recurse without end
            raise UserError(f"{self.origin}: the chat template cannot render the messages: {_line(error)}") from error
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{self.origin}: the chat template makes {len(text)} characters of the messages")
        return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for supervised training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(maxsize=1)
def _environment() -> CountedSandbox:
    """Return the sandbox. Raises UserError for a jinja2 with a known escape from its sandbox."""
    if (found := tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3]))) < _LEAST_JINJA:
        least = ".".join(map(str, _LEAST_JINJA))
        raise UserError(f"jinja2: {'.'.join(map(str, found))} is installed; chat templates need {least} or newer")
    environment = CountedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = environment.counted("tojson", _tojson)
    environment.globals["raise_exception"] = FunctionType(_raise_exception.__code__, {"TemplateError": TemplateError, **_BARE})
    environment.globals["strftime_now"] = FunctionType(_strftime_now.__code__, {"strftime": strftime, **_BARE})
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return strftime(form[:100])
