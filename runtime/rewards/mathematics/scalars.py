"""Decide whether two expressions have the same value: constants exactly, functions at several points.

The points depend on both expressions. A verdict is therefore reproducible, and no answer can be made for the points. Functions
with pieces, such as |x|, are also compared far from 0. Rational functions are evaluated exactly there. Other functions are
evaluated to more and more digits: the difference of equal values shrinks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from fractions import Fraction

from runtime.rewards.mathematics.approximate import DIGITS, NumericEvaluation, Undefined, Value
from runtime.rewards.mathematics.exact import Irrational, Values, exact
from runtime.rewards.mathematics.tree import INFINITY, ExpressionNode, TooCostly, heads, key, number, replace, symbols, walk

POINTS = 4
FAR = (10, 1000, 10**6, 10**12)  # factors of the points that separate pieces: |x - 5| and 5 - x
INTEGER_POINTS = 24  # for functions of integers, such as remainders and floors: they agree at more points
AGREEING = 6  # significant digits to which a decimal must agree with an exact form
_NOISE = Fraction(1, 10**12)  # relative error of a value computed in floating point
_PIECES = frozenset(("abs", "max", "min", "floor", "ceil", "root", "mod", "gcd", "lcm"))
_WHOLE = frozenset(("floor", "ceil", "factorial", "binomial", "gcd", "lcm", "mod"))  # functions about integers

Verdict = bool | None  # None: undecided


def equal_values(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    """Return whether two expressions are equal. Raises TooCostly."""
    if prediction == truth or key(prediction) == key(truth):
        return True
    if _is_infinite(prediction) or _is_infinite(truth):
        return False
    kinds = heads(prediction), heads(truth)
    if ("word" in kinds[0]) != ("word" in kinds[1]):
        return False
    if not all(kind <= _SCALAR for kind in kinds):
        unknown = (node.head in _SCALAR and not kind <= _SCALAR for node, kind in zip((prediction, truth), kinds, strict=True))
        return None if any(unknown) else False
    if ("percent" in kinds[0]) != ("percent" in kinds[1]):
        return _equal_with_percent(prediction, truth, "percent" in kinds[0])
    return _equal(prediction, truth)


_SCALAR = frozenset(
    ("number", "decimal", "symbol", "add", "multiply", "divide", "negate", "power", "percent", "call", "opaque")
)


def _is_infinite(node: ExpressionNode) -> bool:
    return node == INFINITY or (node.head == "negate" and node.args[0] == INFINITY)


def _equal_with_percent(prediction: ExpressionNode, truth: ExpressionNode, predicted: bool) -> Verdict:
    """Compare if one side has a percent sign. The sign may be a unit (25 for 25%) or a hundredth (0.25)."""
    hundredth = ExpressionNode("multiply", (truth if predicted else prediction, number(100)))
    return _equal(prediction, truth) or (_equal(prediction, hundredth) if predicted else _equal(hundredth, truth))


def _equal(prediction: ExpressionNode, truth: ExpressionNode) -> Verdict:
    decimals = bare_decimal(prediction), bare_decimal(truth)
    if decimals[0] is not None and decimals[1] is not None:
        return decimals[0] == decimals[1]
    if decimals[0] is not None:
        return _decimal_equal(decimals[0], truth)
    if decimals[1] is not None:
        return _decimal_equal(decimals[1], prediction)
    rounded = ("decimal" in heads(prediction)) != ("decimal" in heads(truth))
    bases = (0, 10) if _bare_logarithm(prediction) or _bare_logarithm(truth) else (0,)
    verdicts = [_equal_at_points(prediction, truth, base, rounded) for base in bases]
    return True if True in verdicts else verdicts[0]


def _bare_logarithm(node: ExpressionNode) -> bool:
    return any(part.head == "call" and part.value == "log" and len(part.args) == 1 for part in walk(node))


# ---------------------------------------------------------------------------------------------------- decimals


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
            try:
                return exact(node, {})
            except (Irrational, ZeroDivisionError):
                return None
    return None


def _decimal_equal(decimal: Fraction, form: ExpressionNode) -> Verdict:
    """Return whether the decimal is a value of the exact form, to six digits or more."""
    if symbols(form):
        return _equal_at_points(number(decimal), form, 0, False)
    try:
        return agrees(decimal, exact(form, {}))
    except ZeroDivisionError:
        return False
    except Irrational:
        pass
    for base in (0, 10) if _bare_logarithm(form) else (0,):
        evaluation = NumericEvaluation({}, DIGITS, base)
        try:
            value = evaluation.value(form)
        except Undefined:
            return False
        except Irrational:
            return None
        if evaluation.context.im(value) == 0 and agrees(decimal, _fraction(evaluation.context.re(value))):
            return True
    return False


def _fraction(value: Value) -> Fraction:
    """Return the exact value of an mpf."""
    sign, mantissa, exponent, _ = value._mpf_
    return (-1) ** sign * Fraction(int(mantissa)) * Fraction(2) ** exponent


def agrees(decimal: Fraction, value: Fraction) -> bool:
    """Return whether the decimal is the value, or agrees with it to six significant digits or more, rounded or cut off.

    If the value is a decimal with no more digits (an integer, a half), all its digits count: 220.01 is not 220.
    """
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
    exponent = int((value.numerator.bit_length() - value.denominator.bit_length()) * 0.30103)
    while Fraction(10) ** exponent > value:
        exponent -= 1
    while Fraction(10) ** (exponent + 1) <= value:
        exponent += 1
    return exponent


def _significant_digits(value: Fraction) -> int | None:
    """Return the length of the decimal expansion without leading and trailing zeros; None if it does not end."""
    rest = value.denominator
    twos = (rest & -rest).bit_length() - 1
    rest >>= twos
    fives = 0
    while rest % 5 == 0:
        rest //= 5
        fives += 1
    if rest != 1:
        return None
    digits = value.numerator * 10 ** max(twos, fives) // value.denominator
    if digits.bit_length() > 10_000:
        return digits.bit_length()
    return len(str(digits).rstrip("0"))


def rounds(value: ExpressionNode, rounded: ExpressionNode) -> bool:
    """Return whether `rounded` may be a rounded `value`: a millionth away, or less than one in a numeral's last digit."""
    if (rounded.head == "percent") != (value.head == "percent"):
        value = ExpressionNode("multiply", (value, number(100)))
    evaluation = NumericEvaluation({}, DIGITS)
    try:
        found, about = evaluation.value(value), evaluation.value(rounded)
    except (Undefined, Irrational, TooCostly):
        return False
    difference = abs(found - about)
    if difference * 10**AGREEING < abs(about):
        return True
    decimal = rounded.value if rounded.head == "number" else bare_decimal(rounded)
    if not isinstance(decimal, Fraction):
        return False
    places = next((places for places in range(DIGITS) if (decimal * 10**places).denominator == 1), DIGITS)
    return bool(difference * 10**places < 1)


# ---------------------------------------------------------------------------------------------------- points


def _equal_at_points(prediction: ExpressionNode, truth: ExpressionNode, log_base: int, rounded: bool) -> Verdict:
    names = sorted(symbols(prediction) | symbols(truth))
    both = prediction, truth
    salt = zlib.crc32(" ".join(sorted(map(key, both))).encode())
    pieces = any(part.head == "call" and part.value in _PIECES for node in both for part in walk(node))
    verdict: Verdict = None
    for values, real_only in _points(names, any(map(_about_integers, both)), salt, pieces):
        try:
            found = _equal_at(prediction, truth, values, log_base, rounded, real_only)
        except Irrational:
            return None  # the expression cannot be evaluated
        except TooCostly:
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


def _points(names: list[str], integral: bool, salt: int, pieces: bool) -> Iterator[tuple[Values, bool]]:
    """Yield the points of comparison, and whether a point counts only if all its roots and logarithms are real."""
    if not names:
        yield {}, False
        return
    for index in range(INTEGER_POINTS if integral else POINTS):
        yield {name: _integer(index, name) if integral else _positive(index, name, salt) for name in names}, False
    if not integral:
        for index in range(4):
            yield {name: _sign(index, at) * _positive(index, name, salt) for at, name in enumerate(names)}, True
    for index, factor in enumerate(FAR if pieces else ()):
        points = {name: factor * _positive(index, name, salt) for name in names}
        if integral:
            yield {name: Fraction(int(1000 * value)) for name, value in points.items()}, True
            continue
        yield points, True
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
    prediction: ExpressionNode, truth: ExpressionNode, values: Values, log_base: int, rounded: bool, real_only: bool
) -> Verdict:
    """Return the verdict at one point; None if the values are not defined there."""
    try:
        found = exact(prediction, values), exact(truth, values)
    except ZeroDivisionError:
        return None
    except Irrational:
        pass
    else:
        return found[0] == found[1] or (rounded and _close(*found))
    try:
        return _equal_digits(prediction, truth, values, log_base, rounded, real_only)
    except Undefined:
        return None


def _close(prediction: Fraction, truth: Fraction) -> bool:
    return abs(prediction - truth) * 2 * 10**AGREEING <= max(abs(prediction), abs(truth))


def _equal_digits(
    prediction: ExpressionNode, truth: ExpressionNode, values: Values, log_base: int, rounded: bool, real_only: bool
) -> Verdict:
    """Compare the difference at a precision and at a higher precision: for equal values it shrinks."""
    difference, scale, peak, real = _difference(prediction, truth, values, log_base, DIGITS)
    if not real and real_only:
        return None
    if rounded:
        return bool(difference * 2 * 10**AGREEING <= scale)
    if difference * 10**10 > scale and peak < 60:
        return False
    digits = DIGITS + 20 + int(2 * peak / 3.3)
    coarse, scale, _, _ = _difference(prediction, truth, values, log_base, digits)
    fine, _, _, _ = _difference(prediction, truth, values, log_base, digits + 40)
    noise = max(coarse, scale * type(scale)(10) ** -(digits - 20)) if scale else coarse
    return bool(fine == 0 or fine * 10**20 <= noise)


def _difference(
    a: ExpressionNode, b: ExpressionNode, values: Values, log_base: int, digits: int
) -> tuple[Value, Value, int, bool]:
    """Return the absolute difference, the larger absolute value, the largest binary exponent, and whether all was real."""
    evaluation = NumericEvaluation(values, digits, log_base)
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
        factor: ExpressionNode = number(top / bottom)
        sign = 1 if top * bottom > 0 else -1
    except ZeroDivisionError:
        return 0
    except Irrational:
        evaluation = NumericEvaluation(first, DIGITS)
        try:
            left, right = evaluation.value(a), evaluation.value(b)
        except (Undefined, Irrational):
            return 0
        if not left or not right or not evaluation.real:
            return None if evaluation.real else 0
        sign = 1 if evaluation.context.re(left / right) > 0 else -1
        change = {name: number(value) for name, value in first.items()}
        factor = ExpressionNode("divide", (_at(a, change), _at(b, change)))
    verdict = equal_values(a, ExpressionNode("multiply", (factor, b)))
    return sign if verdict else (None if verdict is False else 0)


def _at(node: ExpressionNode, change: dict[str, ExpressionNode]) -> ExpressionNode:
    return replace(node, lambda part: change.get(str(part.value)) if part.head == "symbol" else None)
