"""Reading tokens: what every part of the parser is built on."""

from __future__ import annotations

from runtime.rewards.mathematics.lexer import Token
from runtime.rewards.mathematics.tree import ExpressionNode, Unreadable, negate

MAX_DEPTH = 32  # of brackets and exponents

_SAME_RELATION = {
    "\\equiv": "=",
    "\\sim": "\\approx",
    "\\simeq": "\\approx",
    "\\rightarrow": "\\to",
    "\\mapsto": "\\to",
}
_RELATIONS = r"= < > \le \ge \ne \in \notin \approx \cong \to \parallel \perp \subset"
RELATIONS = _SAME_RELATION | {mark: mark for mark in _RELATIONS.split()}
SET_OPERATIONS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference", "\\backslash": "difference"}
CLOSING = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\rvert", "\\rVert", "\\vert", "\\\\", "\\mid"))
OPENING = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",), "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
BARS = {"|": "|", "\\vert": "\\vert", "\\lvert": "\\rvert", "\\|": "\\|", "\\lVert": "\\rVert"}
PI = ExpressionNode("symbol", (), "\\pi")


class TokenReader:
    """A position in the tokens, and what surrounds it."""

    def __init__(self, found: list[Token]):
        self._tokens = found
        self._at = 0
        self._depth = 0
        self._bars: list[str] = []  # closing bars that are waited for
        self._angle = False  # within a trigonometric function's argument, where a degree sign counts
        self._builder = False  # directly within set braces, where a bar or colon says "such that"

    @property
    def _next(self) -> str:
        token = self._tokens[self._at]
        return token.text if token.kind == "command" else token.kind

    def _take(self) -> Token:
        token = self._tokens[self._at]
        if token.kind == "":
            raise Unreadable("the answer ends too early")
        self._at += 1
        return token

    def _expect(self, *kinds: str) -> str:
        found = self._next
        if found not in kinds:
            raise Unreadable(f"{found!r} instead of {kinds[0]!r}")
        self._at += 1
        return found

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")


def with_sign(sign: str, node: ExpressionNode) -> ExpressionNode:
    if sign == "+":
        return node
    if sign == "-":
        return negate(node)
    product = ExpressionNode("multiply", (ExpressionNode("sign"), node))
    return product if sign == "\\pm" else ExpressionNode("negate", (product,))


def product(factors: list[ExpressionNode]) -> ExpressionNode:
    if len(factors) == 1:
        return factors[0]
    if len(factors) == 2 and factors[1].head == "tuple" and str(factors[0].value).isupper():
        return factors[1]  # the coordinates of a point: A(1, 2)
    flat: list[ExpressionNode] = []
    for factor in factors:
        flat.extend(factor.args if factor.head == "multiply" else (factor,))
    return ExpressionNode("multiply", tuple(flat))
