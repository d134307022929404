"""Decide whether two answers are the same, part by part, and at last two expressions: constants exactly, functions at points.

A verdict is None if it is undecided here: sets of real numbers in other notation, arithmetic of matrices."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import ROUND_DOWN, Context, Decimal
from fractions import Fraction
from itertools import chain

from runtime.rewards.extraction import words
from runtime.rewards.mathematics import tree
from runtime.rewards.mathematics.parser import ALL_REALS, NO_SOLUTION
from runtime.rewards.mathematics.tree import ExpressionNode, exact, heads, key, negate, number, replace, signs, symbols, walk

Verdict = bool | None  # None: undecided

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
        return _any(
            same(_solutions(predicted_rows, order, prediction), _solutions(expected_rows, order, truth)) for order in orders
        )
    if key(prediction) == key(truth):
        return True
    if _holds_sets(prediction) or _holds_sets(truth) or {prediction.value, truth.value} == {"\\ne", "or"}:
        return _same_real_sets(_members(prediction), _members(truth))
    if {prediction.head, truth.head} == {"set", "word"}:
        return _same_words(prediction, truth)
    predicted, expected = _items(_bracketed(prediction, truth)), _items(_bracketed(truth, prediction))
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
    both, short = (items.head, like.head), len(items.args) != len(like.args)
    if both != ("list", "tuple") or short or any(item.head == "tuple" for item in items.args):
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
        raise tree.TooCostly("a long list")
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
        result = result and verdict
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
    if both == ("tuple", "tuple"):  # of two, also the open and closed ends have to be the same
        alike = len(prediction.args) == len(truth.args) and (prediction.value == truth.value or len(truth.args) > 2)
        return alike and _all(map(same, prediction.args, truth.args))
    if "matrix" in both:
        return _same_matrix(_rows(prediction), _rows(truth), "tuple" in both)
    return equal_values(prediction, truth)


def _same_words(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if prediction.head == truth.head:
        return prediction.value == truth.value or {prediction.value, truth.value} <= NO_SOLUTION
    word, other = (prediction, truth) if prediction.head == "word" else (truth, prediction)
    return other.head == "set" and not other.args and word.value in NO_SOLUTION


def _same_tuple(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    if len(prediction.args) != len(truth.args) or (prediction.value != truth.value and len(truth.args) <= 2):
        return False  # the latter: open and closed ends
    return _all(map(same, prediction.args, truth.args))


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
        prediction, truth = (rows if len(rows) > 1 else tuple(zip(*rows, strict=True)) for rows in (prediction, truth))
    alike = (len(prediction), len(prediction[0])) == (len(truth), len(truth[0]))
    return alike and _all(map(equal_values, chain.from_iterable(prediction), chain.from_iterable(truth)))


def _same_ratio(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Compare ratios. Proportional ratios are the same, but times of day are not. A ratio of two is also a quotient."""
    if prediction.head != "ratio" or truth.head != "ratio":
        ratio, other = (prediction, truth) if prediction.head == "ratio" else (truth, prediction)
        return len(ratio.args) == 2 and equal_values(ExpressionNode("divide", ratio.args), other)
    if len(prediction.args) != len(truth.args):
        return False
    if _is_clock(prediction) and _is_clock(truth):
        return _all(map(equal_values, prediction.args, truth.args))
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


def _is_name(node: ExpressionNode) -> bool:
    """Return whether the left side of an equation only names the right side: x, f(x), |AB|, (x, y), V_1 : V_2."""
    if node.head in ("tuple", "ratio", "multiply", "list", "call", "divide"):
        return (node.head != "call" or node.value == "abs") and all(_is_name(argument) for argument in node.args)
    if node.head == "power":
        return _is_name(node.args[0])  # f^{-1}(x)
    return node.head in ("opaque", "word") or (node.head == "symbol" and node.value not in tree.CONSTANTS)


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
    """Return the sides of an equation that are answers, i.e. not names. `lenient`: allow any left side. A side that contradicts
    the last side is none: 10 - 3 = 6 means 6, not also 7. A last side may be rounded if it is a decimal or behind \\approx."""
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
    verdicts = list(map(same, prediction.args, truth.args))
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
    if relation.args[0] != tree.UNNAMED or len(names) != 1 or tree.UNNAMED.value in names:
        return relation
    return ExpressionNode("relation", (ExpressionNode("symbol", (), names.pop()), *relation.args[1:]), relation.value)


def _ends(relation: ExpressionNode) -> ExpressionNode:
    """Reduce an equation of several steps to its ends: x = 6/2 = 3 becomes x = 3."""
    name, *sides = relation.args
    marks = str(relation.value).split()
    if not set(marks) <= {"=", "\\approx"}:
        return relation
    exact = [side for side, mark in zip(sides, marks, strict=True) if mark == "="]
    return ExpressionNode("relation", (name, (exact or sides)[-1]), "=")


def _holds_sets(node: ExpressionNode) -> bool:
    parts = (node, *node.args) if node.head == "relation" else (node,)
    reals = any(part == _REALS or (part.head == "word" and part.value in ALL_REALS) for part in parts)
    return reals or any(part.head in ("union", "intersection", "difference") for part in parts)


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
        marks, ends = ["<", *marks], (negate(tree.INFINITY), *ends)
    elif len(ends) == 2:
        marks, ends = [*marks, "<"], (*ends, tree.INFINITY)
    if len(ends) != 3 or ends[1].head != "symbol" or not set(marks) <= {"<", "\\le"} or symbols(ends[0]) | symbols(ends[2]):
        return None
    return ExpressionNode("tuple", (ends[0], ends[2]), f"{'(' if marks[0] == '<' else '['}{')' if marks[1] == '<' else ']'}")


def _rows_by_name(node: ExpressionNode) -> list[dict[str, ExpressionNode]] | None:
    """Return the two solutions of `p=5, q=2; p=7, q=3`. Return None if the answer does not give several variables values."""
    assigned = _assigned(node)
    if not all(_is_name(name) for name, _ in assigned):
        return None
    pairs = [(key(name), value) for name, value in assigned]
    width = len(dict(pairs))
    rows = [dict(pairs[start : start + width]) for start in range(0, len(pairs), width or 1)]
    return rows if width > 1 and all(len(row) == width for row in rows) else None


def _solutions(rows: list[dict[str, ExpressionNode]] | None, order: list[str], otherwise: ExpressionNode) -> ExpressionNode:
    """Return the solutions as points, (5, 2), (7, 3)."""
    points = tuple(ExpressionNode("tuple", tuple(row[name] for name in order), "()") for row in rows or ())
    return ExpressionNode("list", points) if len(points) > 1 else points[0] if points else otherwise


def _assigned(item: ExpressionNode) -> list[tuple[ExpressionNode, ExpressionNode]]:
    """Return the sides of `p = 5`, or of each coordinate of `(p, q) = (5, 2)`; for anything else a pair without a name."""
    if item.head in ("list", "set"):
        return [pair for part in item.args for pair in _assigned(part)]
    if item.head != "relation" or item.value != "=":
        return [(number(0), item)]
    left, right = item.args
    both = left.head == right.head == "tuple" and len(left.args) == len(right.args)
    return list(zip(left.args, right.args, strict=True)) if both else [(left, right)]


# ---- Expressions
# The points depend on both expressions: a verdict is reproducible, and no answer can be made for the points. Functions with
# pieces, such as |x|, are also compared far from 0. Rational functions are evaluated exactly there. Other functions are
# evaluated to more and more digits: the difference of equal values shrinks.

POINTS = 4
FAR = (10, 1000, 10**6, 10**12)  # factors of the points that separate pieces: |x - 5| and 5 - x
INTEGER_POINTS = 24  # for functions of integers, such as remainders and floors: they agree at more points
AGREEING = 6  # significant digits to which a decimal must agree with an exact form
_CUT_OFF = Context(prec=9, rounding=ROUND_DOWN)
_NOISE = Fraction(1, 10**12)  # relative error of a value computed in floating point
_PIECES = frozenset(("abs", "max", "min", "floor", "ceil", "root", "mod", "gcd", "lcm"))
_WHOLE = frozenset(("floor", "ceil", "factorial", "binomial", "gcd", "lcm", "mod"))  # functions about integers


def equal_values(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Return whether two expressions are equal. Raises TooCostly."""
    if prediction == truth or key(prediction) == key(truth):
        return True
    kinds = heads(prediction), heads(truth)
    infinities = tree.INFINITY, negate(tree.INFINITY)
    if prediction in infinities or truth in infinities or ("word" in kinds[0]) != ("word" in kinds[1]):
        return False
    if not all(kind <= _SCALAR for kind in kinds):
        unknown = (node.head in _SCALAR and not kind <= _SCALAR for node, kind in zip((prediction, truth), kinds, strict=True))
        return None if any(unknown) else False
    verdict = _equal(prediction, truth)
    if verdict or ("percent" in kinds[0]) == ("percent" in kinds[1]):
        return verdict
    with_sign, without = (prediction, truth) if "percent" in kinds[0] else (truth, prediction)
    hundredth = ExpressionNode("multiply", (without, number(100)))  # the sign may be a unit (25 for 25%) or a hundredth (0.25)
    return _equal(with_sign, hundredth)


_SCALAR = words("number decimal symbol add multiply divide negate power percent call opaque")


def _equal(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    decimals = bare_decimal(prediction), bare_decimal(truth)
    if None not in decimals:
        return decimals[0] == decimals[1]
    for decimal, form in zip(decimals, (truth, prediction), strict=True):
        if decimal is not None:
            return _decimal_equal(decimal, form)
    rounded = ("decimal" in heads(prediction)) != ("decimal" in heads(truth))
    bases = (0, 10) if _bare_logarithm(prediction) or _bare_logarithm(truth) else (0,)
    verdicts = [_equal_at_points(prediction, truth, base, rounded) for base in bases]
    return True if True in verdicts else verdicts[0]


def _bare_logarithm(node: ExpressionNode) -> bool:
    return any(part.head == "call" and part.value == "log" and len(part.args) == 1 for part in walk(node))


def bare_decimal(node: ExpressionNode) -> Fraction | None:
    r"""Return the value of a decimal numeral, with a sign or a power of ten; None for anything else."""
    if node.head == "decimal":
        return node.value  # type: ignore[return-value]
    if node.head in ("negate", "percent"):
        value = bare_decimal(node.args[0])
        return value if value is None or node.head == "percent" else -value
    if node.head == "multiply" and node.args[0].head == "decimal" and len(node.args) == 2:
        scale = node.args[1]
        if scale.head == "number" or (scale.head == "power" and scale.args[0] == number(10)):
            with suppress(tree.Irrational, ZeroDivisionError):
                return exact(node, {})
    return None


def _decimal_equal(decimal: Fraction, form: ExpressionNode) -> Verdict:
    """Return whether the decimal is a value of the exact form, to six digits or more."""
    if symbols(form):
        return _equal_at_points(number(decimal), form, 0, False)
    try:
        return agrees(decimal, exact(form, {}))
    except ZeroDivisionError:
        return False
    except tree.Irrational:
        pass
    for base in (0, 10) if _bare_logarithm(form) else (0,):
        evaluation = tree.NumericEvaluation({}, tree.DIGITS, base)
        try:
            value = evaluation.value(form)
        except (tree.Undefined, tree.Irrational) as error:
            return False if isinstance(error, tree.Undefined) else None
        if evaluation.context.im(value) == 0 and agrees(decimal, _fraction(evaluation.context.re(value))):
            return True
    return False


def _fraction(value: tree.Value) -> Fraction:
    """Return the exact value of an mpf."""
    sign, mantissa, exponent, _ = value._mpf_
    return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent


def agrees(decimal: Fraction, value: Fraction) -> bool:
    """Return whether the decimal is the value, or agrees with it to six significant digits or more, rounded or cut off. If the
    value is a decimal with no more digits (an integer, a half), all its digits count: 220.01 is not 220."""
    if decimal == value:
        return True
    if decimal * value <= 0:
        return False
    decimal, value = abs(decimal), abs(value)
    difference = abs(decimal - value)
    digits = _significant_digits(value)
    if digits is not None and digits <= (_significant_digits(decimal) or 0):
        return difference <= _NOISE * value
    unit = Fraction(10) ** (_exponent(min(decimal, value)) - AGREEING + 1)  # unit of the sixth digit
    return difference <= unit / 2 or (difference < unit and decimal // unit == value // unit)


def _exponent(value: Fraction) -> int:
    """Return the exponent of ten in scientific notation."""
    return _CUT_OFF.divide(Decimal(value.numerator), Decimal(value.denominator)).adjusted()


def _significant_digits(value: Fraction) -> int | None:
    """Return the length of the decimal expansion without leading and trailing zeros; None if it does not end."""
    places = value.denominator.bit_length()  # at least as many as an expansion that ends has
    if pow(10, places, value.denominator):
        return None
    digits = value.numerator * 10**places // value.denominator
    return digits.bit_length() if digits.bit_length() > 10_000 else len(str(digits).rstrip("0"))


def rounds(value: ExpressionNode, rounded: ExpressionNode) -> bool:
    """Return whether `rounded` may be a rounded `value`: a millionth away, or less than one in a numeral's last digit."""
    if (rounded.head == "percent") != (value.head == "percent"):
        value = ExpressionNode("multiply", (value, number(100)))
    evaluation = tree.NumericEvaluation({}, tree.DIGITS)
    try:
        found, about = evaluation.value(value), evaluation.value(rounded)
    except (tree.Undefined, tree.Irrational, tree.TooCostly):
        return False
    difference = abs(found - about)
    if difference * 10**AGREEING < abs(about):
        return True
    decimal = rounded.value if rounded.head == "number" else bare_decimal(rounded)
    if not isinstance(decimal, Fraction):
        return False
    places = next((places for places in range(tree.DIGITS) if (decimal * 10**places).denominator == 1), tree.DIGITS)
    return bool(difference * 10**places < 1)


def _equal_at_points(prediction: ExpressionNode, truth: ExpressionNode, log_base: int, rounded: bool) -> Verdict:
    names = sorted(symbols(prediction) | symbols(truth))
    both = prediction, truth
    salt = zlib.crc32(" ".join(sorted(map(key, both))).encode())
    pieces = any(part.head == "call" and part.value in _PIECES for node in both for part in walk(node))
    verdict: Verdict = None
    for values, real_only in _points(names, any(map(_about_integers, both)), salt, pieces):
        try:
            found = _equal_at(prediction, truth, values, log_base, rounded, real_only)
        except (tree.Undefined, ZeroDivisionError):
            continue
        except tree.Irrational:
            return None  # the expression cannot be evaluated
        except tree.TooCostly:
            if max(map(abs, values.values()), default=0) < FAR[0]:
                raise
            continue
        if found is False:
            return False
        verdict = verdict or found
    return verdict if names else bool(verdict)


def _about_integers(node: ExpressionNode) -> bool:
    """Return whether the expression has a meaning only for integers, such as n! and (-1)^n."""
    for part in walk(node):
        if part.head == "call" and part.value in _WHOLE and symbols(part):
            return True
        if part.head == "power" and symbols(part.args[1]) and part.args[0].head == "negate":
            return True
        if part.head == "power" and symbols(part.args[1]) and part.args[0].head == "number" and part.args[0].value < 0:  # type: ignore[operator]
            return True
    return False


def _points(names: list[str], integral: bool, salt: int, pieces: bool) -> Iterator[tuple[tree.Values, bool]]:
    """Yield the points of comparison, and whether a point counts only if all its roots and logarithms are real."""
    if not names:
        yield {}, False
        return
    for index in range(INTEGER_POINTS if integral else POINTS):
        yield {name: _integer(index, name) if integral else _positive(index, name, salt) for name in names}, False
    for index in range(0 if integral else 4):
        yield {name: _sign(index, at) * _positive(index, name, salt) for at, name in enumerate(names)}, True
    for index, factor in enumerate(FAR if pieces else ()):
        points = {name: factor * _positive(index, name, salt) for name in names}
        yield {name: Fraction(int(1000 * value)) for name, value in points.items()} if integral else points, True
        if not integral:
            yield {name: _sign(index, at) * points[name] for at, name in enumerate(names)}, True


def _positive(index: int, name: str, salt: int) -> Fraction:
    return Fraction(zlib.crc32(f"{index} {name} {salt}".encode()) % 1999 + 211, 1000)


def _sign(index: int, order: int) -> int:
    """Return the sign of the variable at index `order`. Each variable is negative somewhere, and any two differ somewhere."""
    return -1 if index == 0 or (order >> (index - 1)) & 1 == index & 1 else 1


def _integer(index: int, name: str) -> Fraction:
    """Return values that differ for all indices below 31. The step depends on the name, to mix parities and remainders."""
    chance = zlib.crc32(name.encode())
    return Fraction(1 + (chance + index * (1 + chance // 31 % 30)) % 31)


def _equal_at(
    prediction: ExpressionNode, truth: ExpressionNode, values: tree.Values, log_base: int, rounded: bool, real_only: bool
) -> Verdict:
    """Return the verdict at a point; None if `real_only` and a value is not real. Raises Undefined, ZeroDivisionError."""
    with suppress(tree.Irrational):
        left, right = exact(prediction, values), exact(truth, values)
        return left == right or (rounded and abs(left - right) * 2 * 10**AGREEING <= max(abs(left), abs(right)))
    difference, scale, peak, real = _difference(prediction, truth, values, log_base, tree.DIGITS)
    if not real and real_only:
        return None
    if rounded:
        return bool(difference * 2 * 10**AGREEING <= scale)
    if difference * 10**10 > scale and peak < 60:
        return False
    digits = tree.DIGITS + 20 + int(2 * peak / 3.3)
    coarse, scale, _, _ = _difference(prediction, truth, values, log_base, digits)
    fine, _, _, _ = _difference(prediction, truth, values, log_base, digits + 40)
    noise = max(coarse, scale * type(scale)(10) ** -(digits - 20)) if scale else coarse
    return bool(fine == 0 or fine * 10**20 <= noise)


def _difference(
    a: ExpressionNode, b: ExpressionNode, values: tree.Values, log_base: int, digits: int
) -> tuple[tree.Value, tree.Value, int, bool]:
    """Return the absolute difference, the larger absolute value, the largest binary exponent, and whether all was real."""
    evaluation = tree.NumericEvaluation(values, digits, log_base)
    left, right = evaluation.value(a), evaluation.value(b)
    return abs(left - right), max(abs(left), abs(right)), evaluation.peak, evaluation.real


def proportional(a: ExpressionNode, b: ExpressionNode) -> int | None:
    """Return the sign of the constant c ≠ 0 with a = c·b; None if there is none, 0 if undecided."""
    names = sorted(symbols(a) | symbols(b))
    if not names:
        return None
    first = next(_points(names, False, 0, False))[0]
    try:
        top, bottom = exact(a, first), exact(b, first)
        if not top or not bottom:
            return None if top != bottom else 0
        factor, sign = number(top / bottom), 1 if top * bottom > 0 else -1
    except ZeroDivisionError:
        return 0
    except tree.Irrational:
        evaluation = tree.NumericEvaluation(first, tree.DIGITS)
        try:
            left, right = evaluation.value(a), evaluation.value(b)
        except (tree.Undefined, tree.Irrational):
            return 0
        if not left or not right or not evaluation.real:
            return None if evaluation.real else 0
        sign = 1 if evaluation.context.re(left / right) > 0 else -1
        change = {ExpressionNode("symbol", (), name): number(value) for name, value in first.items()}
        factor = ExpressionNode("divide", (replace(a, change.get), replace(b, change.get)))
    verdict = equal_values(a, ExpressionNode("multiply", (factor, b)))
    return sign if verdict else (None if verdict is False else 0)
