"""The tokens of a tidied answer. The lexer separates words (`\\text{ cm}`, `Wednesday`) from variables (`RC`, `xy`)."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from runtime.rewards.mathematics.tree import Unreadable


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


TRIGONOMETRIC = _words("sin cos tan cot sec csc")
PREFIXED = TRIGONOMETRIC | _words("sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc ln log log10 exp")
"""Functions whose argument may follow without brackets."""
LISTED = _words("max min gcd lcm floor ceil abs")
"""Functions whose arguments are in brackets."""
SPELLED_FUNCTIONS = PREFIXED | LISTED | _words("asin acos atan lg sqrt")
"""Functions that answers may write without a backslash."""
SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}

SPELLED_SYMBOLS = {
    **{name: f"\\{name}" for name in _words("pi alpha beta gamma delta epsilon theta lambda phi omega infty cup cbrt")},
    "inf": "\\infty",
    "infinity": "\\infty",
    "mod": "\\bmod",
}
CONNECTIVES = _words("and or")
UNITS = _words(
    "mm cm dm km ft yd mi nm kg mg lb lbs oz ml mL cL dL kL hr hrs min mins sec secs ms Hz kHz MHz GHz Pa kPa eV keV MeV GeV",
    "kJ kW kWh mph kmh kph rad deg pm am pct AU pc kpc Mpc mol cc sq in",
)
"""Short units; longer words need no list."""
PERCENT = _words("percent pct")

ACCENTS = _words(
    r"\overline \bar \vec \hat \widehat \tilde \dot \ddot \overrightarrow \overleftrightarrow",
    r"\mathbb \mathcal \mathfrak \mathscr \stackrel \overset",
)
"""Commands that make a new symbol of their argument."""
UNREAD = _words(r"\int \iint \oint \lim \limsup \liminf \sup \inf \det \choose \atop")
"""Commands that are left to algebra."""
MATRICES = _words("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")

NO_SOLUTION = frozenset(
    ("no solution", "no solutions", "none", "empty set", "the empty set", "no real solution", "no real solutions")
)
ALL_REALS = frozenset(("all real numbers", "all reals", "all real"))
NOT_PROSE = SPELLED_FUNCTIONS | CONNECTIVES | _words("pi mod infinity inf")
"""Words that do not make an answer prose."""


MAX_TOKENS = 1200


class Token(msgspec.Struct, frozen=True, gc=False):
    """`kind`: number, decimal, letter, command, word (plain), text (within `\\text`), begin, end, or the mark itself."""

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
_SIGNS = re.compile(r"[^ ~.?\"'’‘“”`\[\]\\-]")
_VOWEL = re.compile(r"[aeiouyAEIOUY]")
MAX_DIGITS = 4000


def tokens(text: str) -> list[Token]:
    """Return the tokens of `text` and a last token of kind "". Raises Unreadable for a character that answers do not have.
    Outside all brackets, "1,440" is one number."""
    found: list[Token] = []
    depth = 0  # of brackets: inside them, a comma separates
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(found) > MAX_TOKENS:
            raise Unreadable(f"{text[position]!r} at {position}")
        kind = str(match.lastgroup)
        if kind in ("whole", "fixed", "period"):
            kind = "repeating"
        content = match.group(kind)
        position = match.end()
        if kind == "space":
            continue
        if kind == "thousands" and depth:
            content = content.partition(",")[0]
            position = match.start() + len(content)
            kind = "number"
        if content in ("(", "[", "{", "\\{"):
            depth += 1
        elif content in (")", "]", "}", "\\}"):
            depth -= 1
        found.extend(_read(kind, content, match))
    found.append(Token("", ""))
    return found


def _read(kind: str, content: str, match: re.Match[str]) -> list[Token]:
    if kind in ("number", "decimal", "thousands", "scientific"):
        if len(content) > MAX_DIGITS:
            raise Unreadable("a number of too many digits")
        plain = content.replace(",", "")
        return [Token("number" if plain.isdigit() else "decimal", plain, Fraction(plain.rstrip(".")))]
    if kind == "repeating":
        return [Token("number", content, _repeating(match["whole"], match["fixed"], match["period"]))]
    if kind == "text":
        return _text(content)
    if kind == "letters":
        return _letters(content)
    if kind in ("begin", "end"):
        return [Token(kind, content)]
    return [Token(kind if kind == "command" else content, content)]


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    """Return the value of `whole.fixed` followed by infinitely many `period`."""
    if len(whole) + len(fixed) > MAX_DIGITS:
        raise Unreadable("a number of too many digits")
    tail = Fraction(int(period), 10 ** len(period) - 1)
    return (int((whole + fixed) or "0") + tail) / 10 ** len(fixed)


def _letters(run: str) -> list[Token]:
    """Return a function's name, a word, or a variable for each letter."""
    if len(run) > 1:
        if run in SPELLED_FUNCTIONS:
            return [Token("command", f"\\{run}")]
        if run in SPELLED_SYMBOLS:
            return [Token("command", SPELLED_SYMBOLS[run])]
        if run.lower() in CONNECTIVES:
            return [Token(";", run)]
        if run in UNITS or (len(run) >= 4 and _VOWEL.search(run) and not run.isupper()):
            return [Token("word", run)]
    return [Token("letter", letter) for letter in run]


def _text(content: str) -> list[Token]:
    """Return the words, numbers, connectives and marks of a text command. Raises Unreadable for signs that change a number."""
    found = []
    parts = _TEXT_TOKEN.findall(content)
    if _SIGNS.search(_TEXT_TOKEN.sub(" ", content)):
        raise Unreadable(f"{content!r} holds other signs")
    if any(len(part) > 1 and part[0].isalpha() for part in parts):
        parts = [part for part in parts if part not in "()"]  # a remark in parentheses
    if parts in (["i"], ["e"]):
        return [Token("letter", parts[0])]
    for part in parts:
        if part[0].isdigit():
            found.append(Token("decimal" if "." in part else "number", part, Fraction(part.replace(",", ""))))
        elif part[0].isalpha():
            if part.lower() in CONNECTIVES:
                found.append(Token(";", part))
            elif len(part) > 2 and part in SPELLED_SYMBOLS:
                found.append(Token("command", SPELLED_SYMBOLS[part]))
            elif part in SPELLED_FUNCTIONS:
                found.append(Token("command", f"\\{part}"))
            else:
                found.append(Token("text", part.rstrip(".'’-").replace(".", "")))
        else:
            found.append(Token(part, part))
    return found
