"""Exact rational arithmetic with bounded size of numbers."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction

from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, key, spend

MAX_BITS = 200_000  # bits of a numerator or denominator: about 60,000 digits; the gcd of two such numbers takes 0.1 s

Values = Mapping[str, Fraction]  # values of symbols, by name


class Irrational(Exception):
    """The value is not a rational number, or not known to be one."""


def exact(node: ExpressionNode, values: Values) -> Fraction:
    """Return the value of `node`. Raises Irrational, TooCostly, or ZeroDivisionError."""
    evaluate = _HEADS.get(node.head)
    if evaluate is None:
        raise Irrational(node.head)
    return evaluate(node, values)


def opaque_value(node: ExpressionNode, values: Values) -> Fraction:
    """Return a made-up value for a node that cannot be evaluated. Equal texts at one point get equal values; others differ."""
    point = " ".join(f"{name}={value}" for name, value in sorted(values.items()))
    return Fraction(zlib.crc32(f"{key(node)} {point}".encode()) + 2, 1_000_003)


def _literal(node: ExpressionNode, values: Values) -> Fraction:
    return node.value  # type: ignore[return-value]


def _symbol(node: ExpressionNode, values: Values) -> Fraction:
    value = values.get(node.value)  # type: ignore[arg-type]
    if value is None:
        raise Irrational(node.value)
    return value


def _add(node: ExpressionNode, values: Values) -> Fraction:
    total = Fraction(0)
    for term in node.args:
        total = _bounded(total + exact(term, values))
    return total


def _multiply(node: ExpressionNode, values: Values) -> Fraction:
    product = Fraction(1)
    for factor in node.args:
        product = _bounded(product * exact(factor, values))
    return product


def _divide(node: ExpressionNode, values: Values) -> Fraction:
    top, bottom = node.args
    return _bounded(exact(top, values) / exact(bottom, values))


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return `base ** exponent` if it is rational. An odd root of a negative number is real."""
    if exponent.denominator != 1:
        if exponent.denominator > 64:
            raise Irrational("root")
        base = root(base, exponent.denominator)
    count = exponent.numerator
    if base in (0, 1, -1):
        if base == 0 and count < 0:
            raise ZeroDivisionError
        return Fraction(1) if count % 2 == 0 and (base or not count) else base
    if _bits(base) * abs(count) > MAX_BITS:
        raise TooCostly("a power of too many digits")
    return _bounded(base**count)


def root(base: Fraction, degree: int) -> Fraction:
    """Return the real root; for an even degree the root that is not negative. Raises Irrational if it is not rational."""
    if base < 0 and degree % 2:
        return -root(-base, degree)
    if base < 0:
        raise Irrational("root")
    return Fraction(_integer_root(base.numerator, degree), _integer_root(base.denominator, degree))


def _integer_root(value: int, degree: int) -> int:
    if degree == 2:
        found = math.isqrt(value)
    else:
        if value.bit_length() > 20_000:
            raise TooCostly("a root of too many digits")
        found = 1 << -(-value.bit_length() // degree)
        while True:  # Newton's method from above
            better = ((degree - 1) * found + value // found ** (degree - 1)) // degree
            if better >= found:
                break
            found = better
    if found**degree != value:
        raise Irrational("root")
    return found


def _call(node: ExpressionNode, values: Values) -> Fraction:
    function = _FUNCTIONS.get(node.value)  # type: ignore[arg-type]
    if function is None or not node.args:
        raise Irrational(node.value)
    return function(*(exact(argument, values) for argument in node.args))


def _root(radicand: Fraction, degree: Fraction) -> Fraction:
    if degree.denominator != 1 or not 0 < degree <= 64:
        raise Irrational("root")
    return root(radicand, int(degree))


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise Irrational("factorial")
    if value * max(1, value.numerator.bit_length()) > MAX_BITS:
        raise TooCostly("a factorial of too many digits")
    return _bounded(Fraction(math.factorial(value.numerator)))


def _binomial(top: Fraction, bottom: Fraction) -> Fraction:
    if top.denominator != 1 or bottom.denominator != 1 or top < 0 or bottom < 0:
        raise Irrational("binomial")
    smaller = min(bottom, top - bottom)
    if smaller > 0 and smaller * top.numerator.bit_length() > MAX_BITS:
        raise TooCostly("a binomial coefficient of too many digits")
    return _bounded(Fraction(math.comb(top.numerator, bottom.numerator)))


def _integers(function: Callable[..., int]) -> Callable[..., Fraction]:
    def apply(*values: Fraction) -> Fraction:
        if any(value.denominator != 1 for value in values):
            raise Irrational(function.__name__)
        return Fraction(function(*map(int, values)))

    return apply


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    bits = _bits(value)
    spend(4 + bits * bits / 1e6)  # reducing a fraction takes quadratic time
    if bits > MAX_BITS:
        raise TooCostly("a number of too many digits")
    return value


_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "root": _root,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "factorial": _factorial,
    "binomial": _binomial,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "gcd": _integers(math.gcd),
    "lcm": _integers(math.lcm),
    "mod": _integers(operator.mod),
}
_HEADS: dict[str, Callable[[ExpressionNode, Values], Fraction]] = {
    "number": _literal,
    "decimal": _literal,
    "symbol": _symbol,
    "add": _add,
    "multiply": _multiply,
    "divide": _divide,
    "negate": lambda node, values: -exact(node.args[0], values),
    "percent": lambda node, values: exact(node.args[0], values),  # a percent sign is a unit, see scalars.py
    "power": lambda node, values: power(exact(node.args[0], values), exact(node.args[1], values)),
    "call": _call,
    "opaque": opaque_value,
}
