"""The expression tree of an answer, by recursive descent. Time is linear in the number of tokens, depth is bounded."""

from __future__ import annotations

from fractions import Fraction

from runtime.rewards.mathematics.lexer import Token, tokens
from runtime.rewards.mathematics.tree import Node, Unknown, Unreadable, negate, number
from runtime.rewards.mathematics.vocabulary import (
    ACCENTS,
    LISTED,
    MATRICES,
    PERCENT,
    PREFIXED,
    SAME_FUNCTION,
    SCALES,
    TRIGONOMETRIC,
    UNREAD,
)

MAX_DEPTH = 32  # of brackets and exponents

RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "\\le": "\\le",
    "\\ge": "\\ge",
    "\\ne": "\\ne",
    "\\in": "\\in",
    "\\approx": "\\approx",
}
RELATIONS |= {
    "\\equiv": "=",
    "\\sim": "\\approx",
    "\\simeq": "\\approx",
    "\\cong": "\\cong",
    "\\to": "\\to",
    "\\notin": "\\notin",
}
RELATIONS |= {
    "\\rightarrow": "\\to",
    "\\mapsto": "\\to",
    "\\parallel": "\\parallel",
    "\\perp": "\\perp",
    "\\subset": "\\subset",
}
_SET_OPERATIONS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference", "\\backslash": "difference"}
_TIMES = frozenset(("*", "\\cdot", "\\times", "\\ast"))
_OVER = frozenset(("/", "\\div"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\rvert", "\\rVert", "\\vert", "\\\\", "\\mid"))
_OPENING = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",), "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
_BARS = {"|": "|", "\\vert": "\\vert", "\\lvert": "\\rvert", "\\|": "\\|", "\\lVert": "\\rVert"}
_INVERSE = {name: f"arc{name}" for name in TRIGONOMETRIC}
_FUNCTION_LETTERS = frozenset("fg")
_PI = Node("symbol", (), "\\pi")
_DEGREE = Node("divide", (_PI, number(180)))
_ARGUMENT_STARTS = frozenset(("letter", "\\pi", "\\frac", "\\sqrt", "\\theta", "\\alpha", "\\beta", "\\phi", "\\omega"))


def parse(text: str, thousands: bool = True) -> Node:
    """The tree of a tidied answer. Raises Unreadable."""
    return _Parser(tokens(text, thousands)).answer()


class _Parser:
    def __init__(self, found: list[Token]):
        self._tokens = found
        self._at = 0
        self._depth = 0
        self._bars: list[str] = []  # closing bars that are waited for
        self._angle = False  # within a trigonometric function's argument, where a degree sign counts
        self._builder = False  # directly within set braces, where a bar or colon says "such that"

    # ------------------------------------------------------------------------------------------------ tokens

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

    # ------------------------------------------------------------------------------------------------ from lists to sums

    def answer(self) -> Node:
        items = self._items()
        if self._next:
            raise Unreadable(f"{self._next!r} is left over")
        if not items:
            raise Unreadable("nothing")
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _items(self) -> list[Node]:
        """Statements between commas, semicolons and "and", up to what closes them."""
        items: list[Node] = []
        while True:
            while self._next in (",", ";"):
                self._at += 1
            if not self._next or self._next in _CLOSING or self._next in self._bars[-1:]:
                return items
            items.append(self._statement())
            if self._next not in (",", ";"):
                return items

    def _statement(self) -> Node:
        if self._next in ("=", "\\approx", "\\in"):
            self._at += 1
        parts = [self._sets()]
        marks = []
        while self._next in RELATIONS:
            marks.append(RELATIONS[self._take().text])
            parts.append(self._sets())
        return Node("relation", tuple(parts), " ".join(marks)) if marks else parts[0]

    def _sets(self) -> Node:
        left = self._ratio()
        while self._next in _SET_OPERATIONS:
            operation = _SET_OPERATIONS[self._take().text]
            right = self._ratio()
            same = left.head == operation != "difference"
            left = Node(operation, (*left.args, right) if same else (left, right))
        return left

    def _ratio(self) -> Node:
        parts = [self._sum()]
        while self._next in (":", "\\colon") and not self._builder:
            self._at += 1
            parts.append(self._sum())
        return Node("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    def _sum(self) -> Node:
        terms = []
        sign = self._sign() if self._next in ("+", "-", "\\pm", "\\mp") else None
        while True:
            term = self._term()
            terms.append(term if sign is None else _signed(sign, term))
            if self._next not in ("+", "-", "\\pm", "\\mp"):
                break
            sign = self._sign()
        return Node("add", tuple(terms)) if len(terms) > 1 else terms[0]

    def _sign(self) -> str:
        """One sign for a run of them."""
        sign = "+"
        while self._next in ("+", "-", "\\pm", "\\mp"):
            mark = self._take().text
            if mark in ("\\pm", "\\mp"):
                sign = mark
            elif mark == "-":
                sign = {"+": "-", "-": "+", "\\pm": "\\mp", "\\mp": "\\pm"}[sign]
        return sign

    # ------------------------------------------------------------------------------------------------ products

    def _term(self) -> Node:
        start = self._at
        factors = [self._factor()]
        literal = self._at == start + 1 and self._tokens[start].kind == "number"  # may start a mixed number
        while True:
            follows = self._next
            if follows in _TIMES:
                self._at += 1
                factors.append(self._signed_factor())
            elif follows in _OVER:
                self._at += 1
                if self._next in ("word", "text"):
                    self._unit(factors)
                    continue
                top = _product(factors)
                factors = [Node("divide", (top, self._signed_factor()))]
            elif follows in ("word", "text"):
                self._unit(factors)
            elif literal and follows == "\\frac" and (mixed := self._mixed(factors[-1])) is not None:
                factors[-1] = mixed
            elif follows == "number" and literal:
                factors[-1] = self._spaced_mixed(factors[-1])
            elif self._starts_factor(follows):
                factors.append(self._factor())
            else:
                return _product(factors)
            literal = False

    def _signed_factor(self) -> Node:
        if self._next in ("+", "-", "\\pm", "\\mp"):
            return _signed(self._sign(), self._factor())
        return self._factor()

    def _starts_factor(self, follows: str) -> bool:
        if follows in ("letter", "(", "[", "{", "\\{", "begin") or (follows in _BARS and not self._builder):
            return follows not in self._bars[-1:]
        if follows == "number":
            return self._tokens[self._at - 1].kind in (")", "}", "]")
        return (
            follows.startswith("\\")
            and follows not in _CLOSING
            and follows not in RELATIONS
            and follows not in _SET_OPERATIONS
            and follows not in self._bars
            and follows not in ("\\pm", "\\mp", "\\colon")
        )

    def _mixed(self, whole: Node) -> Node | None:
        r"""`2\frac{3}{4}` as 2 + 3/4; None where the fraction is not a proper one of two literals."""
        start = self._at
        part = self._factor()
        if part.head == "divide" and all(side.head == "number" for side in part.args):
            top, bottom = (side.value for side in part.args)
            if 0 < top < bottom:  # type: ignore[operator]
                return Node("add", (whole, part))
        self._at = start
        return None

    def _spaced_mixed(self, whole: Node) -> Node:
        """`2 3/4` as 2 + 3/4. Other numbers that stand side by side are not an answer."""
        top = self._take()
        self._expect("/")
        bottom = self._take()
        if bottom.kind != "number" or not 0 < top.value < bottom.value:  # type: ignore[operator]
            raise Unreadable("numbers side by side")
        return Node("add", (whole, number(top.value / bottom.value)))  # type: ignore[operator]

    def _unit(self, factors: list[Node]) -> None:
        """Skip words behind a value, with their exponents; words that scale it or say percent count."""
        only_words = all(factor.head == "word" for factor in factors)
        while self._next in ("word", "text"):
            word = self._take().text
            folded = word.lower()
            if folded in PERCENT:
                factors[:] = [Node("percent", (_product(factors),))]
            elif folded in SCALES and factors[-1].head in ("number", "decimal"):
                factors.append(number(SCALES[folded]))
            elif only_words:
                factors[:] = [Node("word", (), f"{factors[0].value} {folded}")]
            while self._next in ("^", "/") and not only_words:
                if self._next == "^":
                    self._at += 1
                    self._argument()
                elif self._tokens[self._at + 1].kind in ("word", "text"):
                    self._at += 1
                else:
                    break

    def _factor(self) -> Node:
        """A primary with what follows it: exponent, factorial, percent, degrees."""
        base = self._primary()
        while True:
            follows = self._next
            if follows == "^":
                self._at += 1
                if self._next == "\\prime" or (self._next == "{" and self._tokens[self._at + 1].text == "\\prime"):
                    base = self._primes(base)
                    continue
                self._enter()
                exponent = self._argument(signed=True)
                self._depth -= 1
                base = Node("power", (base, exponent))
            elif follows == "!":
                self._at += 1
                if self._next == "!":
                    raise Unknown("a double factorial")
                base = Node("call", (base,), "factorial")
            elif follows == "%":
                self._at += 1
                base = Node("percent", (base,))
            elif follows == "\\degree":
                self._at += 1
                if self._next == "letter" and self._tokens[self._at].text in "CF":
                    self._at += 1
                base = Node("multiply", (base, _DEGREE)) if self._angle else base
            elif follows == "'" and base.head in ("number", "decimal", "symbol"):
                base = self._primes(base)
            else:
                return base

    def _primes(self, base: Node) -> Node:
        """Primes make another symbol of a symbol; behind a number they are minutes, feet or inches."""
        count = 0
        braced = self._next == "{"
        if braced:
            self._at += 1
        while self._next in ("\\prime", "'"):
            self._at += 1
            count += 1
        if braced:
            self._expect("}")
        return Node("symbol", (), f"{base.value}" + "'" * count) if base.head == "symbol" else base

    def _argument(self, signed: bool = False, digit: bool = False) -> Node:
        """What a command or exponent applies to: a braced group, else one token. `digit`: of a number only the first."""
        if self._next == "{":
            return self._braces()
        if signed and self._next in ("-", "+"):
            return _signed(self._sign(), self._argument())
        token = self._tokens[self._at]
        if digit and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self._tokens[self._at] = Token("number", token.text[1:], Fraction(token.text[1:]))
            return number(int(token.text[0]))
        if self._next in ("word", "text") and len(token.text) > 1:
            raise Unreadable("a word as an argument")
        self._enter()
        node = self._primary()
        self._depth -= 1
        return node

    # ------------------------------------------------------------------------------------------------ primaries

    def _primary(self) -> Node:
        token = self._take()
        kind = token.text if token.kind == "command" else token.kind
        if kind in ("number", "decimal"):
            return self._numeral(token)
        if kind == "letter":
            return self._symbol(token.text)
        if kind in ("word", "text"):
            return self._word(token)
        if kind in _BARS:
            return self._absolute(kind)
        if kind in _OPENING:
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
        raise Unreadable(f"{kind!r} is no value")

    def _numeral(self, token: Token) -> Node:
        if self._next != "_":
            return Node(token.kind, (), token.value if token.value is not None else Fraction(0))
        self._at += 1
        base = self._subscript()
        if base.isdigit() and 2 <= int(base[:3]) <= 36 and all(int(digit) < int(base) for digit in token.text if digit != "."):
            whole, _, part = token.text.partition(".")
            digits = int(whole + part, int(base)) if whole + part else 0
            return number(Fraction(digits, int(base) ** len(part)))
        return Node("symbol", (), f"{token.text}_{base}")

    def _symbol(self, name: str) -> Node:
        if self._next == "_":
            self._at += 1
            name = f"{name}_{self._subscript()}"
        while self._next == "'":
            self._at += 1
            name += "'"
        if self._next == "(" and (name[0] in _FUNCTION_LETTERS or self._calls_number()):
            self._at += 1
            return Node("opaque", self._closed("("), name)
        return Node("symbol", (), name)

    def _calls_number(self) -> bool:
        """A letter before a number in parentheses, as in I(0), is a function, and no product."""
        return self._tokens[self._at + 1].kind == "number" and self._tokens[self._at + 2].kind == ")"

    def _subscript(self) -> str:
        """The text of a subscript, without spaces."""
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

    def _word(self, token: Token) -> Node:
        """Text that is the answer itself; short words that no text command marks are products of variables."""
        if len(token.text) == 1:
            return self._symbol(token.text)
        if token.kind == "word" and len(token.text) < 4:
            return _product([Node("symbol", (), letter) for letter in token.text])
        words = [token.text]
        while self._next in ("word", "text", "letter"):
            words.append(self._take().text)
        return Node("word", (), " ".join(words).casefold())

    def _absolute(self, opening: str) -> Node:
        self._enter()
        self._bars.append(_BARS[opening])
        inside = self._sum()
        self._expect(self._bars.pop())
        self._depth -= 1
        return Node("call", (inside,), "abs")

    def _closed(self, opening: str) -> tuple[Node, ...]:
        """The items up to the bracket that closes `opening`, which has been taken."""
        self._enter()
        bars, self._bars = self._bars, []
        builder, self._builder = self._builder, False
        items = self._items()
        self._close = self._expect(*_OPENING[opening])
        self._bars, self._builder = bars, builder
        self._depth -= 1
        return tuple(items)

    def _brackets(self, opening: str) -> Node:
        items = self._closed(opening)
        if opening in ("\\lfloor", "\\lceil") and len(items) == 1:
            return Node("call", items, "floor" if opening == "\\lfloor" else "ceil")
        if opening == "\\langle":
            return Node("tuple", items, "()")
        if len(items) == 1 and (opening, self._close) in (("(", ")"), ("[", "]")):
            return items[0]
        return Node("tuple", items, opening + self._close)

    def _braces(self) -> Node:
        """A group; one that holds several items is a set."""
        self._expect("{")
        self._enter()
        bars, self._bars = self._bars, []
        items = self._items()
        self._expect("}")
        self._bars = bars
        self._depth -= 1
        if not items:
            raise Unreadable("an empty group")
        return items[0] if len(items) == 1 else Node("set", tuple(items))

    def _set(self) -> Node:
        self._enter()
        bars, self._bars = self._bars, []
        builder, self._builder = self._builder, True
        items = self._items()
        if self._next in ("|", "\\mid", ":", "\\colon"):
            self._at += 1
            self._builder = False
            items = self._items()
            self._expect("\\}")
            node = items[0] if len(items) == 1 else Node("list", tuple(items))
        else:
            self._expect("\\}")
            node = Node("set", tuple(items))
        self._bars, self._builder = bars, builder
        self._depth -= 1
        return node

    def _matrix(self, environment: str) -> Node:
        if environment not in MATRICES:
            raise Unknown(f"environment {environment!r}")
        self._enter()
        rows: list[list[Node]] = [[]]
        while self._next != "end":
            if self._next == "\\\\":
                self._at += 1
                rows.append([])
            elif self._next == "&":
                self._at += 1
            else:
                rows[-1].append(self._statement())
        self._at += 1
        self._depth -= 1
        if not rows[-1]:
            rows.pop()
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unreadable("rows of different lengths")
        return Node("matrix", tuple(Node("row", tuple(row)) for row in rows))

    # ------------------------------------------------------------------------------------------------ commands

    def _command(self, command: str) -> Node:
        name = command[1:]
        name = SAME_FUNCTION.get(name, name)
        if command in ("\\frac", "\\binom"):
            self._enter()
            top, bottom = self._argument(digit=True), self._argument(digit=True)
            self._depth -= 1
            return Node("divide", (top, bottom)) if command == "\\frac" else Node("call", (top, bottom), "binomial")
        if command in ("\\sqrt", "\\cbrt"):
            return self._root(3 if command == "\\cbrt" else 2)
        if name in PREFIXED:
            return self._function(name)
        if name in LISTED and self._next in ("(", "{", "\\{"):
            opening = self._take().text
            if opening == "(":
                return Node("call", self._closed("("), name)
            self._at -= 1
            group = self._braces() if opening == "{" else self._primary()
            return Node("call", group.args if group.head == "set" else (group,), name)
        if command in ("\\sum", "\\prod"):
            return self._series(name)
        if command in ACCENTS:
            return self._symbol(f"{name} {self._raw()}")
        if command in ("\\emptyset", "\\varnothing"):
            return Node("set")
        if command in ("\\ldots", "\\dots", "\\cdots"):
            return Node("symbol", (), "\\ldots")
        if command in UNREAD:
            raise Unknown(command)
        if command in _CLOSING or command in RELATIONS or command in _SET_OPERATIONS:
            raise Unreadable(f"{command} is no value")
        if not name.isalpha():
            raise Unreadable(f"{command} is no value")
        return self._symbol({"\\varepsilon": "\\epsilon", "\\varphi": "\\phi"}.get(command, command))

    def _raw(self) -> str:
        return self._subscript() if self._next == "{" else self._take().text

    def _root(self, degree: int) -> Node:
        index: Node = number(degree)
        if self._next == "[":
            self._at += 1
            index = self._closed("[")[0]
        self._enter()
        radicand = self._argument() if self._next != "(" else self._primary()
        self._depth -= 1
        return Node("call", (radicand, index), "root")

    def _function(self, name: str) -> Node:
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
        self._enter()
        argument = self._function_argument()
        self._depth -= 1
        self._angle = outer
        call = Node("call", (argument,) if base is None else (argument, base), name)
        return call if exponent is None else Node("power", (call, exponent))

    def _function_argument(self) -> Node:
        """One group in brackets, or the product up to the next sign, function or bracket."""
        if self._next in ("(", "[", "{", *_BARS):
            return self._factor() if self._next not in ("(", "[") else self._primary()
        sign = self._sign() if self._next in ("+", "-") else "+"
        factors = [self._factor()]
        while self._next in _ARGUMENT_STARTS:
            factors.append(self._factor())
        if self._next == "/" and _PI in factors and self._tokens[self._at + 1].kind == "number":
            self._at += 1
            factors = [Node("divide", (_product(factors), self._factor()))]
        return _signed(sign, _product(factors))

    def _series(self, name: str) -> Node:
        """A sum or product over an index: the first argument is the index, then its first and last value, and the term."""
        self._expect("_")
        start = self._argument()
        self._expect("^")
        end = self._argument()
        if start.head != "relation" or start.value != "=" or start.args[0].head != "symbol":
            raise Unknown("a sum without an index")
        self._enter()
        body = self._term()
        self._depth -= 1
        return Node("call", (start.args[0], start.args[1], end, body), name)


def _signed(sign: str, node: Node) -> Node:
    if sign == "+":
        return node
    if sign == "-":
        return negate(node)
    product = Node("multiply", (Node("sign"), node))
    return product if sign == "\\pm" else Node("negate", (product,))


def _product(factors: list[Node]) -> Node:
    if len(factors) == 1:
        return factors[0]
    if len(factors) == 2 and factors[1].head == "tuple" and str(factors[0].value).isupper():
        return factors[1]  # the coordinates of a point: A(1, 2)
    flat: list[Node] = []
    for factor in factors:
        flat.extend(factor.args if factor.head == "multiply" else (factor,))
    return Node("multiply", tuple(flat))
