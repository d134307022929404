"""Parse an answer to an expression tree, by recursive descent. Time is linear in the number of tokens; depth is bounded.

This file has the grammar from lists to factors; primaries.py has the parts of factors.
"""

from __future__ import annotations

from runtime.rewards.mathematics.lexer import PERCENT, tokens
from runtime.rewards.mathematics.primaries import BARS, CLOSING, PI, RELATIONS, SET_OPERATIONS, Primaries, product, with_sign
from runtime.rewards.mathematics.tree import UNNAMED, ExpressionNode, Unknown, Unreadable, is_domain, number
from runtime.rewards.numeric import NOT_UNITS, SCALES

_TIMES = frozenset(("*", "\\cdot", "\\times", "\\ast"))
_OVER = frozenset(("/", "\\div"))
_COMPARISONS = frozenset(("\\ne", "<", ">", "\\le", "\\ge"))
_MODULO = frozenset(("\\bmod", "\\mod", "\\pmod"))
_LETTERS = frozenset("mghslLdtNJWVAKCFTHBM")  # units of one letter
_DEGREE = ExpressionNode("divide", (PI, number(180)))


def parse(text: str) -> ExpressionNode:
    """Return the tree of a tidied answer. Raises Unreadable."""
    return Parser(tokens(text)).answer()


class Parser(Primaries):
    def answer(self) -> ExpressionNode:
        items = self._items()
        if self._next:
            raise Unreadable(f"{self._next!r} is left over")
        if not items:
            raise Unreadable("nothing")
        return self._list(items)

    def _items(self) -> list[ExpressionNode]:
        """Return statements between commas, semicolons and "and", up to a closing mark."""
        items: list[ExpressionNode] = []
        joints: set[str] = set()
        while True:
            joint: list[str] = []
            while self._next in (",", ";"):
                joint.append(self._take().text.lower())
            joints.update(joint[-1:])
            if not self._next or self._next in CLOSING or self._next in self._bars[-1:]:
                break
            items.append(self._statement())
            if self._next not in (",", ";"):
                break
        self._joint = joints.pop() if joints in ({"or"}, {"and"}) else ""
        return items

    def _statement(self) -> ExpressionNode:
        if self._next in ("=", "\\approx", "\\in"):
            self._at += 1
        parts = [UNNAMED if self._next in _COMPARISONS else self._sets()]
        marks = []
        while self._next in RELATIONS:
            marks.append(RELATIONS[self._take().text])
            parts.append(self._sets())
        if self._next == "\\pmod" or (marks and self._next in _MODULO):
            self._at += 1
            parts.append(self._argument())
            marks.append("mod")
        return ExpressionNode("relation", tuple(parts), " ".join(marks)) if marks else parts[0]

    def _sets(self) -> ExpressionNode:
        left = self._ratio()
        while self._next in SET_OPERATIONS:
            operation = SET_OPERATIONS[self._take().text]
            right = self._ratio()
            same = left.head == operation != "difference"
            left = ExpressionNode(operation, (*left.args, right) if same else (left, right))
        return left

    def _list(self, items: list[ExpressionNode]) -> ExpressionNode:
        """Return one statement or a list. Leave out statements that a variable is a real number."""
        items = [item for item in items if not is_domain(item)] or items
        return items[0] if len(items) == 1 else ExpressionNode("list", tuple(items), self._joint)

    def _ratio(self) -> ExpressionNode:
        parts = [self._sum()]
        while self._next in (":", "\\colon") and not self._builder:
            self._at += 1
            parts.append(self._sum())
        return ExpressionNode("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    def _sum(self) -> ExpressionNode:
        terms = []
        sign = self._sign() if self._next in ("+", "-", "\\pm", "\\mp") else None
        while True:
            term = self._term()
            terms.append(term if sign is None else with_sign(sign, term))
            if self._next not in ("+", "-", "\\pm", "\\mp"):
                break
            sign = self._sign()
        if self._next in ("\\bmod", "\\mod") and all(token.text != "\\equiv" for token in self._tokens):
            if len(terms) > 1:
                raise Unreadable("the remainder of a sum")
            self._at += 1
            return ExpressionNode("call", (terms[0], self._factor()), "mod")
        return ExpressionNode("add", tuple(terms)) if len(terms) > 1 else terms[0]

    def _sign(self) -> str:
        """Read a run of signs as one sign."""
        sign = "+"
        while self._next in ("+", "-", "\\pm", "\\mp"):
            mark = self._take().text
            if mark in ("\\pm", "\\mp"):
                sign = mark
            elif mark == "-":
                sign = {"+": "-", "-": "+", "\\pm": "\\mp", "\\mp": "\\pm"}[sign]
        return sign

    def _term(self) -> ExpressionNode:
        start = self._at
        factors = [self._factor()]
        literal = self._at == start + 1 and self._tokens[start].kind == "number"  # may start a mixed number
        while True:
            follows = self._next
            if follows in _TIMES:
                self._at += 1
                if self._next in ("word", "text") and factors[-1].head != "word":
                    self._unit(factors)
                    continue
                factors.append(self._signed_factor())
            elif follows in _OVER:
                self._at += 1
                if self._next in ("word", "text"):
                    self._unit(factors)
                    continue
                top = product(factors)
                factors = [ExpressionNode("divide", (top, self._signed_factor()))]
            elif follows in ("word", "text"):
                self._unit(factors)
            elif literal and follows == "\\frac":
                factors = _mixed(factors[0], self._factor())
            elif self._starts_factor(follows):
                factors.append(self._factor())
            else:
                return product(factors)
            literal = False

    def _signed_factor(self) -> ExpressionNode:
        if self._next in ("+", "-", "\\pm", "\\mp"):
            return with_sign(self._sign(), self._factor())
        return self._factor()

    def _starts_factor(self, follows: str) -> bool:
        if follows in ("letter", "(", "[", "{", "\\{", "begin") or (follows in BARS and not self._builder):
            return follows not in self._bars[-1:]
        if follows == "number":
            return self._tokens[self._at - 1].kind in (")", "}", "]")
        return (
            follows.startswith("\\")
            and follows not in CLOSING
            and follows not in RELATIONS
            and follows not in SET_OPERATIONS
            and follows not in self._bars
            and follows not in ("\\pm", "\\mp", "\\colon", *_MODULO)
        )

    def _unit(self, factors: list[ExpressionNode]) -> None:
        """Skip unit words behind a value, with their exponents. Words that scale the value or mean percent change it."""
        only_words = all(factor.head == "word" for factor in factors)
        while self._next in ("word", "text"):
            word = self._take().text
            folded = word.lower()
            if folded in PERCENT:
                factors[:] = [ExpressionNode("percent", (product(factors),))]
            elif folded in SCALES and factors[-1].head in ("number", "decimal"):
                factors.append(number(SCALES[folded]))
            elif not only_words and (folded in NOT_UNITS or folded in SCALES or not _is_unit(word, factors[-1])):
                raise Unreadable(f"{word} is not a unit")
            elif only_words:
                factors[:] = [ExpressionNode("word", (), f"{factors[0].value} {folded}")]
            while self._next in ("^", "/", *_TIMES) and not only_words:
                if self._next == "^":
                    self._at += 1
                    self._argument(signed=True)
                elif self._tokens[self._at + 1].kind in ("word", "text"):
                    self._at += 1
                else:
                    break

    def _factor(self) -> ExpressionNode:
        """Return a primary with its exponent, factorial, percent sign or degree sign."""
        base = self._primary()
        while True:
            follows = self._next
            if follows == "^":
                self._at += 1
                base = ExpressionNode("power", (base, self._exponent()))
            elif follows == "!":
                self._at += 1
                if self._next == "!":
                    raise Unknown("a double factorial")
                base = ExpressionNode("call", (base,), "factorial")
            elif follows == "%":
                self._at += 1
                base = ExpressionNode("percent", (base,))
            elif follows == "\\degree":
                self._at += 1
                if self._next == "letter" and self._tokens[self._at].text in "CF":
                    self._at += 1
                base = ExpressionNode("multiply", (base, _DEGREE)) if self._angle else base
            elif follows == "'" and base.head in ("number", "decimal"):
                self._at += 1  # minutes, feet or inches
            else:
                return base

    def _exponent(self) -> ExpressionNode:
        """Return the exponent behind a caret. The last of several carets binds first: 2^3^2 is 2^9."""
        with self._nested():
            exponent = self._argument(signed=True)
            if self._next == "^":
                self._at += 1
                exponent = ExpressionNode("power", (exponent, self._exponent()))
        return exponent


def _is_unit(word: str, value: ExpressionNode) -> bool:
    """Return whether a word may be the unit of a value: 5 m, but not 5 x or B C."""
    return len(word) > 1 or (word in _LETTERS and value.head != "symbol")


def _mixed(whole: ExpressionNode, part: ExpressionNode) -> list[ExpressionNode]:
    r"""Read `2\frac{3}{4}` as 2 + 3/4. Anything except a proper fraction of two literals is a product."""
    if part.head == "divide" and all(side.head == "number" for side in part.args):
        top, bottom = (side.value for side in part.args)
        if 0 < top < bottom:  # type: ignore[operator]
            return [ExpressionNode("add", (whole, part))]
    return [whole, part]
