"""Values modulo primes: what tells 2^(2^100) from 2^(2^100) + 1 without writing them down.

Two rational numbers that leave the same residues modulo several primes of 31 bits are taken as equal; with different
residues they are certainly not. The factorial of a number above the primes is a multiple of them all, which says nothing of
its value (`hides_a_factorial`).
"""

from __future__ import annotations

import math
from functools import lru_cache

from runtime.rewards.mathematics.exact import Irrational, Values, exact, opaque_value
from runtime.rewards.mathematics.tree import ExpressionNode, TooCostly, walk
from runtime.rewards.mathematics.work import spend

PRIMES = (2_147_483_629, 2_147_483_587, 2_147_483_563, 2_147_483_549)
MAX_FACTORIAL = 200_000


def residue(node: ExpressionNode, values: Values, prime: int) -> int:
    """The value of `node` modulo `prime`. Raises Irrational, TooCostly, or ZeroDivisionError where it has no residue."""
    head = node.head
    if head in ("number", "decimal"):
        return _quotient(node.value.numerator, node.value.denominator, prime)  # type: ignore[union-attr]
    if head == "symbol":
        value = exact(node, values)
        return _quotient(value.numerator, value.denominator, prime)
    if head == "opaque":
        value = opaque_value(node, values)
        return _quotient(value.numerator, value.denominator, prime)
    parts = [residue(argument, values, prime) for argument in node.args] if head in _PLAIN else []
    if head == "add":
        return sum(parts) % prime
    if head == "multiply":
        return math.prod(parts) % prime
    if head == "negate":
        return -parts[0] % prime
    if head == "percent":
        return parts[0]
    if head == "divide":
        return _quotient(parts[0], parts[1], prime)
    if head == "power":
        return _power(node, values, prime)
    if head == "call" and node.value == "factorial":
        return _factorial(node, values, prime)
    return _small(node, values, prime)


def hides_a_factorial(node: ExpressionNode, values: Values) -> bool:
    """Whether a factorial in it leaves the residue 0 whatever its size, so that equal residues do not mean equal values."""
    return any(_is_multiple(part, values) for part in walk(node) if part.head == "call" and part.value == "factorial")


def _is_multiple(factorial: ExpressionNode, values: Values) -> bool:
    try:
        return exact(factorial.args[0], values) >= min(PRIMES)
    except TooCostly:
        return True


_PLAIN = frozenset(("add", "multiply", "negate", "percent", "divide"))


def _small(node: ExpressionNode, values: Values, prime: int) -> int:
    value = exact(node, values)
    return _quotient(value.numerator, value.denominator, prime)


def _quotient(top: int, bottom: int, prime: int) -> int:
    if bottom % prime == 0:
        raise ZeroDivisionError
    return top * pow(bottom, -1, prime) % prime


def _power(node: ExpressionNode, values: Values, prime: int) -> int:
    base_node, exponent = node.args
    inverse = exponent.head == "negate"
    if inverse:
        exponent = exponent.args[0]
    try:
        count = exact(exponent, values)
    except TooCostly:
        count = None  # type: ignore[assignment]
    if count is not None:
        if count.denominator != 1:
            return _small(node, values, prime)
        reduced = int(count) % (prime - 1) if count >= 0 else -(int(-count) % (prime - 1))
    else:
        reduced = _tower(exponent, values, prime - 1)
    base = residue(base_node, values, prime)
    if base == 0:
        if inverse or (count is not None and count <= 0):
            raise ZeroDivisionError
        return 0
    return pow(base, -reduced if inverse else reduced, prime)


def _tower(node: ExpressionNode, values: Values, modulus: int) -> int:
    """The residue of a positive integer too large to write down, modulo any number, by Euler's theorem as generalised:
    a^b = a^(b mod φ(m) + φ(m)) modulo m for every b ≥ log2(m)."""
    if modulus == 1:
        return 0
    try:
        value = exact(node, values)
    except TooCostly:
        pass
    else:
        if value.denominator != 1 or value < 0:
            raise TooCostly("an exponent that is no positive integer")
        return int(value) % modulus
    if node.head in ("add", "multiply"):
        parts = [_tower(argument, values, modulus) for argument in node.args]
        return (sum(parts) if node.head == "add" else math.prod(parts)) % modulus
    if node.head == "call" and node.value == "factorial":
        return 0  # one that cannot be written down is larger than any modulus here
    if node.head != "power":
        raise TooCostly(f"a {node.head} of too many digits in an exponent")
    base = _tower(node.args[0], values, modulus)
    try:
        count = exact(node.args[1], values)
    except TooCostly:
        spend(3000)  # where the modulus is new
        period = _totient(modulus)
        return pow(base, _tower(node.args[1], values, period) + period, modulus)
    if count.denominator != 1 or count < 0:
        raise TooCostly("an exponent that is no positive integer")
    return pow(base, int(count), modulus)


@lru_cache(maxsize=256)
def _totient(modulus: int) -> int:
    """Euler's φ, by trial division: of a number below 2^31 at most 46,341 steps."""
    result = rest = modulus
    divisor = 2
    while divisor * divisor <= rest:
        if rest % divisor == 0:
            result -= result // divisor
            while rest % divisor == 0:
                rest //= divisor
        divisor += 1
    return result - result // rest if rest > 1 else result


def _factorial(node: ExpressionNode, values: Values, prime: int) -> int:
    try:
        count = exact(node.args[0], values)
    except TooCostly:
        return 0  # a multiple of the prime
    if count.denominator != 1 or count < 0:
        raise Irrational("factorial")
    if count >= prime:
        return 0
    if count > MAX_FACTORIAL:
        raise TooCostly("the factorial of a large number")
    spend(int(count) / 10)
    product = 1
    for factor in range(2, int(count) + 1):
        product = product * factor % prime
    return product
