"""Primaries: numbers, symbols, brackets, matrices and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from runtime.rewards.mathematics.lexer import ACCENTS, LISTED, MATRICES, PREFIXED, SAME_FUNCTION, TRIGONOMETRIC, UNREAD, Token
from runtime.rewards.mathematics.tree import ExpressionNode, Unknown, Unreadable, is_domain, negate, number

MAX_DEPTH = 32  # of brackets and exponents

_SAME_RELATION = {"\\equiv": "=", "\\sim": "\\approx", "\\simeq": "\\approx", "\\rightarrow": "\\to", "\\mapsto": "\\to"}
_RELATIONS = r"= < > \le \ge \ne \in \notin \approx \cong \to \parallel \perp \subset"
RELATIONS = _SAME_RELATION | {mark: mark for mark in _RELATIONS.split()}
SET_OPERATIONS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference", "\\backslash": "difference"}
CLOSING = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\rvert", "\\rVert", "\\vert", "\\\\", "\\mid"))
OPENING = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",), "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
BARS = {"|": "|", "\\vert": "\\vert", "\\lvert": "\\rvert", "\\|": "\\|", "\\lVert": "\\rVert"}
PI = ExpressionNode("symbol", (), "\\pi")


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


_INVERSE = {name: f"arc{name}" for name in TRIGONOMETRIC}
_FUNCTION_LETTERS = frozenset("fg")
_ARGUMENT_STARTS = frozenset(("letter", "\\pi", "\\frac", "\\sqrt", "\\theta", "\\alpha", "\\beta", "\\phi", "\\omega"))


class Primaries:
    """The lower half of the grammar: the position in the tokens and its context. `Parser` has the upper half."""

    def __init__(self, found: list[Token]):
        self._tokens = found
        self._at = 0
        self._depth = 0
        self._bars: list[str] = []  # closing bars that are expected
        self._angle = False  # within a trigonometric function's argument, where a degree sign counts
        self._builder = False  # directly within set braces, where a bar or colon means "such that"
        self._joint = ""  # of the last statements: "or" if only that stood between them

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

    @contextmanager
    def _nested(self, builder: bool | None = None) -> Iterator[None]:
        """Enter one level. `builder`: within brackets, of that kind; bars expected outside close nothing inside."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        outer = self._bars, self._builder
        if builder is not None:
            self._bars, self._builder = [], builder
        yield
        self._bars, self._builder = outer
        self._depth -= 1

    def _items(self) -> list[ExpressionNode]:
        raise NotImplementedError

    def _statement(self) -> ExpressionNode:
        raise NotImplementedError

    def _list(self, items: list[ExpressionNode]) -> ExpressionNode:
        raise NotImplementedError

    def _sum(self) -> ExpressionNode:
        raise NotImplementedError

    def _sign(self) -> str:
        raise NotImplementedError

    def _term(self) -> ExpressionNode:
        raise NotImplementedError

    def _factor(self) -> ExpressionNode:
        raise NotImplementedError

    def _primary(self) -> ExpressionNode:
        token = self._take()
        kind = token.text if token.kind == "command" else token.kind
        if kind in ("number", "decimal"):
            return self._numeral(token)
        if kind == "letter":
            return self._symbol(token.text)
        if kind in ("word", "text"):
            return self._word(token)
        if kind in BARS:
            return self._absolute(kind)
        if kind in OPENING:
            return self._brackets(kind)
        if kind == "{":
            self._at -= 1
            return self._braces()
        if kind == "\\{":
            return self._set()
        if kind == "begin":
            return self._matrix(token.text)
        if token.kind == "command":
            return self._command(kind)
        raise Unreadable(f"{kind!r} is not a value")

    def _numeral(self, token: Token) -> ExpressionNode:
        if self._next != "_":
            return ExpressionNode(token.kind, (), token.value if token.value is not None else Fraction(0))
        self._at += 1
        base = self._subscript()
        whole, _, part = token.text.partition(".")
        if (
            base.isdigit()
            and 2 <= int(base[:3]) <= 36
            and all("0" <= digit <= "9" and int(digit) < int(base) for digit in whole + part)
        ):
            digits = int(whole + part, int(base)) if whole + part else 0
            return number(Fraction(digits, int(base) ** len(part)))
        return ExpressionNode("symbol", (), f"{token.text}_{base}")

    def _symbol(self, name: str) -> ExpressionNode:
        if self._next == "_":
            self._at += 1
            name = f"{name}_{self._subscript()}"
        while self._next == "'":
            self._at += 1
            name += "'"
        if self._next == "(" and (name[0] in _FUNCTION_LETTERS or self._calls_number()):
            self._at += 1
            return ExpressionNode("opaque", self._closed("("), name)
        return ExpressionNode("symbol", (), name)

    def _calls_number(self) -> bool:
        """Return whether a number in parentheses follows, as in I(0): then the letter is a function."""
        return self._tokens[self._at + 1].kind == "number" and self._tokens[self._at + 2].kind == ")"

    def _subscript(self) -> str:
        """Return the text of a subscript without spaces."""
        if self._next != "{":
            return self._take().text
        self._at += 1
        text: list[str] = []
        depth = 1
        while True:
            token = self._take()
            depth += {"{": 1, "}": -1}.get(token.kind, 0)
            if depth == 0:
                return "".join(text)
            text.append(token.text)

    def _word(self, token: Token) -> ExpressionNode:
        """Return text that is the answer itself. Short words outside text commands are products of variables."""
        if len(token.text) == 1:
            return self._symbol(token.text)
        if token.kind == "word" and len(token.text) < 4:
            return product([ExpressionNode("symbol", (), letter) for letter in token.text])
        words = [token.text]
        while self._next in ("word", "text", "letter"):
            words.append(self._take().text)
        return ExpressionNode("word", (), " ".join(words).casefold())

    def _absolute(self, opening: str) -> ExpressionNode:
        with self._nested():
            self._bars.append(BARS[opening])
            inside = self._sum()
            self._expect(self._bars.pop())
        return ExpressionNode("call", (inside,), "abs")

    def _closed(self, opening: str) -> tuple[ExpressionNode, ...]:
        """Return the items up to the bracket that closes `opening`. `opening` has been read already."""
        with self._nested(builder=False):
            items = self._items()
            self._close = self._expect(*OPENING[opening])
        return tuple(items)

    def _brackets(self, opening: str) -> ExpressionNode:
        items = self._closed(opening)
        if opening in ("\\lfloor", "\\lceil") and len(items) == 1:
            return ExpressionNode("call", items, "floor" if opening == "\\lfloor" else "ceil")
        if opening == "\\langle":
            return ExpressionNode("tuple", items, "()")
        if len(items) == 1 and (opening, self._close) in (("(", ")"), ("[", "]")):
            return items[0]
        return self._list(list(items)) if self._joint else ExpressionNode("tuple", items, opening + self._close)

    def _braces(self) -> ExpressionNode:
        """Return a group in braces; a group of several items is a set."""
        self._expect("{")
        with self._nested(builder=self._builder):
            items = self._items()
            self._expect("}")
        if not items:
            raise Unreadable("an empty group")
        return self._list(items) if len(items) == 1 or self._joint else ExpressionNode("set", tuple(items))

    def _set(self) -> ExpressionNode:
        with self._nested(builder=True):
            items = self._items()
            if self._next in ("|", "\\mid", ":", "\\colon"):
                self._at += 1
                self._builder = False
                domain = [item for item in items if item.head == "relation" and not is_domain(item)]
                node = self._list(self._items())
                if domain:  # e.g. a set of integers: compare the set as written
                    node = ExpressionNode("set", (*domain, node))
            else:
                node = ExpressionNode("set", tuple(items))
            self._expect("\\}")
        return node

    def _matrix(self, environment: str) -> ExpressionNode:
        if environment not in MATRICES and environment != "cases":
            raise Unknown(f"environment {environment!r}")
        rows: list[list[ExpressionNode]] = [[]]
        with self._nested():
            while self._next != "end":
                if self._next == "\\\\":
                    self._at += 1
                    rows.append([])
                elif self._next == "&" or (environment == "cases" and self._next in (",", ";")):
                    self._at += 1
                else:
                    rows[-1].append(self._statement())
        self._at += 1
        if not rows[-1]:
            rows.pop()
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of different lengths")
        if environment == "cases" or all(row[0].head == "relation" for row in rows):
            if len(rows[0]) > 1:
                raise Unknown("a function by cases")
            return ExpressionNode("list", tuple(row[0] for row in rows))
        return ExpressionNode("matrix", tuple(ExpressionNode("row", tuple(row)) for row in rows))

    def _argument(self, signed: bool = False, digit: bool = False) -> ExpressionNode:
        """Return the argument of a command or exponent: a braced group, else one token. `digit`: take only the first digit."""
        if self._next == "{":
            return self._braces()
        if signed and self._next in ("-", "+"):
            return with_sign(self._sign(), self._argument())
        token = self._tokens[self._at]
        if digit and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self._tokens[self._at] = Token("number", token.text[1:], Fraction(token.text[1:]))
            return number(int(token.text[0]))
        if self._next in ("word", "text") and len(token.text) > 1:
            raise Unreadable("a word as an argument")
        with self._nested():
            return self._primary()

    # ------------------------------------------------------------------------------------------------ commands

    def _command(self, command: str) -> ExpressionNode:
        name = command[1:]
        name = SAME_FUNCTION.get(name, name)
        if command in ("\\frac", "\\binom"):
            with self._nested():
                top, bottom = self._argument(digit=True), self._argument(digit=True)
            return (
                ExpressionNode("divide", (top, bottom))
                if command == "\\frac"
                else ExpressionNode("call", (top, bottom), "binomial")
            )
        if command in ("\\sqrt", "\\cbrt"):
            return self._root(3 if command == "\\cbrt" else 2)
        if name in PREFIXED:
            return self._function(name)
        if name in LISTED and self._next in ("(", "{", "\\{"):
            opening = self._take().text
            if opening == "(":
                return ExpressionNode("call", self._closed("("), name)
            self._at -= 1
            group = self._braces() if opening == "{" else self._primary()
            return ExpressionNode("call", group.args if group.head == "set" else (group,), name)
        if command in ("\\sum", "\\prod"):
            return self._series(name)
        if command in ACCENTS:
            return self._symbol(f"{name} {self._raw()}")
        if command in ("\\emptyset", "\\varnothing"):
            return ExpressionNode("set")
        if command in ("\\ldots", "\\dots", "\\cdots"):
            return ExpressionNode("symbol", (), "\\ldots")
        if command in UNREAD:
            raise Unknown(command)
        if command in CLOSING or command in RELATIONS or command in SET_OPERATIONS or name.endswith("mod"):
            raise Unreadable(f"{command} is not a value")
        if not name.isalpha():
            raise Unreadable(f"{command} is not a value")
        return self._symbol({"\\varepsilon": "\\epsilon", "\\varphi": "\\phi"}.get(command, command))

    def _raw(self) -> str:
        return self._subscript() if self._next == "{" else self._take().text

    def _root(self, degree: int) -> ExpressionNode:
        index: ExpressionNode = number(degree)
        if self._next == "[":
            self._at += 1
            items = self._closed("[")
            if len(items) != 1:
                raise Unreadable("a root without a degree")
            index = items[0]
        with self._nested():
            radicand = self._argument() if self._next != "(" else self._primary()
        return ExpressionNode("call", (radicand, index), "root")

    def _function(self, name: str) -> ExpressionNode:
        base = exponent = None
        if self._next == "_":
            self._at += 1
            base = self._argument()
        if self._next == "^":
            self._at += 1
            exponent = self._argument(signed=True)
        if exponent == number(-1) and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        outer, self._angle = self._angle, self._angle or name in TRIGONOMETRIC
        with self._nested():
            argument = self._function_argument()
        self._angle = outer
        call = ExpressionNode("call", (argument,) if base is None else (argument, base), name)
        return call if exponent is None else ExpressionNode("power", (call, exponent))

    def _function_argument(self) -> ExpressionNode:
        """Return one group in brackets, or the product up to the next sign, function or bracket."""
        if self._next in ("(", "[", "{", *BARS):
            return self._factor() if self._next not in ("(", "[") else self._primary()
        sign = self._sign() if self._next in ("+", "-") else "+"
        factors = [self._factor()]
        while self._next in _ARGUMENT_STARTS:
            factors.append(self._factor())
        if self._next == "/" and PI in factors and self._tokens[self._at + 1].kind == "number":
            self._at += 1
            factors = [ExpressionNode("divide", (product(factors), self._factor()))]
        return with_sign(sign, product(factors))

    def _series(self, name: str) -> ExpressionNode:
        """Return a sum or product, compared as text. Its arguments: index, first value, last value, and the term."""
        self._expect("_")
        start = self._argument()
        self._expect("^")
        end = self._argument()
        if start.head != "relation" or start.value != "=" or start.args[0].head != "symbol":
            raise Unknown("a sum without an index")
        with self._nested():
            body = self._term()
        return ExpressionNode("call", (start.args[0], start.args[1], end, body), name)
