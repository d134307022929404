"""Values to many digits, real or complex, with mpmath. The largest intermediate number determines the precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from runtime.rewards.mathematics.exact import Irrational, exact, opaque_value
from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, spend

DIGITS = 40  # in addition to the digits before the decimal point of the largest intermediate value
MAX_DIGITS = 20_000
_BITS_PER_DIGIT = 3.33

Value = Any  # an mpf or mpc of mpmath, which is untyped


class Undefined(ArithmeticError):
    """There is no finite value."""


@lru_cache(maxsize=1)
def _context() -> Any:
    import mpmath  # loaded only for values that are not rational

    return mpmath.MPContext()


class NumericEvaluation:
    """Evaluates trees at one point to `digits` digits. `peak`: binary exponent of the largest value so far.

    `real`: no root, power or logarithm has left the real numbers.
    """

    def __init__(self, values: Mapping[str, Fraction], digits: int, log_base: int = 0):
        self.context = _context()
        self.context.dps = digits
        self.peak = 0
        self.real = True
        self._values = values
        self._log_base = log_base  # base of a bare \log; 0: natural

    def value(self, node: ExpressionNode) -> Value:
        """Return the value of `node`. Raises Undefined, TooCostly, or Irrational if it is not a number."""
        try:
            result = self._value(node)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:  # complex numbers have no order
            if isinstance(error, TooCostly):
                raise
            raise Undefined(str(error)) from error
        if not self.context.isfinite(result):
            raise Undefined("not finite")
        return result

    def _value(self, node: ExpressionNode) -> Value:
        head = node.head
        context = self.context
        if head in ("number", "decimal"):
            result = self._fraction(node.value)  # type: ignore[arg-type]
        elif head == "symbol":
            result = self._symbol(str(node.value))
        elif head == "opaque":
            result = self._fraction(opaque_value(node, self._values))
        elif head == "add":
            result = context.mpf(0)
            for term in node.args:
                result = result + self._value(term)
        elif head == "multiply":
            result = context.mpf(1)
            for factor in node.args:
                result = result * self._value(factor)
        elif head == "divide":
            result = self._value(node.args[0]) / self._value(node.args[1])
        elif head == "negate":
            result = -self._value(node.args[0])
        elif head == "percent":
            result = self._value(node.args[0])
        elif head == "power":
            result = self._power(node)
        elif head == "call":
            result = self._call(node)
        else:
            raise Irrational(head)
        return self._noted(result)

    def _noted(self, value: Value) -> Value:
        spend(4 + self.context.dps**2 / 250_000)
        if not self.context.isfinite(value):
            raise Undefined("not finite")
        if value:
            self.peak = max(self.peak, abs(int(self.context.mag(value))))
            if self.peak > MAX_DIGITS * _BITS_PER_DIGIT:
                raise TooCostly("a value of too many digits")
        return value

    def _spend_on_function(self) -> None:
        spend(40 + self.context.dps**2 / 2500)

    def _fraction(self, value: Fraction) -> Value:
        return self.context.mpf(value.numerator) / value.denominator

    def _symbol(self, name: str) -> Value:
        context = self.context
        if name in self._values:
            return self._fraction(self._values[name])
        constants = {"\\pi": context.pi, "e": context.e, "i": context.j}
        if name not in constants:
            raise Irrational(name)
        return +constants[name]

    def _power(self, node: ExpressionNode) -> Value:
        base = self._value(node.args[0])
        self._spend_on_function()
        try:
            exponent = exact(node.args[1], self._values)
        except Irrational:
            return self._general_power(base, self._value(node.args[1]))
        if exponent.denominator == 1:
            self._check_growth(base, exponent.numerator)
            return base**exponent.numerator
        return self._root(base, exponent.denominator, exponent.numerator)

    def _general_power(self, base: Value, exponent: Value) -> Value:
        context = self.context
        self._check_growth(base, int(abs(exponent)) + 1)
        if not base:
            return context.mpf(0) if context.re(exponent) > 0 else 1 / base
        if context.im(base) == 0 and context.re(base) < 0:
            self.real = False
        return context.power(base, exponent)

    def _check_growth(self, base: Value, count: int) -> None:
        if base and abs(int(self.context.mag(base)) + 1) * abs(count) > MAX_DIGITS * _BITS_PER_DIGIT * 2:
            raise TooCostly("a power of too many digits")

    def _root(self, base: Value, degree: int, count: int = 1) -> Value:
        """Return `base` to the power of count / degree, in lowest terms. An odd root of a negative number is real."""
        context = self.context
        self._check_growth(base, count // degree + 1)
        if context.im(base) == 0:
            base = context.re(base)
            if base >= 0:
                return context.root(base, degree) ** count if base else base**count
            if degree % 2:
                return (-context.root(-base, degree)) ** count
        self.real = False
        return context.power(base, context.mpf(count) / degree)

    def _call(self, node: ExpressionNode) -> Value:
        name = str(node.value)
        context = self.context
        self._spend_on_function()
        arguments = [self._value(argument) for argument in node.args]
        if name == "root":
            degree = exact(node.args[1], self._values)
            if degree.denominator != 1 or not 0 < degree <= 1000:
                return self._general_power(arguments[0], 1 / arguments[1])
            return self._root(arguments[0], int(degree))
        if name in ("ln", "log", "log10"):
            return self._logarithm(name, *arguments)
        function = FUNCTIONS.get(name)
        if function is None:
            raise Irrational(name)
        if name in _GROWING and abs(arguments[0]) > MAX_DIGITS:
            raise TooCostly(f"{name} of a large number")
        result = function(context, *arguments)
        if isinstance(result, context.mpc) and not any(isinstance(argument, context.mpc) for argument in arguments):
            self.real = False
        return result

    def _logarithm(self, name: str, argument: Value, base: Value = None) -> Value:
        context = self.context
        if context.im(argument) or context.re(argument) < 0:
            self.real = False
        natural = context.ln(argument)
        if base is None:
            base = {"ln": 0, "log10": 10, "log": self._log_base}[name]
        return natural / context.ln(base) if base else natural


def _floor(context: Any, value: Value) -> Value:
    """Return the floor of a real number. An integer with a rounding error gives that integer."""
    nearest = context.nint(context.re(value))
    close = abs(value - nearest) < context.mpf(10) ** (-context.dps // 2)
    return nearest if close else context.floor(context.re(value))


_NAMED = {name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp", "binomial")}
_NAMED |= {f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: lambda context, *values, own=own: getattr(context, own)(*values) for name, own in _NAMED.items()},
    "abs": lambda context, value: abs(value),
    "floor": _floor,
    "ceil": lambda context, value: -_floor(context, -value),
    "factorial": lambda context, value: context.gamma(value + 1),
    "max": lambda context, *values: max(values),
    "min": lambda context, *values: min(values),
}
_GROWING = frozenset(("sinh", "cosh", "exp", "factorial", "binomial"))
