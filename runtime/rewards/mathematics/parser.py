"""Parse an answer: text to tokens, and tokens to an expression tree, by recursive descent.

Time is linear in the length; depth is bounded. Words (`\\text{ cm}`, `Wednesday`) are separated from variables (`RC`, `xy`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain

import msgspec

from runtime.rewards.extraction import NOT_UNITS, SCALES, words
from runtime.rewards.mathematics.tree import UNNAMED, ExpressionNode, Unknown, Unreadable, is_domain, negate, number

# ---- Tokens

TRIGONOMETRIC = words("sin cos tan cot sec csc")
# Functions: with an argument that may follow without brackets, with arguments in brackets, and all that may lack a backslash.
PREFIXED = TRIGONOMETRIC | words("sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc ln log log10 exp")
LISTED = words("max min gcd lcm floor ceil abs")
SPELLED_FUNCTIONS = PREFIXED | LISTED | words("asin acos atan lg sqrt")
SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}
_SYMBOLS = words("pi alpha beta gamma delta epsilon theta lambda phi omega infty cup cbrt")
SPELLED = {name: f"\\{name}" for name in SPELLED_FUNCTIONS | _SYMBOLS}
SPELLED |= {"inf": "\\infty", "infinity": "\\infty", "mod": "\\bmod"}
CONNECTIVES = words("and or")
UNITS = words(  # the short ones; longer words need no list
    "mm cm dm km ft yd mi nm kg mg lb lbs oz ml mL cL dL kL hr hrs min mins sec secs ms Hz kHz MHz GHz Pa kPa eV keV MeV GeV",
    "kJ kW kWh mph kmh kph rad deg pm am pct AU pc kpc Mpc mol cc sq in",
)

ACCENTS = words(  # commands that make a new symbol of their argument
    r"\overline \bar \vec \hat \widehat \tilde \dot \ddot \overrightarrow \overleftrightarrow",
    r"\mathbb \mathcal \mathfrak \mathscr \stackrel \overset",
)
UNREAD = words(r"\int \iint \oint \lim \limsup \liminf \sup \inf \det \choose \atop")  # left to algebra
MATRICES = words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")

NO_SOLUTION = {"no solution", "no solutions", "none", "empty set", "the empty set", "no real solution", "no real solutions"}
ALL_REALS = frozenset(("all real numbers", "all reals", "all real"))
NOT_PROSE = SPELLED_FUNCTIONS | CONNECTIVES | words("pi mod infinity inf")  # words that do not make an answer prose


MAX_TOKENS = 1200


class Token(msgspec.Struct, frozen=True, gc=False):
    """`kind`: number, decimal, letter, word (plain), text (within `\\text`), begin, end, or the mark or command itself."""

    kind: str
    text: str
    value: Fraction | None = None


_TOKEN = re.compile(
    r"(?P<space> +)"
    r"|\\(?:text[a-z]{0,6}|mbox|mathrm|mathbf|mathit|mathsf) ?\{(?P<text>[^{}]*)\}"
    r"|\\begin ?\{(?P<begin>[A-Za-z]{1,12})\*?\}(?: ?\{[|lcr ]*\})?"
    r"|\\end ?\{(?P<end>[A-Za-z]{1,12})\*?\}"
    r"|(?P<command>\\[A-Za-z]+|\\\\|\\[{}|])"
    r"|(?P<repeating>(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\(?:overline|bar|dot) ?\{(?P<period>[0-9]{1,40})\})"
    r"|(?P<scientific>(?:[0-9]+\.[0-9]*[eE][-+]?[0-9]{1,3}|[0-9]+[eE][-+]?[0-9]{1,3})(?![0-9A-Za-z]))"
    r"|(?P<thousands>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9]|,[0-9]))"
    r"|(?P<decimal>[0-9]*\.[0-9]+|[0-9]+\.(?![0-9]))"
    r"|(?P<number>[0-9]+)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<mark>[-+*/^_!'%=<>,;:&|()\[\]{}])"
)
_TEXT_TOKEN = re.compile(r"[ap]\.m\.|[A-Za-z][A-Za-z'’.-]*|[0-9][0-9,]*(?:\.[0-9]+)?|[-+*/^=,;:()%]")
_OTHER_SIGNS = re.compile(r"[^ ~.?\"'’‘“”`\[\]\\-]")
_VOWEL = re.compile(r"[aeiouyAEIOUY]")


def tokens(text: str) -> list[Token]:
    """Return the tokens of `text` and one of kind "". Raises Unreadable. Outside all brackets, "1,440" is one number."""
    found: list[Token] = []
    depth = 0  # of brackets: inside them, a comma separates
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(found) > MAX_TOKENS:
            raise Unreadable(f"{text[position]!r} at {position}")
        kind = str(match.lastgroup)
        content = match.group(kind)
        position = match.end()
        if kind == "thousands" and depth:
            kind, content = "number", content.partition(",")[0]
            position = match.start() + len(content)
        depth += (content in ("(", "[", "{", "\\{")) - (content in (")", "]", "}", "\\}"))
        found.extend(_read(kind, content, match))
    found.append(Token("", ""))
    return found


def _read(kind: str, content: str, match: re.Match[str]) -> list[Token]:
    if kind in ("number", "decimal", "thousands", "scientific"):
        plain = content.replace(",", "")
        return [Token("number" if plain.isdigit() else "decimal", plain, Fraction(plain.rstrip(".")))]
    if kind == "repeating":
        whole, fixed, period = match["whole"], match["fixed"], match["period"]  # infinitely many of these
        tail = Fraction(int(period), 10 ** len(period) - 1)
        return [Token("number", content, (int((whole + fixed) or "0") + tail) / 10 ** len(fixed))]
    if kind == "text":
        return _text(content)
    if kind == "letters":
        return _letters(content)
    return [Token(content if kind in ("mark", "command") else kind, content)] if kind != "space" else []


def _letters(run: str) -> list[Token]:
    """Return a function's name, a word, or a variable for each letter."""
    if len(run) > 1 and (token := _spelled(run)) is not None:
        return [token]
    if len(run) > 1 and (run in UNITS or (len(run) >= 4 and _VOWEL.search(run) and not run.isupper())):
        return [Token("word", run)]
    return [Token("letter", letter) for letter in run]


def _spelled(word: str) -> Token | None:
    """Return the token of a function, a symbol or a connective; None for other words."""
    if word in SPELLED:
        return Token(SPELLED[word], SPELLED[word])
    return Token(";", word) if word.lower() in CONNECTIVES else None


def _text(content: str) -> list[Token]:
    """Return the words, numbers, connectives and marks of a text command. Raises Unreadable for signs that change a number."""
    found = []
    parts = _TEXT_TOKEN.findall(content)
    if _OTHER_SIGNS.search(_TEXT_TOKEN.sub(" ", content)):
        raise Unreadable(f"{content!r} holds other signs")
    if any(len(part) > 1 and part[0].isalpha() for part in parts):
        parts = [part for part in parts if part not in "()"]  # a remark in parentheses
    if parts in (["i"], ["e"]):
        return [Token("letter", parts[0])]
    for part in parts:
        if part[0].isdigit():
            found.append(Token("decimal" if "." in part else "number", part, Fraction(part.replace(",", ""))))
        elif part[0].isalpha():
            token = None if part == "pi" else _spelled(part)
            found.append(token or Token("text", part.rstrip(".'’-").replace(".", "")))
        else:
            found.append(Token(part, part))
    return found


# ---- Grammar

MAX_DEPTH = 32  # of brackets and exponents

_RELATIONS = {mark: mark for mark in words(r"= < > \le \ge \ne \in \notin \approx \cong \to \parallel \perp \subset")}
_RELATIONS |= {"\\equiv": "=", "\\sim": "\\approx", "\\simeq": "\\approx", "\\rightarrow": "\\to", "\\mapsto": "\\to"}
_SET_OPERATIONS = {"\\cup": "union", "\\cap": "intersection", "\\setminus": "difference", "\\backslash": "difference"}
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\rvert", "\\rVert", "\\vert", "\\\\", "\\mid"))
_NO_VALUES = frozenset((*_CLOSING, *_RELATIONS, *_SET_OPERATIONS))
_SIGNS = ("+", "-", "\\pm", "\\mp")
_OPENING = {"(": (")", "]"), "[": ("]", ")"), "\\langle": ("\\rangle",), "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
_BARS = {"|": "|", "\\vert": "\\vert", "\\lvert": "\\rvert", "\\|": "\\|", "\\lVert": "\\rVert"}
_PI = ExpressionNode("symbol", (), "\\pi")


def with_sign(sign: str, node: ExpressionNode) -> ExpressionNode:
    product = node if sign in ("+", "-") else ExpressionNode("multiply", (ExpressionNode("sign"), node))
    return product if sign in ("+", "\\pm") else negate(product)


def product(factors: list[ExpressionNode]) -> ExpressionNode:
    if len(factors) == 1:
        return factors[0]
    if len(factors) == 2 and factors[1].head == "tuple" and str(factors[0].value).isupper():
        return factors[1]  # the coordinates of a point: A(1, 2)
    parts = (factor.args if factor.head == "multiply" else (factor,) for factor in factors)
    return ExpressionNode("multiply", tuple(chain.from_iterable(parts)))


_ARGUMENT_STARTS = frozenset(("letter", "\\pi", "\\frac", "\\sqrt", "\\theta", "\\alpha", "\\beta", "\\phi", "\\omega"))
_TIMES = ("*", "\\cdot", "\\times", "\\ast")
_OVER = ("/", "\\div")
_COMPARISONS = frozenset(("\\ne", "<", ">", "\\le", "\\ge"))
_MODULO = frozenset(("\\bmod", "\\mod", "\\pmod"))
_NO_FACTORS = frozenset((*_NO_VALUES, *_SIGNS, *_MODULO, "\\colon"))
_LETTERS = frozenset("mghslLdtNJWVAKCFTHBM")  # units of one letter
_DEGREE = ExpressionNode("divide", (_PI, number(180)))


def parse(text: str) -> ExpressionNode:
    """Return the tree of a tidied answer. Raises Unreadable."""
    return Parser(tokens(text)).answer()


class Parser:
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
        return self._tokens[self._at].kind

    def _take(self) -> Token:
        token = self._tokens[self._at]
        if token.kind == "":
            raise Unreadable("the answer ends too early")
        self._at += 1
        return token

    def _skip(self, *kinds: str) -> str:
        """Read a token of one of these kinds and return the kind; otherwise return ""."""
        found = self._next if self._next in kinds else ""
        self._at += bool(found)
        return found

    def _expect(self, *kinds: str) -> str:
        if found := self._skip(*kinds):
            return found
        raise Unreadable(f"{self._next!r} instead of {kinds[0]!r}")

    @contextmanager
    def _nested(self, builder: bool | None = None) -> Iterator[None]:
        """Enter one level. `builder`: within brackets, of that kind; bars expected outside close nothing inside."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        outer = self._bars, self._builder, self._angle
        if builder is not None:
            self._bars, self._builder = [], builder
        yield
        self._bars, self._builder, self._angle = outer
        self._depth -= 1

    def answer(self) -> ExpressionNode:
        items = self._items()
        if self._next or not items:
            raise Unreadable(f"{self._next!r} is left over")
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
            if not self._next or self._next in _CLOSING or self._next in self._bars[-1:]:
                break
            items.append(self._statement())
            if self._next not in (",", ";"):
                break
        self._joint = joints.pop() if joints in ({"or"}, {"and"}) else ""
        return items

    def _statement(self) -> ExpressionNode:
        self._skip("=", "\\approx", "\\in")
        parts = [UNNAMED if self._next in _COMPARISONS else self._sets()]
        marks = []
        while mark := self._skip(*_RELATIONS):
            marks.append(_RELATIONS[mark])
            parts.append(self._sets())
        if self._skip("\\pmod", *(_MODULO if marks else ())):
            parts.append(self._argument())
            marks.append("mod")
        return ExpressionNode("relation", tuple(parts), " ".join(marks)) if marks else parts[0]

    def _sets(self) -> ExpressionNode:
        left = self._ratio()
        while mark := self._skip(*_SET_OPERATIONS):
            operation = _SET_OPERATIONS[mark]
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
        while not self._builder and self._skip(":", "\\colon"):
            parts.append(self._sum())
        return ExpressionNode("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    def _sum(self) -> ExpressionNode:
        terms: list[ExpressionNode] = []
        while not terms or self._next in _SIGNS:
            terms.append(self._signed(self._term))
        if self._next in ("\\bmod", "\\mod") and all(token.text != "\\equiv" for token in self._tokens):
            if len(terms) > 1:
                raise Unreadable("the remainder of a sum")
            self._at += 1
            return ExpressionNode("call", (terms[0], self._factor()), "mod")
        return ExpressionNode("add", tuple(terms)) if len(terms) > 1 else terms[0]

    def _sign(self) -> str:
        """Read a run of signs, or none, as one sign."""
        sign = "+"
        while mark := self._skip(*_SIGNS):
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
            sign = self._skip(*_TIMES, *_OVER)
            if self._next in ("word", "text") and (sign not in _TIMES or factors[-1].head != "word"):
                self._unit(factors)
            elif sign in _OVER:
                factors = [ExpressionNode("divide", (product(factors), self._signed(self._factor)))]
            elif sign:
                factors.append(self._signed(self._factor))
            elif literal and follows == "\\frac":
                factors = _mixed(factors[0], self._factor())
            elif self._starts_factor(follows):
                factors.append(self._factor())
            else:
                return product(factors)
            literal = False

    def _signed(self, read: Callable[[], ExpressionNode]) -> ExpressionNode:
        return with_sign(self._sign(), read())

    def _starts_factor(self, follows: str) -> bool:
        if follows in ("letter", "(", "[", "{", "\\{", "begin") or (follows in _BARS and not self._builder):
            return follows not in self._bars[-1:]
        if follows == "number":
            return self._tokens[self._at - 1].kind in (")", "}", "]")
        return follows.startswith("\\") and follows not in _NO_FACTORS and follows not in self._bars

    def _unit(self, factors: list[ExpressionNode]) -> None:
        """Skip unit words behind a value, with their exponents. Words that scale the value or mean percent change it."""
        only_words = all(factor.head == "word" for factor in factors)
        while self._next in ("word", "text"):
            word = self._take().text
            folded = word.lower()
            letter_unit = word in _LETTERS and factors[-1].head != "symbol"  # 5 m, but not 5 x or B C
            if folded in ("percent", "pct"):
                factors[:] = [ExpressionNode("percent", (product(factors),))]
            elif folded in SCALES and factors[-1].head in ("number", "decimal"):
                factors.append(number(SCALES[folded]))
            elif not only_words and (folded in NOT_UNITS or folded in SCALES or (len(word) == 1 and not letter_unit)):
                raise Unreadable(f"{word} is not a unit")
            elif only_words:
                factors[:] = [ExpressionNode("word", (), f"{factors[0].value} {folded}")]
            while self._next in ("^", "/", *_TIMES) and not only_words:
                if self._skip("^"):
                    self._argument(signed=True)
                elif self._tokens[self._at + 1].kind in ("word", "text"):
                    self._at += 1
                else:
                    break

    def _factor(self) -> ExpressionNode:
        """Return a primary with its exponent, factorial, percent sign or degree sign."""
        base = self._primary()
        while True:
            if self._skip("^"):
                base = ExpressionNode("power", (base, self._exponent()))
            elif self._skip("!"):
                if self._next == "!":
                    raise Unknown("a double factorial")
                base = ExpressionNode("call", (base,), "factorial")
            elif self._skip("%"):
                base = ExpressionNode("percent", (base,))
            elif self._skip("\\degree"):
                self._at += self._next == "letter" and self._tokens[self._at].text in "CF"
                base = ExpressionNode("multiply", (base, _DEGREE)) if self._angle else base
            elif base.head not in ("number", "decimal") or not self._skip("'"):  # minutes, feet or inches
                return base

    def _exponent(self) -> ExpressionNode:
        """Return the exponent behind a caret. The last of several carets binds first: 2^3^2 is 2^9."""
        with self._nested():
            exponent = self._argument(signed=True)
            if self._skip("^"):
                exponent = ExpressionNode("power", (exponent, self._exponent()))
        return exponent

    # ---- Primaries: numbers, symbols, brackets, matrices and commands

    def _primary(self) -> ExpressionNode:
        token = self._take()
        read = _PRIMARIES.get(token.kind) or (Parser._command if token.kind.startswith("\\") else None)
        if read is None:
            raise Unreadable(f"{token.kind!r} is not a value")
        return read(self, token)

    def _numeral(self, token: Token) -> ExpressionNode:
        if not self._skip("_"):
            return ExpressionNode(token.kind, (), token.value if token.value is not None else Fraction(0))
        base = self._subscript()
        whole, _, part = token.text.partition(".")
        known = base.isdigit() and 2 <= int(base[:3]) <= 36
        if known and all("0" <= digit <= "9" and int(digit) < int(base) for digit in whole + part):
            digits = int(whole + part, int(base)) if whole + part else 0
            return number(Fraction(digits, int(base) ** len(part)))
        return ExpressionNode("symbol", (), f"{token.text}_{base}")

    def _symbol(self, name: str) -> ExpressionNode:
        if self._skip("_"):
            name = f"{name}_{self._subscript()}"
        while self._skip("'"):
            name += "'"
        of_number = [token.kind for token in self._tokens[self._at + 1 : self._at + 3]] == ["number", ")"]  # I(0) is a function
        if (name[0] in "fg" or of_number) and self._skip("("):
            return ExpressionNode("opaque", self._closed("("), name)
        return ExpressionNode("symbol", (), name)

    def _subscript(self) -> str:
        """Return the text of a subscript without spaces."""
        depth = 1 if self._skip("{") else 0
        text = "" if depth else self._take().text
        while depth:
            token = self._take()
            depth += (token.kind == "{") - (token.kind == "}")
            text += token.text if depth else ""
        return text

    def _word(self, token: Token) -> ExpressionNode:
        """Return text that is the answer itself. Short words outside text commands are products of variables."""
        if len(token.text) == 1:
            return self._symbol(token.text)
        if token.kind == "word" and len(token.text) < 4:
            return product([ExpressionNode("symbol", (), letter) for letter in token.text])
        text = token.text
        while self._next in ("word", "text", "letter"):
            text += f" {self._take().text}"
        return ExpressionNode("word", (), text.casefold())

    def _absolute(self, opening: Token) -> ExpressionNode:
        with self._nested():
            self._bars.append(_BARS[opening.kind])
            inside = self._sum()
            self._expect(self._bars.pop())
        return ExpressionNode("call", (inside,), "abs")

    def _closed(self, opening: str) -> tuple[ExpressionNode, ...]:
        """Return the items up to the bracket that closes `opening`, which has been read already."""
        with self._nested(builder=False):
            items = self._items()
            self._close = self._expect(*_OPENING[opening])
        return tuple(items)

    def _brackets(self, token: Token) -> ExpressionNode:
        opening = token.kind
        items = self._closed(opening)
        if opening in ("\\lfloor", "\\lceil") and len(items) == 1:
            return ExpressionNode("call", items, "floor" if opening == "\\lfloor" else "ceil")
        if opening == "\\langle":
            return ExpressionNode("tuple", items, "()")
        if len(items) == 1 and (opening, self._close) in (("(", ")"), ("[", "]")):
            return items[0]
        return self._list(list(items)) if self._joint else ExpressionNode("tuple", items, opening + self._close)

    def _braces(self, opening: Token) -> ExpressionNode:
        """Return a group in braces, whose first was read; a group of several items is a set."""
        with self._nested(builder=self._builder):
            items = self._items()
            self._expect("}")
        if not items:
            raise Unreadable("an empty group")
        return self._list(items) if len(items) == 1 or self._joint else ExpressionNode("set", tuple(items))

    def _set(self, opening: Token) -> ExpressionNode:
        with self._nested(builder=True):
            items = self._items()
            node = ExpressionNode("set", tuple(items))
            if self._skip("|", "\\mid", ":", "\\colon"):
                self._builder = False
                domain = [item for item in items if item.head == "relation" and not is_domain(item)]
                node = self._list(self._items())  # with a domain, e.g. integers: compare the set as written
                node = ExpressionNode("set", (*domain, node)) if domain else node
            self._expect("\\}")
        return node

    def _matrix(self, opening: Token) -> ExpressionNode:
        environment = opening.text
        if environment not in MATRICES and environment != "cases":
            raise Unknown(f"environment {environment!r}")
        rows: list[list[ExpressionNode]] = [[]]
        with self._nested():
            while self._next != "end":
                if self._skip("\\\\"):
                    rows.append([])
                elif not self._skip("&", *((",", ";") if environment == "cases" else ())):
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
            return self._braces(self._take())
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

    def _command(self, token: Token) -> ExpressionNode:
        command = token.kind
        name = SAME_FUNCTION.get(command[1:], command[1:])
        if command in ("\\frac", "\\binom"):
            with self._nested():
                both = self._argument(digit=True), self._argument(digit=True)
            return ExpressionNode("divide", both) if name == "frac" else ExpressionNode("call", both, "binomial")
        if command in ("\\sqrt", "\\cbrt"):
            return self._root(3 if command == "\\cbrt" else 2)
        if name in PREFIXED:
            return self._function(name)
        if name in LISTED and self._next in ("(", "{", "\\{"):
            if self._skip("("):
                return ExpressionNode("call", self._closed("("), name)
            group = self._primary()
            return ExpressionNode("call", group.args if group.head == "set" else (group,), name)
        if command in ("\\sum", "\\prod"):
            return self._series(name)
        if command in ACCENTS:
            return self._symbol(f"{name} {self._subscript()}")
        if command in ("\\emptyset", "\\varnothing"):
            return ExpressionNode("set")
        if command in ("\\ldots", "\\dots", "\\cdots"):
            return ExpressionNode("symbol", (), "\\ldots")
        if command in UNREAD:
            raise Unknown(command)
        if command in _NO_VALUES or name.endswith("mod") or not name.isalpha():
            raise Unreadable(f"{command} is not a value")
        return self._symbol({"\\varepsilon": "\\epsilon", "\\varphi": "\\phi"}.get(command, command))

    def _root(self, degree: int) -> ExpressionNode:
        items = self._closed("[") if self._skip("[") else (number(degree),)
        if len(items) != 1:
            raise Unreadable("a root without a degree")
        with self._nested():
            radicand = self._argument() if self._next != "(" else self._primary()
        return ExpressionNode("call", (radicand, items[0]), "root")

    def _function(self, name: str) -> ExpressionNode:
        bases = (self._argument(),) if self._skip("_") else ()
        exponent = self._argument(signed=True) if self._skip("^") else None
        if exponent == number(-1) and name in TRIGONOMETRIC:
            name, exponent = f"arc{name}", None
        with self._nested():
            self._angle = self._angle or name in TRIGONOMETRIC
            argument = self._function_argument()
        call = ExpressionNode("call", (argument, *bases), name)
        return call if exponent is None else ExpressionNode("power", (call, exponent))

    def _function_argument(self) -> ExpressionNode:
        """Return one group in brackets, or the product up to the next sign, function or bracket."""
        if self._next in ("(", "["):
            return self._primary()
        if self._next in ("{", *_BARS):
            return self._factor()
        sign = self._sign() if self._next in ("+", "-") else "+"
        factors = [self._factor()]
        while self._next in _ARGUMENT_STARTS:
            factors.append(self._factor())
        if self._next == "/" and _PI in factors and self._tokens[self._at + 1].kind == "number":
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


_PRIMARIES: dict[str, Callable[[Parser, Token], ExpressionNode]] = {
    **dict.fromkeys(("number", "decimal"), Parser._numeral),
    **dict.fromkeys(("letter", "word", "text"), Parser._word),
    **dict.fromkeys(_BARS, Parser._absolute),
    **dict.fromkeys(_OPENING, Parser._brackets),
    "{": Parser._braces,
    "\\{": Parser._set,
    "begin": Parser._matrix,
}


def _mixed(whole: ExpressionNode, part: ExpressionNode) -> list[ExpressionNode]:
    r"""Read `2\frac{3}{4}` as 2 + 3/4. Anything except a proper fraction of two literals is a product."""
    literals = part.head == "divide" and all(side.head == "number" for side in part.args)
    proper = literals and 0 < part.args[0].value < part.args[1].value  # type: ignore[operator]
    return [ExpressionNode("add", (whole, part))] if proper else [whole, part]
