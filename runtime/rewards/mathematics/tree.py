"""Expression trees of answers, and a limit on the work of comparing them.

A node has a head, arguments and a value. The heads:

    number      value: Fraction, exact                     decimal     value: Fraction, written with a decimal point
    symbol      value: its name; pi, e, i and infinity are names too
    add, multiply, divide, negate, power, percent          arithmetic; multiply and add take any number of arguments
    sign        the sign of a plus-minus; the same one throughout an answer
    call        value: the name of a function in approximate.FUNCTIONS
    opaque      value: the name of a function that cannot be evaluated
    word        value: text, folded
    tuple       value: its two brackets      set, matrix (of rows), row, ratio
    list        value: "or" or "and" if only that word stands between its members
    relation    value: the relation signs, one fewer than the arguments
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
    """The text is not in a notation of the parser."""


class Unknown(Unreadable):
    """The notation may be meaningful, but the parser does not know it."""


class TooCostly(ValueError):
    """Deciding would take too much time or memory."""


class ExpressionNode(msgspec.Struct, frozen=True, gc=False):
    head: str
    args: tuple[ExpressionNode, ...] = ()
    value: Fraction | str = ""


CONSTANTS = frozenset(("\\pi", "e", "i", "\\infty"))
INFINITY = ExpressionNode("symbol", (), "\\infty")
UNNAMED = ExpressionNode("symbol", (), "")  # the missing left side of `> 3`
_COMMUTATIVE = frozenset(("add", "multiply", "set", "list", "union", "intersection"))


def number(value: int | Fraction) -> ExpressionNode:
    return ExpressionNode("number", (), Fraction(value))


def negate(node: ExpressionNode) -> ExpressionNode:
    return ExpressionNode("number", (), -node.value) if node.head == "number" else ExpressionNode("negate", (node,))  # type: ignore[operator]


def is_domain(node: ExpressionNode) -> bool:
    """Return whether a statement says that a variable is a real number."""
    return (
        node.head == "relation" and node.value == "\\in" and node.args[0].head == "symbol" and node.args[1].value == "mathbb R"
    )


def walk(node: ExpressionNode) -> Iterator[ExpressionNode]:
    """Yield `node` and all nodes below it."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.args)


def heads(node: ExpressionNode) -> set[str]:
    return {part.head for part in walk(node)}


def symbols(node: ExpressionNode) -> set[str]:
    """Return the names of the free symbols, without constants."""
    return {str(part.value) for part in walk(node) if part.head == "symbol" and part.value not in CONSTANTS}


def replace(node: ExpressionNode, change: Callable[[ExpressionNode], ExpressionNode | None]) -> ExpressionNode:
    """Return `node` with outermost parts replaced. `change` returns the replacement of a part, or None to keep it."""
    changed = change(node)
    if changed is not None:
        return changed
    if not node.args:
        return node
    return ExpressionNode(node.head, tuple(replace(argument, change) for argument in node.args), node.value)


def signs(node: ExpressionNode) -> list[ExpressionNode]:
    """Return both values of an answer with plus-minus signs, or the answer itself without such signs."""
    if "sign" not in heads(node):
        return [node]
    return [replace(node, lambda part: number(sign) if part.head == "sign" else None) for sign in (1, -1)]  # noqa: B023


@lru_cache(maxsize=4096)
def key(node: ExpressionNode) -> str:
    """Return a text that is equal for nodes which differ only in the order of commutative arguments."""
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
    """Make `spend` raise TooCostly within this context once more than `limit` has been spent."""
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
