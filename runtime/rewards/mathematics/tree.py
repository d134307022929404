"""Expression trees of answers, and the bound on the work of comparing them.

A node is a head, its arguments and a value. The heads:

    number      value: Fraction, exact                     decimal     value: Fraction, written with a decimal point
    symbol      value: its name; pi, e, i and infinity are such names
    add, multiply, divide, negate, power, percent          arithmetic; multiply and add take any number of arguments
    sign        the sign of a plus-minus, the same one throughout an answer
    call        value: a function's name (see approximate.FUNCTIONS)
    opaque      value: a function's name that cannot be evaluated
    word        value: text, folded
    tuple       value: its two brackets      set, matrix (of rows), row, ratio
    list        value: "or" or "and" where that word alone stands between its members
    relation    value: the relations' signs, one fewer than the arguments
    union, intersection, difference         of sets
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache

import msgspec


class Unreadable(ValueError):
    """The text is not in the notation that the parser knows."""


class Unknown(Unreadable):
    """The notation may be meaningful, but the parser does not know it."""


class TooCostly(ValueError):
    """Deciding would take more time or memory than an answer is worth."""


class ExpressionNode(msgspec.Struct, frozen=True, gc=False):
    head: str
    args: tuple[ExpressionNode, ...] = ()
    value: Fraction | str = ""


CONSTANTS = frozenset(("\\pi", "e", "i", "\\infty"))
INFINITY = ExpressionNode("symbol", (), "\\infty")
UNNAMED = ExpressionNode("symbol", (), "")  # what `> 3` is about
_COMMUTATIVE = frozenset(("add", "multiply", "set", "list", "union", "intersection"))


def number(value: int | Fraction) -> ExpressionNode:
    return ExpressionNode("number", (), Fraction(value))


def negate(node: ExpressionNode) -> ExpressionNode:
    return ExpressionNode("number", (), -node.value) if node.head == "number" else ExpressionNode("negate", (node,))  # type: ignore[operator]


def is_domain(node: ExpressionNode) -> bool:
    """Whether a statement says that a variable is a real number."""
    return (
        node.head == "relation" and node.value == "\\in" and node.args[0].head == "symbol" and node.args[1].value == "mathbb R"
    )


def walk(node: ExpressionNode) -> Iterator[ExpressionNode]:
    """`node` and everything below it."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.args)


def heads(node: ExpressionNode) -> set[str]:
    return {part.head for part in walk(node)}


def symbols(node: ExpressionNode) -> set[str]:
    """Names of the free symbols; of constants none."""
    return {str(part.value) for part in walk(node) if part.head == "symbol" and part.value not in CONSTANTS}


def replace(node: ExpressionNode, change: Callable[[ExpressionNode], ExpressionNode | None]) -> ExpressionNode:
    """`node` with each outermost part for which `change` gives one replaced."""
    changed = change(node)
    if changed is not None:
        return changed
    if not node.args:
        return node
    return ExpressionNode(node.head, tuple(replace(argument, change) for argument in node.args), node.value)


def signs(node: ExpressionNode) -> list[ExpressionNode]:
    """What an answer with plus-minus signs stands for: itself where it has none, else both values."""
    if "sign" not in heads(node):
        return [node]
    return [replace(node, lambda part: number(sign) if part.head == "sign" else None) for sign in (1, -1)]  # noqa: B023


@lru_cache(maxsize=4096)
def key(node: ExpressionNode) -> str:
    """A text that is the same for nodes which differ only in the order of commutative arguments."""
    if isinstance(node.value, Fraction):
        return f"{node.value.numerator:x}/{node.value.denominator:x}"  # decimal digits would take quadratic time
    if not node.args:
        return node.value if node.head == "symbol" else f"{node.head} {node.value}"
    if node.head == "negate":
        return key(ExpressionNode("multiply", (number(-1), *node.args)))
    parts = [key(argument) for argument in node.args]
    if node.head in _COMMUTATIVE:
        parts.sort()
    return f"{node.head} {'' if node.head == 'list' else node.value}({';'.join(parts)})"


LIMIT = 300_000.0

_left: ContextVar[list[float] | None] = ContextVar("left", default=None)


@contextmanager
def limited(limit: float = LIMIT) -> Iterator[None]:
    """Within it, `spend` raises TooCostly once more than `limit` has been spent."""
    token = _left.set([limit])
    try:
        yield
    finally:
        _left.reset(token)


def spend(cost: float) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= cost
        if left[0] < 0:
            raise TooCostly("too much arithmetic")
