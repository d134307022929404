"""Decide whether two answers are the same: lists, sets, tuples, intervals, equations, inequalities, matrices, ratios, words.

A verdict is True, False, or None if it is undecided here: sets of real numbers in other notation, arithmetic of matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from runtime.rewards.mathematics.lexer import ALL_REALS, NO_SOLUTION
from runtime.rewards.mathematics.scalars import Verdict, bare_decimal, equal_values, proportional, rounds
from runtime.rewards.mathematics.tree import (
    CONSTANTS,
    INFINITY,
    UNNAMED,
    ExpressionNode,
    TooCostly,
    heads,
    key,
    negate,
    number,
    replace,
    signs,
    symbols,
)

_Rows = tuple[tuple[ExpressionNode, ...], ...]

MAX_ITEMS = 100  # items of a list that are compared pairwise
_REALS = ExpressionNode("symbol", (), "mathbb R")
_ORDER = frozenset(("=", "<", "\\le", "\\ne"))
_DOWNWARD = {">": "<", "\\ge": "\\le"}
_TIME = re.compile(r"1?[0-9]|2[0-4]")


def same(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Return whether two answers are the same. Raises TooCostly."""
    prediction = _with_constant(prediction, truth)
    if _alternatives(prediction, truth) != _alternatives(truth, prediction):
        return False
    predicted_rows, expected_rows = _rows_by_name(prediction), _rows_by_name(truth)
    other = truth if predicted_rows else prediction
    rows = predicted_rows or expected_rows
    if rows and ((predicted_rows and expected_rows) or any(part.head == "tuple" for part in (other, *other.args))):
        if predicted_rows and expected_rows and predicted_rows[0].keys() != expected_rows[0].keys():
            return False
        orders = list(rows[0]), sorted(rows[0])  # coordinates without names are in written or in alphabetical order
        return _any(same(_points(predicted_rows, order, prediction), _points(expected_rows, order, truth)) for order in orders)
    if key(prediction) == key(truth):
        return True
    if _holds_sets(prediction) or _holds_sets(truth) or {prediction.value, truth.value} == {"\\ne", "or"}:
        return _same_real_sets(_members(prediction), _members(truth))
    if {prediction.head, truth.head} == {"set", "word"}:
        return _same_words(prediction, truth)
    if prediction.head == "list" and truth.head == "tuple":
        prediction = _bracketed(prediction, truth)
    elif truth.head == "list" and prediction.head == "tuple":
        truth = _bracketed(truth, prediction)
    predicted, expected = _items(prediction), _items(truth)
    if len(predicted) == len(expected) == 1:
        return _same_item(predicted[0], expected[0])
    return _same_in_any_order(predicted, expected)


def _with_constant(node: ExpressionNode, other: ExpressionNode) -> ExpressionNode:
    """Rename `x + c` to `x + C` if the other answer has that: a constant of integration."""
    for ours, theirs in (("c", "C"), ("C", "c")):
        constant = ExpressionNode("symbol", (), ours)
        apart = {ours, theirs} & symbols(node) == {ours} and {ours, theirs} & symbols(other) == {theirs}
        if apart and any(part.head == "add" and constant in part.args for part in (node, *node.args)):
            return replace(node, lambda part: ExpressionNode("symbol", (), theirs) if part == constant else None)  # noqa: B023
    return node


def _alternatives(node: ExpressionNode, other: ExpressionNode) -> bool:
    """Return whether "or" differs from a comma: x = 1 or y = 2, and inequalities if the other answer has "and"."""
    firsts = {key(part.args[0]) for part in node.args if part.head == "relation" and part.value == "="}
    ordered = any(part.head == "relation" and part.value != "=" for part in node.args)
    return node.value == "or" and (len(firsts) == len(node.args) or (ordered and other.value == "and"))


def _bracketed(items: ExpressionNode, like: ExpressionNode) -> ExpressionNode:
    """Return a list as the tuple `like` without brackets, if it is as long and its members are not tuples."""
    if len(items.args) != len(like.args) or any(item.head == "tuple" for item in items.args):
        return items
    return ExpressionNode("tuple", items.args, like.value)


def _items(node: ExpressionNode) -> list[ExpressionNode]:
    """Return the members of a list or set. A plus-minus sign gives two members."""
    if node.head == "relation" and node.value in ("=", "\\in") and node.args[1].head in ("set", "list"):
        node = node.args[1]
    if node.head == "relation" and node.value == "=" and "sign" in heads(node.args[1]) and _is_name(node.args[0]):
        node = node.args[1]
    members = node.args if node.head in ("list", "set") else (node,)
    return [value for member in members for value in signs(member)]


def _same_in_any_order(predicted: Sequence[ExpressionNode], expected: Sequence[ExpressionNode]) -> Verdict:
    """Return whether the items can be paired: equal texts first, then pairwise comparison."""
    if len(predicted) != len(expected):
        return False
    rest = list(predicted)
    keys = [key(item) for item in rest]
    missing = []
    for item in expected:
        if (found := key(item)) in keys:
            at = keys.index(found)
            del rest[at], keys[at]
        else:
            missing.append(item)
    if len(missing) > MAX_ITEMS:
        raise TooCostly("a long list")
    verdict: Verdict = True
    for item in missing:
        verdicts = [_same_item(other, item) for other in rest]
        if True in verdicts:
            del rest[verdicts.index(True)]
        elif None in verdicts:
            verdict = None
        else:
            return False
    return verdict


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    result: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            result = None
    return result


def _any(verdicts: Iterable[Verdict]) -> Verdict:
    found = list(verdicts)
    return True if True in found else (None if None in found else False)


def _same_item(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    both = prediction.head, truth.head
    if "relation" in both:
        return _same_with_relation(prediction, truth)
    if "word" in both:
        return _same_words(prediction, truth)
    if "set" in both or "list" in both:
        return same(prediction, truth) if set(both) <= {"set", "list"} else False
    if "ratio" in both:
        return _same_ratio(prediction, truth)
    if both == ("tuple", "tuple"):
        return _same_tuple(prediction, truth)
    if "matrix" in both:
        return _same_matrix(_rows(prediction), _rows(truth), "tuple" in both)
    return equal_values(prediction, truth)


def _same_words(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if prediction.head == truth.head:
        return prediction.value == truth.value or {prediction.value, truth.value} <= NO_SOLUTION
    word, other = (prediction, truth) if prediction.head == "word" else (truth, prediction)
    return other.head == "set" and not other.args and word.value in NO_SOLUTION


def _same_tuple(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if len(prediction.args) != len(truth.args):
        return False
    if prediction.value != truth.value and len(truth.args) <= 2:
        return False  # open and closed ends
    return _all(same(left, right) for left, right in zip(prediction.args, truth.args, strict=True))


def _rows(node: ExpressionNode) -> _Rows | None:
    """Return the entries of a matrix, or of a vector as a column; None for anything else."""
    if node.head == "matrix":
        return tuple(row.args for row in node.args)
    return tuple((item,) for item in node.args) if node.head == "tuple" and node.value in ("()", "[]") else None


def _same_matrix(prediction: _Rows | None, truth: _Rows | None, vectors: bool) -> Verdict:
    """Compare entry by entry; matrix arithmetic is undecided here. `vectors`: treat rows and columns alike."""
    if prediction is None or truth is None:
        return None
    if vectors:
        prediction, truth = _column(prediction), _column(truth)
    if (len(prediction), len(prediction[0])) != (len(truth), len(truth[0])):
        return False
    return _all(
        equal_values(left, right)
        for ours, theirs in zip(prediction, truth, strict=True)
        for left, right in zip(ours, theirs, strict=True)
    )


def _column(entries: _Rows) -> _Rows:
    return tuple((entry,) for entry in entries[0]) if len(entries) == 1 else entries


# ---------------------------------------------------------------------------------------------------- ratios


def _same_ratio(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Compare ratios. Proportional ratios are the same, but times of day are not. A ratio of two is also a quotient."""
    if prediction.head != "ratio" or truth.head != "ratio":
        ratio, other = (prediction, truth) if prediction.head == "ratio" else (truth, prediction)
        return len(ratio.args) == 2 and equal_values(ExpressionNode("divide", ratio.args), other)
    if len(prediction.args) != len(truth.args):
        return False
    if _is_clock(prediction) and _is_clock(truth):
        return _all(equal_values(left, right) for left, right in zip(prediction.args, truth.args, strict=True))
    first, other = prediction.args[0], truth.args[0]
    return _all(
        equal_values(ExpressionNode("multiply", (left, other)), ExpressionNode("multiply", (right, first)))
        for left, right in zip(prediction.args[1:], truth.args[1:], strict=True)
    )


def _is_clock(node: ExpressionNode) -> bool:
    """Return whether a ratio may be a time of day, which is not a proportion."""
    hours, minutes = node.args[0], node.args[1]
    if len(node.args) > 3 or hours.head != "number" or minutes.head != "number":
        return False
    return bool(_TIME.fullmatch(str(hours.value))) and (minutes.value == 0 or minutes.value >= 10) and minutes.value < 60  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------- relations


def _is_name(node: ExpressionNode) -> bool:
    """Return whether the left side of an equation only names the right side: x, f(x), |AB|, (x, y), V_1 : V_2."""
    if node.head == "symbol":
        return node.value not in CONSTANTS
    if node.head in ("tuple", "ratio", "multiply", "list", "call", "divide"):
        return (node.head != "call" or node.value == "abs") and all(_is_name(argument) for argument in node.args)
    if node.head == "power":
        return _is_name(node.args[0])  # f^{-1}(x)
    return node.head in ("opaque", "word")


def _same_with_relation(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if prediction.head == truth.head:
        return _same_relation(prediction, truth)
    relation, other = (prediction, truth) if prediction.head == "relation" else (truth, prediction)
    marks = set(str(relation.value).split())
    if marks <= {"=", "\\approx", "\\in"}:
        return _any(same(value, other) for value in _values(relation, lenient=relation is prediction))
    if other.head == "tuple" and (interval := _real_set(relation)) is not None:
        return same(interval, other)
    return None if other.head in ("tuple", "set") else False  # several inequalities may describe them


def _values(relation: ExpressionNode, lenient: bool) -> list[ExpressionNode]:
    """Return the sides of an equation that are answers, i.e. not names. `lenient`: allow any left side.

    A side that contradicts the last side is not an answer: 10 - 3 = 6 means 6, not also 7. A last side that is a decimal or
    stands behind an \\approx may be rounded.
    """
    first, last = relation.args[0], relation.args[-1]
    if _is_name(last) and not _is_name(first) and symbols(first).isdisjoint(symbols(last)):
        return [first]
    constants = [side for side in relation.args if side.head != "word" and not symbols(side)]
    if set(str(relation.value).split()) == {"="} and bare_decimal(last) is None:
        constants = [side for side in constants if same(side, last) is not False]
    elif not symbols(last):
        constants = [side for side in constants if rounds(side, last)]
    if _is_name(first) or not symbols(first) or (lenient and last != number(0)):
        return [last, *(side for side in constants if side is not last)]
    return []


def _same_relation(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Compare side by side, or as multiples of each other."""
    prediction, truth = _upward(_ends(_named(prediction, truth))), _upward(_ends(_named(truth, prediction)))
    if prediction.value != truth.value:
        return None
    verdicts = [same(left, right) for left, right in zip(prediction.args, truth.args, strict=True)]
    verdict = _all(verdicts)
    if verdict or str(truth.value) not in _ORDER or (verdicts[0] and _defines(prediction) and _defines(truth)):
        return verdict
    sign = proportional(*(ExpressionNode("add", (side.args[0], negate(side.args[1]))) for side in (prediction, truth)))
    return None if sign == 0 else sign == 1 or (sign == -1 and truth.value in ("=", "\\ne"))


def _defines(relation: ExpressionNode) -> bool:
    """Return whether the left side is a name that the right side does not contain. Then the right side decides alone."""
    name, value = relation.args
    return name.head == "opaque" or (_is_name(name) and symbols(name).isdisjoint(symbols(value)))


def _upward(relation: ExpressionNode) -> ExpressionNode:
    """Rewrite `b > x > a` as `a < x < b`."""
    marks = str(relation.value).split()
    if not all(mark in _DOWNWARD for mark in marks):
        return relation
    return ExpressionNode("relation", relation.args[::-1], " ".join(_DOWNWARD[mark] for mark in reversed(marks)))


def _named(relation: ExpressionNode, other: ExpressionNode) -> ExpressionNode:
    """Rewrite `> 3` as `x > 3` if the other answer is about x."""
    names = symbols(other)
    if relation.args[0] != UNNAMED or len(names) != 1 or UNNAMED.value in names:
        return relation
    return ExpressionNode("relation", (ExpressionNode("symbol", (), names.pop()), *relation.args[1:]), relation.value)


def _ends(relation: ExpressionNode) -> ExpressionNode:
    """Reduce an equation of several steps to its ends: x = 6/2 = 3 becomes x = 3."""
    marks = set(str(relation.value).split())
    if marks <= {"=", "\\approx"} and len(relation.args) > 1:
        exact = [side for side, mark in zip(relation.args[1:], str(relation.value).split(), strict=True) if mark == "="]
        return ExpressionNode("relation", (relation.args[0], exact[-1] if exact else relation.args[-1]), "=")
    return relation


def _holds_sets(node: ExpressionNode) -> bool:
    return any(
        part.head in ("union", "intersection", "difference")
        or part == _REALS
        or (part.head == "word" and part.value in ALL_REALS)
        for part in (node, *(node.args if node.head == "relation" else ()))
    )


def _same_real_sets(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Compare unions part by part; leave the rest to algebra."""
    if prediction.head == truth.head == "symbol":
        return prediction == truth  # R and Z
    return True if prediction.head == truth.head == "union" and _same_in_any_order(prediction.args, truth.args) else None


def _members(node: ExpressionNode) -> ExpressionNode:
    """Return the set in `x \\in S` and `D = S`, and the union of inequalities and intervals joined by "or"."""
    if (found := _real_set(node)) is not None:
        return found
    if node.head == "relation" and node.value == "=" and _is_name(node.args[0]):
        node = node.args[1]
    return _REALS if node.head == "word" and node.value in ALL_REALS else node


def _real_set(node: ExpressionNode) -> ExpressionNode | None:
    """Return the interval of an inequality between a variable and numbers, or a union of intervals; None for anything else."""
    if node.head == "union" or (node.head == "list" and node.value == "or"):
        parts = [_real_set(part) or (part if part.head in ("tuple", "set") else None) for part in node.args]
        if None in parts:
            return None
        flat = (part for whole in parts if whole for part in (whole.args if whole.head == "union" else (whole,)))
        return ExpressionNode("union", tuple(flat))
    if node.head != "relation":
        return None
    left, right = node.args[0], node.args[-1]
    if node.value == "\\in" and _is_name(left):
        return _real_set(right) or right
    if node.value in ("=", "\\ne") and left.head == "symbol" and _is_name(left) and not symbols(right):
        sides = (ExpressionNode("relation", (left, right), "<"), ExpressionNode("relation", (right, left), "<"))
        return ExpressionNode("set", (right,)) if node.value == "=" else _real_set(ExpressionNode("list", sides, "or"))
    marks, ends = str(_upward(node).value).split(), _upward(node).args
    if len(ends) == 2 and symbols(ends[0]):
        marks, ends = ["<", *marks], (negate(INFINITY), *ends)
    elif len(ends) == 2:
        marks, ends = [*marks, "<"], (*ends, INFINITY)
    if len(ends) != 3 or ends[1].head != "symbol" or not set(marks) <= {"<", "\\le"} or symbols(ends[0]) | symbols(ends[2]):
        return None
    return ExpressionNode("tuple", (ends[0], ends[2]), f"{'(' if marks[0] == '<' else '['}{')' if marks[1] == '<' else ']'}")


# ---------------------------------------------------------------------------------------------------- several variables


def _rows_by_name(node: ExpressionNode) -> list[dict[str, ExpressionNode]] | None:
    """Return the two solutions of `p=5, q=2; p=7, q=3`. Return None if the answer does not give several variables values."""
    pairs: list[tuple[str, ExpressionNode]] = []
    for item in node.args if node.head in ("list", "set") else (node,):
        assigned = _assigned(item)
        if not all(_is_name(name) for name, _ in assigned):
            return None
        pairs += [(key(name), value) for name, value in assigned]
    width = len(dict(pairs))
    rows = [dict(pairs[start : start + width]) for start in range(0, len(pairs), width or 1)]
    return rows if width > 1 and all(len(row) == width for row in rows) else None


def _points(rows: list[dict[str, ExpressionNode]] | None, order: list[str], otherwise: ExpressionNode) -> ExpressionNode:
    """Return the solutions as points, (5, 2), (7, 3)."""
    if rows is None:
        return otherwise
    points = tuple(ExpressionNode("tuple", tuple(row[name] for name in order), "()") for row in rows)
    return points[0] if len(points) == 1 else ExpressionNode("list", points)


def _assigned(item: ExpressionNode) -> list[tuple[ExpressionNode, ExpressionNode]]:
    """Return the sides of `p = 5`, or of each coordinate of `(p, q) = (5, 2)`; for anything else a pair without a name."""
    if item.head in ("list", "set"):
        return [pair for part in item.args for pair in _assigned(part)]
    if item.head != "relation" or item.value != "=":
        return [(number(0), item)]
    left, right = item.args
    both = left.head == right.head == "tuple" and len(left.args) == len(right.args)
    return list(zip(left.args, right.args, strict=True)) if both else [(left, right)]
