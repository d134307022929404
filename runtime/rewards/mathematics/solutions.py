"""Solutions of several variables, however they are written: `(5,2),(7,2)`, `(p,q)=(5,2),(7,2)`, `p=5,q=2;p=7,q=2`.

Every function takes time linear in the number of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.rewards.mathematics.tree import CONSTANTS, ExpressionNode, walk

_Pairs = list[tuple[str, ExpressionNode]]


class Solutions(msgspec.Struct, frozen=True, gc=False):
    """`rows`: one solution each, its values in the order of `names`; without names where only tuples are given."""

    names: tuple[str, ...]
    rows: list[tuple[ExpressionNode, ...]]

    def arranged(self, names: Sequence[str]) -> ExpressionNode:
        """The solutions as a list of tuples, their values in the order of `names`."""
        order = [self.names.index(name) for name in names] if names else range(len(self.rows[0]))
        return ExpressionNode("list", tuple(ExpressionNode("tuple", tuple(row[at] for at in order), "()") for row in self.rows))


def pairs_of_lists(prediction: ExpressionNode, truth: ExpressionNode) -> list[tuple[ExpressionNode, ExpressionNode]] | None:
    """Two answers as lists of tuples, in the ways in which they are to be compared: the same in one of them is the same.

    None where they are not both solutions of several variables, or neither names its variables. Where one does not, the
    variables are taken in the order in which the other writes them, or in that of the alphabet.
    """
    predicted, expected = solutions(prediction), solutions(truth)
    if predicted is None or expected is None or not (predicted.names or expected.names):
        return None
    if predicted.names and expected.names:
        if set(predicted.names) != set(expected.names):
            return None
        return [(predicted.arranged(expected.names), expected.arranged(expected.names))]
    names = predicted.names or expected.names
    orders = dict.fromkeys((names, tuple(sorted(names))))
    return [
        (predicted.arranged(order if predicted.names else ()), expected.arranged(order if expected.names else ()))
        for order in orders
    ]


def solutions(node: ExpressionNode) -> Solutions | None:
    """What an answer says of two variables or more; None where it says anything else."""
    names, items = _statements(node)
    if items and all(map(_is_point, items)) and len({len(item.args) for item in items}) == 1:
        rows = [item.args for item in items]
        return Solutions(names, rows) if not names or len(names) == len(rows[0]) else None
    assignments: _Pairs = []
    for item in items:
        found = _assignments(item, assignments)
        if found is None:
            return None
        assignments += found
    return _grouped(assignments)


def _statements(node: ExpressionNode) -> tuple[tuple[str, ...], Sequence[ExpressionNode]]:
    """The members of a list or set; with the names in front of them in `(x, y) \\in \\{...\\}`."""
    if node.head == "relation" and node.value in ("=", "\\in") and node.args[1].head in ("set", "list"):
        if (names := _names(node.args[0])) is None:
            return (), ()
        return names, node.args[1].args
    return (), node.args if node.head in ("list", "set") else (node,)


def _is_point(node: ExpressionNode) -> bool:
    return node.head == "tuple" and node.value == "()" and len(node.args) > 1 and all(map(_is_value, node.args))


def _is_value(node: ExpressionNode) -> bool:
    return not any(part.head in ("relation", "sign") for part in walk(node))


def _is_variable(node: ExpressionNode) -> bool:
    return node.head == "symbol" and node.value not in CONSTANTS


def _names(node: ExpressionNode) -> tuple[str, ...] | None:
    names = tuple(str(part.value) for part in node.args)
    return names if node.head == "tuple" and all(map(_is_variable, node.args)) and len(set(names)) == len(names) else None


def _assignments(item: ExpressionNode, before: _Pairs) -> _Pairs | None:
    """What an item assigns; a tuple without names takes those of the item before it."""
    if item.head in ("list", "set", "tuple") and item.args and all(part.head == "relation" for part in item.args):
        found = [_assignment(part) for part in item.args]
        return None if None in found else [pair for pair in found if pair]
    if _is_point(item) and len(before) >= len(item.args):
        return [(name, value) for (name, _), value in zip(before[-len(item.args) :], item.args, strict=True)]
    if item.head == "relation" and item.value == "=" and _is_point(item.args[1]):
        names = _names(item.args[0])
        if names is None or len(names) != len(item.args[1].args):
            return None
        return list(zip(names, item.args[1].args, strict=True))
    pair = _assignment(item)
    return None if pair is None else [pair]


def _assignment(node: ExpressionNode) -> tuple[str, ExpressionNode] | None:
    """The name and value of `x = 5`."""
    if node.head != "relation" or node.value != "=" or not _is_variable(node.args[0]) or not _is_value(node.args[1]):
        return None
    return str(node.args[0].value), node.args[1]


def _grouped(assignments: _Pairs) -> Solutions | None:
    """Assignments cut into solutions, each of which assigns every name once; None where they are none."""
    names = tuple(dict.fromkeys(name for name, _ in assignments))
    width = len(names)
    if width < 2 or len(assignments) % width:
        return None
    rows = []
    for start in range(0, len(assignments), width):
        values = dict(assignments[start : start + width])
        if len(values) < width:
            return None
        rows.append(tuple(values[name] for name in names))
    return Solutions(names, rows)
