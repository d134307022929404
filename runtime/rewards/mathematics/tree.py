"""Expression trees of answers, two ways to evaluate them, and a limit on the work of it.

A node has a head, arguments and a value. The heads:

    number      value: Fraction, exact                     decimal     value: Fraction, written with a decimal point
    symbol      value: its name; pi, e, i and infinity are names too
    add, multiply, divide, negate, power, percent          arithmetic; multiply and add take any number of arguments
    sign        the sign of a plus-minus; the same one throughout an answer
    call        value: the name of a function of _FUNCTIONS
    opaque      value: the name of a function that cannot be evaluated
    word        value: text, folded
    tuple       value: its two brackets      set, matrix (of rows), row, ratio
    list        value: "or" or "and" if only that word stands between its members
    relation    value: the relation signs, one fewer than the arguments
    union, intersection, difference         of sets"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, TypeVar

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
    member = (node.head, node.value) == ("relation", "\\in")
    return member and node.args[0].head == "symbol" and node.args[1].value == "mathbb R"


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
    return changed or ExpressionNode(node.head, tuple(replace(argument, change) for argument in node.args), node.value)


def signs(node: ExpressionNode) -> list[ExpressionNode]:
    """Return both values of an answer with plus-minus signs, or the answer itself without such signs."""
    both = (replace(node, lambda part: number(sign) if part.head == "sign" else None) for sign in (1, -1))  # noqa: B023
    return list(both) if "sign" in heads(node) else [node]


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

_left: ContextVar[float] = ContextVar("left", default=math.inf)


def limit() -> None:
    """Make `spend` raise TooCostly once more than LIMIT has been spent from now on."""
    _left.set(LIMIT)


def spend(cost: float) -> None:
    _left.set(_left.get() - cost)
    if _left.get() < 0:
        raise TooCostly("too much arithmetic")


# ---- Exact values

T = TypeVar("T")
MAX_BITS = 200_000  # bits of a numerator or denominator: about 60,000 digits; the gcd of two such numbers takes 0.1 s

Values = Mapping[str, Fraction]  # values of symbols, by name


class Irrational(Exception):
    """The value is not a rational number, or not known to be one."""


def exact(node: ExpressionNode, values: Values) -> Fraction:
    """Return the value of `node`. Raises Irrational, TooCostly, or ZeroDivisionError."""
    return _known(_EXACT_HEADS, node.head)(node, values)


def _known(table: Mapping[str, T], name: Fraction | str) -> T:
    """Return an entry. Raises Irrational without one."""
    found = table.get(name)  # type: ignore[arg-type]  # names are text
    if found is None:
        raise Irrational(name)
    return found


def opaque_value(node: ExpressionNode, values: Values) -> Fraction:
    """Return a made-up value for a node that cannot be evaluated. Equal texts at one point get equal values; others differ."""
    point = " ".join(f"{name}={value}" for name, value in sorted(values.items()))
    return Fraction(zlib.crc32(f"{key(node)} {point}".encode()) + 2, 1_000_003)


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return `base ** exponent` if it is rational. An odd root of a negative number is real."""
    if exponent.denominator != 1:
        base = root(base, exponent.denominator)
    count = exponent.numerator
    if base not in (0, 1, -1):
        _check_bits(_bits(base) * abs(count), "a power")
    return _bounded(base**count)


def root(base: Fraction, degree: Fraction | int) -> Fraction:
    """Return the real root; for an even degree the root that is not negative. Raises Irrational if it is not rational."""
    if base < 0 and degree % 2 == 1:
        return -root(-base, degree)
    if base < 0 or degree.denominator != 1 or not 0 < degree <= 64:
        raise Irrational("root")
    return Fraction(_integer_root(base.numerator, int(degree)), _integer_root(base.denominator, int(degree)))


def _integer_root(value: int, degree: int) -> int:
    if degree == 2:
        found = math.isqrt(value)
    else:
        _check_bits(value.bit_length(), "a root", 20_000)
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
    if not node.args:
        raise Irrational(node.value)
    return _known(_EXACT_FUNCTIONS, node.value)(*(exact(argument, values) for argument in node.args))


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise Irrational("factorial")
    _check_bits(value * max(1, value.numerator.bit_length()), "a factorial")
    return _bounded(Fraction(math.factorial(value.numerator)))


def _binomial(top: Fraction, bottom: Fraction) -> Fraction:
    if top.denominator != 1 or bottom.denominator != 1 or top < 0 or bottom < 0:
        raise Irrational("binomial")
    smaller = min(bottom, top - bottom)
    _check_bits(smaller * top.numerator.bit_length(), "a binomial coefficient")
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
    _check_bits(bits, "a number")
    return value


def _check_bits(bits: int | Fraction, what: str, most: float = MAX_BITS) -> None:
    if bits > most:
        raise TooCostly(f"{what} of too many digits")


_EXACT_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "root": root,
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
_EXACT_HEADS: dict[str, Callable[[ExpressionNode, Values], Fraction]] = {
    **dict.fromkeys(("number", "decimal"), lambda node, values: node.value),  # type: ignore[arg-type, return-value]
    "symbol": lambda node, values: _known(values, node.value),
    "add": lambda node, values: reduce(lambda total, term: _bounded(total + exact(term, values)), node.args, Fraction(0)),
    "multiply": lambda node, values: reduce(lambda total, term: _bounded(total * exact(term, values)), node.args, Fraction(1)),
    "divide": lambda node, values: _bounded(exact(node.args[0], values) / exact(node.args[1], values)),
    "negate": lambda node, values: -exact(node.args[0], values),
    "percent": lambda node, values: exact(node.args[0], values),  # a percent sign is a unit, see comparison.py
    "power": lambda node, values: power(exact(node.args[0], values), exact(node.args[1], values)),
    "call": _call,
    "opaque": opaque_value,
}


# ---- Values to many digits, real or complex, with mpmath. The largest intermediate number determines the precision.

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
    """Evaluates trees at a point. `peak`: largest binary exponent so far. `real`: no step has left the real numbers."""

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
            return self._noted(_known(_HEADS, node.head)(self, node))
        except TooCostly:
            raise
        except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:  # complex numbers have no order
            raise Undefined(str(error)) from error

    def _noted(self, value: Value) -> Value:
        spend(4 + self.context.dps**2 / 250_000)
        if not self.context.isfinite(value):
            raise Undefined("not finite")
        if value:
            self.peak = max(self.peak, abs(int(self.context.mag(value))))
            _check_bits(self.peak, "a value", MAX_DIGITS * _BITS_PER_DIGIT)
        return value

    def _fraction(self, value: Fraction) -> Value:
        return self.context.mpf(value.numerator) / value.denominator

    def _symbol(self, name: str) -> Value:
        context = self.context
        if name in self._values:
            return self._fraction(self._values[name])
        return +_known({"\\pi": context.pi, "e": context.e, "i": context.j}, name)

    def _power(self, node: ExpressionNode) -> Value:
        base = self.value(node.args[0])
        spend(40 + self.context.dps**2 / 2500)
        try:
            exponent = exact(node.args[1], self._values)
        except Irrational:
            return self._general_power(base, self.value(node.args[1]))
        if exponent.denominator == 1:
            self._check_growth(base, exponent.numerator)
            return base**exponent.numerator
        return self._root(base, exponent.denominator, exponent.numerator)

    def _general_power(self, base: Value, exponent: Value) -> Value:
        context = self.context
        self._check_growth(base, int(abs(exponent)) + 1)
        if not base:
            return context.mpf(0) if context.re(exponent) > 0 else 1 / base
        self.real = self.real and (context.im(base) != 0 or context.re(base) >= 0)
        return context.power(base, exponent)

    def _check_growth(self, base: Value, count: int) -> None:
        if base:
            _check_bits(abs(int(self.context.mag(base)) + 1) * abs(count), "a power", MAX_DIGITS * _BITS_PER_DIGIT * 2)

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
        name, context = str(node.value), self.context
        spend(40 + context.dps**2 / 2500)
        arguments = [self.value(argument) for argument in node.args]
        if name == "root":
            degree = exact(node.args[1], self._values)
            if degree.denominator != 1 or not 0 < degree <= 1000:
                return self._general_power(arguments[0], 1 / arguments[1])
            return self._root(arguments[0], int(degree))
        if name in ("ln", "log", "log10"):
            return self._logarithm(name, *arguments)
        function = _known(_FUNCTIONS, name)
        if name in _GROWING and abs(arguments[0]) > MAX_DIGITS:
            raise TooCostly(f"{name} of a large number")
        result = function(context, *arguments)
        if isinstance(result, context.mpc) and not any(isinstance(argument, context.mpc) for argument in arguments):
            self.real = False
        return result

    def _logarithm(self, name: str, argument: Value, base: Value = None) -> Value:
        context = self.context
        self.real = self.real and not context.im(argument) and context.re(argument) >= 0
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
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: lambda context, *values, own=own: getattr(context, own)(*values) for name, own in _NAMED.items()},
    "abs": lambda context, value: abs(value),
    "floor": _floor,
    "ceil": lambda context, value: -_floor(context, -value),
    "factorial": lambda context, value: context.gamma(value + 1),
    "max": lambda context, *values: max(values),
    "min": lambda context, *values: min(values),
}
_GROWING = frozenset(("sinh", "cosh", "exp", "factorial", "binomial"))
_HEADS: dict[str, Callable[[NumericEvaluation, ExpressionNode], Value]] = {
    **dict.fromkeys(("number", "decimal"), lambda here, node: here._fraction(node.value)),  # type: ignore[arg-type]
    "symbol": lambda here, node: here._symbol(str(node.value)),
    "opaque": lambda here, node: here._fraction(opaque_value(node, here._values)),
    "add": lambda here, node: sum(map(here.value, node.args), here.context.mpf(0)),
    "multiply": lambda here, node: math.prod(map(here.value, node.args), start=here.context.mpf(1)),
    "divide": lambda here, node: here.value(node.args[0]) / here.value(node.args[1]),
    "negate": lambda here, node: -here.value(node.args[0]),
    "percent": lambda here, node: here.value(node.args[0]),
    "power": NumericEvaluation._power,
    "call": NumericEvaluation._call,
}
