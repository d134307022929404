"""Matrices and vectors with their arithmetic: sums, products and multiples become the matrix that they are."""

from __future__ import annotations

from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, Unreadable, negate, number

MAX_ENTRIES = 400

Rows = tuple[tuple[ExpressionNode, ...], ...]


def rows(node: ExpressionNode) -> Rows | None:
    """The entries of what is a matrix or vector (a tuple is a column), None for anything else.

    Raises Unreadable where shapes do not fit, TooCostly for a large product.
    """
    if node.head == "matrix":
        return tuple(row.args for row in node.args)
    if node.head == "tuple":
        return tuple((item,) for item in node.args) if node.value in ("()", "[]") and len(node.args) > 1 else None
    if node.head not in ("add", "multiply", "negate", "divide"):
        return None
    parts = [rows(argument) for argument in node.args]
    if all(part is None for part in parts):
        return None
    if node.head == "add":
        return _sum(parts)
    if node.head == "negate":
        return _map(parts[0] or (), negate)
    if node.head == "divide":
        if parts[0] is None or parts[1] is not None:
            raise Unreadable("a division by a matrix")
        return _map(parts[0], lambda entry: ExpressionNode("divide", (entry, node.args[1])))
    return _product(list(zip(node.args, parts, strict=True)))


def _map(entries: Rows, change) -> Rows:  # type: ignore[no-untyped-def]
    return tuple(tuple(change(entry) for entry in row) for row in entries)


def _sum(parts: list[Rows | None]) -> Rows:
    shapes = {None if part is None else (len(part), len(part[0])) for part in parts}
    if len(shapes) > 1:
        raise Unreadable("a sum of different shapes")
    terms = [part for part in parts if part is not None]
    return tuple(
        tuple(ExpressionNode("add", entries) for entries in zip(*lines, strict=True)) for lines in zip(*terms, strict=True)
    )


def _product(factors: list[tuple[ExpressionNode, Rows | None]]) -> Rows:
    scalars = tuple(factor for factor, part in factors if part is None)
    matrices = [part for _, part in factors if part is not None]
    result = matrices[0]
    for right in matrices[1:]:
        if len(result[0]) != len(right):
            raise Unreadable("a product of shapes that do not fit")
        if len(result) * len(right[0]) * len(right) > MAX_ENTRIES:
            raise TooCostly("a product of large matrices")
        columns = list(zip(*right, strict=True))
        result = tuple(
            tuple(
                ExpressionNode(
                    "add", (number(0), *(ExpressionNode("multiply", pair) for pair in zip(row, column, strict=True)))
                )
                for column in columns
            )
            for row in result
        )
    return _map(result, lambda entry: ExpressionNode("multiply", (*scalars, entry))) if scalars else result
