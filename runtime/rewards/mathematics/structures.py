"""Whether two answers are the same thing: lists, sets, tuples, intervals, equations, inequalities, matrices, ratios, words.

A verdict is True, False, or None where it cannot be told here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from runtime.rewards.mathematics import matrices, real_sets, solutions
from runtime.rewards.mathematics.scalars import Verdict, equal_values, proportional
from runtime.rewards.mathematics.tree import (
    CONSTANTS,
    UNNAMED,
    ExpressionNode,
    TooCostly,
    Unreadable,
    key,
    negate,
    number,
    signs,
    symbols,
    walk,
)
from runtime.rewards.mathematics.vocabulary import NO_SOLUTION

MAX_ITEMS = 100  # of a list in which each is compared with each
_TIME = re.compile(r"1?[0-9]|2[0-4]")


def same(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Whether two answers are the same. Raises TooCostly."""
    if (ways := solutions.pairs_of_lists(prediction, truth)) is not None:
        return _any(same(*lists) for lists in ways)
    if key(prediction) == key(truth):
        return True
    if _holds_sets(prediction) or _holds_sets(truth):
        return _same_real_sets(prediction, truth)
    if {prediction.head, truth.head} == {"set", "word"}:
        return _same_words(prediction, truth)
    if prediction.head == "list" and truth.head == "tuple":
        prediction = _bracketed(prediction, truth)
    elif truth.head == "list" and prediction.head == "tuple":
        truth = _bracketed(truth, prediction)
    predicted, expected = _items(prediction), _items(truth)
    if len(predicted) == len(expected) == 1:
        return _same_item(predicted[0], expected[0])
    if "set" in (prediction.head, truth.head) or _has_sign(prediction) or _has_sign(truth):
        predicted, expected = _distinct(predicted), _distinct(expected)
    return _same_in_any_order(predicted, expected)


def _bracketed(items: ExpressionNode, like: ExpressionNode) -> ExpressionNode:
    """A list as a tuple whose brackets were left out, if it is as long and its members are not tuples themselves."""
    if len(items.args) != len(like.args) or any(item.head == "tuple" for item in items.args):
        return items
    return ExpressionNode("tuple", items.args, like.value)


def _items(node: ExpressionNode) -> list[ExpressionNode]:
    """The members of a list or set; plus-minus stands for two of them."""
    if node.head == "relation" and node.value in ("=", "\\in") and node.args[1].head in ("set", "list"):
        node = node.args[1]
    if node.head == "relation" and node.value == "=" and _has_sign(node.args[1]) and _is_name(node.args[0]):
        node = node.args[1]
    members = node.args if node.head in ("list", "set") else (node,)
    return [value for member in members for value in signs(member)]


def _has_sign(node: ExpressionNode) -> bool:
    return any(part.head == "sign" for part in walk(node))


def _distinct(items: list[ExpressionNode]) -> list[ExpressionNode]:
    kept: list[ExpressionNode] = []
    if len(items) > MAX_ITEMS:
        return list({key(item): item for item in items}.values())
    for item in items:
        if not any(_same_item(other, item) for other in kept):
            kept.append(item)
    return kept


def _same_in_any_order(predicted: Sequence[ExpressionNode], expected: Sequence[ExpressionNode]) -> Verdict:
    """Whether the items can be paired up: equal texts first, then each with each."""
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
    heads = prediction.head, truth.head
    if "relation" in heads:
        return _same_with_relation(prediction, truth)
    if "word" in heads:
        return _same_words(prediction, truth)
    if "set" in heads or "list" in heads:
        return same(prediction, truth) if heads[0] in ("set", "list") and heads[1] in ("set", "list") else False
    if "ratio" in heads:
        return _same_ratio(prediction, truth)
    if heads == ("tuple", "tuple"):
        return _same_tuple(prediction, truth)
    try:
        rows = matrices.rows(prediction), matrices.rows(truth)
    except Unreadable:
        return None
    if rows[0] is None and rows[1] is None:
        return equal_values(prediction, truth)
    if rows[0] is None or rows[1] is None:
        return False
    return _same_matrix(rows[0], rows[1], "tuple" in heads)


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


def _same_matrix(prediction: matrices.Rows, truth: matrices.Rows, vectors: bool) -> Verdict:
    """Entry by entry. A tuple is a vector, whichever way it is written."""
    if vectors:
        prediction, truth = _column(prediction), _column(truth)
    if (len(prediction), len(prediction[0])) != (len(truth), len(truth[0])):
        return False
    return _all(
        equal_values(left, right)
        for ours, theirs in zip(prediction, truth, strict=True)
        for left, right in zip(ours, theirs, strict=True)
    )


def _column(entries: matrices.Rows) -> matrices.Rows:
    return tuple((entry,) for entry in entries[0]) if len(entries) == 1 else entries


# ---------------------------------------------------------------------------------------------------- ratios


def _same_ratio(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Proportional ones are the same, but times of day are not; a ratio of two is also a quotient."""
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
    """Whether it may be a time, whose minutes are not a multiple of its hours."""
    hours, minutes = node.args[0], node.args[1]
    if len(node.args) > 3 or hours.head != "number" or minutes.head != "number":
        return False
    return bool(_TIME.fullmatch(str(hours.value))) and (minutes.value == 0 or minutes.value >= 10) and minutes.value < 60  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------- relations


def _is_name(node: ExpressionNode) -> bool:
    """Whether the left side of an equation only names what the right side is: x, f(x), |AB|, (x, y), V_1 : V_2."""
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
    if other.head == "tuple":
        return _same_real_sets(prediction, truth)
    return False


def _values(relation: ExpressionNode, lenient: bool) -> list[ExpressionNode]:
    """What an equation says the answer is: the sides that are no names. `lenient`: whatever stands on its left side."""
    first, last = relation.args[0], relation.args[-1]
    if _is_name(last) and not _is_name(first):
        return [first]
    constants = [side for side in relation.args if side.head != "word" and not symbols(side)]
    if _is_name(first) or not symbols(first) or (lenient and last != number(0)):
        return [last, *(side for side in constants if side is not last)]
    return []


def _same_relation(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    prediction, truth = _ends(_named(prediction, truth)), _ends(_named(truth, prediction))
    marks = str(prediction.value).split(), str(truth.value).split()
    if marks[0] == marks[1] and len(prediction.args) == len(truth.args):
        verdict = _all(same(left, right) for left, right in zip(prediction.args, truth.args, strict=True))
        if verdict:
            return True
    if set(marks[0] + marks[1]) <= {"=", "<", ">", "\\le", "\\ge", "\\ne"}:
        sets = _same_real_sets(prediction, truth) if "=" not in marks[0] else None
        return sets if sets is not None else _same_conditions(_conditions(prediction), _conditions(truth))
    if "\\in" in marks[0] + marks[1] and marks[0] != marks[1]:
        return _same_real_sets(prediction, truth)
    return False if marks[0] == marks[1] else None


def _named(relation: ExpressionNode, other: ExpressionNode) -> ExpressionNode:
    """`> 3` as `x > 3` where the other is about x."""
    names = symbols(other)
    if relation.args[0] != UNNAMED or len(names) != 1 or UNNAMED.value in names:
        return relation
    return ExpressionNode("relation", (ExpressionNode("symbol", (), names.pop()), *relation.args[1:]), relation.value)


def _ends(relation: ExpressionNode) -> ExpressionNode:
    """An equation through several steps as one between its ends: x = 6/2 = 3."""
    marks = set(str(relation.value).split())
    if marks <= {"=", "\\approx"} and len(relation.args) > 1:
        exact = [side for side, mark in zip(relation.args[1:], str(relation.value).split(), strict=True) if mark == "="]
        return ExpressionNode("relation", (relation.args[0], exact[-1] if exact else relation.args[-1]), "=")
    return relation


def _conditions(relation: ExpressionNode) -> list[tuple[ExpressionNode, str]]:
    """A chain of relations as conditions `f = 0`, `f < 0`, `f \\le 0` or `f \\ne 0`."""
    conditions = []
    for mark, left, right in zip(str(relation.value).split(), relation.args[:-1], relation.args[1:], strict=True):
        if mark in (">", "\\ge"):
            left, right, mark = right, left, {">": "<", "\\ge": "\\le"}[mark]
        conditions.append((ExpressionNode("add", (left, negate(right))), mark))
    return conditions


def _same_conditions(predicted: list[tuple[ExpressionNode, str]], expected: list[tuple[ExpressionNode, str]]) -> Verdict:
    if len(predicted) != len(expected):
        return None
    rest = list(predicted)
    for function, mark in expected:
        for index, (other, other_mark) in enumerate(rest):
            if mark == other_mark and _same_zeros(other, function, mark):
                del rest[index]
                break
        else:
            return False
    return True


def _same_zeros(a: ExpressionNode, b: ExpressionNode, mark: str) -> bool:
    """Whether a is a multiple of b; a positive one where that matters."""
    sign = proportional(a, b)
    return sign == 1 or (sign == -1 and mark in ("=", "\\ne"))


def _holds_sets(node: ExpressionNode) -> bool:
    return any(real_sets.is_set_expression(part) for part in (node, *(node.args if node.head == "relation" else ())))


def _same_real_sets(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if _members(prediction).head == _members(truth).head == "symbol":
        return _members(prediction) == _members(truth)  # R and Z
    try:
        return real_sets.same_set(real_sets.intervals(_members(prediction)), real_sets.intervals(_members(truth)))
    except Unreadable:
        return None


def _members(node: ExpressionNode) -> ExpressionNode:
    """The set in `x \\in S` and `D = S`."""
    if node.head == "relation" and node.value in ("=", "\\in") and _is_name(node.args[0]):
        return node.args[1]
    return node
