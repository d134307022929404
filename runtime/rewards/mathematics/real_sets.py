"""Subsets of the real line as sorted, disjoint intervals: unions, intersections, differences and inequalities."""

from __future__ import annotations

from typing import NamedTuple

from runtime.rewards.mathematics.approximate import NumericEvaluation, Undefined, Value
from runtime.rewards.mathematics.exact import Irrational
from runtime.rewards.mathematics.tree import INFINITY, ExpressionNode, TooCostly, Unreadable, symbols
from runtime.rewards.mathematics.vocabulary import ALL_REALS

DIGITS = 200
MAX_INTERVALS = 200
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}


class Interval(NamedTuple):
    """Its two ends, each as (value, 1 where the end lies just above the value, else 0).

    (1, 2] is ((1, 1), (2, 1)), and [1, 2) is ((1, 0), (2, 0)): so every union, complement and comparison is one of pairs.
    """

    low: tuple[Value, int]
    high: tuple[Value, int]


def is_set_expression(node: ExpressionNode) -> bool:
    return node.head in ("union", "intersection", "difference") or _is_reals(node)


def intervals(node: ExpressionNode) -> list[Interval]:
    """The set that a node stands for. Raises Unreadable for what is no subset of the real line with constant ends."""
    if _is_reals(node):
        return [Interval((_infinite(-1), 1), (_infinite(1), 0))]
    if node.head == "set":
        points = [_end(item) for item in node.args]
        return _merged([Interval((point, 0), (point, 1)) for point in points])
    if node.head == "tuple" and len(node.args) == 2 and node.value in ("()", "(]", "[)", "[]"):
        low, high = (_end(item) for item in node.args)
        return _merged([Interval((low, int(str(node.value)[0] == "(")), (high, int(str(node.value)[1] == "]")))])
    if node.head == "relation":
        return _inequality(node)
    if node.head in ("union", "list"):
        return _merged([interval for part in node.args for interval in intervals(part)])
    if node.head in ("intersection", "difference"):
        result = intervals(node.args[0])
        for part in node.args[1:]:
            other = intervals(part)
            result = _intersection(result, other if node.head == "intersection" else _complement(other))
        return result
    raise Unreadable(f"a {node.head} is no set of real numbers")


def _is_reals(node: ExpressionNode) -> bool:
    return (node.head == "symbol" and node.value == "mathbb R") or (node.head == "word" and node.value in ALL_REALS)


def _infinite(sign: int) -> Value:
    return NumericEvaluation({}, DIGITS).context.inf * sign


def _end(node: ExpressionNode) -> Value:
    if node == INFINITY:
        return _infinite(1)
    if node.head == "negate" and node.args[0] == INFINITY:
        return _infinite(-1)
    evaluation = NumericEvaluation({}, DIGITS)
    try:
        value = evaluation.value(node)
    except (Undefined, Irrational, TooCostly) as error:
        raise Unreadable("an end that is no real constant") from error
    if evaluation.context.im(value):
        raise Unreadable("an end that is not real")
    return evaluation.context.re(value)


def _inequality(node: ExpressionNode) -> list[Interval]:
    """That of one variable: `x < 3`, `-1 < x \\le 2`, `x \\ne 2`, `x \\in ...`."""
    marks = str(node.value).split()
    if marks == ["\\in"]:
        return intervals(node.args[1])
    variables = [index for index, part in enumerate(node.args) if part.head == "symbol" and symbols(part)]
    if len(variables) != 1 or len(node.args) > 3:
        raise Unreadable("no inequality of one variable")
    result = [Interval((_infinite(-1), 1), (_infinite(1), 0))]
    at = variables[0]
    for index, mark in enumerate(marks):
        if mark not in _FLIPPED or at not in (index, index + 1):
            raise Unreadable("no inequality of one variable")
        bound = _end(node.args[index + 1 if at == index else index])
        result = _intersection(result, _side(mark if at == index else _FLIPPED[mark], bound))
    return result


def _side(mark: str, bound: Value) -> list[Interval]:
    """The numbers x with `x mark bound`."""
    low, high = (_infinite(-1), 1), (_infinite(1), 0)
    below, above = (bound, 0), (bound, 1)
    if mark == "<":
        return [Interval(low, below)]
    if mark == "\\le":
        return [Interval(low, above)]
    if mark == ">":
        return [Interval(above, high)]
    if mark == "\\ge":
        return [Interval(below, high)]
    point = [Interval(below, above)]
    return point if mark == "=" else _complement(point)


def _merged(found: list[Interval]) -> list[Interval]:
    if len(found) > MAX_INTERVALS:
        raise TooCostly("a union of many sets")
    merged: list[Interval] = []
    for low, high in sorted(interval for interval in found if interval.low < interval.high):
        if merged and not _before(merged[-1].high, low):
            merged[-1] = Interval(merged[-1].low, max(merged[-1].high, high))
        else:
            merged.append(Interval(low, high))
    return merged


def _before(a: tuple[Value, int], b: tuple[Value, int]) -> bool:
    """a < b, with values that differ by rounding alone taken as the same."""
    return a[1] < b[1] if same_value(a[0], b[0]) else a[0] < b[0]


def same_value(a: Value, b: Value) -> bool:
    context = NumericEvaluation({}, DIGITS).context
    if a == b or not (context.isfinite(a) and context.isfinite(b)):
        return bool(a == b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * context.mpf(10) ** (20 - DIGITS))


def _complement(found: list[Interval]) -> list[Interval]:
    ends = [(_infinite(-1), 1)]
    for low, high in found:
        ends += [low, high]
    ends.append((_infinite(1), 0))
    return [Interval(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low < high]


def _intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    return _merged([Interval(max(left.low, right.low), min(left.high, right.high)) for left in a for right in b])


def same_set(a: list[Interval], b: list[Interval]) -> bool:
    return len(a) == len(b) and all(
        same_value(left[0], right[0]) and left[1] == right[1]
        for first, second in zip(a, b, strict=True)
        for left, right in zip(first, second, strict=True)
    )
